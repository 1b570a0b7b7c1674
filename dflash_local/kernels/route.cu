// Which experts a few rows take, how much of each, and the list of those that occur, for the products behind it: one
// block, a warp for each row.
//
// A row's probabilities are float32, a softmax over all experts; the likeliest TOP_K are taken one by one, of equally
// likely ones the first. Their weights, divided by their sum where NORMED, are rounded to bfloat16, as a model in
// bfloat16 does. A shared expert (SHARED: 1, or 2 with a gate, whose logit is the last) is each row's last slot.
// Experts that occur are listed by number, the slots of each by row: bits of a mask that the warps set, so that no order
// of arrival shows.
//
// From the compiler's command line: EXPERTS (that are routed), TOP_K, SHARED, NORMED, HAS_BIAS, SHARED_BYTES (0).
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
constexpr int MAX_ROWS = 16, WARPS = MAX_ROWS, THREADS = WARPS * 32;
constexpr int SLOTS = TOP_K + (SHARED > 0);
constexpr int OF_LANE = (EXPERTS + 31) / 32;       // experts of a lane: lane, lane + 32, ...
constexpr int ALL = EXPERTS + (SHARED > 0);
constexpr int OF_THREAD = (ALL + THREADS - 1) / THREADS;  // experts that a thread lists, side by side
constexpr float LOWEST = -3.0e38f;  // below every logit of bfloat16 that is finite
static_assert(TOP_K <= 32 && TOP_K <= EXPERTS, "a lane keeps a choice");

__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}
__device__ __forceinline__ float from_bfloat16(u16 value) { return __uint_as_float(u32(value) << 16); }
__device__ __forceinline__ float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }
__device__ __forceinline__ u32 warp_max(u32 value) {
  u32 d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
  return d;
}
__device__ __forceinline__ u32 warp_min(u32 value) {
  u32 d;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
  return d;
}

// logits: [rows, >= EXPERTS], the shared expert's gate behind them. bias: [EXPERTS] or null. weights, experts: [rows,
// SLOTS]. list: as of expert_gate_up.cu. distinct: how many routed experts occur.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
route(const u16* logits, const u16* __restrict__ bias, float* weights, int* experts, int* list, int* distinct,
      i64 logits_stride, int rows, int list_experts) {
  __shared__ u32 rows_of[OF_THREAD * THREADS];      // of an expert, by bits
  __shared__ u8 slot_of[OF_THREAD * THREADS][MAX_ROWS];
  __shared__ int warp_occurring[WARPS], warp_slots[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < OF_THREAD * THREADS; i += THREADS) rows_of[i] = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  __syncthreads();
  if (warp < rows) {
    const u16* of_row = logits + warp * logits_stride;
    float value[OF_LANE], highest = LOWEST;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      const int expert = i * 32 + lane;
      value[i] = LOWEST;
      if (expert >= EXPERTS) continue;
      value[i] = from_bfloat16(of_row[expert]);
      if (HAS_BIAS) value[i] += from_bfloat16(bias[expert]);
      highest = max(highest, value[i]);
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) highest = max(highest, __shfl_xor_sync(~0u, highest, mask));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      if (i * 32 + lane >= EXPERTS) continue;
      value[i] = expf(value[i] - highest);
      sum += value[i];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    // Probabilities are not negative: their bits are in their order, and one more leaves 0 for what cannot be taken.
    u32 key[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) key[i] = i * 32 + lane < EXPERTS ? __float_as_uint(value[i] / sum) + 1 : 0;
    int chosen = 0;
    float weight = 0.0f, all_weights = 0.0f;
    for (int j = 0; j < TOP_K; j++) {
      u32 best = 0;
      int where = 0;
#pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        if (key[i] > best) best = key[i], where = i;
      const u32 highest_key = warp_max(best);
      const int expert = warp_min(best == highest_key ? where * 32 + lane : ~0u);
      const float probability = __uint_as_float(highest_key - 1);
#pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        if (i * 32 + lane == expert) key[i] = 0;
      if (lane == j) chosen = expert, weight = probability;
      all_weights += probability;
    }
    if (NORMED) weight = weight / all_weights;
    if (SHARED > 0 && lane == TOP_K) {
      chosen = EXPERTS;
      weight = SHARED == 2 ? 1.0f / (1.0f + expf(-from_bfloat16(of_row[EXPERTS]))) : 1.0f;
    }
    if (lane < SLOTS) {
      weights[warp * SLOTS + lane] = rounded(weight), experts[warp * SLOTS + lane] = chosen;
      atomicOr(rows_of + chosen, 1u << warp);
      slot_of[chosen][warp] = lane;
    }
  }
  __syncthreads();
  // How many experts and slots are before those of a thread.
  int occurring = 0, slots = 0;
#pragma unroll
  for (int i = 0; i < OF_THREAD; i++) {
    const u32 mine = rows_of[threadIdx.x * OF_THREAD + i];
    occurring += mine != 0, slots += __popc(mine);
  }
  int to_me = occurring, slots_to_me = slots;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, to_me, distance), slots_before = __shfl_up_sync(~0u, slots_to_me, distance);
    if (lane >= distance) to_me += before, slots_to_me += slots_before;
  }
  if (lane == 31) warp_occurring[warp] = to_me, warp_slots[warp] = slots_to_me;
  __syncthreads();
  int at = to_me - occurring, slot = slots_to_me - slots, all = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    if (i < warp) at += warp_occurring[i], slot += warp_slots[i];
    all += warp_occurring[i];
  }
  int* starts = list + 1 + list_experts;
  int* list_slots = starts + list_experts + 1;
#pragma unroll
  for (int i = 0; i < OF_THREAD; i++) {
    const int expert = threadIdx.x * OF_THREAD + i;
    u32 mine = rows_of[expert];
    if (!mine) continue;
    list[1 + at] = expert, starts[at++] = slot;
    for (; mine; mine &= mine - 1) {
      const int row = __ffs(mine) - 1;
      list_slots[slot++] = row * SLOTS + slot_of[expert][row];
    }
  }
  if (threadIdx.x == 0) {
    list[0] = all, starts[all] = rows * SLOTS;
    if (distinct) *distinct = all - (SHARED > 0 && rows > 0);
  }
}
