// Products of small matrices of float32 for `fused.c`, by tiles whose sums stay in the registers of AVX-512.
#define LANES 16  // floats of a vector
#include "kernels.h"

#if defined(__AVX512F__)
enum {
  HEIGHT = 6,   // of a tile, whose sums are in registers,
  VECTORS = 4,  // and its breadth
};

INLINE bits load_bits(const int32_t *p) { return *(const bits *)p; }
INLINE vec only(vec x, bits mask) { return (vec)((bits)x & mask); }

INLINE float sum_of(vec x) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}

INLINE float largest_of(vec x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

// C [rows, width] = A [rows, depth] B [depth, width], or C + A B: number (r, d) of A is a[r * down + d * along], a row
// of B `next_b` numbers from the one before it, one of C `next_c`.
typedef struct {
  const float *a, *b;
  float *c;
  int64_t down, along, next_b, next_c, depth;
  int adds;
} Product;

INLINE void tile(int rows, int vectors, const Product *p) {
  vec sum[HEIGHT][VECTORS];
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vectors; i++) sum[r][i] = splat(0);
  const float *a = p->a, *b = p->b;
  for (int64_t d = 0; d < p->depth; d++, a += p->along, b += p->next_b) {
    vec of_b[VECTORS];
    for (int i = 0; i < vectors; i++) of_b[i] = load(b + i * LANES);
    for (int r = 0; r < rows; r++) {
      vec of_a = splat(a[r * p->down]);
      for (int i = 0; i < vectors; i++) sum[r][i] += of_a * of_b[i];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vectors; i++) {
      float *c = p->c + r * p->next_c + i * LANES;
      store(c, p->adds ? load(c) + sum[r][i] : sum[r][i]);
    }
}

// Calls with constants become loops without branches.
#define FOR_ROWS(n)                                                \
  static void tile_##n##_1(const Product *p) { tile(n, 1, p); }    \
  static void tile_##n##_all(const Product *p) { tile(n, VECTORS, p); }
FOR_ROWS(1)
FOR_ROWS(2)
FOR_ROWS(3)
FOR_ROWS(4)
FOR_ROWS(5)
FOR_ROWS(6)
#define TILES(width) {tile_1_##width, tile_2_##width, tile_3_##width, tile_4_##width, tile_5_##width, tile_6_##width}
static void (*const narrow[HEIGHT])(const Product *) = TILES(1);
static void (*const broad[HEIGHT])(const Product *) = TILES(all);

static void multiply(Product whole, int64_t rows, int64_t width) {
  for (int64_t i = 0, step; i < width; i += step) {
    int all = width - i >= VECTORS * LANES;
    step = all ? VECTORS * LANES : LANES;
    for (int64_t r = 0; r < rows; r += HEIGHT) {
      Product p = whole;
      p.a += r * p.down;
      p.b += i;
      p.c += r * p.next_c + i;
      (all ? broad : narrow)[(rows - r < HEIGHT ? rows - r : HEIGHT) - 1](&p);
    }
  }
}
#endif
