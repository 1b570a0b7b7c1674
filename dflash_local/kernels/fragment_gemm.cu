// Products of a few rows with a weight, quantised or not: out[M, N] = x[M, K] W[N, K]^T, M <= 8 * ROW_TILES, sums in float32.
// What codes and fragments are stands in fragments.cu.
//
// Blocks are persistent. A unit of work is WARPS_N * TILES_PER_WARP tiles; the K of a unit is shared by WARPS_K warps,
// whose sums are added in a fixed order through shared memory, and by SPLIT_K blocks, which at the end wait for each
// other and add their sums in a fixed order, each for a share of the units. A result depends on its own row alone.
//
// A weight may have a tail: features below the coded ones that are bfloat16, too few for a launch of their own. Each of
// the first blocks multiplies one of its tiles after fewer units; all warps share the K of a tile.
//
// From the compiler's command line, beside what fragments.cu names: ROW_TILES, WARPS_K, WARPS_N, NUM_STAGES, SPLIT_K,
// BLOCKS_PER_SM, SWIGLU, HAS_TAIL, SHARED_BYTES.
constexpr int ROWS = ROW_TILES * 8;
constexpr int WARPS = WARPS_K * WARPS_N, THREADS = WARPS * 32;
constexpr int BLOCK_STEPS = (STEPS + SPLIT_K - 1) / SPLIT_K;
constexpr int WARP_STEPS = (BLOCK_STEPS + WARPS_K - 1) / WARPS_K;
constexpr bool RAGGED = BLOCK_STEPS * SPLIT_K != STEPS || WARP_STEPS * WARPS_K != BLOCK_STEPS;
constexpr int COLUMNS = WARPS_N * TILES_PER_WARP * TILE_N;  // of a unit
constexpr int OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;
constexpr int OUTPUTS = ROWS * COLUMNS;
constexpr int BLOCK_K = WARPS_K * WARP_STEPS * STEP_K;
constexpr int X_STRIDE = BLOCK_K * 2 + 64;  // bytes of a row of x in shared memory; 64 modulo 128: no bank conflicts
constexpr int X_BYTES = ROWS * X_STRIDE;
constexpr int GROUP_SUM_BYTES = SUMS_X ? BLOCK_K / STEP_GROUP * ROWS * SUM_BYTES : 0;
constexpr int SUM_STRIDE = COLUMNS + 4;  // 4 modulo 16: no bank conflicts
constexpr int SUM_FLOATS = WARPS_K * ROWS * SUM_STRIDE;
constexpr int TAIL_STEP_BYTES = STEP_K * TILE_N * 2;  // of a tile, as eight loads of 16 bytes
constexpr i64 TAIL_TILE_BYTES = (i64)STEPS * TAIL_STEP_BYTES;
constexpr int TAIL_STRIDE = TILE_N + 4, TAIL_OUTPUTS = ROWS * TILE_N;  // as SUM_STRIDE, OUTPUTS
static_assert(WARPS * ROWS * TAIL_STRIDE <= 2 * SUM_FLOATS, "room for the sums of a tile of the tail");
static_assert(X_BYTES + GROUP_SUM_BYTES + 2 * SUM_FLOATS * 4 == SHARED_BYTES, "shared memory as the host counts it");
static_assert(!SWIGLU || (COLUMNS % 32 == 0 && TILES_PER_WARP <= 2), "a unit holds tiles of both halves");

struct Output {
  u16* out;
  const u16* residual;  // null, or rows that lie as those of out
  const u16* bias;      // null, or of each feature
  i64 stride;
  int rows, features;
};

