// C = A B of large matrices whose factors are rounded to bfloat16 (to nearest, ties to even) and summed in float32, by
// a processor's matrix unit (AMX) or by its vectors (AVX512_BF16). Arguments: A [M, K] and B [K, N], float32 or
// bfloat16. Attribute `across`, int32, a sum: 1, A is stored as [K, M]; 2, B is stored as [N, K]. Results: C [M, N],
// float32, and scratch for the smaller factor, uint8.
//
// A number of C is summed over K in an order that depends on K alone: the same bits whatever M and N are and however
// many threads work. Both factors are cut into tiles of 16 x 32 numbers, 1 KiB, padded with zeros, that lie in the
// order in which they are read: the smaller factor's once for all threads; the larger one's block by block, in a core's
// second cache.
#include "kernels.h"

#if defined(BFLOAT_TILES)
#if defined(AMX)
#include <sys/syscall.h>
#include <unistd.h>

int may_use_unit;

// Asks Linux for the matrix unit, for the whole process, once and before all products: it may answer otherwise later.
int matmul_unit(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return may_use_unit = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

enum {
  BREADTH = 16,  // lines of tiles of a block, at most: it stays in the second cache,
  DEPTH = 24,    // and tiles of a line: two lines of the other factor stay in the first
};

typedef struct {
  int type;
  int along;  // whether K is the axis whose numbers are neighbours
  const char *data;
  int64_t size, stride;  // of the other axis; numbers from one to the next of the axis that is not neighbours'
} Matrix;

typedef struct {
  Matrix a, b;
  int64_t depth;  // K
  float *c;
  int wide;  // whether the larger factor is B
  char *packed;  // the smaller factor
  int64_t breadth;  // lines of tiles, each over K, of a block of the larger one
} Work;

// 16 neighbours from number `i` on, those of `mask`, as bfloat16; zeros for the others.
INLINE __m256i load(const Matrix *m, int64_t i, __mmask16 mask) {
  if (m->type == FLOAT) return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, (const float *)m->data + i));
  return _mm256_maskz_loadu_epi16(mask, (const uint16_t *)m->data + i);
}

INLINE __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// One tile, from number `side` and `k` on. Rows of it are numbers of the axis that is kept, each with its 32 of K; with
// `pairs` its rows are pairs of K, each with those of 16 numbers of the axis that is kept.
static void pack(const Matrix *m, int64_t depth, int64_t side, int64_t k, int pairs, __m512i *to) {
  __m512i r[SIDE];
  if (m->along) {
    __mmask16 low = first(depth - k), high = first(depth - k - 16);
    for (int i = 0; i < SIDE; i++) {
      int64_t at = (side + i) * m->stride + k;
      r[i] = _mm512_setzero_si512();
      if (side + i < m->size)
        r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(m, at, low)), load(m, at + 16, high), 1);
    }
  } else {
    __mmask16 mask = first(m->size - side);
    for (int i = 0; i < SIDE; i++) {
      int64_t now = k + 2 * i, at = now * m->stride + side;
      __m512i even = _mm512_cvtepu16_epi32(load(m, at, now < depth ? mask : 0));
      __m512i odd = _mm512_cvtepu16_epi32(load(m, at + m->stride, now + 1 < depth ? mask : 0));
      r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
  }
  if (m->along == pairs) transpose(r);
  for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + i, r[i]);
}

// Lines of the smaller factor's tiles.
static void pack_lines(const void *work, int64_t begin, int64_t end, float *scratch) {
  const Work *w = work;
  const Matrix *small = w->wide ? &w->a : &w->b;
  int64_t deep = tiles(w->depth, DEEP);
  for (int64_t i = begin; i < end; i++)
    for (int64_t k = 0; k < deep; k++)
      pack(small, w->depth, i * SIDE, k * DEEP, !w->wide, (__m512i *)(w->packed + (i * deep + k) * TILE));
}

// Sums over `count` tiles of K of up to 2 x 2 tiles of C: c[row][column], `stride` numbers from one row to the next.
// The tiles of a second line of A are `next_a` bytes behind those of the first, and so on.
typedef struct {
  const char *a, *b;
  int64_t next_a, next_b, count, stride;
  float *c;
  int begins;  // whether C holds no sums yet
} Step;

typedef void Kind(const Step *s);

enum { MICRO_ROWS = 8 };  // rows whose sums, of 2 x 16 columns, stay in registers

