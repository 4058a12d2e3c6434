// x W^T of few rows, on all cores. Arguments: x [R, I] and W [O, I], float32; result [R, O].
//
// Each number is LANES sums over the input that are added in the end, in an order that depends on I alone: a row's
// results have the same bits alone and among others. A row of zeros is not computed: slots that stand empty are free.
#include "threads.h"

// A fused product and sum is called by name: left to the compiler, it might be in one tile and not in another.
#if defined(__AVX512F__)
#define LANES 16
#define IN_GROUPS(f) f(0), f(4), f(8), f(12)
#include <immintrin.h>
#define ADD_PRODUCT(sum, a, b) sum = (vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum))
#define IN_REGISTER(x) __asm__("" : "+v"(x))
enum { OUTS = 8 };
#elif defined(__aarch64__)
#define LANES 4
#define IN_GROUPS(f) f(0)
#include <arm_neon.h>
#define ADD_PRODUCT(sum, a, b) sum = (vec)vfmaq_f32((float32x4_t)(sum), (float32x4_t)(a), (float32x4_t)(b))
#define IN_REGISTER(x) __asm__("" : "+w"(x))
enum { OUTS = 8 };
#else
#define LANES 8
#define IN_GROUPS(f) f(0), f(4)
#if defined(__FMA__)
#include <immintrin.h>
#define ADD_PRODUCT(sum, a, b) sum = (vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum))
#else
#define ADD_PRODUCT(sum, a, b) sum += (a) * (b)
#endif
#define IN_REGISTER(x)
enum { OUTS = 4 };
#endif
enum {
  ROWS = 3,               // with OUTS, the sums of a tile fit the registers
  LINE = 16,              // floats of a cache line
  FEW_NUMBERS = 1 << 16,  // a W of fewer numbers than this is read sooner than another core wakes
};

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));

#if defined(__clang__)
#define SHUFFLE(a, b, f) __builtin_shufflevector(a, b, IN_GROUPS(f))
#else
typedef int32_t order __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, f) __builtin_shuffle(a, b, (order){IN_GROUPS(f)})
#endif
#define LOW(i) i, LANES + i, i + 1, LANES + i + 1
#define HIGH(i) i + 2, LANES + i + 2, i + 3, LANES + i + 3
#define LOW_PAIR(i) i, i + 1, LANES + i, LANES + i + 1
#define HIGH_PAIR(i) i + 2, i + 3, LANES + i + 2, LANES + i + 3

INLINE vec load(const float *p) { return *(const vec *)p; }

// The first `count` of LANES numbers; zeros follow.
INLINE vec load_some(const float *p, int64_t count) {
  float all[LANES] = {0};
  memcpy(all, p, sizeof(float) * count);
  return load(all);
}

// Sums of a, b, c and d. Each step adds pairs of neighbours, so that half as many vectors hold all.
INLINE four sums_of(vec a, vec b, vec c, vec d) {
  vec ab = SHUFFLE(a, b, LOW) + SHUFFLE(a, b, HIGH);
  vec cd = SHUFFLE(c, d, LOW) + SHUFFLE(c, d, HIGH);
  vec all = SHUFFLE(ab, cd, LOW_PAIR) + SHUFFLE(ab, cd, HIGH_PAIR);
  four parts[LANES / 4];
  memcpy(parts, &all, sizeof all);
  four sum = parts[0];
  for (int i = 1; i < LANES / 4; i++) sum += parts[i];
  return sum;
}

