// A grid of CUDA threads on the host, for sources that use what stands here: every thread is a fiber, which gives way at
// barriers and nowhere else. Instructions that such a source writes in PTX have their meaning here in C++.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static  // of sizes known to the compiler: for kernels of one block

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
using std::max;
using std::min;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Barrier {
  int waiting = 0, passed = 0;
};
struct Fiber {
  ucontext_t context;             // where it begins
  jmp_buf place;                  // where it gave way
  std::unique_ptr<char[]> stack;  // not written before: most of a page's fibers need little of it
  int block, thread;
  bool begun, done;
};
struct Operands {  // of a warp's mma, or of its shuffle, by lane
  u32 a[32][4], b[32][2];
  float value[32];
};
static Index threadIdx, blockIdx, gridDim;
static u8* shared_memory;
static int block_threads, running;
static jmp_buf scheduler;
static std::vector<Fiber> fibers;
static std::vector<Barrier> block_barriers, warp_barriers;
static std::vector<int> votes;
static std::vector<Operands> operands;
static std::vector<std::vector<u8>> shared_memories;
static std::function<void()> work;

// A context begins each fiber; from then on it jumps, since swapcontext() asks the system for the signals at every turn.
static void give_way() {
  if (!_setjmp(fibers[running].place)) _longjmp(scheduler, 1);
}
static void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
static void wait_at(std::vector<Barrier>& barriers, int which, int expected) {
  const int passed = barriers[which].passed;
  if (++barriers[which].waiting == expected) {
    barriers[which].waiting = 0;
    barriers[which].passed++;
  } else {
    while (barriers[which].passed == passed) give_way();
  }
}
static int warp() { return (blockIdx.x * block_threads + threadIdx.x) / 32; }
static void __syncthreads() { wait_at(block_barriers, blockIdx.x, block_threads); }
static int __syncthreads_or(int vote) {
  votes[blockIdx.x] |= vote;
  __syncthreads();
  const int any = votes[blockIdx.x];
  __syncthreads();
  votes[blockIdx.x] = 0;
  __syncthreads();
  return any;
}
static void __syncwarp() { wait_at(warp_barriers, warp(), 32); }
static void __threadfence() {}
static int atomicAdd(int* p, int value) {
  const int before = *p;
  *p += value;
  return before;
}
static void atomicOr(u32* p, u32 bits) { *p |= bits; }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static int __ffs(u32 bits) { return __builtin_ffs(bits); }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, T value) { *p = value; }
#define __expf expf
#define __fmaf_rn fmaf
static float __fdividef(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static u32 __byte_perm(u32 low, u32 high, u32 selectors) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= u32(both >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}

// What sources write in PTX.
static uint4 load_streamed(const void* p) { return *(const uint4*)p; }
static int load_acquire(const int* p) {
  give_way();
  return *(volatile const int*)p;
}
static void prefetch(const u8* p) { (void)*(volatile const u8*)p; }
static u32 and_or(u32 value, u32 mask, u32 bits) { return (value & mask) | bits; }
static u16 to_bfloat16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static u32 to_pair(float low, float high) { return to_bfloat16(low) | u32(to_bfloat16(high)) << 16; }
static float bfloat16_value(u32 bits) { return __uint_as_float(bits << 16); }
static float from_float16(u32 bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
static u32 fma_pairs(u32 a, u32 b, u32 c) {  // the product has 16 bits, so that a double rounds the sum once
  u32 found = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const double product = (double)bfloat16_value(a >> shift & 0xffff) * bfloat16_value(b >> shift & 0xffff);
    found |= u32(to_bfloat16(float(product + bfloat16_value(c >> shift & 0xffff)))) << shift;
  }
  return found;
}
// mma.m16n8k16, row and column; its operands' places as in the instruction set's manual.
static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int lane = threadIdx.x & 31;
  Operands& all = operands[warp()];
  std::copy(a, a + 4, all.a[lane]);
  all.b[lane][0] = b0, all.b[lane][1] = b1;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = (lane >> 2) + i / 2 * 8, column = (lane & 3) * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; k++) {
      const u32 left = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 right = all.b[column * 4 + k % 8 / 2][k / 8];
      sum += (double)bfloat16_value(left >> 16 * (k & 1) & 0xffff) * bfloat16_value(right >> 16 * (k & 1) & 0xffff);
    }
    c[i] = sum;
  }
  __syncwarp();
}
// mma.m16n8k8: the first half of its depth.
static void mma(float (&c)[4], const u32 (&a)[2], u32 b) {
  const u32 both[4] = {a[0], a[1], 0, 0};
  mma(c, both, b, 0);
}

template <class T> static T of_lane(T value, int lane) {
  static_assert(sizeof(T) == 4, "a register");
  Operands& all = operands[warp()];
  memcpy(&all.value[threadIdx.x & 31], &value, 4);
  __syncwarp();
  T found;
  memcpy(&found, &all.value[lane], 4);
  __syncwarp();
  return found;
}
template <class T> static T __shfl_xor_sync(u32, T value, int mask) {
  return of_lane(value, (threadIdx.x & 31) ^ mask);
}
template <class T> static T __shfl_up_sync(u32, T value, int distance) {
  const int lane = threadIdx.x & 31;
  return of_lane(value, lane < distance ? lane : lane - distance);
}

template <class T> static T __shfl_sync(u32, T value, int lane) { return of_lane(value, lane); }