INLINE void sum_pairs(const Step *s, int rows, int columns) {
  for (int row = 0; row < rows * SIDE; row += MICRO_ROWS) {
    __m512 c[MICRO_ROWS][2];
    float *to = s->c + row * s->stride;
    for (int r = 0; r < MICRO_ROWS; r++)
      for (int i = 0; i < columns; i++) c[r][i] = _mm512_setzero_ps();
    const char *a = s->a + row / SIDE * s->next_a + row % SIDE * 64, *b = s->b;
    for (int64_t k = 0; k < s->count; k++, a += TILE, b += TILE)
      for (int pair = 0; pair < SIDE; pair++) {
        __m512bh of_b[2];
        for (int i = 0; i < columns; i++) of_b[i] = (__m512bh)_mm512_load_si512(b + i * s->next_b + pair * 64);
        for (int r = 0; r < MICRO_ROWS; r++) {
          __m512bh of_a = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(a + r * 64 + pair * 4));
          for (int i = 0; i < columns; i++) c[r][i] = _mm512_dpbf16_ps(c[r][i], of_a, of_b[i]);
        }
      }
    for (int r = 0; r < MICRO_ROWS; r++)
      for (int i = 0; i < columns; i++) {
        // Sums of a part begin at zero: in one chain over a long K their errors would grow with it.
        float *sum = to + r * s->stride + i * SIDE;
        _mm512_storeu_ps(sum, s->begins ? c[r][i] : _mm512_add_ps(_mm512_loadu_ps(sum), c[r][i]));
      }
  }
}

#if defined(AMX)
INLINE float *at(const Step *s, int row, int column) { return s->c + row * SIDE * s->stride + column * SIDE; }

// one(C's register, A's, B's, row, column): a register's number is part of an instruction.
#define FOR_TILES(rows, columns, one)                \
  do {                                               \
    one(0, 4, 6, 0, 0);                              \
    if (columns > 1) one(1, 4, 7, 0, 1);             \
    if (rows > 1) one(2, 5, 6, 1, 0);                \
    if (rows > 1 && columns > 1) one(3, 5, 7, 1, 1); \
  } while (0)
#define CLEAR(c, a, b, row, column) _tile_zero(c)
#define LOAD(c, a, b, row, column) _tile_loadd(c, at(s, row, column), 4 * s->stride)
#define STORE(c, a, b, row, column) _tile_stored(c, at(s, row, column), 4 * s->stride)
#define ADD(c, a, b, row, column) _tile_dpbf16ps(c, a, b)

INLINE void sum_tiles(const Step *s, int rows, int columns) {
  // GCC does not know that tiles are read from memory.
  __asm__ volatile("" ::: "memory");
  if (s->begins)
    FOR_TILES(rows, columns, CLEAR);
  else
    FOR_TILES(rows, columns, LOAD);
  const char *a = s->a, *b = s->b;
  for (int64_t k = 0; k < s->count; k++, a += TILE, b += TILE) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    if (rows > 1) _tile_loadd(5, a + s->next_a, 64);
    if (columns > 1) _tile_loadd(7, b + s->next_b, 64);
    FOR_TILES(rows, columns, ADD);
  }
  FOR_TILES(rows, columns, STORE);
}
#endif

#define FOR_KIND(name, rows, columns) \
  static void name##_##rows##columns(const Step *s) { name(s, rows, columns); }
#define KINDS(name)                                                        \
  FOR_KIND(name, 1, 1)                                                     \
  FOR_KIND(name, 1, 2)                                                     \
  FOR_KIND(name, 2, 1)                                                     \
  FOR_KIND(name, 2, 2)                                                     \
  static Kind *const name##_kinds[2][2] = {{name##_11, name##_12}, {name##_21, name##_22}};
KINDS(sum_pairs)
#if defined(AMX)
KINDS(sum_tiles)
#define KIND(rows, columns) (may_use_unit ? sum_tiles_kinds : sum_pairs_kinds)[rows][columns]
INLINE void begin_tiles(void) {
  if (may_use_unit) configure();
}
INLINE void end_tiles(void) {
  if (may_use_unit) _tile_release();
}
#else
#define KIND(rows, columns) sum_pairs_kinds[rows][columns]
INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#endif

