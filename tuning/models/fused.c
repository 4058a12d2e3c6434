// Attention of packed rows and its gradient, without the logits of a whole row (Dao et al., 2022), on all cores, by
// vectors of AVX-512: with shorter ones XLA's is as fast.
//
// Axes: B rows, L tokens, N query heads, K key-value heads, G = N / K, H head size (a multiple of LANES). The token of
// column i sees that of column j <= i where group is the same, branch the same or 0 at j, and position[i] - position[j]
// < window, which is at least 1: so each sees itself. Attribute: scale, float32, of the logits. All sums are in
// float32, in an order that threads do not change.
//
// fused_forward(q [B, L, N, H], k [B, L, K, H], v, group [B, L], branch, position, window []) -> out [B, L, N, H] and
// the logarithm of each query's normaliser [B, L, N]; numbers are float32, the others int32.
// fused_backward(q, k, v, group, branch, position, window, out, normaliser, gradient of out) -> those of q, k and v.
//
// A block of queries meets blocks of keys. The queries of the G heads that share keys are rows of one matrix, token by
// token, as they lie in memory.
#include <math.h>

#include "fused.h"

#if defined(__AVX512F__)
enum {
  KEYS = 64,    // of a block: one of a head, either way round, stays in a core's first cache
  ROWS = 192,   // of a block of queries, as near as tokens come to it: with KEYS and H, its matrices stay in the second
};

typedef struct {
  const float *q, *k, *v, *out, *normaliser, *g;
  const int32_t *group, *branch, *position;
  float *to_out, *to_normaliser, *dq, *dk, *dv;
  float scale;
  int32_t window;
  int64_t rows, length, heads, shared, size;  // B, L, K, G, H
  int64_t tokens;                             // of a block of queries
} Work;

// Of one thread: matrices of a block of queries and of one of keys.
typedef struct {
  float *q, *g, *o;    // [tokens * G, H]: scaled queries, gradients of outputs; outputs, or gradients of queries
  float *s, *d;        // [tokens * G, KEYS]: logits, then weights; gradients of either
  float *k, *v;        // [KEYS, H]
  float *kt, *vt;      // [H, KEYS]
  float *top, *total;  // [tokens * G]: the largest logit, or the normaliser; the sum of weights, or that of g * out
  int32_t *seen;       // [tokens, KEYS]: -1 where a token sees a key, else 0
} Scratch;

static int64_t scratch_floats(const Work *w) {
  int64_t rows = w->tokens * w->shared;
  return rows * (3 * w->size + 2 * KEYS + 2) + KEYS * w->size * 4 + w->tokens * KEYS;
}

static Scratch scratch_of(const Work *w, float *at) {
  int64_t rows = w->tokens * w->shared, block = KEYS * w->size;
  Scratch s;
  s.q = at;
  s.g = s.q + rows * w->size;
  s.o = s.g + rows * w->size;
  s.s = s.o + rows * w->size;
  s.d = s.s + rows * KEYS;
  s.k = s.d + rows * KEYS;
  s.v = s.k + block;
  s.kt = s.v + block;
  s.vt = s.kt + block;
  s.top = s.vt + block;
  s.total = s.top + rows;
  s.seen = (int32_t *)(s.total + rows);
  return s;
}

// The numbers of one key-value head in some tokens of [B, L, N or K, H], one row of `wide` for each token.
INLINE int64_t place(const Work *w, int64_t row, int64_t token, int64_t wide, int64_t head) {
  return ((row * w->length + token) * w->heads + head) * wide;
}

// [count, H] of keys or values as they lie, zeros behind them; and turned, [H, KEYS].
static void pack(const Work *w, const float *from, int64_t count, float *as_is, float *turned) {
  int64_t size = w->size, next = w->heads * size;
  for (int64_t j = 0; j < KEYS; j++) {
    if (j < count)
      memcpy(as_is + j * size, from + j * next, sizeof(float) * size);
    else
      memset(as_is + j * size, 0, sizeof(float) * size);
  }
  if (!turned) return;
#if defined(BFLOAT_TILES)
  for (int64_t j = 0; j < KEYS; j += SIDE)
    for (int64_t h = 0; h < size; h += SIDE) {
      __m512i r[SIDE];
      for (int i = 0; i < SIDE; i++) r[i] = _mm512_loadu_si512(as_is + (j + i) * size + h);
      transpose(r);
      for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(turned + (h + i) * KEYS + j, r[i]);
    }
#else
  for (int64_t h = 0; h < size; h++)
    for (int64_t j = 0; j < KEYS; j++) turned[h * KEYS + j] = as_is[j * size + h];
#endif
}

