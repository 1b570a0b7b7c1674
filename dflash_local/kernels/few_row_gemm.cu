// Products of a few rows with a quantised weight: out[M, N] = x[M, K] W[N, K]^T, M <= 8 * ROW_TILES, sums in float32.
//
// The weight is the 16-row A operand of mma.m16n8k16, eight rows of x are its B operand. fragment_packing.py lays the
// codes out as [tile of 16 features][step of 128 along K][16-byte load][lane]: a lane loads what it multiplies itself.
// Blocks are persistent. A unit of work is WARPS_N * TILES_PER_WARP tiles; the K of a unit is shared by WARPS_K warps,
// whose sums are added in a fixed order through shared memory, and by SPLIT_K blocks, which at the end wait for each
// other and add their sums in a fixed order, each for a share of the units. A result depends on its own row alone.
//
// Codes become bfloat16 by few bit operations, each exactly.
// int4: 128 + code; (128 + zero) times the sum of the group's x is taken off after the group.
// int8: the code less 128, as 128 + its lower seven bits less 128 or 256; zero points are taken off like int4's.
// e4m3, e2m1: their bits are those of a bfloat16 2^120 or 2^126 times smaller; x is multiplied by 2^60 beforehand, and
// sums or scales by the rest.
//
// Scales of groups multiply the group's sums, which are kept apart: at a group's end four multiply-adds of a lane for
// eight rows. Of a group of 16 (NVFP4) only half of the lanes hold columns, so that no instruction sums one alone: its
// scale multiplies the decoded codes, four multiplications for any number of rows. Sums by 16 columns would take twice
// as many at 16 rows, and registers. It is exact: the product of two and of four significant bits has six.
// Scales of rows multiply what a warp has summed up for a unit.
//
// A weight may have a tail: features below the coded ones that are bfloat16, too few for a launch of their own. Each of
// the first blocks multiplies one of its tiles after fewer units; all warps share the K of a tile.
//
// From the compiler's command line: CODES and SCALE_TYPE (the names below), BLOCK_ROWS and GROUP_SIZE (features and
// columns that share a scale; 0: there are only scales of rows), HAS_ZEROS, ROW_SCALE_TYPE, IN_FEATURES, ROW_TILES,
// WARPS_K, WARPS_N, TILES_PER_WARP, NUM_STAGES, SPLIT_K, BLOCKS_PER_SM, SWIGLU, HAS_TAIL, SHARED_BYTES.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