// Finishes WIDTH features from the at-th WIDTH on; sum(row, column) is a result in float32.
template <int WIDTH, bool GATED, class Sum>
__device__ __forceinline__ void store(const Output& output, int at, const Sum& sum) {
  for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
    const int row = i / WIDTH, column = i % WIDTH, feature = at * WIDTH + column;
    if (row >= output.rows || feature >= output.features) continue;
    float result;
    if (GATED) {  // columns of 16 of the gate and of up take turns
      const int gate_column = column / TILE_N * 2 * TILE_N + column % TILE_N;
      const float gate = rounded(sum(row, gate_column)), up = rounded(sum(row, gate_column + TILE_N));
      result = rounded(gate / (1.0f + __expf(-gate))) * up;
    } else {
      result = sum(row, column);
      // Rounded before the sum, as a layer whose output is added to the residual would be.
      if (output.residual) result = rounded(result) + from_bfloat16(output.residual[row * output.stride + feature]);
      if (output.bias) result = rounded(result) + from_bfloat16(output.bias[feature]);
    }
    output.out[row * output.stride + feature] = to_bfloat16(result);
  }
}

// A warp's part of a tile of the tail: every WARPS-th step of the block's. x: as of multiply_step, at the first step.
__device__ __forceinline__ void multiply_tail(float (&total)[ROW_TILES][4], const u8* tile, const u8* x, int steps,
                                              int warp, int lane) {
  for (int step = warp; step < steps; step += WARPS) {
    uint4 codes[8];
#pragma unroll
    for (int k16 = 0; k16 < 8; k16++) codes[k16] = load_streamed(tile + step * TAIL_STEP_BYTES + k16 * 512 + lane * 16);
#pragma unroll
    for (int k32 = 0; k32 < STEP_K / 32; k32++)
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        const uint4 b = *(const uint4*)(x + m * 8 * X_STRIDE + step * STEP_K * 2 + k32 * 64);
        const uint4 first = codes[2 * k32], second = codes[2 * k32 + 1];
        mma(total[m], {first.x, first.y, first.z, first.w}, b.x, b.y);
        mma(total[m], {second.x, second.y, second.z, second.w}, b.z, b.w);
      }
  }
}

// tiles: of 16 features, in the weight; for SWIGLU half of them are the gate's, then those of up follow.
// tail: as codes, [tile][step][k16][lane], tail_features of the out_features; its blocks have tail_share units each.
// partial_sums [SPLIT_K][units, tiles of the tail][row][column] and counters (zeros, and zeros again when the kernel
// ends) are for SPLIT_K > 1.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fragment_gemm(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
             const u8* __restrict__ offsets, const u8* __restrict__ row_scales, const u8* __restrict__ tail,
             u16* out, const u16* residual, const u16* bias, float* partial_sums, int* counters, i64 x_stride, i64 out_stride, int rows,
             int out_features, int tiles, int tail_features, int tail_share) {
  extern __shared__ __align__(16) u8 shared[];
  u8* group_sums = shared + X_BYTES;
  float* warp_sums = (float*)(shared + X_BYTES + GROUP_SUM_BYTES);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_k = warp / WARPS_N, warp_n = warp % WARPS_N;
  const int g = lane >> 2, t = lane & 3;
  const int split = blockIdx.x % SPLIT_K, part = blockIdx.x / SPLIT_K, parts = gridDim.x / SPLIT_K;
  const int units = (tiles + WARPS_N * TILES_PER_WARP - 1) / (WARPS_N * TILES_PER_WARP);
  const int tail_tiles = HAS_TAIL ? (tail_features + TILE_N - 1) / TILE_N : 0;
  // Units before a block's: the first blocks have tail_share each, the others equal parts of what is left.
  const int tail_parts = tail_tiles < parts ? tail_tiles : 0, shared_units = units - tail_parts * tail_share;
  auto units_before = [&](int block) {
    if (block < tail_parts) return block * tail_share;
    return tail_parts * tail_share + int((i64)shared_units * (block - tail_parts) / (parts - tail_parts));
  };
  const int first_unit = units_before(part), end_unit = units_before(part + 1);
  const int features = out_features - (HAS_TAIL ? tail_features : 0);  // coded
  const Weight weight = {codes, scales, offsets, row_scales, SWIGLU ? features * 2 : features};
  const Output output = {out, residual, bias, out_stride, rows, features};
  const Output tail_output = {out + features, residual ? residual + features : 0, bias ? bias + features : 0,
                              out_stride, rows, tail_features};
  const i64 split_sums = (i64)units * OUTPUTS + (i64)tail_tiles * TAIL_OUTPUTS;  // of partial_sums
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif

  // Weights are loaded NUM_STAGES steps ahead; (next_unit, next_step) is the next to load.
  Step stages[NUM_STAGES];
  const int first_step = split * BLOCK_STEPS + warp_k * WARP_STEPS;
  const int my_steps = min(WARP_STEPS, min(BLOCK_STEPS - warp_k * WARP_STEPS, STEPS - first_step));
  const int total_steps = (end_unit - first_unit) * WARP_STEPS;
  int next_unit = first_unit, next_step = 0;
  const int tile_distance = SWIGLU ? tiles / 2 : 1;
  auto load_next = [&](Step& step) {
    // Tiles of the gate and of up take turns.
    const int turn = (next_unit * WARPS_N + warp_n) * TILES_PER_WARP;
    const int tile = SWIGLU ? (turn >> 1) + (turn & 1) * tile_distance : turn;
    load_step(step, weight, tile, tile_distance, first_step + next_step, !RAGGED || next_step < my_steps,
              next_step == WARP_STEPS - 1, tiles - turn, lane);
    if (++next_step == WARP_STEPS) next_step = 0, next_unit++;
  };
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++)
    if (i < total_steps) load_next(stages[i]);
  const int tail_steps = max(0, min(BLOCK_STEPS, STEPS - split * BLOCK_STEPS));
  const u8* block_tail = tail + (i64)split * BLOCK_STEPS * TAIL_STEP_BYTES;
  if (HAS_TAIL && part < tail_tiles)  // registers are for the units: the tail waits in the L2 cache
    for (int at = threadIdx.x * 128; at < tail_steps * TAIL_STEP_BYTES; at += THREADS * 128)
      prefetch(block_tail + part * TAIL_TILE_BYTES + at);