typedef struct {
  int64_t first, end;
} Span;

INLINE void widen(int32_t x, int32_t range[2]) {
  if (x < range[0]) range[0] = x;
  if (x > range[1]) range[1] = x;
}

static void ranges(const Work *w, int64_t row, int64_t from, int64_t count, int32_t groups[2], int32_t positions[2]) {
  groups[0] = positions[0] = INT32_MAX;
  groups[1] = positions[1] = INT32_MIN;
  for (int64_t i = row * w->length + from; count; i++, count--) {
    widen(w->group[i], groups);
    widen(w->position[i], positions);
  }
}

// Whether no token of a block can see a key of another, by their ranges alone: rows of many groups, and narrow windows,
// have few blocks that meet.
static int apart(const Work *w, int64_t row, int64_t from, int64_t tokens, int64_t key) {
  int32_t groups[2], positions[2], of_keys[2], their_positions[2];
  ranges(w, row, from, tokens, groups, positions);
  ranges(w, row, key, w->length - key < KEYS ? w->length - key : KEYS, of_keys, their_positions);
  return groups[1] < of_keys[0] || groups[0] > of_keys[1] || positions[0] - (int64_t)their_positions[1] >= w->window;
}

// What `tokens` tokens from column `from` on see of the keys from column `key` on, and which tokens see any of them.
static Span see(const Work *w, int64_t row, int64_t from, int64_t tokens, int64_t key, int32_t *seen) {
  const int32_t *group = w->group + row * w->length, *branch = w->branch + row * w->length;
  const int32_t *position = w->position + row * w->length;
  int32_t of_keys[3][KEYS];
  int64_t count = w->length - key < KEYS ? w->length - key : KEYS;
  for (int64_t j = 0; j < KEYS; j++) {
    int64_t column = key + (j < count ? j : 0);
    of_keys[0][j] = group[column];
    of_keys[1][j] = branch[column];
    of_keys[2][j] = position[column];
  }
  bits columns;
  for (int i = 0; i < LANES; i++) columns[i] = i;
  Span span = {tokens, 0};
  for (int64_t t = 0; t < tokens; t++) {
    int64_t column = from + t, last = column - key;
    // Neither may overflow: columns and positions are far below 2^30.
    int32_t at_most = last < KEYS ? last : KEYS - 1;
    int32_t behind = w->window < 1 << 30 ? position[column] - w->window : INT32_MIN;
    bits any = {0};
    for (int64_t j = 0; j < KEYS; j += LANES) {
      bits its = load_bits(of_keys[1] + j);
      bits mask = (load_bits(of_keys[0] + j) == group[column]) & ((its == 0) | (its == branch[column])) &
                  (load_bits(of_keys[2] + j) > behind) & (columns + (int32_t)j <= at_most);
      *(bits *)(seen + t * KEYS + j) = mask;
      any |= mask;
    }
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= any[i];
    if (!found) continue;
    if (span.first > t) span.first = t;
    span.end = t + 1;
  }
  return span;
}

// The queries of a block, times the scale.
static void take_queries(const Work *w, int64_t row, int64_t head, int64_t from, int64_t tokens, float *q) {
  int64_t wide = w->shared * w->size;
  for (int64_t t = 0; t < tokens; t++) {
    const float *its = w->q + place(w, row, from + t, wide, head);
    for (int64_t i = 0; i < wide; i += LANES) store(q + t * wide + i, load(its + i) * w->scale);
  }
}

// Logits of the tokens of a span with a block of keys.
static void logits(const Work *w, const Scratch *s, Span span) {
  int64_t first = span.first * w->shared, rows = (span.end - span.first) * w->shared;
  multiply((Product){.a = s->q + first * w->size, .down = w->size, .along = 1, .b = s->kt, .next_b = KEYS,
                     .c = s->s + first * KEYS, .next_c = KEYS, .depth = w->size},
           rows, KEYS);
}