enum { INT4, INT8, E4M3, E2M1 };  // CODES
enum { NO_SCALE, BF16_SCALE, FP16_SCALE, FP32_SCALE, E8M0_SCALE, E4M3_SCALE };  // SCALE_TYPE, ROW_SCALE_TYPE
constexpr int STEP_K = 128, TILE_N = 16;
constexpr int WEIGHT_BITS = CODES == INT4 || CODES == E2M1 ? 4 : 8;
constexpr int ROWS = ROW_TILES * 8;
constexpr int WARPS = WARPS_K * WARPS_N, THREADS = WARPS * 32;
constexpr int LOADS = WEIGHT_BITS / 2;  // 16-byte loads of a lane for one tile and step
constexpr bool SCALED = GROUP_SIZE > 0, ROW_SCALED = ROW_SCALE_TYPE != NO_SCALE;
constexpr bool SCALES_CODES = SCALE_TYPE == E4M3_SCALE, SCALES_SUMS = SCALED && !SCALES_CODES;
constexpr bool SUMS_X = CODES == INT4 || HAS_ZEROS;
constexpr bool SMALL_CODES = CODES == E4M3 || CODES == E2M1;  // x is multiplied by 2^60
// Columns of a step that share a scale, how many such groups a step has, and steps that share a scale.
constexpr int STEP_GROUP = SCALED && STEP_K % (SCALED ? GROUP_SIZE : 1) == 0 ? GROUP_SIZE : STEP_K;
constexpr int GROUPS = STEP_K / STEP_GROUP;
constexpr int GROUP_STEPS = SCALED ? (GROUP_SIZE + STEP_K - 1) / STEP_K : 1;
constexpr int K16_OF_GROUP = STEP_GROUP / 16;
constexpr int SCALE_BYTES = SCALE_TYPE == FP32_SCALE ? 4 : SCALE_TYPE == E8M0_SCALE || SCALE_TYPE == E4M3_SCALE ? 1 : 2;
// A lane has two features of a tile, g and g + 8. Scales of groups of one feature lie as
// [tile][group / GROUPS][g][group % GROUPS][two], zero points, which are bytes, too; those of blocks of features as
// [blocks of features][blocks of columns], one for a tile and step.
// Of groups of 16 columns a lane has every other one: those of its half of the lanes lie side by side.
constexpr int SCALE_WORDS = SCALES_CODES ? 2 : SCALED && BLOCK_ROWS == 1 ? (GROUPS * SCALE_BYTES + 1) / 2 : 1;
constexpr int ZERO_WORDS = HAS_ZEROS ? (GROUPS + 1) / 2 : 1;
constexpr int STEP_BYTES = LOADS * 512;  // of a tile's codes
constexpr int STEPS = (IN_FEATURES + STEP_K - 1) / STEP_K;
constexpr int BLOCK_STEPS = (STEPS + SPLIT_K - 1) / SPLIT_K;
constexpr int WARP_STEPS = (BLOCK_STEPS + WARPS_K - 1) / WARPS_K;
constexpr bool RAGGED = BLOCK_STEPS * SPLIT_K != STEPS || WARP_STEPS * WARPS_K != BLOCK_STEPS;
constexpr int SCALED_STEPS = (STEPS + GROUP_STEPS - 1) / GROUP_STEPS;
constexpr i64 TILE_BYTES = (i64)STEPS * STEP_BYTES;
constexpr int COLUMNS = WARPS_N * TILES_PER_WARP * TILE_N;  // of a unit
constexpr int OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;
constexpr int OUTPUTS = ROWS * COLUMNS;
constexpr int BLOCK_K = WARPS_K * WARP_STEPS * STEP_K;
constexpr int X_STRIDE = BLOCK_K * 2 + 64;  // bytes of a row of x in shared memory; 64 modulo 128: no bank conflicts
constexpr int X_BYTES = ROWS * X_STRIDE;
constexpr int GROUP_SUM_BYTES = SUMS_X ? BLOCK_K / STEP_GROUP * ROWS * 4 : 0;
constexpr int SUM_STRIDE = COLUMNS + 4;  // 4 modulo 16: no bank conflicts
constexpr int SUM_FLOATS = WARPS_K * ROWS * SUM_STRIDE;
constexpr int TAIL_STEP_BYTES = STEP_K * TILE_N * 2;  // of a tile, as eight loads of 16 bytes
constexpr i64 TAIL_TILE_BYTES = (i64)STEPS * TAIL_STEP_BYTES;
constexpr int TAIL_STRIDE = TILE_N + 4, TAIL_OUTPUTS = ROWS * TILE_N;  // as SUM_STRIDE, OUTPUTS
// What codes are too small by and x, 2^60 times too large, has not made up for; NVFP4's scales have made up for 2^7.
constexpr float TWO_60 = 1152921504606846976.0f, REST_E4M3 = TWO_60, REST_NVFP4 = TWO_60 / 2;
constexpr int REST_E2M1 = 66;  // 2^66
static_assert(WARPS * ROWS * TAIL_STRIDE <= 2 * SUM_FLOATS, "room for the sums of a tile of the tail");
static_assert(X_BYTES + GROUP_SUM_BYTES + 2 * SUM_FLOATS * 4 == SHARED_BYTES, "shared memory as the host counts it");
static_assert(!SCALED || BLOCK_ROWS == 1 || (BLOCK_ROWS % TILE_N == 0 && GROUPS == 1 && !HAS_ZEROS), "scales");
static_assert(!SCALES_CODES || (GROUP_SIZE == 16 && BLOCK_ROWS == 1), "scales of codes");
static_assert(SCALED || !SUMS_X, "an offset is taken off a group");
static_assert(!SWIGLU || (COLUMNS % 32 == 0 && TILES_PER_WARP <= 2), "a unit holds tiles of both halves");

__device__ __forceinline__ uint4 load_streamed(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void prefetch(const u8* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }
__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 and_or(u32 value, u32 mask, u32 bits) {  // (value & mask) | bits, one instruction
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(value), "r"(mask), "r"(bits));
  return d;
}
__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {  // of two bfloat16
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) { return fma_pairs(a, b, 0x80008000u); }
__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}
__device__ __forceinline__ float from_bfloat16(u16 value) { return __uint_as_float(u32(value) << 16); }
__device__ __forceinline__ float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }
__device__ __forceinline__ float low_bfloat16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bfloat16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float from_float16(u32 value) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(u16(value)));
  return f;
}

template <int TYPE> __device__ __forceinline__ u32 load_scale(const u8* scales, i64 at) {
  return TYPE == FP32_SCALE ? __ldg((const u32*)scales + at) : __ldg((const u16*)scales + at);
}
template <int TYPE> __device__ __forceinline__ float scale_value(u32 bits) {
  if (TYPE == BF16_SCALE) return low_bfloat16(bits);
  return TYPE == FP16_SCALE ? from_float16(bits) : __uint_as_float(bits);
}

