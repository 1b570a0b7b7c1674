// The recurrence of Gated-DeltaNet over the few rows of a block, behind the rows that were kept of the last one.
//
// A warp has four value dimensions of one value head; of each, eight lanes share the state's row over K, so that a sum
// over K is three shuffles. State, keys and queries of a lane are the columns 32 j + 4 lane + 0 to 3, in registers. Rows
// wait for each other, so they do not wait for memory, too: ROWS of them are copied to shared memory at a time. The sum
// of a row's output is taken side by side with the next row's sum over K. All sums are written out as fused
// multiply-adds: a row's bits do not tell whether it was run as a part of a block or committed later.
//
// From the compiler's command line: K_HEADS, V_HEADS, K_DIM, V_DIM; of a block, WARPS, V_OF_BLOCK, ROWS and
// SHARED_BYTES; and STEP_K, the columns of which the lanes that share a row have four each.
typedef unsigned int u32;
typedef unsigned char u8;
constexpr int LANES_K = STEP_K / 4, V_OF_WARP = V_OF_BLOCK / WARPS, THREADS = WARPS * 32;
constexpr int VECTORS = K_DIM / STEP_K;  // of four columns, of a lane
constexpr int NUMBERS = V_OF_BLOCK + 2;  // of a row, beside key and query: values, logarithm of the decay, beta
static_assert(LANES_K * 4 == STEP_K && V_OF_WARP * WARPS == V_OF_BLOCK && V_OF_WARP * LANES_K == 32, "whole blocks");
static_assert(K_DIM % STEP_K == 0 && V_DIM % V_OF_BLOCK == 0 && V_HEADS % K_HEADS == 0, "whole warps");
static_assert(NUMBERS <= 32 && K_DIM % 4 == 0, "a lane copies one of a row's numbers");

struct Row {
  float4 key[VECTORS];
  float value, decay, beta;
};

struct Rows {  // what a block reads of them
  float numbers[ROWS][NUMBERS], keys[ROWS][K_DIM], queries[ROWS][K_DIM];
};
static_assert(sizeof(Rows) == SHARED_BYTES, "shared memory as the host counts it");

