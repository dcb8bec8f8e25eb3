"""The CUDA source of hippo.models.quantized.packed, compiled at load for the device at hand.

A block of 8 warps computes the product of TILES * 16 rows of the weight with up to EIGHTS * 8 rows.
The warps share the columns: warp w has the tiles w, w + 8, ... of 64 columns, and their sums are
added in a fixed order at the end. The weight is matrix A of mma.m16n8k16 and the rows are matrix B.
Each thread has AHEAD loads of a tile row's weights under way before it needs the first.

4-bit codes are looked up two at a time: shared memory holds what each byte stands for, once for
each lane, so that the 32 lanes read from 32 banks. 8-bit codes become float32 by their bits:
0x4B000000 | code is 2^23 + code. With zero points, the rows' sums over a tile's columns, which
tensor cores compute as products with ones, are multiplied with the zero points and taken away.
"""

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned short u16;
#define WORDS (BITS / 4)  // loads of 16 bytes for a tile

__device__ __forceinline__ void multiply_tile(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 rounded_pair(float first, float second) {
  u32 pair;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ u16 rounded(float value) {
  u16 found;
  asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(found) : "f"(value));
  return found;
}

__device__ __forceinline__ float widened_half(u16 value) {
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(value));
  return found;
}

__device__ __forceinline__ float widened(u16 value) {
  return IS_BFLOAT ? __uint_as_float((u32)value << 16) : widened_half(value);
}

__device__ __forceinline__ float number_of(u32 word, int place) {
  return __uint_as_float(__byte_perm(word, 0x4B000000, 0x7540 | place)) - 8388736.0f;
}

// The four registers of matrix A for a step: rows g and g + 8, first and last two columns.
__device__ __forceinline__ void decode(u32* a, const u32* words, int step, const u32* table,
                                       u32 lane4) {
#if BITS == 4
  u32 word = words[step];
  u32 places[4] = {word << 7, word >> 1, word >> 9, word >> 17};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = *(const u32*)((const char*)table + ((places[i] & 0x7F80u) | lane4));
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 word = words[2 * step + i / 2];
    a[i] = rounded_pair(number_of(word, 2 * (i % 2)), number_of(word, 2 * (i % 2) + 1));
  }
#endif
}

extern "C" __global__ void __launch_bounds__(256, 2) multiply(
    const uint4* __restrict__ packed, const void* __restrict__ scales,
    const u16* __restrict__ zeros, const u32* __restrict__ pairs, const u16* __restrict__ bias,
    const u16* __restrict__ x, u16* __restrict__ product, int num_rows, int height, int width) {
  // Sums of a warp: EIGHTS times, 8 columns of TILES * 16 numbers, padded against bank conflicts.
  constexpr int COLUMN = TILES * 16 + 4;
  __shared__ __align__(16) u32 shared[BITS == 4 ? 256 * 32 : 8 * 8 * COLUMN];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 num_tiles = width / 64;
  const long long first_place = (long long)blockIdx.x * TILES * num_tiles;
  const uint4* own_weights = packed + (first_place * 32 + lane) * WORDS;
#if BITS == 4
  const u32* own_scales = (const u32*)scales + first_place * 8 + g;  // pairs of float16
  for (int i = threadIdx.x; i < 256 * 32; i += 256) shared[i] = pairs[i / 32];
  __syncthreads();
#endif

  float sums[TILES][EIGHTS][4] = {};
  uint4 weights[AHEAD][TILES][WORDS];
#if BITS == 4
  u32 factors[AHEAD][TILES];
#define LOAD_SCALE(slot, i, place) factors[slot][i] = __ldg(own_scales + (place) * 8);
#else
#define LOAD_SCALE(slot, i, place)
#endif
#if HAS_ZEROS
  const u16* own_zeros = zeros + first_place * 8 + g;  // pairs of bytes
  u32 points[AHEAD][TILES];
#define LOAD_ZERO(slot, i, place) points[slot][i] = __ldg(own_zeros + (place) * 8);
#else
#define LOAD_ZERO(slot, i, place)
#endif
#define LOAD(slot, tile)                                                               \
  _Pragma("unroll") for (u32 i = 0; i < TILES; ++i) {                                  \
    const u32 place = i * num_tiles + (tile);                                          \
    _Pragma("unroll") for (u32 k = 0; k < WORDS; ++k)                                  \
      weights[slot][i][k] = __ldcs(own_weights + (place * (32 * WORDS) + k));          \
    LOAD_SCALE(slot, i, place)                                                         \
    LOAD_ZERO(slot, i, place)                                                          \
  }

#pragma unroll
  for (u32 slot = 0; slot < AHEAD; ++slot)
    if (warp + 8 * slot < num_tiles) { LOAD(slot, warp + 8 * slot) }

  for (u32 first = warp; first < num_tiles; first += 8 * AHEAD) {
#pragma unroll
    for (u32 slot = 0; slot < AHEAD; ++slot) {
      const u32 tile = first + 8 * slot;
      if (tile >= num_tiles) break;
      uint4 rows[EIGHTS][2];
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
        const int row = n * 8 + g;
        const uint4* from = (const uint4*)(x + ((u32)(row * width) + tile * 64 + t * 16));
        rows[n][0] = rows[n][1] = make_uint4(0, 0, 0, 0);
        if (row < num_rows) { rows[n][0] = __ldg(from); rows[n][1] = __ldg(from + 1); }
      }
      uint4 now[TILES][WORDS];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < WORDS; ++k) now[i][k] = weights[slot][i][k];
#if BITS == 4
      u32 factor[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) factor[i] = factors[slot][i];
#endif
#if HAS_ZEROS
      u32 point[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) point[i] = points[slot][i];
#endif
      if (tile + 8 * AHEAD < num_tiles) { LOAD(slot, tile + 8 * AHEAD) }
      const u32* b = (const u32*)rows;
#if HAS_ZEROS
      const u32 one = IS_BFLOAT ? 0x3F803F80u : 0x3C003C00u, ones[4] = {one, one, one, one};
      float of_columns[EIGHTS][4] = {};  // all rows of the result are the same
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
          multiply_tile(of_columns[n], ones, b[n * 8 + 2 * step], b[n * 8 + 2 * step + 1]);
#endif
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#if BITS == 4
        float part[EIGHTS][4] = {};
#else
        float (*part)[4] = sums[i];
#endif
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          u32 a[4];
          decode(a, (const u32*)now[i], step, shared, lane * 4);
#pragma unroll
          for (int n = 0; n < EIGHTS; ++n)
            multiply_tile(part[n], a, b[n * 8 + 2 * step], b[n * 8 + 2 * step + 1]);
        }