struct Weight {
  const u8* codes;
  const u8* scales;
  const u8* zeros;
  const u8* row_scales;
  int features;
};

struct Step {  // what a lane holds of one step: codes, scales and zero points of its warp's tiles
  uint4 codes[TILES_PER_WARP][LOADS];
  u32 scales[TILES_PER_WARP][SCALE_WORDS];
  u32 zeros[TILES_PER_WARP][ZERO_WORDS];
  u32 row_scales[TILES_PER_WARP][2];  // in the last step of a unit
};

template <int WORDS> __device__ __forceinline__ void load_words(u32 (&words)[WORDS], const u8* p, bool load) {
  if (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 v = load ? __ldg((const uint4*)p + i) : make_uint4(0, 0, 0, 0);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  } else if (WORDS == 2) {
    const uint2 v = load ? __ldg((const uint2*)p) : make_uint2(0, 0);
    words[0] = v.x, words[WORDS - 1] = v.y;
  } else {
    words[0] = load ? __ldg((const u32*)p) : 0;
  }
}

// tile: the warp's first one; its others follow, tile_distance apart. last: of the unit.
__device__ __forceinline__ void load_step(Step& step, const Weight& weight, int tile, int tile_distance, int at,
                                          bool inside, bool last, int tiles_left, int lane) {
#pragma unroll
  for (int n = 0; n < TILES_PER_WARP; n++) {
    const bool load = inside && n < tiles_left;
    const int t = tile + n * tile_distance;
    const u8* codes = weight.codes + t * TILE_BYTES + at * STEP_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < LOADS; i++) step.codes[n][i] = load ? load_streamed(codes + i * 512) : make_uint4(0, 0, 0, 0);
    if (ROW_SCALED && last) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int feature = t * TILE_N + h * 8 + (lane >> 2);
        const bool has = n < tiles_left && feature < weight.features;
        step.row_scales[n][h] = has ? load_scale<ROW_SCALE_TYPE>(weight.row_scales, feature) : 0;
      }
    }
    if (!SCALED) continue;
    if (BLOCK_ROWS == 1) {
      const i64 pair = (((i64)t * SCALED_STEPS + at / GROUP_STEPS) * 8 + (lane >> 2)) * GROUPS;
      const int half_of_lanes = SCALES_CODES ? (lane >> 1 & 1) * 8 : 0;
      load_words(step.scales[n], weight.scales + pair * 2 * SCALE_BYTES + half_of_lanes, load);
      if (HAS_ZEROS && GROUPS == 1) step.zeros[n][0] = load ? __ldg((const u16*)weight.zeros + pair) : 0;
      if (HAS_ZEROS && GROUPS > 1) load_words(step.zeros[n], weight.zeros + pair * 2, load);
    } else {
      const int block = t * TILE_N / BLOCK_ROWS * SCALED_STEPS + at / GROUP_STEPS;
      step.scales[n][0] = load ? load_scale<SCALE_TYPE>(weight.scales, block) : 0;
    }
  }
}

__device__ __forceinline__ void decode_e4m3(u32 w, u32& high, u32& low) {  // of the pairs of bytes (1, 3) and (0, 2)
  high = and_or(w >> 4, 0x07f007f0u, w & 0x80008000u);
  low = and_or(w << 4, 0x07f007f0u, (w << 8) & 0x80008000u);
}

__device__ __forceinline__ u32 decode_int8(u32 w) {  // of the pair of bytes (0, 2)
  const u32 lower = and_or(w, 0x007f007fu, 0x43004300u), sign = and_or(w, 0x00800080u, 0x43004300u);
  return fma_pairs(sign, 0xbf80bf80u, lower);
}

// The A operand of the 16-deep tile k16 of a step.
__device__ __forceinline__ void decode(const uint4 (&codes)[LOADS], int k16, u32 (&a)[4]) {
  const u32* words = (const u32*)codes;
  if (CODES == INT4) {
    const u32 w = words[k16];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = and_or(w >> 4 * i, 0x000f000fu, 0x43004300u);
  } else if (CODES == E2M1) {
    const u32 w = words[k16];
    a[0] = w & 0x81c081c0u;
    a[1] = (w << 3) & 0x81c081c0u;
    a[2] = and_or(w << 6, 0x01c001c0u, (w << 1) & 0x80008000u);
    a[3] = and_or(w >> 3, 0x01c001c0u, (w << 2) & 0x80008000u);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 w = words[2 * k16 + i];
      if (CODES == E4M3) decode_e4m3(w, a[2 * i], a[2 * i + 1]);
      else a[2 * i] = decode_int8(w >> 8), a[2 * i + 1] = decode_int8(w);
    }
  }
}