// Weights in place of the logits of one query, relative to the largest so far; what was summed before follows it.
INLINE void add_weights(const Work *w, const int32_t *seen, float *s, float *top, float *total, float *o) {
  vec most = splat(-INFINITY);
  for (int j = 0; j < KEYS; j += LANES) {
    bits mask = load_bits(seen + j);
    vec x = only(load(s + j), mask) + only(splat(-INFINITY), ~mask);
    store(s + j, x);
    most = larger(x, most);
  }
  float now = largest_of(most);
  // Nothing seen so far has a weight, which against the largest logit, -infinity too, would be none. A NaN stays one.
  int none = now == -INFINITY && *top == -INFINITY;
  for (int j = 0; none && j < KEYS; j++) none = s[j] == -INFINITY;
  if (none) {
    memset(s, 0, sizeof(float) * KEYS);
    return;
  }
  if (now > *top) {
    float less = exponential(splat(*top - now))[0];
    *top = now;
    *total *= less;
    for (int64_t h = 0; h < w->size; h += LANES) store(o + h, load(o + h) * less);
  }
  vec sum = splat(0);
  for (int j = 0; j < KEYS; j += LANES) {
    vec e = only(exponential(load(s + j) - *top), load_bits(seen + j));
    store(s + j, e);
    sum += e;
  }
  *total += sum_of(sum);
}

// Item: a block of queries of one key-value head of one row.
static void forward(const void *work, int64_t begin, int64_t end, float *scratch) {
  const Work *w = work;
  Scratch s = scratch_of(w, scratch);
  int64_t blocks = (w->length + w->tokens - 1) / w->tokens, wide = w->shared * w->size;
  for (int64_t item = begin; item < end; item++) {
    int64_t row = item / blocks / w->heads, head = item / blocks % w->heads, from = item % blocks * w->tokens;
    int64_t tokens = w->length - from < w->tokens ? w->length - from : w->tokens, rows = tokens * w->shared;
    take_queries(w, row, head, from, tokens, s.q);
    memset(s.o, 0, sizeof(float) * rows * w->size);
    for (int64_t r = 0; r < rows; r++) s.top[r] = -INFINITY, s.total[r] = 0;
    for (int64_t key = 0; key < from + tokens; key += KEYS) {
      if (apart(w, row, from, tokens, key)) continue;
      Span span = see(w, row, from, tokens, key, s.seen);
      if (span.first >= span.end) continue;
      int64_t count = w->length - key < KEYS ? w->length - key : KEYS, at = place(w, row, key, w->size, head);
      pack(w, w->k + at, count, s.k, s.kt);
      pack(w, w->v + at, count, s.v, NULL);
      logits(w, &s, span);
      int64_t first = span.first * w->shared, last = span.end * w->shared;
      for (int64_t r = first; r < last; r++)
        add_weights(w, s.seen + r / w->shared * KEYS, s.s + r * KEYS, s.top + r, s.total + r, s.o + r * w->size);
      multiply((Product){.a = s.s + first * KEYS, .down = KEYS, .along = 1, .b = s.v, .next_b = w->size,
                         .c = s.o + first * w->size, .next_c = w->size, .depth = KEYS, .adds = 1},
               last - first, w->size);
    }
    for (int64_t t = 0; t < tokens; t++) {
      float *out = w->to_out + place(w, row, from + t, wide, head);
      float *normaliser = w->to_normaliser + place(w, row, from + t, w->shared, head);
      for (int64_t g = 0; g < w->shared; g++) {
        int64_t r = t * w->shared + g;
        for (int64_t h = 0; h < w->size; h += LANES)
          store(out + g * w->size + h, load(s.o + r * w->size + h) / s.total[r]);
        normaliser[g] = s.top[r] + logf(s.total[r]);
      }
    }
  }
}

// Weights in place of the logits of one query, and the logits' gradients in place of those of the weights.
INLINE void differentiate(const int32_t *seen, float *s, float *d, float normaliser, float g_dot_out) {
  for (int j = 0; j < KEYS; j += LANES) {
    vec p = only(exponential(load(s + j) - normaliser), load_bits(seen + j));
    store(s + j, p);
    store(d + j, p * (load(d + j) - g_dot_out));
  }
}