// `outs` results of each of `rows` rows. Calls with constants become loops without branches. `next` is what to fetch
// meanwhile, as long as a row of W; NULL for nothing.
INLINE void tile(int rows, int outs, const float *const *x, const float *w, int64_t size, float *const *y,
                 const float *next) {
  vec sum[ROWS][OUTS] = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    if (next && i % LINE == 0) __builtin_prefetch(next + i);
    vec in[ROWS];
    for (int r = 0; r < rows; r++) in[r] = load(x[r] + i);
    for (int o = 0; o < outs; o++) {
      vec weight = load(w + o * size + i);
      // Or GCC reads it again for each row.
      IN_REGISTER(weight);
      for (int r = 0; r < rows; r++) ADD_PRODUCT(sum[r][o], in[r], weight);
    }
  }
  if (i < size)
    for (int o = 0; o < outs; o++)
      for (int r = 0; r < rows; r++)
        ADD_PRODUCT(sum[r][o], load_some(x[r] + i, size - i), load_some(w + o * size + i, size - i));
  for (int r = 0; r < rows; r++) {
    if (outs % 4 == 0)
      for (int o = 0; o < outs; o += 4)
        *(four *)(y[r] + o) = sums_of(sum[r][o], sum[r][o + 1], sum[r][o + 2], sum[r][o + 3]);
    else
      for (int o = 0; o < outs; o++) y[r][o] = sums_of(sum[r][o], sum[r][o], sum[r][o], sum[r][o])[0];
  }
}

#define FOR_ROWS(n)                                                                                                  \
  static void tile_##n(const float *const *x, const float *w, int64_t size, float *const *y, const float *next) {    \
    tile(n, OUTS, x, w, size, y, next);                                                                              \
  }                                                                                                                  \
  static void one_##n(const float *const *x, const float *w, int64_t size, float *const *y, const float *next) {     \
    tile(n, 1, x, w, size, y, next);                                                                                 \
  }
FOR_ROWS(1)
FOR_ROWS(2)
FOR_ROWS(3)
typedef void Tile(const float *const *, const float *, int64_t, float *const *, const float *);
static Tile *const tile_for[] = {tile_1, tile_2, tile_3}, *const one_for[] = {one_1, one_2, one_3};

typedef struct {
  const float *x, *w;
  float *y;
  int64_t size, outs, live;
  const int64_t *rows;  // the numbers of those that are not zero
} Work;

static void multiply(const void *work, int64_t first, int64_t end, float *scratch) {
  (void)scratch;
  const Work *m = work;
  for (int64_t t = first; t < end; t++) {
    int64_t from = t * OUTS, outs = m->outs - from < OUTS ? m->outs - from : OUTS;
    for (int64_t r = 0; r < m->live; r += ROWS) {
      const float *x[ROWS];
      float *y[ROWS];
      int rows = m->live - r < ROWS ? m->live - r : ROWS;
      for (int i = 0; i < rows; i++) {
        x[i] = m->x + m->rows[r + i] * m->size;
        y[i] = m->y + m->rows[r + i] * m->outs + from;
      }
      const float *w = m->w + from * m->size;
      // Each pass over the rows fetches a row of the next tile.
      const float *next = t + 1 < end && from + OUTS + r / ROWS < m->outs && r / ROWS < OUTS
                              ? w + (OUTS + r / ROWS) * m->size
                              : NULL;
      if (outs == OUTS) {
        tile_for[rows - 1](x, w, m->size, y, next);
      } else {
        for (int o = 0; o < outs; o++) {
          one_for[rows - 1](x, w + o * m->size, m->size, y, NULL);
          for (int i = 0; i < rows; i++) y[i]++;
        }
      }
    }
  }
}

static int is_zero(const float *x, int64_t size) {
  for (int64_t i = 0; i < size; i++)
    if (x[i] != 0) return 0;
  return 1;
}

XLA_FFI_Error *products(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  Work work = {
      .x = args[0]->data,
      .w = args[1]->data,
      .y = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data,
      .size = args[0]->dims[1],
      .outs = args[1]->dims[0],
  };
  int64_t count = args[0]->dims[0];
  int64_t *rows = malloc(sizeof(int64_t) * (count + 1));
  if (!rows) return no_memory(frame);
  for (int64_t r = 0; r < count; r++) {
    if (is_zero(work.x + r * work.size, work.size))
      memset(work.y + r * work.outs, 0, sizeof(float) * work.outs);
    else
      rows[work.live++] = r;
  }
  work.rows = rows;
  int64_t threads = work.size * work.outs < FEW_NUMBERS ? 1 : threads_of(frame);
  int64_t tiles = work.live ? (work.outs + OUTS - 1) / OUTS : 0;
  XLA_FFI_Error *error = spread(frame, multiply, &work, sizeof work, tiles, 2 * threads, threads, 0);
  free(rows);
  return error;
}