// Multiplies decoded codes by scales of e4m3, which are positive. scales: [two groups][feature g and g + 8].
// Codes are 2^126 times too small, the scales' bits 2^120; times 2^127 no product leaves bfloat16's range: the
// smallest is 2^-129, which it has exactly, without a leading one.
__device__ __forceinline__ void scale_codes(u32 (&a)[4], u32 scales, int group) {
  const u32 first = multiply_pairs((scales << 4) & 0x07f007f0u, 0x7f007f00u);
  const u32 second = multiply_pairs((scales >> 4) & 0x07f007f0u, 0x7f007f00u);
  const u32 both_of_first = __byte_perm(first, 0, group ? 0x3232 : 0x1010);
  const u32 both_of_second = __byte_perm(second, 0, group ? 0x3232 : 0x1010);
  a[0] = multiply_pairs(a[0], both_of_first), a[2] = multiply_pairs(a[2], both_of_first);
  a[1] = multiply_pairs(a[1], both_of_second), a[3] = multiply_pairs(a[3], both_of_second);
}

// The lowest byte as a zero point of codes as they are decoded: int4's are 128 too large, int8's 128 too small.
__device__ __forceinline__ float zero_point(u32 points) {
  const float offset = CODES == INT4 ? -128.0f : 128.0f;
  return __uint_as_float(and_or(points, 0xffu, 0x4b000000u)) - (8388608.0f + offset);
}

// total += scale * (sum of the group), for the lane's two features and two rows.
__device__ __forceinline__ void add_group(float (&total)[4], float (&sum)[4], const u32 (&scales)[SCALE_WORDS],
                                          const u32 (&zeros)[ZERO_WORDS], int group, const float* group_sums) {
  float low, high;
  if (SCALE_TYPE == E8M0_SCALE) {
    const u32 pair = scales[group / 2] >> (group % 2 * 16);
    low = __uint_as_float(((pair & 0xff) + REST_E2M1) << 23);
    high = __uint_as_float(((pair >> 8 & 0xff) + REST_E2M1) << 23);
  } else if (BLOCK_ROWS > 1) {
    low = high = scale_value<SCALE_TYPE>(scales[0]);
  } else if (SCALE_TYPE == FP32_SCALE) {
    low = scale_value<SCALE_TYPE>(scales[group * 2 % SCALE_WORDS]);
    high = scale_value<SCALE_TYPE>(scales[(group * 2 + 1) % SCALE_WORDS]);
  } else {
    low = scale_value<SCALE_TYPE>(scales[group] & 0xffff), high = scale_value<SCALE_TYPE>(scales[group] >> 16);
  }
  if (CODES == E4M3) low *= REST_E4M3, high *= REST_E4M3;
  if (SUMS_X) {
    const u32 points = HAS_ZEROS ? zeros[group / 2] >> (group % 2 * 16) : 0;
    const float zero_low = HAS_ZEROS ? zero_point(points) : 136.0f;
    const float zero_high = HAS_ZEROS ? zero_point(points >> 8) : 136.0f;
    const float2 of_x = *(const float2*)(group_sums + group * ROWS);
    sum[0] -= zero_low * of_x.x, sum[1] -= zero_low * of_x.y;
    sum[2] -= zero_high * of_x.x, sum[3] -= zero_high * of_x.y;
  }
  total[0] += low * sum[0], total[1] += low * sum[1];
  total[2] += high * sum[2], total[3] += high * sum[3];
}

// What a unit's sums are multiplied with at the end, for feature g or g + 8.
__device__ __forceinline__ float unit_scale(u32 row_scale) {
  const float rest = SCALES_CODES ? REST_NVFP4 : CODES == E4M3 && !SCALED ? REST_E4M3 : 1.0f;
  return ROW_SCALED ? rest * scale_value<ROW_SCALE_TYPE>(row_scale) : rest;
}

