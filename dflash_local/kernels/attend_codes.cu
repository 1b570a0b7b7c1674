// Attention of the queries that share one KV head over a split of a cache of int8 codes: one block, for Hopper's warp
// group products. Products are transposed, so that nothing but queries is rounded up, to a multiple of 16:
//   scores [keys, queries] = K Q^T    int8, exact: K and both parts of Q from shared memory
//   output [head_dim, queries] += V^T P^T    bf16: V^T decoded in registers, P^T from shared memory
// A step has 128 keys. Of the two warp groups each scores 64 keys and holds 128 dimensions of the output.
//
// Weights are powers of two above a reference of their query, near its largest score: it moves only where a score lies
// more than FAR above it. That is a query's own affair, so its bits do not depend on others; a step in which no
// reference moves rescales nothing.
//
// From the compiler's command line: NUM_HEADS, NUM_KV_HEADS, QUERIES and SPLITS_PER_DOUBLING.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int D = 256, STEP = 128, THREADS = 256, GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int COLUMNS = QUERIES / 8;  // of eight queries: a thread has two of each
constexpr int PANEL = 128;            // bytes of a row that are swizzled together
constexpr int Q_PANEL = QUERIES * PANEL, K_PANEL = STEP * PANEL, TILE = STEP * D;
constexpr int Q_AT = 0, K_AT = Q_AT + 4 * Q_PANEL, V_AT = K_AT + 2 * TILE, P_AT = V_AT + 2 * TILE;
constexpr int SCALES_AT = P_AT + 2 * Q_PANEL;            // [keys or values][buffer][STEP]
constexpr int REFERENCE_AT = SCALES_AT + 4 * STEP * 4;   // [QUERIES]
constexpr int QUERY_SCALES_AT = REFERENCE_AT + QUERIES * 4, SHRINK_AT = QUERY_SCALES_AT + QUERIES * 4;
constexpr int WARPS_AT = SHRINK_AT + QUERIES * 4;        // [8][QUERIES]
constexpr float NOTHING = -1e30f, FAR = 8.0f, LOG2_E = 1.4426950408889634f;
static_assert(QUERIES % 16 == 0 && QUERIES <= 96, "shapes of both products");

#define R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R1 R0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R2 R1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R3 R2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define R4 R3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define R5 R4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FOUR(k, d, i) k(d[i]), k(d[i + 1]), k(d[i + 2]), k(d[i + 3])
#define EIGHT(k, d, i) FOUR(k, d, i), FOUR(k, d, i + 4)
#define S0(k, d) EIGHT(k, d, 0)
#define S1(k, d) S0(k, d), EIGHT(k, d, 8)
#define S2(k, d) S1(k, d), EIGHT(k, d, 16)
#define S3(k, d) S2(k, d), EIGHT(k, d, 24)
#define S4(k, d) S3(k, d), EIGHT(k, d, 32)
#define S5(k, d) S4(k, d), EIGHT(k, d, 40)
#if QUERIES == 16
#define RESULTS R0
#define SUMS S0
#define INPUTS(of) of("%8", "%9", "%10", "%11", "%12")
#elif QUERIES == 32
#define RESULTS R1
#define SUMS S1
#define INPUTS(of) of("%16", "%17", "%18", "%19", "%20")
#elif QUERIES == 48
#define RESULTS R2
#define SUMS S2
#define INPUTS(of) of("%24", "%25", "%26", "%27", "%28")
#elif QUERIES == 64
#define RESULTS R3
#define SUMS S3
#define INPUTS(of) of("%32", "%33", "%34", "%35", "%36")
#elif QUERIES == 80
#define RESULTS R4
#define SUMS S4
#define INPUTS(of) of("%40", "%41", "%42", "%43", "%44")
#elif QUERIES == 96
#define RESULTS R5
#define SUMS S5
#define INPUTS(of) of("%48", "%49", "%50", "%51", "%52")
#endif
#define AS_INT(x) "+r"(x)
#define AS_FLOAT(x) "+f"(x)

