// What products of a few rows share, whatever they multiply: codes of a weight to the tensor core's operands, in registers.
// It stands before fragment_gemm.cu, expert_gate_up.cu and expert_down.cu when they are compiled.
//
// The weight is the 16-row A operand of mma.m16n8k16, eight rows of x are its B operand. fragment_packing.py lays the
// codes out as [tile of 16 features][step of 128 along K][16-byte load][lane]: a lane loads what it multiplies itself.
// Plain bfloat16 lies as a checkpoint has it, [features][IN_FEATURES]: within 32 columns lane (g, t) takes columns 8t to
// 8t + 7 of features g and g + 8, so that K is permuted alike in both operands.
//
// Codes become bfloat16 by few bit operations, each exactly.
// int4, int5: 128 + code; (128 + zero) times the sum of the group's x is taken off after the group. Where groups have
// minima, codes count from zero: (minimum - 128 scale) times the sum of x is added behind. Where scales and minima are
// bytes, the tensor core multiplies a step's with the sums of its groups: bytes are exact in bfloat16, and a sum is three.
// int6: the code less 32. iq4: a table's bytes, by the code's lower three bits from its halves, by the fourth from both.
// What int5 and int6 have above four bits lies behind the step's loads, for each lane in words of 64 and 32 columns.
// int8: the code less 128, as 128 + its lower seven bits less 128 or 256; zero points are taken off like int4's.
// e4m3, e2m1: their bits are those of a bfloat16 2^120 or 2^126 times smaller; x is multiplied by 2^60 beforehand, and
// sums or scales by the rest.
//
// Scales of groups multiply the group's sums, which are kept apart: at a group's end four multiply-adds of a lane for
// eight rows. Of a group of 16 (NVFP4) only half of the lanes hold columns, so that no instruction sums one alone: its
// scale multiplies the decoded codes, four multiplications for any number of rows. Sums by 16 columns would take twice
// as many at 16 rows, and registers. It is exact: the product of two and of four significant bits has six. Groups of 16
// of int6 have scales of up to eighteen bits: there lanes hold other columns (ORDERED), of x and of codes, so that an
// instruction multiplies one group.
// Scales of rows multiply what a warp has summed up for a unit. Scales of one byte (NESTED) have a float16 for each 256
// columns as a factor, minima another; they lie in the place of the scales of rows.
//
// From the compiler's command line: CODES and SCALE_TYPE (the names below), BLOCK_ROWS and GROUP_SIZE (features and
// columns that share a scale; 0: there are only scales of rows), HAS_ZEROS, HAS_MINIMA, ROW_SCALE_TYPE, IN_FEATURES,
// TILES_PER_WARP.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