__device__ __forceinline__ void copy_16_bytes(u32 to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ void copy_4_bytes(u32 to, const void* from, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ u32 place_of(const float* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void load(float4 (&to)[VECTORS], const float* from) {
#pragma unroll
  for (int j = 0; j < VECTORS; j++) to[j] = *(const float4*)(from + STEP_K * j);
}

__device__ __forceinline__ Row load_row(const Rows& rows, int at, int v, int part) {
  Row row;
  load(row.key, rows.keys[at] + part * 4);
  row.value = rows.numbers[at][v];
  row.decay = __expf(rows.numbers[at][V_OF_BLOCK]);
  row.beta = rows.numbers[at][V_OF_BLOCK + 1];
  return row;
}

__device__ __forceinline__ float dot(const float4 (&a)[VECTORS], const float4 (&b)[VECTORS]) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < VECTORS; j++) {
    sum.x = __fmaf_rn(a[j].x, b[j].x, sum.x), sum.y = __fmaf_rn(a[j].y, b[j].y, sum.y);
    sum.z = __fmaf_rn(a[j].z, b[j].z, sum.z), sum.w = __fmaf_rn(a[j].w, b[j].w, sum.w);
  }
  return __fadd_rn(__fadd_rn(sum.x, sum.y), __fadd_rn(sum.z, sum.w));
}

// Two sums over the lanes that share a row of the state.
__device__ __forceinline__ void add_lanes(float& a, float& b) {
#pragma unroll
  for (int lane = LANES_K / 2; lane > 0; lane /= 2) {
    const float c = __shfl_xor_sync(0xffffffffu, a, lane), d = __shfl_xor_sync(0xffffffffu, b, lane);
    a = __fadd_rn(a, c), b = __fadd_rn(b, d);
  }
}

// One row: the state decays, and is corrected along the key. before: the query of the row before, whose output with the
// state as it was is returned.
__device__ __forceinline__ float advance(float4 (&state)[VECTORS], const Row& row, const float4 (&before)[VECTORS]) {
  float output = dot(state, before);
#pragma unroll
  for (int j = 0; j < VECTORS; j++) {
    state[j].x = __fmul_rn(state[j].x, row.decay), state[j].y = __fmul_rn(state[j].y, row.decay);
    state[j].z = __fmul_rn(state[j].z, row.decay), state[j].w = __fmul_rn(state[j].w, row.decay);
  }
  float known = dot(state, row.key);
  add_lanes(known, output);
  const float delta = __fmul_rn(row.beta, __fadd_rn(row.value, -known));
#pragma unroll
  for (int j = 0; j < VECTORS; j++) {
    state[j].x = __fmaf_rn(delta, row.key[j].x, state[j].x), state[j].y = __fmaf_rn(delta, row.key[j].y, state[j].y);
    state[j].z = __fmaf_rn(delta, row.key[j].z, state[j].z), state[j].w = __fmaf_rn(delta, row.key[j].w, state[j].w);
  }
  return output;
}

// Arguments as of delta_step.GatedDeltaState; out: [rows, V_HEADS, V_DIM]. A block: V_OF_BLOCK dimensions of one head.
extern "C" __global__ void __launch_bounds__(THREADS)
delta_block(float* state, const float* queries, const float* keys, const float* values, const float* gates, float* out,
            const int* cycle, const int* kept, int rows, int max_rows) {
  extern __shared__ __align__(16) u8 shared[];
  Rows& staged = *(Rows*)shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane % LANES_K;
  const int head = blockIdx.x % V_HEADS, key_head = head / (V_HEADS / K_HEADS);
  const int first_v = blockIdx.x / V_HEADS * V_OF_BLOCK, v = warp * V_OF_WARP + lane / LANES_K;
  keys += key_head * K_DIM, queries += key_head * K_DIM, values += head * V_DIM + first_v, gates += head;
  out += head * V_DIM + first_v + v;
  float* place = state + (head * V_DIM + first_v + v) * K_DIM + part * 4;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // Written in the cycle before, or before the host waited: the kernel in front of this one, which lets it begin when it
  // ends, comes behind that.
  const int half = *cycle % 2, count = *kept, old = (1 - half) * max_rows, fresh = half * max_rows;
  float4 s[VECTORS], query[VECTORS] = {};
  load(s, place);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  auto store_state = [&] {
#pragma unroll
    for (int j = 0; j < VECTORS; j++) *(float4*)(place + STEP_K * j) = s[j];
  };
  // A lane copies one of a row's numbers, and four columns of its key and of its query at a time.
  const bool is_value = lane < V_OF_BLOCK;
  const float* numbers = is_value ? values + lane : gates + (lane - V_OF_BLOCK) * V_HEADS;
  const int row_numbers = is_value ? V_HEADS * V_DIM : 2 * V_HEADS;
  auto copy_row = [&](int to, int at) {
    for (int k = lane * 4; k < K_DIM; k += 128)
      copy_16_bytes(place_of(staged.keys[to] + k), keys + at * (K_HEADS * K_DIM) + k, 16);
    if (lane < NUMBERS) copy_4_bytes(place_of(staged.numbers[to] + lane), numbers + at * row_numbers, 4);
  };
  // First come the rows that were kept, then the block's, which alone have queries.
  const int all = count + rows;
  for (int begin = 0; begin < all; begin += ROWS) {
    const int end = min(begin + ROWS, all);
    if (begin > 0) __syncthreads();  // the rows before have been read
    int i = begin + warp;
    for (; i < min(end, count); i += WARPS) copy_row(i - begin, old + i);
    for (; i < end; i += WARPS) {
      copy_row(i - begin, fresh + i - count);
      for (int k = lane * 4; k < K_DIM; k += 128)
        copy_16_bytes(place_of(staged.queries[i - begin] + k), queries + (i - count) * (K_HEADS * K_DIM) + k, 16);
    }
    wait_for_copies();
    __syncthreads();
    Row row = load_row(staged, 0, v, part);
#pragma unroll 2
    for (int i = begin; i < end; i++) {
      if (i == count && count > 0) store_state();
      const Row next = load_row(staged, i + 1 - begin, v, part);  // behind the last one stand other numbers
      const float output = advance(s, row, query);
      if (part == 0 && i > count) out[(i - 1 - count) * (V_HEADS * V_DIM)] = output;
      row = next;
      if (i >= count) load(query, staged.queries[i - begin] + part * 4);
    }
  }
  if (rows == 0) {
    if (count > 0) store_state();
    return;
  }
  float output = dot(s, query), unused = 0.0f;
  add_lanes(unused, output);
  if (part == 0) out[(rows - 1) * (V_HEADS * V_DIM)] = output;
}