// Of Hopper. Shared memory is named by the distance from its begin; copies and products are done at once.
static size_t __cvta_generic_to_shared(const void* p) { return (const u8*)p - shared_memory; }
static void begin_products() {}
static void commit_products() {}
static void wait_for_products() {}
static void wait_for_earlier() {}
static void commit_copies() {}
static void wait_for_copies() {}
static int hidden(int number) { return number; }
static float power(float x) { return exp2f(x); }
static void copy_16_bytes(u32 to, const void* from, int size) {
  memset(shared_memory + to, 0, 16), memcpy(shared_memory + to, from, size);
}
static void copy_4_bytes(u32 to, const void* from, int size) {
  memset(shared_memory + to, 0, 4), memcpy(shared_memory + to, from, size);
}
static u32 subtract_pairs(u32 a, u32 b) {
  const float low = bfloat16_value(a & 0xffff) - bfloat16_value(b & 0xffff);
  return to_pair(low, bfloat16_value(a >> 16) - bfloat16_value(b >> 16));
}
// stmatrix with four transposed matrices.
static void store_transposed(u32 to, const u32 (&pairs)[4]) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 8; i++) {
    const u16 number = pairs[i / 2] >> 16 * (i % 2);
    memcpy(shared_memory + of_lane(to, i / 2 * 8 + lane % 4 * 2 + i % 2) + lane / 4 * 2, &number, 2);
  }
}
// A byte of a wgmma's operand in rows of 128 bytes, swizzled. ``matrix``: its descriptor.
static const u8* swizzled(unsigned long long matrix, int row, int byte) {
  const u32 at = u32(matrix & 0x3fff) * 16 + row * 128 + byte;
  return shared_memory + (at ^ (at >> 7 & 7) << 4);
}
static int column_of(int i) { return i / 4 * 8 + (threadIdx.x & 3) * 2 + i % 2; }  // of a thread's i-th sum
template <int N> static void score_product(int (&sums)[N], unsigned long long a, unsigned long long b, int onto) {
  for (int i = 0; i < N; i++) {
    const int row = (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4 + i / 2 % 2 * 8;
    int sum = onto ? sums[i] : 0;
    for (int k = 0; k < 32; k++) sum += (signed char)*swizzled(a, row, k) * (signed char)*swizzled(b, column_of(i), k);
    sums[i] = sum;
  }
}
template <int N> static void output_product(float (&sums)[N], const u32* a, unsigned long long b) {
  const int lane = threadIdx.x & 31;
  Operands& all = operands[warp()];
  std::copy(a, a + 4, all.a[lane]);
  __syncwarp();
  for (int i = 0; i < N; i++) {
    double sum = sums[i];
    for (int k = 0; k < 16; k++) {
      const u32 left = all.a[lane / 4 * 4 + k % 8 / 2][i / 2 % 2 + k / 8 * 2];
      const u16 right = *(const u16*)swizzled(b, column_of(i), k * 2);
      sum += (double)bfloat16_value(left >> 16 * (k & 1) & 0xffff) * bfloat16_value(right);
    }
    sums[i] = sum;
  }
  __syncwarp();
}

static u32 warp_max(u32 value) {
  for (int mask = 16; mask; mask >>= 1) value = std::max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}
static u32 warp_min(u32 value) {
  for (int mask = 16; mask; mask >>= 1) value = std::min(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

constexpr size_t STACK_BYTES = 1 << 16;
static void run_fiber() {
  work();
  fibers[running].done = true;
  give_way();
}

// Whether a warp rests for now. Seed 0: none ever does; else three of four, others after every 64 turns, so that warps
// and blocks get far ahead of each other where nothing keeps them together.
static bool rests(u32 seed, u32 warp, u32 turn) {
  u32 mixed = (seed * 0x9e3779b9u) ^ (warp * 0x85ebca6bu) ^ (turn / 64 * 0xc2b2ae35u);
  mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
  return seed && ((mixed ^ mixed >> 13) & 3);
}

// All blocks run at a time; what they share is not initialised, so it is filled with NaN.
static bool run_grid(int blocks, int threads, int shared_bytes, int seed, std::function<void()> kernel) {
  gridDim = {blocks, 1}, block_threads = threads, work = kernel;
  fibers = std::vector<Fiber>(blocks * threads);
  block_barriers.assign(blocks, Barrier());
  votes.assign(blocks, 0);
  warp_barriers.assign(blocks * threads / 32, Barrier());
  operands.resize(blocks * threads / 32);
  shared_memories.assign(blocks, std::vector<u8>(shared_bytes + 16, 0xff));
  for (int i = 0; i < blocks * threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.block = i / threads, fiber.thread = i % threads, fiber.begun = fiber.done = false;
    makecontext(&fiber.context, run_fiber, 0);
  }
  const int total = blocks * threads;
  int left = total;
  for (long turn = 0; left && turn < 10000000; turn++) {
    left = 0;
    for (int i = 0; i < total; i++) {
      running = i;
      Fiber& fiber = fibers[i];
      left += !fiber.done;
      if (fiber.done || rests(seed, i / 32, turn)) continue;
      threadIdx.x = fiber.thread, blockIdx.x = fiber.block;
      shared_memory = (u8*)(((size_t)shared_memories[fiber.block].data() + 15) & ~(size_t)15);
      resume(fiber);
    }
  }
  fibers.clear();  // a library stays loaded
  return left == 0;  // else they wait for each other for ever
}