enum { INT4, INT8, E4M3, E2M1, BFLOAT16, INT5, INT6, IQ4 };  // CODES
// SCALE_TYPE, ROW_SCALE_TYPE
enum { NO_SCALE, BF16_SCALE, FP16_SCALE, FP32_SCALE, E8M0_SCALE, E4M3_SCALE, UINT8_SCALE, INT8_SCALE };
constexpr int STEP_K = 128, TILE_N = 16;
constexpr int ABOVE = CODES == INT6 ? 2 : CODES == INT5 ? 1 : 0;  // bits of a code above the four of a load
constexpr int WEIGHT_BITS = CODES == BFLOAT16 ? 16 : CODES == INT8 || CODES == E4M3 ? 8 : 4 + ABOVE;
constexpr int LOADS = (WEIGHT_BITS - ABOVE) / 2;  // 16-byte loads of a lane for one tile and step
constexpr int ABOVE_WORDS = ABOVE ? 2 * ABOVE : 1, K16_OF_ABOVE = ABOVE ? 4 / ABOVE : 1;  // of a step, and of a word
constexpr bool SCALED = GROUP_SIZE > 0, ROW_SCALED = ROW_SCALE_TYPE != NO_SCALE;
constexpr bool SCALES_CODES = SCALE_TYPE == E4M3_SCALE, SCALES_SUMS = SCALED && !SCALES_CODES;
constexpr bool SUMS_X = CODES == INT4 || CODES == INT5 || HAS_ZEROS || HAS_MINIMA;
constexpr bool NESTED = SCALE_TYPE == UINT8_SCALE || SCALE_TYPE == INT8_SCALE;
constexpr bool NESTED_MINIMA = NESTED && HAS_MINIMA;
constexpr bool ORDERED = SCALES_SUMS && GROUP_SIZE == 16;
constexpr bool SMALL_CODES = CODES == E4M3 || CODES == E2M1;  // x is multiplied by 2^60
// Columns of a step that share a scale, how many such groups a step has, and steps that share a scale.
constexpr int STEP_GROUP = SCALED && STEP_K % (SCALED ? GROUP_SIZE : 1) == 0 ? GROUP_SIZE : STEP_K;
constexpr int GROUPS = STEP_K / STEP_GROUP;
constexpr int GROUP_STEPS = SCALED ? (GROUP_SIZE + STEP_K - 1) / STEP_K : 1;
constexpr int K16_OF_GROUP = STEP_GROUP / 16;
constexpr int SCALE_BYTES = SCALE_TYPE == FP32_SCALE ? 4 : NESTED || SCALE_TYPE == E8M0_SCALE || SCALE_TYPE == E4M3_SCALE ? 1 : 2;
constexpr int OFFSET_BYTES = HAS_MINIMA && !NESTED ? 2 : 1;  // of a minimum, or of a zero point
// A lane has two features of a tile, g and g + 8. Scales of groups of one feature lie as
// [tile][group / GROUPS][g][group % GROUPS][two], zero points and minima, too; those of blocks of features as
// [blocks of features][blocks of columns], one for a tile and step; factors as [tile][256 columns][g][two][scales, minima].
// Of groups of 16 columns a lane has every other one: those of its half of the lanes lie side by side.
constexpr int SCALE_WORDS = SCALES_CODES ? 2 : SCALED && BLOCK_ROWS == 1 ? (GROUPS * SCALE_BYTES + 1) / 2 : 1;
constexpr int OFFSET_WORDS = (HAS_ZEROS || HAS_MINIMA) && !NESTED ? (GROUPS * OFFSET_BYTES + 1) / 2 : 1;
constexpr int FACTORS = 1 + HAS_MINIMA, FACTOR_WORDS = NESTED ? FACTORS : 1, FACTOR_STEPS = 2;
constexpr int STEP_BYTES = WEIGHT_BITS * 256;  // of a tile's codes
constexpr int STEPS = (IN_FEATURES + STEP_K - 1) / STEP_K;
constexpr int SCALED_STEPS = (STEPS + GROUP_STEPS - 1) / GROUP_STEPS;
constexpr int FACTORED_STEPS = (STEPS + FACTOR_STEPS - 1) / FACTOR_STEPS;
// What codes are too small by and x, 2^60 times too large, has not made up for; NVFP4's scales have made up for 2^7.
constexpr float TWO_60 = 1152921504606846976.0f, REST_E4M3 = TWO_60, REST_NVFP4 = TWO_60 / 2;
constexpr int REST_E2M1 = 66;  // 2^66
static_assert(!SCALED || BLOCK_ROWS == 1 || (BLOCK_ROWS % TILE_N == 0 && GROUPS == 1 && !HAS_ZEROS), "scales");
static_assert(!SCALES_CODES || (GROUP_SIZE == 16 && BLOCK_ROWS == 1), "scales of codes");
static_assert(SCALED || !SUMS_X, "an offset is taken off a group");
static_assert(!HAS_MINIMA || (GROUPS > 1 && !HAS_ZEROS), "minima of groups within a step");
static_assert(!NESTED || (BLOCK_ROWS == 1 && GROUPS > 1 && !ROW_SCALED), "scales of bytes");
static_assert(!NESTED_MINIMA || GROUPS == 4, "sums of four groups, in three parts each, fill an operand");
static_assert(!ORDERED || (NESTED && !SUMS_X), "groups of 16");
static_assert(IN_FEATURES % 32 == 0, "lanes take 8 columns of 32");

