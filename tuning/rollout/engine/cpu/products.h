// A tile of `products.c`: results of a few outputs and rows.
#include "kernels.h"

// A fused product and sum is called by name: left to the compiler, it might be in one tile and not in another.
#if defined(__AVX512F__)
#define LANES 16
#define IN_GROUPS(f) f(0), f(4), f(8), f(12)
#include <immintrin.h>
#define ADD_PRODUCT(sum, a, b) sum = (vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum))
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#if defined(__AVX512BF16__)
// Each lane adds the products of two neighbours in bfloat16.
#define ADD_PAIRS(sum, a, b) sum = (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#endif
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
#if defined(ADD_PAIRS)
enum { PAIRS = 1 };
#else
enum { PAIRS = 0 };
#define ADD_PAIRS(sum, a, b)
#endif
enum {
  ROWS = 3,               // with OUTS, the sums of a tile fit the registers
  LINE = 16,              // floats of a cache line
  BYTES = 3072,           // of an output's inputs in a block, at most: a tile's weights stay in a core's first cache,
  BLOCK = 48,             // and its rows, with
  GROUP = 8,              // the sums of as many tiles, in the second
  FEW = 16,               // rows, up to which most of the time goes with reading weights
  AHEAD = 256,            // bytes
  FEW_NUMBERS = 1 << 16,  // a W of fewer numbers than this is read sooner than another core wakes
};

// Rows of bfloat16 may begin at any number.
typedef float vec __attribute__((vector_size(4 * LANES), aligned(2)));
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

INLINE vec load(const void *p) { return *(const vec *)p; }

// The first `bytes` of a vector; zeros follow.
INLINE vec load_some(const void *p, int64_t bytes) {
  float all[LANES] = {0};
  memcpy(all, p, bytes);
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

// A piece of the work: results of some rows and outputs, over `count` of the inputs. What was summed before is
// in `sums` unless this is the `first` of the inputs; there it goes until the `last`. Outputs are `apart` numbers from one
// another, their weights `stride`. `next` is what to fetch meanwhile, `count` numbers of as many outputs as `fetched`;
// NULL for nothing. Inputs and weights are float32, or both bfloat16.
typedef struct {
  const char *x[ROWS], *w, *next;
  float *y[ROWS], *sums;
  int64_t stride, apart, count;
  int first, last, fetched;
} Piece;

INLINE float *sums_for(const Piece *p, int row, int out) { return p->sums + (row * OUTS + out) * LANES; }

// Calls with constants become loops without branches. `pairs`: of bfloat16.
INLINE void tile(int rows, int outs, int pairs, const Piece *p) {
  const char *w = p->w, *next = p->next;
  // In bytes.
  int64_t stride = p->stride * (pairs ? 2 : 4), count = p->count * (pairs ? 2 : 4), step = 4 * LANES;
  vec sum[ROWS][OUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outs; o++) sum[r][o] = p->first ? (vec){0} : load(sums_for(p, r, o));
  int64_t i = 0;
  for (; i + step <= count; i += step) {
    if (next && i % (4 * LINE) == 0)
      for (int o = 0; o < p->fetched; o++) __builtin_prefetch(next + o * stride + i);
    vec in[ROWS];
    for (int r = 0; r < rows; r++) in[r] = load(p->x[r] + i);
    for (int o = 0; o < outs; o++) {
      vec weight = load(w + o * stride + i);
      // Or GCC reads it again for each row.
      IN_REGISTER(weight);
      for (int r = 0; r < rows; r++) {
        if (pairs)
          ADD_PAIRS(sum[r][o], in[r], weight);
        else
          ADD_PRODUCT(sum[r][o], in[r], weight);
      }
    }
  }
  if (i < count)
    for (int o = 0; o < outs; o++)
      for (int r = 0; r < rows; r++) {
        vec in = load_some(p->x[r] + i, count - i), weight = load_some(w + o * stride + i, count - i);
        if (pairs)
          ADD_PAIRS(sum[r][o], in, weight);
        else
          ADD_PRODUCT(sum[r][o], in, weight);
      }
  for (int r = 0; r < rows; r++) {
    if (!p->last)
      for (int o = 0; o < outs; o++) *(vec *)sums_for(p, r, o) = sum[r][o];
    else if (outs % 4 == 0)
      for (int o = 0; o < outs; o += 4) {
        four sums = sums_of(sum[r][o], sum[r][o + 1], sum[r][o + 2], sum[r][o + 3]);
        if (p->apart == 1)
          *(four *)(p->y[r] + o) = sums;
        else
          for (int i = 0; i < 4; i++) p->y[r][(o + i) * p->apart] = sums[i];
      }
    else
      for (int o = 0; o < outs; o++) p->y[r][o] = sums_of(sum[r][o], sum[r][o], sum[r][o], sum[r][o])[0];
  }
}

typedef void Tile(const Piece *p);
#define FOR_ROWS(n)                                                   \
  static void tile_##n(const Piece *p) { tile(n, OUTS, 0, p); }       \
  static void one_##n(const Piece *p) { tile(n, 1, 0, p); }           \
  static void pairs_##n(const Piece *p) { tile(n, OUTS, PAIRS, p); }  \
  static void one_pairs_##n(const Piece *p) { tile(n, 1, PAIRS, p); }
FOR_ROWS(1)
FOR_ROWS(2)
FOR_ROWS(3)
// By whether they are of pairs.
static Tile *const tile_for[2][ROWS] = {{tile_1, tile_2, tile_3}, {pairs_1, pairs_2, pairs_3}};
static Tile *const one_for[2][ROWS] = {{one_1, one_2, one_3}, {one_pairs_1, one_pairs_2, one_pairs_3}};