#if __CUDA_ARCH__ >= 900
  // Only weights, which no kernel writes, are read before the kernels in front of this one have ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int first_column = split * BLOCK_STEPS * STEP_K;
  stage_x<BLOCK_K, X_STRIDE, THREADS>(shared, x + first_column, x_stride, rows, ROWS,
                                      min(BLOCK_STEPS * STEP_K, IN_FEATURES - first_column));
  __syncthreads();
  const u8* my_x = shared + g * X_STRIDE + warp_k * WARP_STEPS * STEP_K * 2 + t * 16;
  u8* my_group_sums = group_sums + warp_k * WARP_STEPS * GROUPS * ROWS * SUM_BYTES;
  if (SUMS_X) {
    sum_groups<ROW_TILES, X_STRIDE, WARP_STEPS>(my_group_sums, my_x, lane);  // warps that share a K write the same numbers
    __syncwarp();
  }

  float total[TILES_PER_WARP][ROW_TILES][4] = {};
  int step = 0, unit = first_unit;
  for (int begin = 0; begin < total_steps; begin += NUM_STAGES) {
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      if (begin + i >= total_steps) continue;
      const u8* step_x = my_x + step * STEP_K * 2;
      const u8* step_sums = my_group_sums + step * GROUPS * ROWS * SUM_BYTES;
      multiply_step<ROW_TILES>(
          total, stages[i], [&](int m, int k32) { return *(const uint4*)(step_x + m * 8 * X_STRIDE + k32 * 64); },
          [&](int group, int m) { return ((const float2*)step_sums)[(group * ROW_TILES + m) * 4 + t]; },
          [&](int m) { return ((const uint2*)step_sums)[m * 32 + lane]; }, lane);
      u32 row_scales[TILES_PER_WARP][2];
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++)
        row_scales[n][0] = stages[i].row_scales[n][0], row_scales[n][1] = stages[i].row_scales[n][1];
      if (begin + i + NUM_STAGES < total_steps) load_next(stages[i]);
      if (++step < WARP_STEPS) continue;
      step = 0;
      float* sums = warp_sums + (unit & 1) * SUM_FLOATS;  // by turns, so that one barrier a unit is enough
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (ROW_SCALED || SCALES_CODES) total[n][m][j] *= unit_scale(row_scales[n][j >> 1]);
            const int row = m * 8 + 2 * t + (j & 1), column = (warp_n * TILES_PER_WARP + n) * TILE_N + g + (j >> 1) * 8;
            sums[(warp_k * ROWS + row) * SUM_STRIDE + column] = total[n][m][j];
            total[n][m][j] = 0.0f;
          }
      __syncthreads();
      auto block_sum = [&](int row, int column) {
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS_K; k++) value += sums[(k * ROWS + row) * SUM_STRIDE + column];
        return value;
      };
      if (SPLIT_K == 1) {
        store<OUT_COLUMNS, SWIGLU>(output, unit, block_sum);
      } else {
        float* place = partial_sums + split * split_sums + (i64)unit * OUTPUTS;
        for (int at = threadIdx.x; at < OUTPUTS; at += THREADS)
          if (at / COLUMNS < rows) __stcg(place + at, block_sum(at / COLUMNS, at % COLUMNS));
      }
      unit++;
    }
  }
  for (int tile = part; HAS_TAIL && tile < tail_tiles; tile += parts) {
    float sum[ROW_TILES][4] = {};
    multiply_tail(sum, block_tail + tile * TAIL_TILE_BYTES, shared + g * X_STRIDE + t * 16, tail_steps, warp, lane);
    __syncthreads();  // the last unit's sums have been read
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        warp_sums[(warp * ROWS + m * 8 + 2 * t + (j & 1)) * TAIL_STRIDE + g + (j >> 1) * 8] = sum[m][j];
    __syncthreads();
    auto block_sum = [&](int row, int column) {
      float value = 0.0f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) value += warp_sums[(k * ROWS + row) * TAIL_STRIDE + column];
      return SMALL_CODES ? value * (1.0f / TWO_60) : value;
    };
    if (SPLIT_K == 1) {
      store<TILE_N, false>(tail_output, tile, block_sum);
    } else {
      float* place = partial_sums + split * split_sums + (i64)units * OUTPUTS + tile * TAIL_OUTPUTS;
      for (int at = threadIdx.x; at < TAIL_OUTPUTS; at += THREADS)
        if (at / TILE_N < rows) __stcg(place + at, block_sum(at / TILE_N, at % TILE_N));
    }
  }
  if (SPLIT_K == 1) return;
  // Blocks that share a K are as many as run at a time: each waits for the others once, at the end, and then adds up
  // its share of the units. The counter goes up twice by each block; the last one leaves it as it was.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(counters + part, 1);
    while (load_acquire(counters + part) < SPLIT_K) {
    }
  }
  __syncthreads();
  auto sum_of_splits = [&](const float* place, int at) {
    float value = 0.0f;
#pragma unroll
    for (int k = 0; k < SPLIT_K; k++) value += __ldcg(place + k * split_sums + at);
    return value;
  };
  for (int done = first_unit + split; done < end_unit; done += SPLIT_K) {
    const float* place = partial_sums + (i64)done * OUTPUTS;
    store<OUT_COLUMNS, SWIGLU>(output, done,
                               [&](int row, int column) { return sum_of_splits(place, row * COLUMNS + column); });
  }
  for (int tile = part + split * parts; HAS_TAIL && tile < tail_tiles; tile += parts * SPLIT_K) {
    const float* place = partial_sums + (i64)units * OUTPUTS + tile * TAIL_OUTPUTS;
    store<TILE_N, false>(tail_output, tile,
                         [&](int row, int column) { return sum_of_splits(place, row * TILE_N + column); });
  }
  if (threadIdx.x == 0 && atomicAdd(counters + part, 1) == 2 * SPLIT_K - 1) counters[part] = 0;
}
