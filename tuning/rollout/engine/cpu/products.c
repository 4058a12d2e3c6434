// x W^T on all cores, made for few rows. Arguments: x [R, I], float32; stacked W [L, O, I], float32, bfloat16 or int8; the
// number of the W to take, a scalar, int32; for int8 what an output's weights are multiplied by, [O], float32. Result
// [R, O], float32.
//
// Each number is LANES sums over the input that are added in the end, in an order that depends on I alone: a row's
// results have the same bits alone and among others. A row of zeros is not computed: empty slots take no time. A tile's
// weights of another type become float32 in a core's first cache, once for all rows of a block. With a bfloat16 W the
// rows hold numbers of that type, and a processor that multiplies them (AVX512_BF16) does so; by its matrix unit (AMX),
// if it has one, where the sizes of W are whole tiles: a number then is one sum over the input.
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
  DEPTH = 768,            // inputs of a block, at most: a tile's weights stay in a core's first cache,
  BLOCK = 48,             // and its rows, with
  GROUP = 8,              // the sums of as many tiles, in the second
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
// in `sums` unless this is the `first` of the inputs; there it goes until the `last`. From one output's weights to the
// next are `stride` numbers. `next` is what to fetch meanwhile, `count` numbers; NULL for nothing. Inputs and weights are
// float32, or both bfloat16.
typedef struct {
  const char *x[ROWS], *w, *next;
  float *y[ROWS], *sums;
  int64_t stride, count;
  int first, last;
} Piece;

INLINE float *sums_for(const Piece *p, int row, int out) { return p->sums + (row * OUTS + out) * LANES; }

