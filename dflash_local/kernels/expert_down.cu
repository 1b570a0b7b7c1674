// The second product of a mixture of experts for a few rows, and their weighed sum: out[M, H] = sum over the S experts e
// of a row of weight * (intermediate[M, S, I] down_e^T) (+ residual), M <= 8 * ROW_TILES, sums in float32. What codes and
// fragments are stands in fragments.cu.
//
// Weights of all experts lie below each other, [experts * H, I]. A pair is a tile of 16 features and an expert that
// occurs (the list is route.cu's); tile after tile, a block has either all pairs of every gridDim-th tile or, where
// SHARES_TILES, one of gridDim equal parts of all pairs, whatever tiles that divides. Its warps go through the pairs,
// WARPS of their K_PARTS parts of K at a time, and leave the results of each slot in shared memory; then each row's
// results are added in the order of its slots. Of a tile that several blocks have, each leaves the results of its slots
// in memory, and the last to do so adds them. So a result depends on its own row alone, whatever warp took which expert.
// An expert's rows are read as they are multiplied, from the L2 cache; weights are loaded NUM_STAGES steps ahead, from
// one tile into the next, and the first ones while expert_gate_up.cu still runs.
//
// From the compiler's command line, beside what fragments.cu names: ROW_TILES, WARPS, K_PARTS, NUM_STAGES, SHARES_TILES,
// BLOCKS_PER_SM, SLOTS (experts of a row), MAX_EXPERTS (that rows can have), HAS_BIAS, SHARED_BYTES. TILES_PER_WARP is 1.
constexpr int ROWS = ROW_TILES * 8;
constexpr int THREADS = WARPS * 32;
constexpr int PART_STEPS = (STEPS + K_PARTS - 1) / K_PARTS;
constexpr bool RAGGED = PART_STEPS * K_PARTS != STEPS;
constexpr int RESULT_STRIDE = TILE_N + 1;
constexpr int RESULTS = K_PARTS * ROWS * SLOTS * RESULT_STRIDE;
constexpr int LIST_WORDS = 2 * MAX_EXPERTS + 2 + 3 * ROWS * SLOTS;
constexpr int THREAD_RESULTS = (ROWS * TILE_N + THREADS - 1) / THREADS;  // of a tile
static_assert((2 * RESULTS + LIST_WORDS) * 4 == SHARED_BYTES, "shared memory as the host counts it");
static_assert(TILES_PER_WARP == 1, "a block has a tile at a time");