// A block of queries with what its gradient needs: those of the outputs, normalisers, and sum(g * out) of each query,
// which is that of its weights with their gradients, as the weighted values are the output.
static void take_block(const Work *w, int64_t row, int64_t head, int64_t from, int64_t tokens, const Scratch *s) {
  int64_t size = w->size, wide = w->shared * size;
  take_queries(w, row, head, from, tokens, s->q);
  for (int64_t t = 0; t < tokens; t++) {
    int64_t at = place(w, row, from + t, wide, head);
    memcpy(s->g + t * wide, w->g + at, sizeof(float) * wide);
    for (int64_t g = 0; g < w->shared; g++) {
      vec sum = splat(0);
      for (int64_t h = g * size; h < (g + 1) * size; h += LANES) sum += load(w->g + at + h) * load(w->out + at + h);
      s->total[t * w->shared + g] = sum_of(sum);
      s->top[t * w->shared + g] = w->normaliser[place(w, row, from + t, w->shared, head) + g];
    }
  }
}

enum { OF_QUERIES = 1, OF_KEYS = 2 };

// Adds what a block of queries, which was taken, and a block of keys have in common to the gradients asked for.
static void add_gradients(const Work *w, int64_t row, int64_t head, int64_t from, int64_t tokens, int64_t key,
                          int asked, const Scratch *s) {
  Span span = see(w, row, from, tokens, key, s->seen);
  if (span.first >= span.end) return;
  int64_t size = w->size, next = w->heads * size, at = place(w, row, key, size, head);
  int64_t count = w->length - key < KEYS ? w->length - key : KEYS;
  pack(w, w->k + at, count, s->k, s->kt);
  pack(w, w->v + at, count, s->v, s->vt);
  int64_t first = span.first * w->shared, rows = (span.end - span.first) * w->shared;
  float *q = s->q + first * size, *g = s->g + first * size, *p = s->s + first * KEYS, *d = s->d + first * KEYS;
  logits(w, s, span);
  multiply((Product){.a = g, .down = size, .along = 1, .b = s->vt, .next_b = KEYS, .c = d, .next_c = KEYS,
                     .depth = size},
           rows, KEYS);
  for (int64_t r = 0; r < rows; r++)
    differentiate(s->seen + (first + r) / w->shared * KEYS, p + r * KEYS, d + r * KEYS, s->top[first + r],
                  s->total[first + r]);
  if (asked & OF_QUERIES)
    multiply((Product){.a = d, .down = KEYS, .along = 1, .b = s->k, .next_b = size, .c = s->o + first * size,
                       .next_c = size, .depth = KEYS, .adds = 1},
             rows, size);
  if (!(asked & OF_KEYS)) return;
  multiply((Product){.a = d, .down = 1, .along = KEYS, .b = q, .next_b = size, .c = w->dk + at, .next_c = next,
                     .depth = rows, .adds = 1},
           count, size);
  multiply((Product){.a = p, .down = 1, .along = KEYS, .b = g, .next_b = size, .c = w->dv + at, .next_c = next,
                     .depth = rows, .adds = 1},
           count, size);
}

static void clear_keys(const Work *w, int64_t row, int64_t head, int64_t key, int64_t end) {
  for (int64_t i = key; i < end && i < w->length; i++) {
    int64_t at = place(w, row, i, w->size, head);
    memset(w->dk + at, 0, sizeof(float) * w->size);
    memset(w->dv + at, 0, sizeof(float) * w->size);
  }
}

// Gradients of a block of queries, and what it adds to those of the keys where they are asked for too.
static void of_queries(const Work *w, int64_t row, int64_t head, int64_t from, int asked, const Scratch *s) {
  int64_t tokens = w->length - from < w->tokens ? w->length - from : w->tokens, wide = w->shared * w->size;
  take_block(w, row, head, from, tokens, s);
  memset(s->o, 0, sizeof(float) * tokens * wide);
  for (int64_t key = 0; key < from + tokens; key += KEYS)
    if (!apart(w, row, from, tokens, key)) add_gradients(w, row, head, from, tokens, key, asked, s);
  for (int64_t t = 0; t < tokens; t++) {
    float *dq = w->dq + place(w, row, from + t, wide, head);
    for (int64_t i = 0; i < wide; i += LANES) store(dq + i, load(s->o + t * wide + i) * w->scale);
  }
}