// The whole line comes from memory at once: of plain bfloat16 one load of a warp takes half of eight lines, and 64 bytes
// at a time memory gives a tenth less.
__device__ __forceinline__ uint4 load_streamed(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
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
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[2], u32 b) {  // of half the depth
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
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
// Rounded once, and said here: a compiler that may join a product and a sum rounds either product of two, and not the
// same one in the kernels for eight and for sixteen rows. It is told to join none.
__device__ __forceinline__ void add_product(float& total, float a, float b) { total = __fmaf_rn(a, b, total); }
__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}
__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
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
  const u8* offsets;     // zero points or minima
  const u8* row_scales;  // or factors
  int features;
};

struct Step {  // what a lane holds of one step: codes, scales and zero points or minima of its warp's tiles
  uint4 codes[TILES_PER_WARP][LOADS];
  u32 above[TILES_PER_WARP][ABOVE_WORDS];
  u32 scales[TILES_PER_WARP][SCALE_WORDS];
  u32 offsets[TILES_PER_WARP][OFFSET_WORDS];
  u32 factors[TILES_PER_WARP][FACTOR_WORDS];
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
    if (CODES == BFLOAT16) {  // [32 columns of the step][feature g or g + 8]
      const u8* row = weight.codes + (((i64)t * TILE_N + (lane >> 2)) * IN_FEATURES + at * STEP_K + (lane & 3) * 8) * 2;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const bool has = load && t * TILE_N + (lane >> 2) + i % 2 * 8 < weight.features &&
                         (IN_FEATURES % STEP_K == 0 || at * STEP_K + i / 2 * 32 < IN_FEATURES);
        const u8* from = row + (i64)(i % 2 * 8) * IN_FEATURES * 2 + i / 2 * 64;
        step.codes[n][i] = has ? load_streamed(from) : make_uint4(0, 0, 0, 0);
      }
    } else {
      const u8* codes = weight.codes + u64(u32(t * STEPS + at)) * STEP_BYTES + lane * 16;
#pragma unroll
      for (int i = 0; i < LOADS; i++) step.codes[n][i] = load ? load_streamed(codes + i * 512) : make_uint4(0, 0, 0, 0);
      if (ABOVE) load_words(step.above[n], codes + LOADS * 512 + lane * (4 * ABOVE_WORDS - 16), load);
    }
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
      const u64 pair = (u64(u32(t * SCALED_STEPS + at / GROUP_STEPS)) * 8 + (lane >> 2)) * GROUPS;
      const int half_of_lanes = SCALES_CODES ? (lane >> 1 & 1) * 8 : 0;
      load_words(step.scales[n], weight.scales + pair * 2 * SCALE_BYTES + half_of_lanes, load);
      if (HAS_ZEROS && GROUPS == 1) step.offsets[n][0] = load ? __ldg((const u16*)weight.offsets + pair) : 0;
      const int half_of_groups = NESTED_MINIMA ? (lane & 1) * 4 : 0;  // that a lane multiplies
      if ((HAS_ZEROS && GROUPS > 1) || HAS_MINIMA)
        load_words(step.offsets[n], weight.offsets + pair * 2 * OFFSET_BYTES + half_of_groups, load);
      const u64 factors = u64(u32(t * FACTORED_STEPS + at / FACTOR_STEPS)) * 8 + (lane >> 2);
      if (NESTED) load_words(step.factors[n], weight.row_scales + factors * 4 * FACTORS, load);
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

// Four codes of iq4 (16 bits) to as many bytes of a table of 16.
__device__ __forceinline__ u32 look_up(u32 codes, u32 first, u32 second, u32 third, u32 fourth) {
  const u32 lower = __byte_perm(first, second, codes & 0x7777u), upper = __byte_perm(third, fourth, codes & 0x7777u);
  return __byte_perm(lower, upper, (codes >> 1 & 0x4444u) | 0x3210u);
}