// list: as of expert_gate_up.cu. tiles: of 16 features, of an expert. weights, chosen: [rows, SLOTS], chosen the experts.
// bias: [experts, H] or null. slot_results [rows * SLOTS, H] and tickets [tiles] (zeros, and zeros again when the kernel
// ends) are for SHARES_TILES.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
expert_down(const u16* intermediate, const u8* __restrict__ codes, const u8* __restrict__ scales,
            const u8* __restrict__ offsets, const u8* __restrict__ row_scales, const u16* __restrict__ bias,
            const float* weights, const int* chosen, u16* out, const u16* residual, const int* list, i64 out_stride, int rows,
            int all_features, int tiles, int list_experts, float* slot_results, int* tickets) {
  extern __shared__ __align__(16) u8 shared[];
  float* results = (float*)shared;  // [two tiles by turns][part of K][slot][feature]
  int* experts = (int*)(results + 2 * RESULTS);
  int* starts = experts + MAX_EXPERTS;
  int* slots = starts + MAX_EXPERTS + 1;
  float* weight_of = (float*)(slots + ROWS * SLOTS);
  int* expert_of = (int*)(weight_of + ROWS * SLOTS);
  int& is_last = expert_of[ROWS * SLOTS];  // to leave its part of a tile
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Weight weight = {codes, scales, offsets, row_scales, all_features};
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

  const int block_tiles = tiles > (int)blockIdx.x ? (tiles - (int)blockIdx.x - 1) / (int)gridDim.x + 1 : 0;
  const i64 all_pairs = (i64)tiles * occurring;
  const int first_pair = SHARES_TILES ? int(all_pairs * blockIdx.x / gridDim.x) : 0;
  const int end_pair = SHARES_TILES ? int(all_pairs * (blockIdx.x + 1) / gridDim.x) : block_tiles * occurring;
  if (first_pair == end_pair) return;
  const int first_tile = SHARES_TILES ? first_pair / occurring : blockIdx.x, tile_step = SHARES_TILES ? 1 : gridDim.x;
  const int first_at = SHARES_TILES ? first_pair % occurring : 0;
  const int end_tile = first_tile + (first_at + end_pair - first_pair + occurring - 1) / occurring * tile_step;
  // A warp's work: items warp, warp + WARPS, ... of the block's; an item is a part of K of a pair.
  struct Item {
    int number, at, tile;  // at: of the expert in the list
  };
  auto next_item = [&](Item& item, int distance) {
    item.at += (item.number + distance) / K_PARTS - item.number / K_PARTS;
    item.number += distance;
    for (; item.at >= occurring; item.at -= occurring) item.tile += tile_step;
  };
  Item first_item = {0, first_at, first_tile};
  next_item(first_item, warp);
  const int items = (end_pair - first_pair) * K_PARTS, my_items = items > warp ? (items - warp - 1) / WARPS + 1 : 0;
  const int total_steps = my_items * PART_STEPS;
  Step stages[NUM_STAGES];
  Item loading = first_item;
  int next_step = 0;
  auto load_next = [&](Step& step) {
    const int first = loading.number % K_PARTS * PART_STEPS;
    load_step(step, weight, experts[loading.at] * tiles + loading.tile, 1, first + next_step,
              !RAGGED || first + next_step < STEPS, next_step == PART_STEPS - 1, 1, lane);
    if (++next_step < PART_STEPS) return;
    next_step = 0, next_item(loading, WARPS);
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++)
    if (i < total_steps) load_next(stages[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  float total[1][ROW_TILES][4] = {};
  Item item = first_item;
  int step = 0, tile = first_tile, turn = 0, items_left = my_items;
  int count = 0;
  const int* my_slots = slots;
  const u16* row_of_g[ROW_TILES];
  auto take_rows = [&]() {
    my_slots = slots + starts[item.at], count = starts[item.at + 1] - starts[item.at];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)  // lanes without a row multiply another's, for nothing
      row_of_g[m] = intermediate + (i64)my_slots[min(m * 8 + g, count - 1)] * IN_FEATURES;
  };
  auto load_x = [&](uint4 (&b)[4], int m, int k) {
#pragma unroll
    for (int k32 = 0; k32 < 4; k32++) {
      const bool inside = IN_FEATURES % STEP_K == 0 && !RAGGED || k + k32 * 32 < IN_FEATURES;
      b[k32] = scaled_x(inside ? load_lane_x(row_of_g[m] + k + k32 * 32, t) : make_uint4(0, 0, 0, 0));
    }
  };
  // What all warps have left of a tile's slots becomes its features of out. Two tiles' results lie beside each other, so
  // that one barrier a tile is enough.
  auto finish_tile = [&]() {
    const float* of_tile = results + (turn & 1) * RESULTS;
    auto slot_result = [&](int slot, int column) {
      const float* of_slot = of_tile + slot * RESULT_STRIDE + column;
      float result = 0.0f;
#pragma unroll
      for (int part = 0; part < K_PARTS; part++) result += of_slot[part * ROWS * SLOTS * RESULT_STRIDE];
      return rounded(result);
    };
    // Biases and the residual are read before the other warps are waited for.
    u16 biases[THREAD_RESULTS][HAS_BIAS ? SLOTS : 1], before[THREAD_RESULTS];
#pragma unroll
    for (int i = 0; i < THREAD_RESULTS; i++) {
      const int index = threadIdx.x + i * THREADS, row = index / TILE_N, feature = tile * TILE_N + index % TILE_N;
      if (row >= rows) continue;
      before[i] = residual ? residual[row * out_stride + feature] : 0;
#pragma unroll
      for (int slot = 0; HAS_BIAS && slot < SLOTS; slot++)
        biases[i][slot] = bias[(i64)expert_of[row * SLOTS + slot] * tiles * TILE_N + feature];
    }
    __syncthreads();
    const int features = tiles * TILE_N, begin = tile == first_tile ? first_at : 0;
    const int end = SHARES_TILES ? min(occurring, end_pair - tile * occurring) : occurring;
    const bool whole = !SHARES_TILES || end - begin == occurring;
    if (!whole) {
      const int slots_begin = starts[begin], slots_end = starts[end];
      for (int i = threadIdx.x; i < (slots_end - slots_begin) * TILE_N; i += THREADS) {
        const int slot = slots[slots_begin + i / TILE_N], column = i % TILE_N;
        __stcg(slot_results + (i64)slot * features + tile * TILE_N + column, slot_result(slot, column));
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        is_last = atomicAdd(tickets + tile, end - begin) + end - begin == occurring;
        if (is_last) tickets[tile] = 0;
        __threadfence();
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < THREAD_RESULTS; i++) {
      const int index = threadIdx.x + i * THREADS, row = index / TILE_N, column = index % TILE_N;
      if (row >= rows || (!whole && !is_last)) continue;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < SLOTS; j++) {
        const int slot = row * SLOTS + j;
        float result = whole ? slot_result(slot, column)
                             : __ldcg(slot_results + (i64)slot * features + tile * TILE_N + column);
        if (HAS_BIAS) result = rounded(result + from_bfloat16(biases[i][j]));
        add_product(sum, weight_of[slot], result);
      }
      out[row * out_stride + tile * TILE_N + column] = to_bfloat16(sum + from_bfloat16(before[i]));
    }
    tile += tile_step, turn++;
  };
  auto finish_tiles = [&](int end) {
    while (tile != end) finish_tile();
  };
  if (my_items) finish_tiles(item.tile), take_rows();
  for (int begin = 0; begin < total_steps; begin += NUM_STAGES) {
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      if (begin + i >= total_steps) continue;
      const int part = item.number % K_PARTS, k = (part * PART_STEPS + step) * STEP_K;
      uint4 b[ROW_TILES][4];
      float2 sums[GROUPS][ROW_TILES];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        if (m && count <= 8) continue;
        load_x(b[m], m, k);
        if (!SUMS_X || NESTED_MINIMA) continue;
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
      uint2 split[ROW_TILES] = {};
      auto split_of_g = [&](int m) { return split[m]; };
      if (NESTED_MINIMA) sum_step(split, of_g, lane);
      if (ROW_TILES > 1 && count > 8) multiply_step<ROW_TILES>(total, stages[i], of_g, of_2t, split_of_g, lane);
      else multiply_step<1>(total, stages[i], of_g, of_2t, split_of_g, lane);
      const u32 row_scales_of[2] = {stages[i].row_scales[0][0], stages[i].row_scales[0][1]};
      if (begin + i + NUM_STAGES < total_steps) load_next(stages[i]);
      if (++step < PART_STEPS) continue;
      step = 0;
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
      if (--items_left == 0) continue;
      next_item(item, WARPS);
      finish_tiles(item.tile);
      take_rows();
    }
  }
  finish_tiles(end_tile);
}