// Gradients of a block of keys.
static void of_keys(const Work *w, int64_t row, int64_t head, int64_t key, const Scratch *s) {
  clear_keys(w, row, head, key, key + KEYS);
  for (int64_t from = key / w->tokens * w->tokens; from < w->length; from += w->tokens) {
    int64_t tokens = w->length - from < w->tokens ? w->length - from : w->tokens;
    if (apart(w, row, from, tokens, key)) continue;
    take_block(w, row, head, from, tokens, s);
    add_gradients(w, row, head, from, tokens, key, OF_KEYS, s);
  }
}

// Item: one key-value head of one row.
static void backward(const void *work, int64_t begin, int64_t end, float *scratch) {
  const Work *w = work;
  Scratch s = scratch_of(w, scratch);
  for (int64_t item = begin; item < end; item++) {
    int64_t row = item / w->heads, head = item % w->heads;
    clear_keys(w, row, head, 0, w->length);
    for (int64_t from = 0; from < w->length; from += w->tokens)
      of_queries(w, row, head, from, OF_QUERIES | OF_KEYS, &s);
  }
}

// Item: a block of queries, or behind those one of keys, of a key-value head of a row: 7 products in place of 5, added
// up in the same order.
static void backward_apart(const void *work, int64_t begin, int64_t end, float *scratch) {
  const Work *w = work;
  Scratch s = scratch_of(w, scratch);
  int64_t blocks = (w->length + w->tokens - 1) / w->tokens, all = blocks + (w->length + KEYS - 1) / KEYS;
  for (int64_t item = begin; item < end; item++) {
    int64_t row = item / all / w->heads, head = item / all % w->heads, block = item % all;
    if (block < blocks)
      of_queries(w, row, head, block * w->tokens, OF_QUERIES, &s);
    else
      of_keys(w, row, head, (block - blocks) * KEYS, &s);
  }
}

static Work work_of(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args;
  Work w = {
      .q = args[0]->data,
      .k = args[1]->data,
      .v = args[2]->data,
      .group = args[3]->data,
      .branch = args[4]->data,
      .position = args[5]->data,
      .window = *(const int32_t *)args[6]->data,
      .scale = *(const float *)((XLA_FFI_Scalar *)frame->attrs.attrs[0])->value,
      .rows = args[0]->dims[0],
      .length = args[0]->dims[1],
      .heads = args[1]->dims[2],
      .shared = args[0]->dims[2] / args[1]->dims[2],
      .size = args[0]->dims[3],
  };
  w.tokens = ROWS / w.shared / LANES * LANES;
  if (w.tokens < LANES) w.tokens = LANES;
  if (w.tokens > KEYS) w.tokens = KEYS;
  return w;
}

XLA_FFI_Error *fused_forward(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  Work w = work_of(frame);
  XLA_FFI_Buffer **results = (XLA_FFI_Buffer **)frame->rets.rets;
  w.to_out = results[0]->data;
  w.to_normaliser = results[1]->data;
  int64_t items = w.rows * w.heads * ((w.length + w.tokens - 1) / w.tokens), threads = threads_of(frame);
  // Later blocks see more keys: one at a time.
  return spread(frame, forward, &w, sizeof w, items, items + 1, threads, scratch_floats(&w));
}

XLA_FFI_Error *fused_backward(XLA_FFI_CallFrame *frame) {
  if (only_asks(frame)) return NULL;
  Work w = work_of(frame);
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **results = (XLA_FFI_Buffer **)frame->rets.rets;
  w.out = args[7]->data;
  w.normaliser = args[8]->data;
  w.g = args[9]->data;
  w.dq = results[0]->data;
  w.dk = results[1]->data;
  w.dv = results[2]->data;
  int64_t heads = w.rows * w.heads, threads = threads_of(frame);
  // Threads that wait for others in a last round cost less than the further products, up to a point.
  if (5 * threads * ((heads + threads - 1) / threads) <= 8 * heads)
    return spread(frame, backward, &w, sizeof w, heads, heads + 1, threads, scratch_floats(&w));
  int64_t blocks = (w.length + w.tokens - 1) / w.tokens + (w.length + KEYS - 1) / KEYS;
  return spread(frame, backward_apart, &w, sizeof w, heads * blocks, heads * blocks + 1, threads, scratch_floats(&w));
}
#endif
