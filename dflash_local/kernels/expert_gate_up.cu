// The first product of a mixture of experts for a few rows: intermediate[M, S, I] = act(x gate_e^T) * (x up_e^T) for the
// S experts e of each row, M <= 8 * ROW_TILES, sums in float32. What codes and fragments are stands in fragments.cu.
//
// Weights of all experts lie below each other, [experts * 2 I, H], gate above up. A unit of work is WARPS_N *
// TILES_PER_WARP tiles of one expert, of the gate and of up by turns; its K is shared by WARPS_K warps, whose sums are
// added in a fixed order through shared memory. Blocks are persistent: each takes an equal part of the units of the
// experts that occur, as the list says that route.cu makes; its weights are loaded NUM_STAGES steps ahead, from one unit
// into the next. Only an expert's own rows are multiplied, eight at a time: lane g takes row g of them from shared memory,
// where all rows lie. A result depends on its own row alone: the tensor core's columns know nothing of each other.
//
// From the compiler's command line, beside what fragments.cu names: ROW_TILES, WARPS_K, WARPS_N, NUM_STAGES,
// BLOCKS_PER_SM, SLOTS (experts of a row), MAX_EXPERTS (that rows can have), CLAMPED, HAS_BIAS, SHARED_BYTES.
constexpr int ROWS = ROW_TILES * 8;
constexpr int WARPS = WARPS_K * WARPS_N, THREADS = WARPS * 32;
constexpr int WARP_STEPS = (STEPS + WARPS_K - 1) / WARPS_K;
constexpr bool RAGGED = WARP_STEPS * WARPS_K != STEPS;
constexpr int COLUMNS = WARPS_N * TILES_PER_WARP * TILE_N;  // of a unit
constexpr int OUT_COLUMNS = COLUMNS / 2;
constexpr int ALL_K = WARPS_K * WARP_STEPS * STEP_K;
constexpr int X_STRIDE = ALL_K * 2 + 64;  // bytes of a row of x in shared memory; 64 modulo 128: few bank conflicts
constexpr int X_BYTES = ROWS * X_STRIDE;
constexpr int GROUP_SUM_BYTES = SUMS_X ? ALL_K / STEP_GROUP * ROWS * SUM_BYTES : 0;
constexpr int SUM_STRIDE = COLUMNS + 4;  // 4 modulo 16: no bank conflicts
constexpr int SUM_FLOATS = WARPS_K * ROWS * SUM_STRIDE;
constexpr int LIST_BYTES = (2 * MAX_EXPERTS + 1 + ROWS * SLOTS + 3) / 4 * 16;
static_assert(X_BYTES + GROUP_SUM_BYTES + 2 * SUM_FLOATS * 4 + LIST_BYTES == SHARED_BYTES, "shared memory as the host counts it");
static_assert(COLUMNS % 32 == 0 && TILES_PER_WARP <= 2, "a unit holds tiles of both halves");

