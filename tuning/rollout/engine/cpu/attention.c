// Attention of one query a row over the cached keys and values of an engine's slots, on all cores.
//
// Axes: R rows, P slots, N slots of new tokens, K key-value heads, A query heads of each, H head size (a multiple of
// LANES), S cached tokens, T new ones, L layers. Arguments: q [R, K, A, H], already scaled; keys [L, P, K, H, S] and
// values [L, P, K, S, H]; the same of the new tokens, N and T in place of P and S; the layer's number, a scalar, int32;
// spans [R, 6], int32: of the cached tokens that a row sees slot, first and end, then the same of the new ones, never
// empty together; the sink of each head [K * A], -inf for none; for keys and values in int8 what a token's are multiplied by, [L, P, K, S], float32, in the order of
// the keys and values. Attribute: softcap, float32, 0 for none. Result [R, K, A, H]. Keys and values are of the type KV
// that this is compiled for, all else is float32.
#include <math.h>

#define LANES 16  // floats of a vector
#include "kernels.h"

enum {
  VECTORS = 4,       // vectors that a tile spans
  QUERIES = 4,       // query heads at a time: with VECTORS, the sums of a tile fit the registers
  SPAN = 6,          // numbers of a row's spans
  AHEAD = 16,        // rows to fetch ahead: the hardware does not foresee strides
  FEW_NUMBERS = 1 << 16,  // keys of fewer numbers than this are read sooner than another core wakes
};

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

// Number `i` of keys or values, and a vector of them.
INLINE const char *at(const char *p, int64_t i) { return p + i * bytes_of(KV); }
INLINE vec load_kv(const char *p) {
  if (KV == FLOAT) return load((const float *)p);
  if (KV == INT8) return __builtin_convertvector(__builtin_convertvector(*(const bytes *)p, bits), vec);
  return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16);
}

// Scores of `queries` heads with the tokens of a tile. Calls with constants become loops without branches.
INLINE void score_tile(int queries, int vectors, const float *q, int64_t size, const char *keys, int64_t tokens,
                       float *scores, int64_t stride) {
  vec sum[QUERIES][VECTORS];
  for (int a = 0; a < queries; a++)
    for (int t = 0; t < vectors; t++) sum[a][t] = splat(0);
  for (int64_t h = 0; h < size; h++) {
    const char *row = at(keys, h * tokens);
    vec key[VECTORS];
    for (int t = 0; t < vectors; t++) {
      key[t] = load_kv(at(row, t * LANES));
      __builtin_prefetch(at(row, AHEAD * tokens + t * LANES));
    }
    for (int a = 0; a < queries; a++) {
      vec x = splat(q[a * size + h]);
      for (int t = 0; t < vectors; t++) sum[a][t] += x * key[t];
    }
  }
  for (int a = 0; a < queries; a++)
    for (int t = 0; t < vectors; t++) store(scores + a * stride + t * LANES, sum[a][t]);
}

INLINE void scores_of(int queries, const float *q, int64_t size, const char *keys, int64_t tokens, int64_t first,
                      int64_t end, float *scores, int64_t stride) {
  int64_t s = first;
  // A tile may compute scores behind `end`, which are written over; it may not read behind the slot.
  for (; s < end && s + VECTORS * LANES <= tokens && end - s > LANES; s += VECTORS * LANES)
    score_tile(queries, VECTORS, q, size, at(keys, s), tokens, scores + s - first, stride);
  for (; s < end && s + LANES <= tokens; s += LANES)
    score_tile(queries, 1, q, size, at(keys, s), tokens, scores + s - first, stride);
  for (; s < end; s++)
    for (int a = 0; a < queries; a++) {
      float sum = 0;
      for (int64_t h = 0; h < size; h++) sum += q[a * size + h] * number_of(KV, keys, h * tokens + s);
      scores[a * stride + s - first] = sum;
    }
}