// x: the lane's part of x in shared memory, at the step's first column.
__device__ __forceinline__ void multiply_step(float (&total)[TILES_PER_WARP][ROW_TILES][4], const Step& step,
                                              const u8* x, const float* group_sums) {
  float group_sum[TILES_PER_WARP][ROW_TILES][4];
#pragma unroll
  for (int k32 = 0; k32 < STEP_K / 32; k32++) {
    uint4 b[ROW_TILES];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) b[m] = *(const uint4*)(x + m * 8 * X_STRIDE + k32 * 64);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int k16 = k32 * 2 + half;
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++) {
        u32 a[4];
        decode(step.codes[n], k16, a);
        if (SCALES_CODES) scale_codes(a, step.scales[n][k32 / 2 % SCALE_WORDS], k32 % 2);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          float(&sum)[4] = SCALES_SUMS ? group_sum[n][m] : total[n][m];
          if (SCALES_SUMS && k16 % K16_OF_GROUP == 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = 0.0f;
          }
          mma(sum, a, half ? b[m].z : b[m].x, half ? b[m].w : b[m].y);
          if (SCALES_SUMS && k16 % K16_OF_GROUP == K16_OF_GROUP - 1)
            add_group(total[n][m], sum, step.scales[n], step.zeros[n], k16 / K16_OF_GROUP, group_sums + m * 8);
        }
      }
    }
  }
}

// A block's columns of x to shared memory; rows and columns beyond the last are zeros.
__device__ __forceinline__ void stage_x(u8* shared, const u16* x, i64 x_stride, int rows, int first) {
  constexpr int CHUNKS = BLOCK_K / 8, ALL = ROWS * CHUNKS, AHEAD = 8;
  const int end = min(BLOCK_STEPS * STEP_K, IN_FEATURES - first);
  for (int i = threadIdx.x; i < ALL; i += THREADS * AHEAD) {
    uint4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int at = i + j * THREADS, row = at / CHUNKS, k = at % CHUNKS * 8;
      v[j] = make_uint4(0, 0, 0, 0);
      if (at < ALL && row < rows && k < end) v[j] = *(const uint4*)(x + row * x_stride + first + k);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int at = i + j * THREADS, row = at / CHUNKS, k = at % CHUNKS * 8;
      if (SMALL_CODES) {
        constexpr u32 two_60 = 0x5d805d80u;
        v[j] = make_uint4(multiply_pairs(v[j].x, two_60), multiply_pairs(v[j].y, two_60),
                          multiply_pairs(v[j].z, two_60), multiply_pairs(v[j].w, two_60));
      }
      if (at < ALL) *(uint4*)(shared + row * X_STRIDE + k * 2) = v[j];
    }
  }
}

// Sums of x over the groups of a warp's columns, by the tensor core: [group][row].
__device__ __forceinline__ void sum_groups(float* group_sums, const u8* x, int lane) {
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  for (int group = 0; group < WARP_STEPS * GROUPS; group++) {
    float c[ROW_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < STEP_GROUP; k += 32)
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        const uint4 b = *(const uint4*)(x + m * 8 * X_STRIDE + (group * STEP_GROUP + k) * 2);
        mma(c[m], ones, b.x, b.y);
        mma(c[m], ones, b.z, b.w);
      }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
      if (lane < 4) *(float2*)(group_sums + group * ROWS + m * 8 + 2 * lane) = make_float2(c[m][0], c[m][1]);
  }
}

struct Output {
  u16* out;
  const u16* residual;  // null, or rows that lie as those of out
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
few_row_gemm(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
             const u8* __restrict__ zeros, const u8* __restrict__ row_scales, const u8* __restrict__ tail,
             u16* out, const u16* residual, float* partial_sums, int* counters, i64 x_stride, i64 out_stride, int rows,
             int out_features, int tiles, int tail_features, int tail_share) {
  extern __shared__ __align__(16) u8 shared[];
  float* group_sums = (float*)(shared + X_BYTES);
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
  const Weight weight = {codes, scales, zeros, row_scales, SWIGLU ? features * 2 : features};
  const Output output = {out, residual, out_stride, rows, features};
  const Output tail_output = {out + features, residual ? residual + features : 0, out_stride, rows, tail_features};
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
  stage_x(shared, x, x_stride, rows, split * BLOCK_STEPS * STEP_K);
  __syncthreads();
  const u8* my_x = shared + g * X_STRIDE + warp_k * WARP_STEPS * STEP_K * 2 + t * 16;
  float* my_group_sums = group_sums + warp_k * WARP_STEPS * GROUPS * ROWS;
  if (SUMS_X) {
    sum_groups(my_group_sums, my_x, lane);  // warps that share a K write the same numbers
    __syncwarp();
  }

  float total[TILES_PER_WARP][ROW_TILES][4] = {};
  int step = 0, unit = first_unit;
  for (int begin = 0; begin < total_steps; begin += NUM_STAGES) {
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      if (begin + i >= total_steps) continue;
      multiply_step(total, stages[i], my_x + step * STEP_K * 2, my_group_sums + step * GROUPS * ROWS + 2 * t);
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