// list: [0] how many experts occur; from 1 on which, by number; from 1 + list_experts on where the slots of each begin,
// and where those of the last end; from 2 + 2 * list_experts on the slots, row * SLOTS + rank, by expert and row.
// tiles: of 16 features, of an expert, half of them the gate's. bias: [experts, 2 I] or null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
expert_gate_up(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
               const u8* __restrict__ offsets, const u8* __restrict__ row_scales, const u16* __restrict__ bias,
               u16* intermediate, const int* list, i64 x_stride, int rows, int all_features, int tiles,
               int list_experts, float limit, float alpha) {
  extern __shared__ __align__(16) u8 shared[];
  u8* group_sums = shared + X_BYTES;
  float* warp_sums = (float*)(shared + X_BYTES + GROUP_SUM_BYTES);
  int* experts = (int*)(shared + X_BYTES + GROUP_SUM_BYTES + 2 * SUM_FLOATS * 4);
  int* starts = experts + MAX_EXPERTS;
  int* slots = starts + MAX_EXPERTS + 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_k = warp / WARPS_N, warp_n = warp % WARPS_N;
  const int g = lane >> 2, t = lane & 3;
  const Weight weight = {codes, scales, offsets, row_scales, all_features};
  const int half = tiles / 2, expert_units = tiles / (WARPS_N * TILES_PER_WARP), size = half * TILE_N;
#if __CUDA_ARCH__ >= 900
  // In this order: expert_down may read the list before this kernel has ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // All of the list at once, as far as it may reach: what lies behind its end is not looked at.
  const int occurring = list[0];
  for (int i = threadIdx.x; i < MAX_EXPERTS + 1 + ROWS * SLOTS; i += THREADS) {
    if (i < MAX_EXPERTS) experts[i] = list[1 + i];
    if (i <= MAX_EXPERTS) starts[i] = list[1 + list_experts + i];
    if (i < rows * SLOTS) slots[i] = list[2 + 2 * list_experts + i];
  }
  __syncthreads();

  const int units = occurring * expert_units;
  const int first_unit = int((i64)units * blockIdx.x / gridDim.x), end_unit = int((i64)units * (blockIdx.x + 1) / gridDim.x);
  if (first_unit == end_unit) return;
  Step stages[NUM_STAGES];
  const int first_step = warp_k * WARP_STEPS, my_steps = min(WARP_STEPS, STEPS - first_step);
  const int total_steps = (end_unit - first_unit) * WARP_STEPS;
  int next_at = first_unit / expert_units, next_unit = first_unit % expert_units, next_step = 0;
  int next_tile = experts[next_at] * tiles;
  auto load_next = [&](Step& step) {
    const int turn = (next_unit * WARPS_N + warp_n) * TILES_PER_WARP;
    load_step(step, weight, next_tile + (turn >> 1) + (turn & 1) * half, half, first_step + next_step,
              !RAGGED || next_step < my_steps, next_step == WARP_STEPS - 1, TILES_PER_WARP, lane);
    if (++next_step < WARP_STEPS) return;
    next_step = 0;
    if (++next_unit < expert_units) return;
    next_unit = 0;
    if (++next_at < occurring) next_tile = experts[next_at] * tiles;
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++)
    if (i < total_steps) load_next(stages[i]);

  stage_x<ALL_K, X_STRIDE, THREADS>(shared, x, x_stride, rows, rows, IN_FEATURES);
  __syncthreads();
  const u8* my_x = shared + warp_k * WARP_STEPS * STEP_K * 2 + t * 16;
  u8* my_group_sums = group_sums + warp_k * WARP_STEPS * GROUPS * ROWS * SUM_BYTES;
  if (SUMS_X) {
    sum_groups<ROW_TILES, X_STRIDE, WARP_STEPS>(my_group_sums, my_x + g * X_STRIDE, lane);  // warps that share a K write the same numbers
    __syncwarp();
  }

  float total[TILES_PER_WARP][ROW_TILES][4] = {};
  int at = first_unit / expert_units, unit = first_unit % expert_units, step = 0, turn = 0;
  int count = 0;
  const int* my_slots = slots;
  int row_of_g[ROW_TILES];            // the lane's row of each tile
  const u8* x_of_g[ROW_TILES];        // and its part of it
  int row_of_2t[ROW_TILES][2];        // rows of the lane's results
  auto take_rows = [&]() {
    my_slots = slots + starts[at], count = starts[at + 1] - starts[at];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {  // lanes without a row multiply another's, for nothing
      row_of_g[m] = my_slots[min(m * 8 + g, count - 1)] / SLOTS, x_of_g[m] = my_x + row_of_g[m] * X_STRIDE;
#pragma unroll
      for (int i = 0; i < 2; i++) row_of_2t[m][i] = my_slots[min(m * 8 + 2 * t + i, count - 1)] / SLOTS;
    }
  };
  take_rows();
  // Of a thread's feature in every row: the biases of the unit, which are there when its sums are.
  static_assert(!HAS_BIAS || THREADS % OUT_COLUMNS == 0, "a thread has one feature of a unit");
  float gate_bias = 0.0f, up_bias = 0.0f;
  auto take_biases = [&]() {
    if (!HAS_BIAS) return;
    const u16* of_expert = bias + (i64)experts[at] * 2 * size + unit * OUT_COLUMNS + threadIdx.x % OUT_COLUMNS;
    gate_bias = from_bfloat16(of_expert[0]), up_bias = from_bfloat16(of_expert[size]);
  };
  take_biases();
  for (int begin = 0; begin < total_steps; begin += NUM_STAGES) {
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      if (begin + i >= total_steps) continue;
      const u8* step_sums = my_group_sums + step * GROUPS * ROWS * SUM_BYTES;
      auto of_g = [&](int m, int k32) { return *(const uint4*)(x_of_g[m] + step * STEP_K * 2 + k32 * 64); };
      auto of_2t = [&](int group, int m) {
        const float* sums = (const float*)step_sums + group * ROWS;
        return make_float2(sums[row_of_2t[m][0]], sums[row_of_2t[m][1]]);
      };
      auto split_of_g = [&](int m) { return ((const uint2*)step_sums)[row_of_g[m] * 4 + t]; };
      if (ROW_TILES > 1 && count > 8) multiply_step<ROW_TILES>(total, stages[i], of_g, of_2t, split_of_g, lane);
      else multiply_step<1>(total, stages[i], of_g, of_2t, split_of_g, lane);
      u32 row_scales_of[TILES_PER_WARP][2];
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++)
        row_scales_of[n][0] = stages[i].row_scales[n][0], row_scales_of[n][1] = stages[i].row_scales[n][1];
      if (begin + i + NUM_STAGES < total_steps) load_next(stages[i]);
      if (++step < WARP_STEPS) continue;
      step = 0;
      float* sums = warp_sums + (turn & 1) * SUM_FLOATS;  // by turns, so that one barrier a unit is enough
      turn++;
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (ROW_SCALED || SCALES_CODES) total[n][m][j] *= unit_scale(row_scales_of[n][j >> 1]);
            const int rank = m * 8 + 2 * t + (j & 1), column = (warp_n * TILES_PER_WARP + n) * TILE_N + g + (j >> 1) * 8;
            if (m == 0 || count > 8) sums[(warp_k * ROWS + rank) * SUM_STRIDE + column] = total[n][m][j];
            total[n][m][j] = 0.0f;
          }
      __syncthreads();
      for (int j = threadIdx.x; j < count * OUT_COLUMNS; j += THREADS) {
        const int rank = j / OUT_COLUMNS, column = j % OUT_COLUMNS;
        const int of_gate = column / TILE_N * 2 * TILE_N + column % TILE_N, feature = unit * OUT_COLUMNS + column;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS_K; k++) {
          gate += sums[(k * ROWS + rank) * SUM_STRIDE + of_gate];
          up += sums[(k * ROWS + rank) * SUM_STRIDE + of_gate + TILE_N];
        }
        gate = rounded(gate), up = rounded(up);
        if (HAS_BIAS) gate = rounded(gate + gate_bias), up = rounded(up + up_bias);
        float result;
        if (CLAMPED) {
          gate = min(gate, limit), up = max(min(up, limit), -limit);
          result = rounded(up + 1.0f) * rounded(gate * rounded(1.0f / (1.0f + __expf(-rounded(alpha * gate)))));
        } else {
          result = rounded(gate / (1.0f + __expf(-gate))) * up;
        }
        intermediate[(i64)my_slots[rank] * size + feature] = to_bfloat16(result);
      }
      if (++unit == expert_units) {
        unit = 0;
        if (++at < occurring) take_rows();
      }
      if (begin + i + 1 < total_steps) take_biases();
    }
  }
}
