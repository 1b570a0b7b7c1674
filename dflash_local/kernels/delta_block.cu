// The recurrence of Gated-DeltaNet over the few rows of a block, behind the rows that were kept of the last one.
//
// A warp has four value dimensions of one value head; of each, eight lanes share the state's row over K, so that a sum
// over K is three shuffles. State, keys and queries of a lane are the columns 32 j + 4 lane + 0 to 3, in registers; a
// row's numbers are loaded while the row before it is computed. A row waits for its sum over K, so the sum of an output
// is taken side by side with the next row's. All sums are written out as fused multiply-adds: a row's bits do not tell
// whether it was run as a part of a block or committed later.
//
// From the compiler's command line: K_HEADS, V_HEADS, K_DIM, V_DIM; of a block, WARPS and V_OF_BLOCK; and STEP_K, the
// columns of which the lanes that share a row have four each.
constexpr int LANES_K = STEP_K / 4, V_OF_WARP = V_OF_BLOCK / WARPS, THREADS = WARPS * 32;
constexpr int VECTORS = K_DIM / STEP_K;  // of four columns, of a lane
static_assert(LANES_K * 4 == STEP_K && V_OF_WARP * WARPS == V_OF_BLOCK && V_OF_WARP * LANES_K == 32, "whole blocks");
static_assert(K_DIM % STEP_K == 0 && V_DIM % V_OF_BLOCK == 0 && V_HEADS % K_HEADS == 0, "whole warps");

struct Row {
  float4 key[VECTORS];
  float value, decay, beta;
};

struct Log {  // where a lane's numbers of row 0 lie
  const float* keys;
  const float* values;
  const float* gates;
};

__device__ __forceinline__ void load(float4 (&to)[VECTORS], const float* from) {
#pragma unroll
  for (int j = 0; j < VECTORS; j++) to[j] = *(const float4*)(from + STEP_K * j);
}

__device__ __forceinline__ Row load_row(const Log& log, int at, bool there) {
  Row row = {};
  if (there) {
    load(row.key, log.keys + at * (K_HEADS * K_DIM));
    row.value = log.values[at * (V_HEADS * V_DIM)];
    row.decay = __expf(log.gates[at * (2 * V_HEADS)]);
    row.beta = log.gates[(at * 2 + 1) * V_HEADS];
  }
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
delta_block(float* state, const float* __restrict__ queries, const float* __restrict__ keys,
            const float* __restrict__ values, const float* __restrict__ gates, float* out, const int* cycle,
            const int* kept, int rows, int max_rows) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane % LANES_K;
  const int head = blockIdx.x % V_HEADS, key_head = head / (V_HEADS / K_HEADS);
  const int v = blockIdx.x / V_HEADS * V_OF_BLOCK + warp * V_OF_WARP + lane / LANES_K;
  const Log log = {keys + key_head * K_DIM + part * 4, values + head * V_DIM + v, gates + head};
  queries += key_head * K_DIM + part * 4;
  out += head * V_DIM + v;
  float* place = state + (head * V_DIM + v) * K_DIM + part * 4;
  const int half = *cycle % 2, count = *kept, old = (1 - half) * max_rows, fresh = half * max_rows;

  float4 s[VECTORS], query[VECTORS] = {};
  load(s, place);
  Row row = load_row(log, old, count > 0);
  for (int i = 0; i < count; i++) {
    const Row next = load_row(log, old + i + 1, i + 1 < count);
    advance(s, row, query);
    row = next;
  }
  if (count > 0)
#pragma unroll
    for (int j = 0; j < VECTORS; j++) *(float4*)(place + STEP_K * j) = s[j];
  if (rows == 0) return;
  row = load_row(log, fresh, true);
  for (int i = 0; i < rows; i++) {
    const Row next = load_row(log, fresh + i + 1, i + 1 < rows);
    float4 of_row[VECTORS];
    load(of_row, queries + i * (K_HEADS * K_DIM));
    const float output = advance(s, row, query);
    if (part == 0 && i > 0) out[(i - 1) * (V_HEADS * V_DIM)] = output;
    row = next;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) query[j] = of_row[j];
  }
  float output = dot(s, query), unused = 0.0f;
  add_lanes(unused, output);
  if (part == 0) out[(rows - 1) * (V_HEADS * V_DIM)] = output;
}