// The A operand of the 16-deep tile k16 of a step.
__device__ __forceinline__ void decode(const uint4 (&codes)[LOADS], const u32 (&above)[ABOVE_WORDS], int k16, u32 (&a)[4]) {
  const u32* words = (const u32*)codes;
  if (CODES == INT4 || ABOVE) {
    const u32 w = words[k16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i] = and_or(w >> 4 * i, 0x000f000fu, 0x43004300u);
      if (!ABOVE) continue;
      const int place = ABOVE * (k16 % K16_OF_ABOVE * 4 + i);
      const u32 upper = above[k16 / K16_OF_ABOVE % ABOVE_WORDS];
      a[i] = and_or(place < 4 ? upper << (4 - place) : upper >> (place - 4), ABOVE == 1 ? 0x00100010u : 0x00300030u, a[i]);
      if (CODES == INT6) a[i] = fma_pairs(a[i], 0x3f803f80u, 0xc320c320u);  // less 160
    }
  } else if (CODES == IQ4) {  // the lower and the upper bytes of values in bfloat16, of two operands at a time
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 four = words[k16] >> 16 * i;
      const u32 lower = look_up(four, 0x82a6d0feu, 0x20b00c44u, 0x18c85080u, 0xe2b28a54u);
      const u32 upper = look_up(four, 0xc2c2c2c2u, 0xc1c1c2c2u, 0x4241413fu, 0x42424242u);
      a[2 * i] = __byte_perm(lower, upper, 0x5140), a[2 * i + 1] = __byte_perm(lower, upper, 0x7362);
    }
  } else if (CODES == E2M1) {
    const u32 w = words[k16];
    a[0] = w & 0x81c081c0u;
    a[1] = (w << 3) & 0x81c081c0u;
    a[2] = and_or(w << 6, 0x01c001c0u, (w << 1) & 0x80008000u);
    a[3] = and_or(w >> 3, 0x01c001c0u, (w << 2) & 0x80008000u);
  } else if (CODES == BFLOAT16) {
    const u32* of_g = words + k16 / 2 * 8 + k16 % 2 * 2;  // and four words on those of g + 8
    a[0] = of_g[0], a[1] = of_g[4], a[2] = of_g[1], a[3] = of_g[5];
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

// 2^23 and one of the 16 bytes of a step's words, as float32: the byte stands in the lowest bits. One instruction.
template <int WORDS> __device__ __forceinline__ float byte_above_2_23(const u32 (&words)[WORDS], int byte) {
  return __uint_as_float(__byte_perm(words[byte / 4 % WORDS], 0x4b000000u, 0x7540 + byte % 4));
}

// A byte of scales.
template <int WORDS> __device__ __forceinline__ float byte_value(const u32 (&words)[WORDS], int byte) {
  const float above = byte_above_2_23(words, byte);
  if (SCALE_TYPE != INT8_SCALE) return above - 8388608.0f;
  return __uint_as_float(__float_as_uint(above) ^ 0x80u) - (8388608.0f + 128.0f);  // signed: 128 more, unsigned
}

// A byte as a zero point of codes as they are decoded: int4's are 128 too large, int8's 128 too small.
template <int WORDS> __device__ __forceinline__ float zero_point(const u32 (&points)[WORDS], int byte) {
  const float offset = CODES == INT4 ? -128.0f : 128.0f;
  return byte_above_2_23(points, byte) - (8388608.0f + offset);
}

// What multiplies the bytes of scales, or of minima, of feature g or g + 8.
__device__ __forceinline__ float factor_of(const Step& step, int n, int half, bool of_minima) {
  const int at = half * FACTORS + of_minima;
  return from_float16(step.factors[n][at / 2 % FACTOR_WORDS] >> at % 2 * 16 & 0xffff);
}

// total += scale * (sum of the group), for the lane's two features and two rows. of_x: the group's sums of these rows.
__device__ __forceinline__ void add_group(float (&total)[4], float (&sum)[4], const u32 (&scales)[SCALE_WORDS],
                                          const u32 (&offsets)[OFFSET_WORDS], int group, float2 of_x) {
  float low, high;
  if (NESTED) {
    low = byte_value(scales, group * 2), high = byte_value(scales, group * 2 + 1);
  } else if (SCALE_TYPE == E8M0_SCALE) {
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
  if (SUMS_X && !HAS_MINIMA) {
    const float zero_low = HAS_ZEROS ? zero_point(offsets, group * 2) : CODES == INT5 ? 144.0f : 136.0f;
    const float zero_high = HAS_ZEROS ? zero_point(offsets, group * 2 + 1) : CODES == INT5 ? 144.0f : 136.0f;
    add_product(sum[0], -zero_low, of_x.x), add_product(sum[1], -zero_low, of_x.y);
    add_product(sum[2], -zero_high, of_x.x), add_product(sum[3], -zero_high, of_x.y);
  }
  add_product(total[0], low, sum[0]), add_product(total[1], low, sum[1]);
  add_product(total[2], high, sum[2]), add_product(total[3], high, sum[3]);
  if (HAS_MINIMA && !NESTED) {
    const u32 pair = offsets[group % OFFSET_WORDS];
    float minimum_low = from_float16(pair & 0xffff), minimum_high = from_float16(pair >> 16);
    add_product(minimum_low, -128.0f, low), add_product(minimum_high, -128.0f, high);  // codes are decoded 128 too large
    add_product(total[0], minimum_low, of_x.x), add_product(total[1], minimum_low, of_x.y);
    add_product(total[2], minimum_high, of_x.x), add_product(total[3], minimum_high, of_x.y);
  }
}

// A lane's sums of its row over two groups of a step as the B operand: each is the sum of three bfloat16. Lanes of t 0
// and 1 hold the first and the second of four groups, those of t 2 and 3 the third.
__device__ __forceinline__ uint2 split_sums(float first, float second, int t) {
  const u32 upper = to_pair(first, second);
  first -= low_bfloat16(upper), second -= high_bfloat16(upper);
  const u32 middle = to_pair(first, second);
  if (t < 2) return make_uint2(upper, middle);
  return make_uint2(to_pair(first - low_bfloat16(middle), second - high_bfloat16(middle)), 0);
}

// Sums of rows g, and of g + 8 where there are two tiles of rows, over groups 2 (t % 2) and 2 (t % 2) + 1 of a step.
// x: what the lane multiplies of them in each 32 columns.
template <int M, class X> __device__ __forceinline__ void sum_step(uint2 (&sums)[M], const X& x, int lane) {
  float c[4] = {};
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const u32 ones = (lane >> 2) % 4 == group ? 0x3f803f80u : 0;  // in the column of this group
    const uint4 first = x(0, group), second = M > 1 ? x(M - 1, group) : make_uint4(0, 0, 0, 0);
    mma(c, {first.x, second.x, first.y, second.y}, ones, ones);
    mma(c, {first.z, second.z, first.w, second.w}, ones, ones);
  }
  sums[0] = split_sums(c[0], c[1], lane & 3);
  if (M > 1) sums[M - 1] = split_sums(c[2], c[3], lane & 3);
}

// Four bytes below 128, [group][feature g and g + 8], times a factor as the A operand to sums as of split_sums. FACTOR and
// OFFSET, -128 times it: pairs of bfloat16.
template <u32 FACTOR, u32 OFFSET> __device__ __forceinline__ void decode_bytes(u32 bytes, u32 (&a)[2]) {
  a[0] = fma_pairs(and_or(bytes, 0x007f007fu, 0x43004300u), FACTOR, OFFSET);
  a[1] = fma_pairs(and_or(bytes >> 8, 0x007f007fu, 0x43004300u), FACTOR, OFFSET);
}

// Minima times the sums of x over a step's groups to total, and the scales' bytes times the same to step_total: codes as
// they are decoded are 128 too large.
template <int M, int TILES>
__device__ __forceinline__ void add_nested_minima(float (&total)[TILES][4], float (&step_total)[M][4], const Step& step,
                                                  int n, const uint2 (&sums)[M], int lane) {
  u32 of_scales[2], of_minima[2];
  decode_bytes<0xc300c300u, 0x46804680u>(lane & 1 ? step.scales[n][SCALE_WORDS - 1] : step.scales[n][0], of_scales);
  decode_bytes<0xbf80bf80u, 0x43004300u>(step.offsets[n][0], of_minima);
#pragma unroll
  for (int m = 0; m < M; m++) {
    float minima[4] = {};
    mma(step_total[m], of_scales, sums[m].x), mma(step_total[m], of_scales, sums[m].y);
    mma(minima, of_minima, sums[m].x), mma(minima, of_minima, sums[m].y);
#pragma unroll
    for (int j = 0; j < 4; j++) add_product(total[m][j], factor_of(step, n, j >> 1, true), minima[j]);
  }
}

// What a unit's sums are multiplied with at the end, for feature g or g + 8.
__device__ __forceinline__ float unit_scale(u32 row_scale) {
  const float rest = SCALES_CODES ? REST_NVFP4 : CODES == E4M3 && !SCALED ? REST_E4M3 : 1.0f;
  return ROW_SCALED ? rest * scale_value<ROW_SCALE_TYPE>(row_scale) : rest;
}

// A step of a warp's tiles times M tiles of eight rows. x(m, k32): what the lane takes of 32 columns of its row of tile m,
// g; of_x(group, m): the sums over a group of the step of rows 2t and 2t + 1, where SUMS_X; split_of_x(m): all sums of
// row g as of split_sums, where NESTED_MINIMA.
template <int M, int TILES, class X, class Sums, class SplitSums>
__device__ __forceinline__ void multiply_step(float (&total)[TILES_PER_WARP][TILES][4], const Step& step, const X& x,
                                              const Sums& of_x, const SplitSums& split_of_x, int lane) {
  float group_sum[TILES_PER_WARP][M][4], step_total[TILES_PER_WARP][M][4];
  if (NESTED)
#pragma unroll
    for (int n = 0; n < TILES_PER_WARP; n++)
#pragma unroll
      for (int m = 0; m < M; m++)
        step_total[n][m][0] = step_total[n][m][1] = step_total[n][m][2] = step_total[n][m][3] = 0.0f;
  if (NESTED_MINIMA) {
    uint2 sums[M];
#pragma unroll
    for (int m = 0; m < M; m++) sums[m] = split_of_x(m);
#pragma unroll
    for (int n = 0; n < TILES_PER_WARP; n++) add_nested_minima(total[n], step_total[n], step, n, sums, lane);
  }
#pragma unroll
  for (int k32 = 0; k32 < STEP_K / 32; k32++) {
    uint4 b[M];
#pragma unroll
    for (int m = 0; m < M; m++) b[m] = x(m, k32);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int k16 = k32 * 2 + half;
#pragma unroll
      for (int n = 0; n < TILES_PER_WARP; n++) {
        u32 a[4];
        decode(step.codes[n], step.above[n], k16, a);
        if (SCALES_CODES) scale_codes(a, step.scales[n][k32 / 2 % SCALE_WORDS], k32 % 2);
#pragma unroll
        for (int m = 0; m < M; m++) {
          float(&sum)[4] = SCALES_SUMS ? group_sum[n][m] : total[n][m];
          if (SCALES_SUMS && k16 % K16_OF_GROUP == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
          mma(sum, a, half ? b[m].z : b[m].x, half ? b[m].w : b[m].y);
          if (SCALES_SUMS && k16 % K16_OF_GROUP == K16_OF_GROUP - 1) {
            const int group = k16 / K16_OF_GROUP;
            add_group(NESTED ? step_total[n][m] : total[n][m], sum, step.scales[n], step.offsets[n], group,
                      SUMS_X && !NESTED_MINIMA ? of_x(group, m) : make_float2(0.0f, 0.0f));
          }
        }
      }
    }
  }
  if (NESTED)
#pragma unroll
    for (int n = 0; n < TILES_PER_WARP; n++)
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) add_product(total[n][m][j], factor_of(step, n, j >> 1, false), step_total[n][m][j]);
}

