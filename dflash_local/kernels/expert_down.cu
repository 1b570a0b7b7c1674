// The second product of a mixture of experts for a few rows, and their weighed sum: out[M, H] = sum over the S experts e
// of a row of weight * (intermediate[M, S, I] down_e^T) (+ residual), M <= 8 * ROW_TILES, sums in float32. What codes and
// fragments are stands in fragments.cu.
//
// Weights of all experts lie below each other, [experts * H, I]. A block takes a tile of 16 features after the other,
// each with all experts that occur (the list is route.cu's). Its warps go through the experts, WARPS of them and of their
// K_PARTS parts of K at a time, and leave the results of each slot in shared memory; then each row's results are added in
// the order of its slots. So a result depends on its own row alone, whatever warp took which expert. An expert's rows are
// read from the L2 cache, a step ahead where registers allow; weights are loaded NUM_STAGES steps ahead, from one tile
// into the next, and the first ones while expert_gate_up.cu still runs.
//
// From the compiler's command line, beside what fragments.cu names: ROW_TILES, WARPS, K_PARTS, NUM_STAGES, BLOCKS_PER_SM,
// SLOTS (experts of a row), MAX_EXPERTS (that rows can have), HAS_BIAS, SHARED_BYTES. TILES_PER_WARP is 1.
constexpr int ROWS = ROW_TILES * 8;
constexpr int THREADS = WARPS * 32;
constexpr int PART_STEPS = (STEPS + K_PARTS - 1) / K_PARTS;
constexpr bool RAGGED = PART_STEPS * K_PARTS != STEPS;
constexpr int RESULT_STRIDE = TILE_N + 1;
constexpr int RESULTS = K_PARTS * ROWS * SLOTS * RESULT_STRIDE;
constexpr int LIST_WORDS = 2 * MAX_EXPERTS + 1 + 3 * ROWS * SLOTS;
constexpr int THREAD_RESULTS = (ROWS * TILE_N + THREADS - 1) / THREADS;  // of a tile
static_assert((2 * RESULTS + LIST_WORDS) * 4 == SHARED_BYTES, "shared memory as the host counts it");
// What is multiplied next waits in registers, where the weights leave some.
constexpr bool X_AHEAD = ROW_TILES == 1 || (CODES != BFLOAT16 && (GROUPS == 1 || !SUMS_X));
static_assert(TILES_PER_WARP == 1, "a block has a tile at a time");

