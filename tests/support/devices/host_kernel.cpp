// What hippo/models/quantized/packed_kernel.py needs of CUDA, for a host's compiler: a block is 256 threads,
// and the lanes of a warp meet at barriers where they exchange the factors of a product.

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes)
#define __syncthreads() of_block->arrive_and_wait()

struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static std::barrier<>* of_block;
static std::barrier<>* of_warps[8];
static unsigned left[8][32][4], right[8][32][2];  // factors of a product, by warp and lane

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* place) { return *place; }
template <class T> T __ldcs(const T* place) { return *place; }

static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static unsigned __byte_perm(unsigned first, unsigned second, unsigned chosen) {
  const unsigned long long bytes = first | (unsigned long long)second << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (bytes >> 8 * (chosen >> 4 * i & 7) & 0xFF) << 8 * i;
  return found;
}

static float widened_half(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
}

static float number(unsigned bits) {
  return IS_BFLOAT ? __uint_as_float(bits << 16) : widened_half((unsigned short)bits);
}

static unsigned short rounded(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  if (IS_BFLOAT) return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const _Float16 half = (_Float16)value;
  unsigned short found;
  memcpy(&found, &half, 2);
  return found;
}

static unsigned rounded_pair(float first, float second) {
  return rounded(first) | (unsigned)rounded(second) << 16;
}

// mma.m16n8k16 by the layout of its registers in the PTX ISA.
static void multiply_tile(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  memcpy(left[warp][lane], a, 16);
  right[warp][lane][0] = b0;
  right[warp][lane][1] = b1;
  of_warps[warp]->arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane_of_k = k % 8 / 2, half = k / 8, shift = 16 * (k % 2);
      const unsigned x = left[warp][4 * (row % 8) + lane_of_k][2 * half + row / 8];
      const unsigned y = right[warp][4 * column + lane_of_k][half];
      c[i] += number(x >> shift & 0xFFFF) * number(y >> shift & 0xFFFF);
    }
  }
  of_warps[warp]->arrive_and_wait();
}

template <class Kernel> void launch(int num_blocks, Kernel kernel) {
  for (int block = 0; block < num_blocks; ++block) {
    std::barrier<> all(256);
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    for (auto& of_warp : of_warps) {
      warps.push_back(std::make_unique<std::barrier<>>(32));
      of_warp = warps.back().get();
    }
    of_block = &all;
    std::vector<std::thread> threads;
    for (int i = 0; i < 256; ++i) {
      threads.emplace_back([=] {
        threadIdx.x = i;
        blockIdx.x = block;
        kernel();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}