// A step at C's edge, whose last tiles are not whole, goes by a copy.
static void step(const Work *w, Step *s, int64_t row, int64_t column) {
  int64_t rows = w->a.size - row, columns = w->b.size - column;
  Kind *kind = KIND(rows > SIDE, columns > SIDE);
  if (rows > 2 * SIDE) rows = 2 * SIDE;
  if (columns > 2 * SIDE) columns = 2 * SIDE;
  s->c = w->c + row * w->b.size + column;
  s->stride = w->b.size;
  if (rows % SIDE == 0 && columns % SIDE == 0) {
    kind(s);
    return;
  }
  float copy[2 * SIDE * 2 * SIDE] __attribute__((aligned(64))), *c = s->c;
  if (!s->begins)
    for (int64_t r = 0; r < rows; r++) memcpy(copy + r * 2 * SIDE, c + r * s->stride, 4 * columns);
  s->c = copy;
  s->stride = 2 * SIDE;
  kind(s);
  for (int64_t r = 0; r < rows; r++) memcpy(c + r * w->b.size, copy + r * 2 * SIDE, 4 * columns);
}

// Blocks of the larger factor.
static void multiply(const void *work, int64_t begin, int64_t end, float *scratch) {
  const Work *w = work;
  const Matrix *large = w->wide ? &w->b : &w->a, *small = w->wide ? &w->a : &w->b;
  int64_t deep = tiles(w->depth, DEEP), parts = tiles(deep, DEPTH), part = tiles(deep, parts);
  int64_t all = tiles(large->size, SIDE), others = tiles(small->size, SIDE);
  begin_tiles();
  for (int64_t block = begin; block < end; block++) {
    int64_t from = block * w->breadth, until = from + w->breadth < all ? from + w->breadth : all;
    for (int64_t k = 0; k < deep; k += part) {
      int64_t count = deep - k < part ? deep - k : part;
      char *packed = (char *)scratch;
      for (int64_t line = from; line < until; line++)
        for (int64_t i = 0; i < count; i++, packed += TILE)
          pack(large, w->depth, line * SIDE, (k + i) * DEEP, w->wide, (__m512i *)packed);
      for (int64_t other = 0; other < others; other += 2)
        for (int64_t line = from; line < until; line += 2) {
          const char *its = (char *)scratch + (line - from) * count * TILE;
          const char *whole = w->packed + (other * deep + k) * TILE;
          int64_t next = count * TILE, next_whole = deep * TILE;
          Step s = {.a = w->wide ? whole : its,
                    .b = w->wide ? its : whole,
                    .next_a = w->wide ? next_whole : next,
                    .next_b = w->wide ? next : next_whole,
                    .count = count,
                    .begins = k == 0};
          step(w, &s, (w->wide ? other : line) * SIDE, (w->wide ? line : other) * SIDE);
        }
    }
  }
  end_tiles();
}

INLINE Matrix matrix_of(const XLA_FFI_Buffer *of, int along, int kept) {
  return (Matrix){.type = of->dtype, .along = along, .data = of->data, .size = of->dims[kept], .stride = of->dims[1]};
}

XLA_FFI_Error *matmul(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  int32_t across = *(const int32_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **results = (XLA_FFI_Buffer **)frame->rets.rets;
  Work work = {
      .a = matrix_of(args[0], !(across & 1), across & 1),
      .b = matrix_of(args[1], across >> 1, !(across >> 1)),
      .depth = args[0]->dims[!(across & 1)],
      .c = results[0]->data,
      .packed = results[1]->data,
  };
  // At a cache line's begin.
  work.packed += -(uintptr_t)work.packed % 64;
  work.wide = work.b.size > work.a.size;
  int64_t threads = threads_of(frame), deep = tiles(work.depth, DEEP);
  int64_t large = tiles(work.wide ? work.b.size : work.a.size, SIDE);
  int64_t small = tiles(work.wide ? work.a.size : work.b.size, SIDE);
  // Four blocks for each thread, so that none waits long for another; of an even number of lines.
  work.breadth = tiles(large, 8 * threads) * 2;
  if (work.breadth > BREADTH) work.breadth = BREADTH;
  XLA_FFI_Error *error = spread(frame, pack_lines, &work, sizeof work, small, 2 * threads, threads, 0);
  if (error) return error;
  int64_t scratch = work.breadth * (deep < DEPTH ? deep : DEPTH) * TILE / 4;
  return spread(frame, multiply, &work, sizeof work, tiles(large, work.breadth), 2 * threads, threads, scratch);
}
#endif