// list: as of expert_gate_up.cu. tiles: of 16 features, of an expert. weights, chosen: [rows, SLOTS], chosen the experts.
// bias: [experts, H] or null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
expert_down(const u16* intermediate, const u8* __restrict__ codes, const u8* __restrict__ scales,
            const u8* __restrict__ zeros, const u8* __restrict__ row_scales, const u16* __restrict__ bias,
            const float* weights, const int* chosen, u16* out, const u16* residual, const int* list, i64 out_stride, int rows,
            int all_features, int tiles, int list_experts) {
  extern __shared__ __align__(16) u8 shared[];
  float* results = (float*)shared;  // [two tiles by turns][part of K][slot][feature]
  int* experts = (int*)(results + 2 * RESULTS);
  int* starts = experts + MAX_EXPERTS;
  int* slots = starts + MAX_EXPERTS + 1;
  float* weight_of = (float*)(slots + ROWS * SLOTS);
  int* expert_of = (int*)(weight_of + ROWS * SLOTS);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Weight weight = {codes, scales, zeros, row_scales, all_features};
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // All of the list at once, as far as it may reach: what lies behind its end is not looked at. It and the weights are
  // route.cu's, which has ended: expert_gate_up.cu waited for it before this kernel was launched. Not by the L1 cache,
  // which may hold those of a layer before.
  const int occurring = __ldcg(list);
  for (int i = threadIdx.x; i < MAX_EXPERTS + 1 + ROWS * SLOTS; i += THREADS) {
    if (i < MAX_EXPERTS) experts[i] = __ldcg(list + 1 + i);
    if (i <= MAX_EXPERTS) starts[i] = __ldcg(list + 1 + list_experts + i);
    if (i >= rows * SLOTS) continue;
    slots[i] = __ldcg(list + 2 + 2 * list_experts + i);
    weight_of[i] = __ldcg(weights + i), expert_of[i] = __ldcg(chosen + i);
  }
  __syncthreads();

  // A warp's work: for each tile of its block, items warp, warp + WARPS, ...; an item is a part of K of an expert.
  const int items = occurring * K_PARTS, my_items = items > warp ? (items - warp - 1) / WARPS + 1 : 0;
  const int my_tiles = tiles > (int)blockIdx.x ? (tiles - (int)blockIdx.x - 1) / (int)gridDim.x + 1 : 0;
  const int total_steps = my_tiles * my_items * PART_STEPS;
  Step stages[NUM_STAGES];
  int next_tile = blockIdx.x, next_item = warp, next_step = 0;
  auto load_next = [&](Step& step) {
    const int at = next_item / K_PARTS, first = next_item % K_PARTS * PART_STEPS;
    load_step(step, weight, experts[at] * tiles + next_tile, 1, first + next_step, !RAGGED || first + next_step < STEPS,
              next_step == PART_STEPS - 1, 1, lane);
    if (++next_step < PART_STEPS) return;
    next_step = 0, next_item += WARPS;
    if (next_item < items) return;
    next_item = warp, next_tile += gridDim.x;
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++)
    if (i < total_steps) load_next(stages[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  float total[1][ROW_TILES][4] = {};
  int item = warp, step = 0, tile = blockIdx.x, turn = 0, items_left = my_items;
  int count = 0;
  const int* my_slots = slots;
  auto take_rows = [&]() {
    const int at = item / K_PARTS;
    my_slots = slots + starts[at], count = starts[at + 1] - starts[at];
  };
  // (x_item, x_step) is the next to load of the rows.
  int x_item = warp, x_step = 0, x_count = 0;
  const u16* row_of_g[ROW_TILES];
  auto find_rows = [&]() {
    const int at = x_item / K_PARTS;
    const int* of_expert = slots + starts[at];
    x_count = starts[at + 1] - starts[at];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)  // lanes without a row multiply another's, for nothing
      row_of_g[m] = intermediate + (i64)of_expert[min(m * 8 + g, x_count - 1)] * IN_FEATURES + t * 8;
  };
  auto load_x = [&](uint4 (&b)[ROW_TILES][4]) {
    const int k = (x_item % K_PARTS * PART_STEPS + x_step) * STEP_K;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
      for (int k32 = 0; k32 < 4; k32++) {
        if (m && x_count <= 8) continue;
        const bool inside = IN_FEATURES % STEP_K == 0 && !RAGGED || k + k32 * 32 < IN_FEATURES;
        b[m][k32] = inside ? *(const uint4*)(row_of_g[m] + k + k32 * 32) : make_uint4(0, 0, 0, 0);
      }
    if (++x_step < PART_STEPS) return;
    x_step = 0, x_item += WARPS;
    if (x_item >= items) x_item = warp;  // of the next tile
    find_rows();
  };
  // What all warps have left of a tile's slots becomes its features of out. Two tiles' results lie beside each other, so
  // that one barrier a tile is enough.
  auto finish_tile = [&]() {
    const float* of_tile = results + (turn & 1) * RESULTS;
    // Biases and the residual are read before the other warps are waited for.
    u16 biases[THREAD_RESULTS][HAS_BIAS ? SLOTS : 1], before[THREAD_RESULTS];
#pragma unroll
    for (int i = 0; i < THREAD_RESULTS; i++) {
      const int at = threadIdx.x + i * THREADS, row = at / TILE_N, feature = tile * TILE_N + at % TILE_N;
      if (row >= rows) continue;
      before[i] = residual ? residual[row * out_stride + feature] : 0;
#pragma unroll
      for (int slot = 0; HAS_BIAS && slot < SLOTS; slot++)
        biases[i][slot] = bias[(i64)expert_of[row * SLOTS + slot] * tiles * TILE_N + feature];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREAD_RESULTS; i++) {
      const int at = threadIdx.x + i * THREADS, row = at / TILE_N, column = at % TILE_N;
      if (row >= rows) continue;
      float sum = 0.0f;
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        const float* of_slot = of_tile + (row * SLOTS + slot) * RESULT_STRIDE + column;
        float result = 0.0f;
#pragma unroll
        for (int part = 0; part < K_PARTS; part++) result += of_slot[part * ROWS * SLOTS * RESULT_STRIDE];
        result = rounded(result);
        if (HAS_BIAS) result = rounded(result + from_bfloat16(biases[i][slot]));
        sum += weight_of[row * SLOTS + slot] * result;
      }
      out[row * out_stride + tile * TILE_N + column] = to_bfloat16(sum + from_bfloat16(before[i]));
    }
    tile += gridDim.x, turn++;
  };
  uint4 b[ROW_TILES][4], ahead[ROW_TILES][4];
  if (my_items) take_rows(), find_rows();
  if (X_AHEAD)
    if (total_steps) load_x(ahead);
  for (int begin = 0; begin < total_steps; begin += NUM_STAGES) {
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      if (begin + i >= total_steps) continue;
      if (X_AHEAD) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
          for (int k32 = 0; k32 < 4; k32++) b[m][k32] = scaled_x(ahead[m][k32]);
        if (begin + i + 1 < total_steps) load_x(ahead);
      } else {
        load_x(b);
      }
      float2 sums[GROUPS][ROW_TILES];
#pragma unroll
      for (int m = 0; SUMS_X && m < ROW_TILES; m++) {
        if (m && count <= 8) continue;
        const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          float c[4] = {};
#pragma unroll
          for (int k32 = group * STEP_GROUP / 32; k32 < (group + 1) * STEP_GROUP / 32; k32++)
            mma(c, ones, b[m][k32].x, b[m][k32].y), mma(c, ones, b[m][k32].z, b[m][k32].w);
          sums[group][m] = make_float2(c[0], c[1]);
        }
      }
      auto of_g = [&](int m, int k32) { return b[m][k32]; };
      auto of_2t = [&](int group, int m) { return sums[group][m]; };
      if (ROW_TILES > 1 && count > 8) multiply_step<ROW_TILES>(total, stages[i], of_g, of_2t);
      else multiply_step<1>(total, stages[i], of_g, of_2t);
      const u32 row_scales_of[2] = {stages[i].row_scales[0][0], stages[i].row_scales[0][1]};
      if (begin + i + NUM_STAGES < total_steps) load_next(stages[i]);
      if (++step < PART_STEPS) continue;
      step = 0;
      const int part = item % K_PARTS;
      float* of_part = results + (turn & 1) * RESULTS + part * ROWS * SLOTS * RESULT_STRIDE;
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (ROW_SCALED || SCALES_CODES) total[0][m][j] *= unit_scale(row_scales_of[j >> 1]);
          const int rank = m * 8 + 2 * t + (j & 1), column = g + (j >> 1) * 8;
          if (rank < count) of_part[my_slots[rank] * RESULT_STRIDE + column] = total[0][m][j];
          total[0][m][j] = 0.0f;
        }
      item += WARPS;
      if (--items_left == 0) {
        finish_tile();
        item = warp, items_left = my_items;
      }
      take_rows();
    }
  }
  if (!my_items)
    while (turn < my_tiles) finish_tile();
}
