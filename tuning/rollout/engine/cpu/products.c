// x W^T on all cores, made for few rows. Arguments: x [R, I], float32; stacked W [L, O, I], float32, bfloat16 or int8; the
// number of the W to take, a scalar, int32; for int8 what an output's weights are multiplied by, [O], float32. Result
// [R, O], float32.
//
// Each number is LANES sums over the input that are added in the end, in an order that depends on I alone: a row's
// results have the same bits alone and among others. A row of zeros is not computed: empty slots take no time. A tile's
// weights of another type become float32 in a core's first cache, once for all rows of a block. With a bfloat16 W the
// rows hold numbers of that type, and a processor that multiplies them (AVX512_BF16) does so; by its matrix unit (AMX),
// if it has one, where the sizes of W are whole tiles: a number then is one sum over the input.
#include "products.h"

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

// Whether weights are multiplied as they lie.
INLINE int as_they_lie(const Work *m) { return m->type == FLOAT || m->pairs; }

// Inputs of a block: whole vectors, so that no bit depends on it.
static int64_t depth_of(const Work *m) {
  int64_t bytes = m->pairs ? 2 : 4, step = 4 * LANES / bytes, most = BYTES / bytes;
  // Weights that are read once need no cache.
  int64_t blocks = (m->live <= ROWS && as_they_lie(m)) || m->size <= most ? 1 : (m->size + most - 1) / most;
  return (m->size + blocks * step - 1) / (blocks * step) * step;
}

INLINE const char *weights_of(const Work *m, int64_t out, int64_t input) {
  return m->w + (out * m->size + input) * bytes_of(m->type);
}

INLINE void widen_as(int type, const void *from, int64_t count, float scale, float *to) {
  for (int64_t i = 0; i < count; i++) to[i] = type == INT8 ? scale * number_of(type, from, i) : number_of(type, from, i);
}

// `count` inputs' weights of `outs` outputs in float32, `depth` numbers apart; those of the next tile, at `ahead`, are
// fetched meanwhile.
static void widen(const Work *m, const char *weights, int64_t outs, int64_t stride, int64_t ahead, int64_t count,
                  const float *scale, int64_t apart, float *to) {
  for (int64_t o = 0; o < outs; o++, weights += stride, to += m->depth) {
    for (int64_t i = 0; i < count * bytes_of(m->type); i += 4 * LINE) __builtin_prefetch(weights + ahead + i);
    if (m->type == INT8)
      widen_as(INT8, weights, count, scale[o * apart], to);
    else
      widen_as(BFLOAT, weights, count, 1, to);
  }
}

// Tiles of OUTS outputs that are `apart` from one another. Neighbours are in one tile where that is 1. Else each begins a
// part of the range, and a tile's weights follow on those of the tile before: a processor reads ahead in a few long lines,
// and not in as many short ones as neighbours are.
typedef struct {
  int64_t first, count, apart;
} Range;

// Tile `t` for a block of rows and inputs. `wide` is room for its weights.
static void multiply_block(const Work *m, const Range *range, int64_t t, int64_t row, int64_t rows, int64_t input,
                           float *sums, float *wide) {
  int64_t step = range->apart > 1 ? 1 : OUTS, from = range->first + t * step;
  int64_t outs = m->outs - from < OUTS ? m->outs - from : OUTS, left = m->size - input;
  int64_t bytes = bytes_of(m->type), stride = range->apart * m->size * bytes;
  Piece p = {.stride = range->apart * m->size,
             .apart = range->apart,
             .count = left < m->depth ? left : m->depth,
             .first = input == 0,
             .last = left <= m->depth};
  const char *weights = weights_of(m, from, input);
  int64_t ahead = t + 1 < range->count ? step * m->size * bytes : 0;
  if (!as_they_lie(m)) {
    widen(m, weights, outs, stride, ahead, p.count, m->scale + from, range->apart, wide);
    weights = (const char *)wide;
    p.stride = m->depth;
    ahead = 0;
  } else if (rows <= ROWS && range->apart > 1) {
    // Sooner than the processor by itself.
    ahead = AHEAD;
  }
  // Each pass takes about as many rows, and fetches as many outputs of the next tile: at once only what is read ahead.
  int64_t passes = (rows + ROWS - 1) / ROWS, each = (OUTS + (range->apart > 1 ? passes - 1 : passes / 2)) / passes;
  bytes = m->pairs ? 2 : 4;
  for (int64_t r = 0, now, done = 0; r < rows; r += now, done += each, passes--) {
    now = (rows - r + passes - 1) / passes;
    for (int i = 0; i < now; i++) {
      int64_t number = m->rows[row + r + i];
      p.x[i] = m->x + (number * m->size + input) * bytes;
      p.y[i] = m->y + number * m->outs + from;
    }
    p.w = weights;
    p.sums = sums + r * OUTS * LANES;
    p.fetched = OUTS - done < each ? OUTS - done : each;
    p.next = ahead && done < OUTS ? weights + ahead + done * stride : NULL;
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

static void multiply_range(const Work *m, Range range, float *scratch) {
  float *sums = scratch + (as_they_lie(m) ? 0 : OUTS * m->depth);
  for (int64_t from = 0; from < range.count; from += GROUP) {
    int64_t until = from + GROUP < range.count ? from + GROUP : range.count;
    for (int64_t row = 0; row < m->live; row += BLOCK) {
      int64_t rows = m->live - row < BLOCK ? m->live - row : BLOCK;
      for (int64_t input = 0; input < m->size; input += m->depth)
        for (int64_t t = from; t < until; t++)
          multiply_block(m, &range, t, row, rows, input, sums + (t - from) * BLOCK * OUTS * LANES, scratch);
    }
  }
}

static void multiply(const void *work, int64_t first, int64_t end, float *scratch) {
  const Work *m = work;
  int64_t from = first * OUTS, whole = (end * OUTS < m->outs ? end : m->outs / OUTS) - first;
  // An odd number: where weights are whole pages apart, each takes the other's place in the first cache.
  int64_t apart = whole - (whole % 2 == 0);
  if (m->live <= FEW && apart > 1) {
    multiply_range(m, (Range){from, apart, apart}, scratch);
    from += apart * OUTS;
  }
  if (from < m->outs && from < end * OUTS) multiply_range(m, (Range){from, end - from / OUTS, 1}, scratch);
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
  work.depth = depth_of(&work);
  int64_t scratch = (as_they_lie(&work) ? 0 : OUTS * work.depth) + (work.depth < work.size ? GROUP * BLOCK * OUTS * LANES : 0);
  Part *part = by_tiles ? multiply_tiles : multiply;
  XLA_FFI_Error *error = spread(frame, part, &work, sizeof work, items, 2 * threads, threads, scratch);
  free(memory);
  return error;
}