// x as SMALL_CODES take it: times 2^60.
__device__ __forceinline__ uint4 scaled_x(uint4 v) {
  if (!SMALL_CODES) return v;
  constexpr u32 two_60 = 0x5d805d80u;
  return make_uint4(multiply_pairs(v.x, two_60), multiply_pairs(v.y, two_60), multiply_pairs(v.z, two_60),
                    multiply_pairs(v.w, two_60));
}

// What a lane multiplies of 32 columns of a row of x in memory.
__device__ __forceinline__ uint4 load_lane_x(const u16* columns, int t) {
  if (!ORDERED) return *(const uint4*)(columns + t * 8);
  const uint2 first = *(const uint2*)(columns + t * 4), second = *(const uint2*)(columns + t * 4 + 16);
  return make_uint4(first.x, first.y, second.x, second.y);
}

// Eight columns of a row of x, from the k-th on, to where lanes find them in its 32.
__device__ __forceinline__ void store_staged(u8* row, int k, uint4 v) {
  if (!ORDERED) {
    *(uint4*)(row + k * 2) = v;
  } else {  // four of one lane's, and four of the next one's
    u8* lane = row + k / 32 * 64 + k / 8 % 2 * 32 + k / 16 % 2 * 8;
    *(uint2*)lane = make_uint2(v.x, v.y), *(uint2*)(lane + 16) = make_uint2(v.z, v.w);
  }
}

