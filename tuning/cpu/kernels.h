// Work that XLA's own threads share, the part of its calling convention that all handlers have in common, and the types
// that weights, keys and values have in memory. All sums are in float32.
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define INLINE static inline __attribute__((always_inline))

// Types, by XLA's numbers.
enum { FLOAT = XLA_FFI_DataType_F32, BFLOAT = XLA_FFI_DataType_BF16, INT8 = XLA_FFI_DataType_S8 };

INLINE int64_t bytes_of(int type) { return type == FLOAT ? 4 : type == BFLOAT ? 2 : 1; }

// Number `i` of those at `p`. A constant for `type` makes it a load.
INLINE float number_of(int type, const void *p, int64_t i) {
  if (type == FLOAT) return ((const float *)p)[i];
  if (type == INT8) return ((const int8_t *)p)[i];
  uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

// Vectors of floats for what defines their LANES, 16, before it includes this. For shorter registers compilers cut them,
// in memory: results are the same, and slow.
#if defined(LANES)
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }

#if defined(__AVX512F__)
// Not zeros + x, which would be an addition.
#define FOUR(x) x, x, x, x
INLINE vec splat(float x) { return (vec){FOUR(x), FOUR(x), FOUR(x), FOUR(x)}; }
#else
INLINE vec splat(float x) { return (vec){0} + x; }
#endif

INLINE vec larger(vec a, vec b) {
  bits mask = a > b;
  return (vec)(((bits)a & mask) | ((bits)b & ~mask));
}

// e^x for x <= 0, to 2 units in the last place: Cody and Waite's reduction, the polynomial of Cephes' expf.
INLINE vec exponential(vec x) {
  x = larger(splat(-87.0f), x);  // in this order a NaN stays one
  vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x / ln 2 is in the low bits
  vec n = shifted - 12582912.0f;
  vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vec)(((bits)shifted << 23) + (127 << 23));
}
#endif

// Items `first` to `end` of some work. `scratch` is this thread's own.
typedef void Part(const void *work, int64_t first, int64_t end, float *scratch);

// Threads take items from a common counter. XLA may run a scheduled task late, or on the thread that waits for it: so
// nobody waits for a task to start, and the last holder frees the job.
typedef struct {
  Part *part;
  int64_t count, share, scratch_floats;
  float *scratch;
  atomic_long next, done, workers, holders;
  char work[] __attribute__((aligned(64)));
} Job;

static void take(Job *job) {
  float *scratch = job->scratch + atomic_fetch_add(&job->workers, 1) * job->scratch_floats;
  for (;;) {
    long first = atomic_load(&job->next), size;
    do {
      if (first >= job->count) return;
      size = (job->count - first) / job->share;
      if (size < 1) size = 1;
    } while (!atomic_compare_exchange_weak(&job->next, &first, first + size));
    job->part(job->work, first, first + size, scratch);
    atomic_fetch_add(&job->done, size);
  }
}

static void release(Job *job) {
  if (atomic_fetch_sub(&job->holders, 1) == 1) free(job);
}

static void help(void *job) {
  take(job);
  release(job);
}

static int64_t threads_of(XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args ask = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&ask);
  if (error) {
    XLA_FFI_Error_Destroy_Args drop = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&drop);
    return 1;
  }
  return threads;
}

static int schedule(XLA_FFI_CallFrame *frame, Job *job) {
  XLA_FFI_ThreadPool_Schedule_Args ask = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, job};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&ask);
  if (!error) return 1;
  XLA_FFI_Error_Destroy_Args drop = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&drop);
  return 0;
}

static XLA_FFI_Error *no_memory(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Error_Create_Args make = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "no memory for a kernel's scratch",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&make);
}

// Does `count` items of `work` (`bytes`, copied) on up to `threads` threads, this one included. A thread takes the part
// 1 / `share` of what is left each time, at least one item.
static XLA_FFI_Error *spread(XLA_FFI_CallFrame *frame, Part *part, const void *work, size_t bytes, int64_t count,
                             int64_t share, int64_t threads, int64_t scratch_floats) {
  if (threads > count) threads = count;
  if (threads < 1) threads = 1;
  int64_t room = (bytes + 63) / 64 * 64;
  Job *job = aligned_alloc(64, (sizeof(Job) + room + sizeof(float) * threads * scratch_floats + 63) / 64 * 64);
  if (!job) return no_memory(frame);
  job->part = part;
  job->count = count;
  job->share = share;
  job->scratch_floats = scratch_floats;
  job->scratch = (float *)(job->work + room);
  memcpy(job->work, work, bytes);
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  atomic_init(&job->workers, 0);
  atomic_init(&job->holders, threads);
  for (int64_t helper = 1; helper < threads; helper++)
    if (!schedule(frame, job)) release(job);
  take(job);
  while (atomic_load(&job->done) < count) sched_yield();
  release(job);
  return NULL;
}

// Whether XLA asks for the version of its interface instead of a result; it has the answer then.
static int only_asks(XLA_FFI_CallFrame *frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  about->api_version.major_version = XLA_FFI_API_MAJOR;
  about->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

// Products of bfloat16, C [16, 16] += A [16, 32] B [32, 16] with sums in float32, by a processor's matrix unit (AMX) or
// by its vectors. A tile is 1 KiB in 16 lines: of A one for each row, with its 32 numbers; of B one for each pair of the
// 32, with those of 16 columns.
enum {
  SIDE = 16,    // lines of a tile
  DEEP = 32,    // numbers of bfloat16 in one
  TILE = 1024,  // bytes
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BFLOAT_TILES
#include <immintrin.h>

INLINE int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// 16 x 16 numbers of 4 bytes.
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

#if defined(__AMX_BF16__) && defined(__linux__)
#define AMX
// Before a thread's first tile; _tile_release() is due behind its last.
static void configure(void) {
  // Static: GCC takes its first 8 bytes alone as read, and would not write the others.
  static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
  _tile_loadconfig(&shape);
}
#endif
#endif