#define SHAPE_(queries) "m64n" #queries
#define SHAPE(queries) SHAPE_(queries)
#define SCORE(keys, queries, onto, _, __)                                                             \
  "{.reg .pred p; setp.ne.b32 p, " onto ", 0;\n"                                                      \
  "wgmma.mma_async.sync.aligned." SHAPE(QUERIES) "k32.s32.s8.s8 {" RESULTS "}, " keys ", " queries ", p;}"
#define OUTPUT(a, b, c, d, weights)                                                                   \
  "{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                                             \
  "wgmma.mma_async.sync.aligned." SHAPE(QUERIES) "k16.f32.bf16.bf16 {" RESULTS "}, {" a "," b "," c "," d "}, " \
  weights ", p, 1, 1, 0;}"

__device__ __forceinline__ void score_product(int (&sums)[QUERIES / 2], u64 keys, u64 queries, int onto) {
  asm volatile(INPUTS(SCORE) : SUMS(AS_INT, sums) : "l"(keys), "l"(queries), "r"(onto));
}

__device__ __forceinline__ void output_product(float (&sums)[QUERIES / 2], const u32* v, u64 weights) {
  asm volatile(INPUTS(OUTPUT) : SUMS(AS_FLOAT, sums) : "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "l"(weights));
}

// Products run beside what follows, in order; those between two commits are waited for together.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_earlier() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// ``size``: 0 for zeros instead.
__device__ __forceinline__ void copy_16_bytes(u32 to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ void copy_4_bytes(u32 to, const void* from, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last two groups; products see what they brought, and what was stored, behind the next barrier.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group 2;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
  u32 value;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(a), "r"(b));
  return value;
}
// Four matrices of 8 x 8, their columns as rows of 16 bytes; ``to``: of each lane the place of one.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}
// A number of which the compiler does not know what it was made from.
__device__ __forceinline__ int hidden(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// A product's matrix of rows of PANEL bytes whose 16-byte chunks are swizzled by the row's last three bits.
__device__ __forceinline__ u64 matrix(u32 at) { return (u64)(at >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// Codes of two keys in one dimension, as bf16: 128 plus seven bits, less 128 or, of a negative one, 256.
// ``bits``: 128, twice.
template <int DIM> __device__ __forceinline__ u32 decoded(u32 key, u32 next, u32 bits) {
  const u32 codes = __byte_perm(key, next, 0x4400 + DIM * 0x1111);
  return subtract_pairs((codes & 0x007f007f) | bits, (codes & 0x00800080) | bits);
}

// 16 bytes a thread and turn: STEP rows of codes, in the order in which keys or values are read. Rows behind ``end``
// become zeros.
template <bool OF_VALUES>
__device__ __forceinline__ void copy_codes(const signed char* codes, u32 to, int offset, int end) {
  const int row = threadIdx.x / 16, chunk = threadIdx.x % 16;
  to += OF_VALUES ? row * D + ((chunk / 2 ^ row / 2 % 4) * 2 + chunk % 2) * 16
                  : chunk / 8 * K_PANEL + row * PANEL + (chunk % 8 ^ row % 8) * 16;
  const signed char* const from = codes + (long long)(offset + row) * D + chunk * 16;
#pragma unroll
  for (int turn = 0; turn < STEP; turn += THREADS / 16)
    copy_16_bytes(to + turn * (OF_VALUES ? D : PANEL), from + turn * D, offset + row + turn < end ? 16 : 0);
}

__device__ __forceinline__ void copy_scales(const float* scales, u32 to, int offset, int end) {
  const int key = threadIdx.x % STEP;
  copy_4_bytes(to + key * 4, scales + offset + key, offset + key < end ? 4 : 0);
}

// Both parts of each query and its scale, nearly as ``query_parts`` has them; a warp takes every eighth.
__device__ __forceinline__ void store_queries(const unsigned short* queries, int kv_head, int rows, u8* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint4 words[COLUMNS];
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    const int m = i * 8 + warp;
    words[i] = make_uint4(0, 0, 0, 0);
    if (m < rows * GROUP)
      words[i] = *(const uint4*)(queries + ((m / GROUP) * NUM_HEADS + kv_head * GROUP + m % GROUP) * D + lane * 8);
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    const int m = i * 8 + warp;
    const u32 pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
    float numbers[8], most = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      numbers[j] = __uint_as_float(j % 2 ? pairs[j / 2] & 0xffff0000u : pairs[j / 2] << 16);
      most = fmaxf(most, fabsf(numbers[j]));
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
    const float scale = fmaxf(most, 1e-30f) / (127 * 128), inverse = __fdividef(1.0f, scale);
    u64 high = 0, low = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float steps = __fmul_rn(numbers[j], inverse), upper = floorf(fmaf(steps, 1.0f / 128, 0.5f));
      const float lower = floorf(__fadd_rn(fmaf(-128, upper, steps), 0.5f));
      high |= (u64)((u32)(int)upper & 255) << 8 * j, low |= (u64)((u32)(int)lower & 255) << 8 * j;
    }
    u8* at = shared + Q_AT + lane / 16 * Q_PANEL + m * PANEL + (lane / 2 % 8 ^ m % 8) * 16 + lane % 2 * 8;
    *(u64*)at = high, *(u64*)(at + 2 * Q_PANEL) = low;
    if (lane == 0) ((float*)(shared + QUERY_SCALES_AT))[m] = scale, ((float*)(shared + REFERENCE_AT))[m] = NOTHING;
  }
}

struct Thread {  // where it is in the block, and a product's row and pair of columns that it has
  int group, warp, g, t;
  u32 memory;
  u8* shared;
  __device__ float* numbers(int at) const { return (float*)(shared + at); }
  __device__ int query(int i) const { return i / 2 * 8 + 2 * t + i % 2; }  // of its i-th column
  __device__ float* of_warp(int i) const { return numbers(WARPS_AT) + (group * 4 + warp) * QUERIES + query(i); }
};

typedef int Sums[QUERIES / 2];
typedef float Numbers[QUERIES / 2];  // the thread's of a product; those of column i are i / 2 * 4 + i % 2, and 2 behind
typedef float Columns[QUERIES / 4];

__device__ __forceinline__ void score_step(const Thread& at, Sums& sums, int buffer) {
  const u32 k = at.memory + K_AT + buffer * TILE + at.group * 64 * PANEL;
#pragma unroll
  for (int part = 0; part < 2; part++) {
#pragma unroll
    for (int i = 0; part && i < QUERIES / 2; i++) sums[i] *= 128;
    begin_products();
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      score_product(sums, matrix(k + i / 4 * K_PANEL + i % 4 * 32),
                    matrix(at.memory + Q_AT + (part * 2 + i / 4) * Q_PANEL + i % 4 * 32), part || i);
    commit_products();
    wait_for_products();
  }
}

// The references of queries that have a score far above them become their largest score of this step.
__device__ __forceinline__ void move_references(const Thread& at, const Numbers& scores, Numbers (&output)[2],
                                                Columns& total) {
#pragma unroll
  for (int i = 0; i < QUERIES / 4; i++) {
    float most = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
    for (int other = 4; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
    if (at.g == 0) *at.of_warp(i) = most;
  }
  __syncthreads();
  const int query = threadIdx.x;
  if (query < QUERIES) {
    const float* const of_warps = at.numbers(WARPS_AT) + query;
    float* const reference = at.numbers(REFERENCE_AT) + query;
    float most = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; warp++) most = fmaxf(most, of_warps[warp * QUERIES]);
    const float old = *reference, now = most > old + FAR ? most : old;
    at.numbers(SHRINK_AT)[query] = power(old - now), *reference = now;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < QUERIES / 2; i++) {
    const float by = at.numbers(SHRINK_AT)[at.query(i / 4 * 2 + i % 2)];
    output[0][i] *= by, output[1][i] *= by;
    if (i / 2 % 2 == 0) total[i / 4 * 2 + i % 2] *= by;
  }
}

// Weights are summed as they are, and stored times their value's scale.
__device__ __forceinline__ void store_weights(const Thread& at, const Numbers& scores, const float (&decodes)[2],
                                              Columns& total) {
  const int lane = at.g * 4 + at.t;
  const u32 to = at.memory + P_AT + at.group * Q_PANEL + (lane / 16 * 8 + lane % 8) * PANEL +
                 ((2 * at.warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
  for (int pair = 0; pair < COLUMNS; pair += 2) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = pair + i / 2, half = i % 2, first = column * 4 + half * 2;
      const float2 reference = *(const float2*)(at.numbers(REFERENCE_AT) + at.query(column * 2));
      const float a = power(scores[first] - reference.x), b = power(scores[first + 1] - reference.y);
      total[column * 2] += a, total[column * 2 + 1] += b;
      packed[i] = to_pair(a * decodes[half], b * decodes[half]);
    }
    store_transposed(to + pair * 8 * PANEL, packed);
  }
}

// Values are decoded for one product while the one before it runs.
__device__ __forceinline__ void add_values(const Thread& at, Numbers (&output)[2], int buffer, u32 bits) {
  const u8* const v =
      at.shared + V_AT + buffer * TILE + 2 * at.t * D + ((at.group * 4 + at.warp) ^ at.t) * 32 + 4 * at.g;
  u32 parts[2][8], words[4];
  auto load = [&](int i) {
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = *(const u32*)(v + (i * 16 + j / 2 * 8 + j % 2) * D);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < STEP / 16; i++) {
    u32* const part = parts[i % 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 key = words[half * 2], next = words[half * 2 + 1];
      part[half * 2] = decoded<0>(key, next, bits), part[half * 2 + 1] = decoded<1>(key, next, bits);
      part[4 + half * 2] = decoded<2>(key, next, bits), part[4 + half * 2 + 1] = decoded<3>(key, next, bits);
    }
    if (i + 1 < STEP / 16) load(i + 1);
    const u64 weights = matrix(at.memory + P_AT + i / 4 * Q_PANEL + i % 4 * 32);
    begin_products();
    output_product(output[0], part, weights), output_product(output[1], part + 4, weights);
    commit_products();
    wait_for_earlier();
  }
  wait_for_products();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_codes(const unsigned short* queries, const signed char* keys, const signed char* values,
             const float* key_scales, const float* value_scales, const int* start, float* partial_outputs,
             float* softmax_stats, int rows, int max_rows, float scale, int capacity, int split_size) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  extern __shared__ __align__(1024) u8 shared[];
  const int kv_head = blockIdx.x % NUM_KV_HEADS, num_splits = gridDim.x / NUM_KV_HEADS;
  const int split = num_splits - 1 - blockIdx.x / NUM_KV_HEADS;  // of fixed splits the largest first
  const int begin = *start, end = begin + rows;
  int low, size;
  if (SPLITS_PER_DOUBLING > 0) {
    const int doublings = max(split / max(SPLITS_PER_DOUBLING, 1) - 1, 0);
    low = (split - doublings * SPLITS_PER_DOUBLING) * split_size << doublings, size = split_size << doublings;
  } else {
    size = max(((end + num_splits - 1) / num_splits + STEP - 1) / STEP * STEP, split_size);
    low = split * size;
  }
  if (low >= end) return;
  const int stop = min(low + size, end);
  const int thread = threadIdx.x, warps = __shfl_sync(0xffffffffu, thread / 32, 0);  // in a uniform register
  const Thread at = {warps / 4, warps % 4, thread % 32 / 4, thread % 4, (u32)__cvta_generic_to_shared(shared), shared};
  const long long head_at = (long long)kv_head * capacity;
  keys += head_at * D, values += head_at * D, key_scales += head_at, value_scales += head_at;
  const float* const scales = thread < STEP ? key_scales : value_scales;
  auto copy_keys = [&](int offset, int buffer) {  // and the scales of both
    copy_codes<false>(keys, at.memory + K_AT + buffer * TILE, offset, stop);
    copy_scales(scales, at.memory + SCALES_AT + (buffer * 2 + thread / STEP) * STEP * 4, offset, stop);
    commit_copies();
  };
  auto copy_values = [&](int offset, int buffer) {
    copy_codes<true>(values, at.memory + V_AT + buffer * TILE, offset, stop);
    commit_copies();
  };
  copy_keys(low, 0), copy_values(low, 0), copy_keys(low + STEP, 1);
  store_queries(queries, kv_head, rows, shared);

  scale *= LOG2_E;
  const float *const reference = at.numbers(REFERENCE_AT), *const query_scales = at.numbers(QUERY_SCALES_AT);
  const int own = at.group * 64 + at.warp * 16 + at.g;  // the thread's first key of a step; the other is 8 behind
  const u32 bits = 0x43004300 + gridDim.y - 1;  // as a number that the compiler does not know it stays in a register
  Numbers output[2] = {};
  Columns total = {};
  Sums sums;
  wait_for_copies();  // the first keys
  __syncthreads();
  score_step(at, sums, 0);
  int buffer = 0;
  for (int offset = low; offset < stop; offset += STEP, buffer ^= 1) {
    const float* const step_scales = at.numbers(SCALES_AT) + buffer * 2 * STEP + own;
    const float factors[2] = {step_scales[0] * scale, step_scales[8] * scale};
    const float decodes[2] = {step_scales[STEP], step_scales[STEP + 8]};
    Numbers scores;
#pragma unroll
    for (int i = 0; i < QUERIES / 2; i++) {
      const float of_query = __fmul_rn((float)sums[i], query_scales[at.query(i / 4 * 2 + i % 2)]);
      scores[i] = __fmul_rn(of_query, factors[i / 2 % 2]);
    }
    if (offset + STEP > begin + 1) {
      const int first = hidden(2 * at.t);  // so that rows of queries are not kept in registers
#pragma unroll
      for (int i = 0; i < QUERIES / 2; i++)
        if (offset + own + 8 * (i / 2 % 2) > begin + (i / 4 * 8 + first + i % 2) / GROUP) scores[i] = NOTHING;
    }
    bool moved = false;
#pragma unroll
    for (int i = 0; i < QUERIES / 2; i++) moved |= scores[i] > reference[at.query(i / 4 * 2 + i % 2)] + FAR;
    const bool any = __syncthreads_or(moved);
    copy_values(offset + STEP, buffer ^ 1), copy_keys(offset + 2 * STEP, buffer);
    if (any) move_references(at, scores, output, total);
    store_weights(at, scores, decodes, total);
    wait_for_copies();  // these values, and the next keys
    __syncthreads();
    add_values(at, output, buffer, bits);
    score_step(at, sums, buffer ^ 1);  // zeros behind the split
  }
#pragma unroll
  for (int i = 0; i < QUERIES / 4; i++) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], other);
    if (at.g == 0) *at.of_warp(i) = total[i];
  }
  __syncthreads();
  auto part_of = [&](int query) {
    return (long long)(split * max_rows + query / GROUP) * NUM_HEADS + kv_head * GROUP + query % GROUP;
  };
  if (thread < rows * GROUP) {
    const float* const of_warps = at.numbers(WARPS_AT) + thread;
    float sum = of_warps[0];
    for (int warp = 1; warp < THREADS / 32; warp++) sum += of_warps[warp * QUERIES];
    *(float2*)(softmax_stats + part_of(thread) * 2) = make_float2(reference[thread], sum);
  }
#pragma unroll
  for (int i = 0; i < QUERIES / 4; i++) {
    const int query = at.query(i), place = i / 2 * 4 + i % 2;
    if (query < rows * GROUP)
      *(float4*)(partial_outputs + part_of(query) * D + at.group * 128 + at.warp * 32 + 4 * at.g) =
          make_float4(output[0][place], output[0][place + 2], output[1][place], output[1][place + 2]);
  }
}