// Rows of x to shared memory, STRIDE bytes apart, K columns of each; beyond the last row and column they are zeros.
// staged: rows that are written. end: columns that x has.
template <int K, int STRIDE, int THREADS_OF_BLOCK>
__device__ __forceinline__ void stage_x(u8* shared, const u16* x, i64 x_stride, int rows, int staged, int end) {
  constexpr int CHUNKS = K / 8, AHEAD = 8;
  const int all = staged * CHUNKS;
  for (int i = threadIdx.x; i < all; i += THREADS_OF_BLOCK * AHEAD) {
    uint4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int at = i + j * THREADS_OF_BLOCK, row = at / CHUNKS, k = at % CHUNKS * 8;
      v[j] = make_uint4(0, 0, 0, 0);
      if (at < all && row < rows && k < end) v[j] = *(const uint4*)(x + row * x_stride + k);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int at = i + j * THREADS_OF_BLOCK, row = at / CHUNKS, k = at % CHUNKS * 8;
      if (at < all) store_staged(shared + row * STRIDE, k, scaled_x(v[j]));
    }
  }
}

enum { SUM_BYTES = NESTED_MINIMA ? 8 : 4 };  // of a row and group in shared memory

// Sums of M * 8 rows of x, as they are staged, over the groups of a warp's STEPS_OF_WARP steps, by the tensor core:
// [group][row], or where NESTED_MINIMA [step][row][t] as of split_sums. x: the lane's part.
template <int M, int STRIDE, int STEPS_OF_WARP>
__device__ __forceinline__ void sum_groups(u8* group_sums, const u8* x, int lane) {
  if (NESTED_MINIMA) {
    for (int step = 0; step < STEPS_OF_WARP; step++) {
      uint2 sums[M];
      sum_step(sums, [&](int m, int k32) { return *(const uint4*)(x + m * 8 * STRIDE + step * STEP_K * 2 + k32 * 64); }, lane);
#pragma unroll
      for (int m = 0; m < M; m++) ((uint2*)(group_sums + step * GROUPS * M * 8 * SUM_BYTES))[m * 32 + lane] = sums[m];
    }
    return;
  }
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  for (int group = 0; group < STEPS_OF_WARP * GROUPS; group++) {
    float c[M][4] = {};
#pragma unroll
    for (int k = 0; k < STEP_GROUP; k += 32)
#pragma unroll
      for (int m = 0; m < M; m++) {
        const uint4 b = *(const uint4*)(x + m * 8 * STRIDE + (group * STEP_GROUP + k) * 2);
        mma(c[m], ones, b.x, b.y);
        mma(c[m], ones, b.z, b.w);
      }
#pragma unroll
    for (int m = 0; m < M; m++)
      if (lane < 4) ((float2*)(group_sums + group * M * 8 * SUM_BYTES))[m * 4 + lane] = make_float2(c[m][0], c[m][1]);
  }
}