#if HAS_ZEROS
        const float low_zero = (float)(point[i] & 0xFF), high_zero = (float)(point[i] >> 8);
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
          part[n][0] -= low_zero * of_columns[n][0];
          part[n][1] -= low_zero * of_columns[n][1];
          part[n][2] -= high_zero * of_columns[n][0];
          part[n][3] -= high_zero * of_columns[n][1];
        }
#endif
#if BITS == 4
        const float low = widened_half((u16)(factor[i] & 0xFFFF));
        const float high = widened_half((u16)(factor[i] >> 16));
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
          sums[i][n][0] += low * part[n][0];
          sums[i][n][1] += low * part[n][1];
          sums[i][n][2] += high * part[n][2];
          sums[i][n][3] += high * part[n][3];
        }
#endif
      }
    }
  }

  float* of_warps = (float*)shared;
#pragma unroll
  for (int n = 0; n < EIGHTS; ++n) {
    __syncthreads();
    float* own = of_warps + warp * 8 * COLUMN;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      own[(2 * t) * COLUMN + i * 16 + g] = sums[i][n][0];
      own[(2 * t + 1) * COLUMN + i * 16 + g] = sums[i][n][1];
      own[(2 * t) * COLUMN + i * 16 + g + 8] = sums[i][n][2];
      own[(2 * t + 1) * COLUMN + i * 16 + g + 8] = sums[i][n][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 16 * 8; i += 256) {
      const int place = i % (TILES * 16), column = i / (TILES * 16), row = n * 8 + column;
      if (row >= num_rows) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += of_warps[(w * 8 + column) * COLUMN + place];
      const int out = blockIdx.x * TILES * 16 + place;
      if (BITS == 8) sum *= ((const float*)scales)[out];
      if (bias) sum += widened(bias[out]);
      product[(long long)row * height + out] = rounded(sum);
    }
  }
}

// Writes rows of the weight from tile row first_row on, a tile of 16 rows and 64 columns by a warp.
extern "C" __global__ void __launch_bounds__(256) unpack(
    const uint4* __restrict__ packed, const void* __restrict__ scales,
    const u16* __restrict__ zeros, const u32* __restrict__ pairs, u32* __restrict__ weight,
    int first_row, int count, int width) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, num_tiles = width / 64;
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= count) return;
  const long long place = (long long)first_row * num_tiles + index;
  const int tile_row = index / num_tiles, tile = index % num_tiles;
  uint4 loaded[WORDS];
#pragma unroll
  for (int k = 0; k < WORDS; ++k) loaded[k] = __ldcs(packed + (place * 32 + lane) * WORDS + k);
  const u32* words = (const u32*)loaded;
  float low, high;
#if BITS == 4
  const u32 factor = ((const u32*)scales)[place * 8 + g];
  low = widened_half((u16)(factor & 0xFFFF));
  high = widened_half((u16)(factor >> 16));
#else
  const float* of_rows = (const float*)scales + (first_row + tile_row) * 16;
  low = of_rows[g];
  high = of_rows[g + 8];
#endif
  float low_zero = 0, high_zero = 0;
#if HAS_ZEROS
  const u16 point = zeros[place * 8 + g];
  low_zero = (float)(point & 0xFF);
  high_zero = (float)(point >> 8);
#endif
  u32 found[2][8];  // rows g and g + 8, 16 columns each
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float first, second;
#if BITS == 4
      const u32 pair = __ldg(pairs + ((words[step] >> (8 * i)) & 0xFF));
      first = widened((u16)(pair & 0xFFFF));
      second = widened((u16)(pair >> 16));
#else
      const u32 word = words[2 * step + i / 2];
      first = number_of(word, 2 * (i % 2));
      second = number_of(word, 2 * (i % 2) + 1);
#endif
      const float factor_of_row = i % 2 ? high : low, zero = i % 2 ? high_zero : low_zero;
      found[i % 2][2 * step + i / 2] =
          rounded_pair((first - zero) * factor_of_row, (second - zero) * factor_of_row);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long row = (long long)tile_row * 16 + g + 8 * half;
    uint4* to = (uint4*)(weight + (row * width + tile * 64 + t * 16) / 2);
    to[0] = make_uint4(found[half][0], found[half][1], found[half][2], found[half][3]);
    to[1] = make_uint4(found[half][4], found[half][5], found[half][6], found[half][7]);
  }
}
"""