INLINE void value_tile(int queries, int vectors, const float *weights, int64_t stride, const char *values, int64_t size,
                       int64_t count, float *out) {
  vec sum[QUERIES][VECTORS];
  for (int a = 0; a < queries; a++)
    for (int t = 0; t < vectors; t++) sum[a][t] = load(out + a * size + t * LANES);
  for (int64_t s = 0; s < count; s++) {
    const char *row = at(values, s * size);
    vec value[VECTORS];
    for (int t = 0; t < vectors; t++) {
      value[t] = load_kv(at(row, t * LANES));
      __builtin_prefetch(at(row, AHEAD * size + t * LANES));
    }
    for (int a = 0; a < queries; a++) {
      vec x = splat(weights[a * stride + s]);
      for (int t = 0; t < vectors; t++) sum[a][t] += x * value[t];
    }
  }
  for (int a = 0; a < queries; a++)
    for (int t = 0; t < vectors; t++) store(out + a * size + t * LANES, sum[a][t]);
}

INLINE void values_of(int queries, const float *weights, int64_t stride, const char *values, int64_t size, int64_t count,
                      float *out) {
  int64_t h = 0;
  for (; h + VECTORS * LANES <= size; h += VECTORS * LANES)
    value_tile(queries, VECTORS, weights, stride, at(values, h), size, count, out + h);
  for (; h < size; h += LANES) value_tile(queries, 1, weights, stride, at(values, h), size, count, out + h);
}

// Weights e^(s - max) in place of `count` scores, and their sum with that of the sink, a score without a value. What lies behind them up to a whole vector is lost.
INLINE float soft_max(float *scores, int64_t count, float softcap, float sink) {
  int64_t whole = (count + LANES - 1) / LANES * LANES;
  if (softcap > 0)
    for (int64_t i = 0; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
  for (int64_t i = count; i < whole; i++) scores[i] = -INFINITY;
  vec most = load(scores);
  for (int64_t i = LANES; i < whole; i += LANES) most = larger(most, load(scores + i));
  float maximum = most[0] > sink ? most[0] : sink;
  for (int i = 1; i < LANES; i++) maximum = most[i] > maximum ? most[i] : maximum;
  for (int64_t i = 0; i < whole; i += LANES) store(scores + i, exponential(load(scores + i) - maximum));
  for (int64_t i = count; i < whole; i++) scores[i] = 0;
  vec sums = splat(0);
  for (int64_t i = 0; i < whole; i += LANES) sums += load(scores + i);
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += sums[i];
  return sum + expf(sink - maximum);
}

// One function for each number of query heads: constants in the loops above.
#define FOR_QUERIES(n)                                                                                            \
  static void scores_##n(const float *q, int64_t size, const char *keys, int64_t tokens, int64_t first,           \
                         int64_t end, float *scores, int64_t stride) {                                            \
    scores_of(n, q, size, keys, tokens, first, end, scores, stride);                                              \
  }                                                                                                               \
  static void values_##n(const float *weights, int64_t stride, const char *values, int64_t size, int64_t count,   \
                         float *out) {                                                                            \
    values_of(n, weights, stride, values, size, count, out);                                                      \
  }
FOR_QUERIES(1)
FOR_QUERIES(2)
FOR_QUERIES(3)
FOR_QUERIES(4)
static void (*const scores_for[])(const float *, int64_t, const char *, int64_t, int64_t, int64_t, float *, int64_t) = {
    scores_1, scores_2, scores_3, scores_4};
static void (*const values_for[])(const float *, int64_t, const char *, int64_t, int64_t, float *) = {
    values_1, values_2, values_3, values_4};

// Some tokens of all slots in one layer: cached ones or new ones, `tokens` in each. `span` is where a row's slot, first and
// end are in its spans.
typedef struct {
  const char *keys, *values;
  const float *key_scales, *value_scales;  // NULL but for int8
  int64_t tokens;
  int span;
} Tokens;

typedef struct {
  Tokens cached, new;
  const float *q, *sinks;
  const int32_t *spans;
  float *out;
  float softcap;
  int64_t rows, heads, group, size;
  int64_t stride;  // floats of the scores of one query head
} Work;

INLINE void multiply(float *numbers, int64_t stride, int queries, const float *by, int64_t count) {
  for (int a = 0; a < queries; a++)
    for (int64_t i = 0; i < count; i++) numbers[a * stride + i] *= by[i];
}

// `pair` counts key-value heads of rows, `where` those of the slots.
static void score(const Work *w, const Tokens *x, int64_t pair, int queries, const float *q, float *scores) {
  const int32_t *span = w->spans + SPAN * (pair / w->heads) + x->span;
  int64_t where = span[0] * w->heads + pair % w->heads;
  const char *keys = at(x->keys, where * w->size * x->tokens);
  scores_for[queries - 1](q, w->size, keys, x->tokens, span[1], span[2], scores, w->stride);
  if (x->key_scales)
    multiply(scores, w->stride, queries, x->key_scales + where * x->tokens + span[1], span[2] - span[1]);
}