// Calls with constants become loops without branches. `pairs`: of bfloat16.
INLINE void tile(int rows, int outs, int pairs, const Piece *p) {
  const char *w = p->w, *next = p->next;
  // In bytes.
  int64_t stride = p->stride * (pairs ? 2 : 4), count = p->count * (pairs ? 2 : 4), step = 4 * LANES;
  vec sum[ROWS][OUTS] = {0};
  if (!p->first)
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outs; o++) sum[r][o] = load(sums_for(p, r, o));
  int64_t i = 0;
  for (; i + step <= count; i += step) {
    if (next && i % (4 * LINE) == 0) __builtin_prefetch(next + i);
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
      for (int o = 0; o < outs; o += 4)
        *(four *)(p->y[r] + o) = sums_of(sum[r][o], sum[r][o + 1], sum[r][o + 2], sum[r][o + 3]);
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

typedef struct {
  int type;  // of `w`
  int pairs;  // whether `x` is bfloat16, as `w`
  const char *w, *x;
  const float *scale;
  float *y;
  int64_t size, outs, live;
  int64_t depth;        // inputs of a block
  char *columns;        // `x` as tiles of 16 rows, for the matrix unit; NULL without
  const int64_t *rows;  // the numbers of those that are not zero
} Work;

INLINE const char *weights_of(const Work *m, int64_t out, int64_t input) {
  return m->w + (out * m->size + input) * bytes_of(m->type);
}

INLINE void widen_as(int type, const void *from, int64_t count, float scale, float *to) {
  for (int64_t i = 0; i < count; i++) to[i] = type == INT8 ? scale * number_of(type, from, i) : number_of(type, from, i);
}

// `count` inputs' weights of `outs` outputs in float32, `depth` numbers apart; those of as many outputs behind them are
// fetched meanwhile.
static void widen(const Work *m, int64_t from, int64_t outs, int64_t input, int64_t count, float *to) {
  for (int64_t out = from; out < from + outs; out++, to += m->depth) {
    const char *weights = weights_of(m, out, input), *next = weights_of(m, out + outs, input);
    for (int64_t i = 0; i < count * bytes_of(m->type); i += 4 * LINE) __builtin_prefetch(next + i);
    if (m->type == INT8)
      widen_as(INT8, weights, count, m->scale[out], to);
    else
      widen_as(BFLOAT, weights, count, 1, to);
  }
}

// One tile for a block of rows and inputs. `wide` is room for its weights.
static void multiply_block(const Work *m, int64_t t, int has_next, int64_t row, int64_t rows, int64_t input,
                           float *sums, float *wide) {
  int64_t from = t * OUTS, outs = m->outs - from < OUTS ? m->outs - from : OUTS, left = m->size - input;
  Piece p = {.stride = m->size,
             .count = left < m->depth ? left : m->depth,
             .first = input == 0,
             .last = left <= m->depth};
  const char *weights = weights_of(m, from, input);
  int64_t bytes = m->pairs ? 2 : 4;
  if (m->type != FLOAT && !m->pairs) {
    widen(m, from, outs, input, p.count, wide);
    weights = (const char *)wide;
    p.stride = m->depth;
    has_next = 0;
  }
  for (int64_t r = 0; r < rows; r += ROWS) {
    int now = rows - r < ROWS ? rows - r : ROWS;
    for (int i = 0; i < now; i++) {
      int64_t number = m->rows[row + r + i];
      p.x[i] = m->x + (number * m->size + input) * bytes;
      p.y[i] = m->y + number * m->outs + from;
    }
    p.w = weights;
    p.sums = sums + r * OUTS * LANES;
    // Each pass over the rows fetches a row of the next tile.
    int64_t ahead = OUTS + r / ROWS;
    p.next = has_next && ahead < 2 * OUTS && from + ahead < m->outs ? p.w + ahead * p.stride * bytes : NULL;
    if (outs == OUTS) {
      tile_for[m->pairs][now - 1](&p);
    } else {
      p.next = NULL;
      for (int o = 0; o < outs; o++) {
        one_for[m->pairs][now - 1](&p);
        for (int i = 0; i < now; i++) p.y[i]++;
        p.w += p.stride * bytes;
        p.sums += LANES;
      }
    }
  }
}

static void multiply(const void *work, int64_t first, int64_t end, float *scratch) {
  const Work *m = work;
  float *sums = scratch + (m->type == FLOAT || m->pairs ? 0 : OUTS * m->depth);
  for (int64_t from = first; from < end; from += GROUP) {
    int64_t until = from + GROUP < end ? from + GROUP : end;
    for (int64_t row = 0; row < m->live; row += BLOCK) {
      int64_t rows = m->live - row < BLOCK ? m->live - row : BLOCK;
      for (int64_t input = 0; input < m->size; input += m->depth)
        for (int64_t t = from; t < until; t++)
          multiply_block(m, t, t + 1 < until, row, rows, input, sums + (t - from) * BLOCK * OUTS * LANES, scratch);
    }
  }
}

#if defined(AMX)
extern int may_use_unit;  // matmul.c

enum { LINES = 2 * SIDE };  // outputs of an item

// one(C's register, W's, x's, outputs, rows): a register's number is part of an instruction.
#define FOR_TILES(rows, one)         \
  do {                               \
    one(0, 4, 6, 0, 0);              \
    one(1, 5, 6, 1, 0);              \
    if (rows > 1) one(2, 4, 7, 0, 1); \
    if (rows > 1) one(3, 5, 7, 1, 1); \
  } while (0)
#define CLEAR_TILE(c, w, x, out, row) _tile_zero(c)
#define ADD_TILE(c, w, x, out, row) _tile_dpbf16ps(c, w, x)
#define STORE_TILE(c, w, x, out, row) _tile_stored(c, sums + ((row) * 2 + (out)) * TILE, 64)

// 32 outputs of up to 2 x 16 rows. sums: by rows and outputs, tiles of [output, row].
INLINE void outputs_of(const Work *m, int64_t out, int64_t row, int rows, char *sums) {
  const char *w = weights_of(m, out, 0), *x = m->columns + row * 2 * m->size;
  int64_t stride = 2 * m->size, lower = SIDE * stride, ahead = 2 * lower, other = SIDE * stride;
  int fetch = row == 0 && out + 2 * LINES <= m->outs;
  // GCC does not know that tiles are read from memory.
  __asm__ volatile("" ::: "memory");
  FOR_TILES(rows, CLEAR_TILE);
  for (int64_t k = 0; k < stride; k += 2 * DEEP, x += TILE) {
    if (fetch)
      for (int i = 0; i < LINES; i++) __builtin_prefetch(w + ahead + i * stride + k);
    _tile_loadd(4, w + k, stride);
    _tile_loadd(5, w + lower + k, stride);
    _tile_loadd(6, x, 64);
    if (rows > 1) _tile_loadd(7, x + other, 64);
    FOR_TILES(rows, ADD_TILE);
  }
  FOR_TILES(rows, STORE_TILE);
}

static void multiply_tiles(const void *work, int64_t first, int64_t end, float *scratch) {
  const Work *m = work;
  __m512i sums[4 * SIDE];
  configure();
  for (int64_t item = first; item < end; item++)
    for (int64_t row = 0; row < m->live; row += 2 * SIDE) {
      int64_t rows = m->live - row < 2 * SIDE ? m->live - row : 2 * SIDE;
      if (rows > SIDE)
        outputs_of(m, item * LINES, row, 2, (char *)sums);
      else
        outputs_of(m, item * LINES, row, 1, (char *)sums);
      for (int64_t part = 0; part < tiles(rows, SIDE) * 2; part++) {
        // A line for each row now.
        transpose(sums + part * SIDE);
        float *y = m->y + item * LINES + part % 2 * SIDE;
        for (int64_t r = part / 2 * SIDE, i = 0; i < SIDE && r + i < rows; i++)
          _mm512_storeu_ps(y + m->rows[row + r + i] * m->outs, (__m512)sums[part * SIDE + i]);
      }
    }
  _tile_release();
}

static int suits_tiles(const Work *m) {
  return m->pairs && m->size % DEEP == 0 && m->outs % LINES == 0 && may_use_unit;
}

// Rows in bfloat16 as tiles: for each pair of inputs those of 16 rows. Rows that are missing are zeros.
static void to_columns(const Work *m, const uint16_t *x) {
  for (int64_t row = 0; row < m->live; row += SIDE)
    for (int64_t k = 0; k < m->size; k += DEEP) {
      __m512i *tile = (__m512i *)(m->columns + row * 2 * m->size + k / DEEP * TILE);
      for (int64_t i = 0; i < SIDE; i++)
        tile[i] = row + i < m->live ? _mm512_loadu_si512(x + m->rows[row + i] * m->size + k) : _mm512_setzero_si512();
      transpose(tile);
    }
}
#else
static int suits_tiles(const Work *m) { return 0; }
static void to_columns(const Work *m, const uint16_t *x) {}
enum { LINES = 1 };
#define multiply_tiles multiply
#endif

static int is_zero(const float *x, int64_t size) {
  for (int64_t i = 0; i < size; i++)
    if (x[i] != 0) return 0;
  return 1;
}

// Numbers of bfloat16 in float32 as bfloat16: their upper halves.
static void narrow(const float *from, int64_t count, uint16_t *to) {
  const uint32_t *bits = (const uint32_t *)from;
  for (int64_t i = 0; i < count; i++) to[i] = bits[i] >> 16;
}

XLA_FFI_Error *products(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  const float *x = args[0]->data;
  Work work = {
      .type = args[1]->dtype,
      .w = args[1]->data,
      .x = args[0]->data,
      .y = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data,
      .size = args[0]->dims[1],
      .outs = args[1]->dims[1],
  };
  work.pairs = PAIRS && work.type == BFLOAT;
  if (work.type == INT8) work.scale = args[3]->data;
  work.w = weights_of(&work, *(const int32_t *)args[2]->data * work.outs, 0);
  int64_t count = args[0]->dims[0];
  int by_tiles = suits_tiles(&work);
  // Tiles begin at a cache line, and have room for rows that are missing.
  int64_t room = by_tiles ? 2 * (count + SIDE) * work.size : 0;
  int64_t own = sizeof(int64_t) * count + (work.pairs ? 2 * count * work.size : 0);
  char *memory = aligned_alloc(64, (room + own + 64) / 64 * 64);
  if (!memory) return no_memory(frame);
  int64_t *rows = (int64_t *)(memory + room);
  uint16_t *narrowed = (uint16_t *)(rows + count);
  if (work.pairs) work.x = (const char *)narrowed;
  for (int64_t r = 0; r < count; r++) {
    if (is_zero(x + r * work.size, work.size)) {
      memset(work.y + r * work.outs, 0, sizeof(float) * work.outs);
      continue;
    }
    if (work.pairs) narrow(x + r * work.size, work.size, narrowed + r * work.size);
    rows[work.live++] = r;
  }
  work.rows = rows;
  if (by_tiles) {
    work.columns = memory;
    to_columns(&work, narrowed);
  }
  int64_t threads = work.size * work.outs < FEW_NUMBERS ? 1 : threads_of(frame);
  int64_t items = !work.live ? 0 : by_tiles ? work.outs / LINES : (work.outs + OUTS - 1) / OUTS;
  int64_t blocks = work.size > DEPTH ? (work.size + DEPTH - 1) / DEPTH : 1;
  work.depth = ((work.size + blocks - 1) / blocks + LANES - 1) / LANES * LANES;
  int64_t scratch = (work.type == FLOAT || work.pairs ? 0 : OUTS * work.depth) + (blocks > 1 ? GROUP * BLOCK * OUTS * LANES : 0);
  Part *part = by_tiles ? multiply_tiles : multiply;
  XLA_FFI_Error *error = spread(frame, part, &work, sizeof work, items, 2 * threads, threads, scratch);
  free(memory);
  return error;
}