static void add_values(const Work *w, const Tokens *x, int64_t pair, int queries, float *weights, float *out) {
  const int32_t *span = w->spans + SPAN * (pair / w->heads) + x->span;
  int64_t where = span[0] * w->heads + pair % w->heads;
  const char *values = at(x->values, (where * x->tokens + span[1]) * w->size);
  if (x->value_scales)
    multiply(weights, w->stride, queries, x->value_scales + where * x->tokens + span[1], span[2] - span[1]);
  values_for[queries - 1](weights, w->stride, values, w->size, span[2] - span[1], out);
}

// All query heads of one key-value head of one row.
static void attend(const Work *w, int64_t pair, float *scores) {
  const int32_t *span = w->spans + SPAN * (pair / w->heads);
  int64_t size = w->size, far = span[2] - span[1], near = span[5] - span[4];
  for (int64_t first = 0; first < w->group; first += QUERIES) {
    int queries = w->group - first < QUERIES ? w->group - first : QUERIES;
    const float *q = w->q + (pair * w->group + first) * size;
    float *out = w->out + (pair * w->group + first) * size;
    score(w, &w->cached, pair, queries, q, scores);
    score(w, &w->new, pair, queries, q, scores + far);
    float sum[QUERIES];
    const float *sinks = w->sinks + pair % w->heads * w->group + first;
    for (int a = 0; a < queries; a++) sum[a] = soft_max(scores + a * w->stride, far + near, w->softcap, sinks[a]);
    memset(out, 0, sizeof(float) * queries * size);
    add_values(w, &w->cached, pair, queries, scores, out);
    add_values(w, &w->new, pair, queries, scores + far, out);
    for (int a = 0; a < queries; a++)
      for (int64_t h = 0; h < size; h++) out[a * size + h] /= sum[a];
  }
}

static void attend_pairs(const void *work, int64_t first, int64_t end, float *scores) {
  for (int64_t pair = first; pair < end; pair++) attend(work, pair, scores);
}

// Layer `layer` of stacked keys and values, and of their scales, which follow each other.
static Tokens tokens_of(XLA_FFI_Buffer **stacks, XLA_FFI_Buffer **scales, int64_t layer, int span) {
  const int64_t *dims = stacks[0]->dims;
  int64_t pairs = layer * dims[1] * dims[2], tokens = dims[4];
  Tokens found = {.keys = at(stacks[0]->data, pairs * dims[3] * tokens),
                  .values = at(stacks[1]->data, pairs * dims[3] * tokens),
                  .tokens = tokens,
                  .span = span};
  if (KV == INT8) {
    found.key_scales = (const float *)scales[0]->data + pairs * tokens;
    found.value_scales = (const float *)scales[1]->data + pairs * tokens;
  }
  return found;
}

XLA_FFI_Error *attention(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  XLA_FFI_Buffer *out = frame->rets.rets[0];
  int64_t layer = *(const int32_t *)args[5]->data;
  Work work = {
      .cached = tokens_of(args + 1, args + 8, layer, 0),
      .new = tokens_of(args + 3, args + 10, layer, 3),
      .q = args[0]->data,
      .spans = args[6]->data,
      .sinks = args[7]->data,
      .out = out->data,
      .softcap = *(float *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value,
      .rows = args[0]->dims[0],
      .heads = args[1]->dims[2],
      .group = args[0]->dims[2],
      .size = args[1]->dims[3],
  };
  // Tiles write whole vectors behind the last score.
  work.stride = (work.cached.tokens + work.new.tokens + 2 * VECTORS * LANES) / LANES * LANES;
  int64_t numbers = 0;
  for (int64_t r = 0; r < work.rows; r++) numbers += (work.spans[SPAN * r + 2] - work.spans[SPAN * r + 1]) * work.heads * work.size;
  // Lengths differ: one pair at a time.
  int64_t pairs = work.rows * work.heads, threads = numbers < FEW_NUMBERS ? 1 : threads_of(frame);
  return spread(frame, attend_pairs, &work, sizeof work, pairs, pairs + 1, threads, QUERIES * work.stride);
}
