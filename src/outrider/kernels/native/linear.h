// Linear layers: y[row, n] = sum over k of x[row, k] * w[n, k], for small numbers of rows.
//
// One block of 32 columns is computed for all rows before the next one, so that weights come from
// memory once however many rows there are. A row's arithmetic never depends on the tile it is in:
// integers add up exactly, and floats run over k in order with one sum per output.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

using outrider::kBlock;
using outrider::kGroup;
using outrider::Matrix;

INLINE int round_up(int value, int to) { return (value + to - 1) / to * to; }

// Activations as a kind of weight wants them. Only the parts of that kind are filled.
struct Acts {
  uint8_t* bytes;  // [rows, ld] int8, or uint8 with kInt8Offset added
  float* scale;    // [rows]
  int32_t* sums;   // [rows, groups] sums of the int8 values over each group
  uint16_t* halves;  // [rows, ld] bf16
  float* floats;     // [rows, ld]
  int ld;            // K rounded up to 64
};

// The 16 lanes at `x[k]`, with zeros behind `count`.
INLINE F load_tail(const float* x, int k, int count) {
  if (k + kLanes <= count) return f_load(x + k);
  alignas(64) float lane[kLanes] = {0};
  for (int i = 0; k + i < count; i++) lane[i] = x[k + i];
  return f_load(lane);
}

// One row to int8 with one scale: scale = max |x| / 127, round to nearest even. A row with a NaN
// or an infinity gets a scale that is not finite, so that the fault shows in every output.
inline void quantise_row(const float* x, int k, int32_t offset, Acts a, int row, bool sums) {
  uint8_t* out = a.bytes + (size_t)row * a.ld;
  I most = i_zero();
  for (int i = 0; i < k; i += kLanes)
    most = i_max(most, i_and(as_i(load_tail(x, i, k)), i_set(0x7fffffff)));
  int32_t bits = reduce_max_i(most);
  float amax;
  std::memcpy(&amax, &bits, 4);
  a.scale[row] = amax / 127.0f;
  F inverse = f_set(amax > 1e-30f ? 127.0f / amax : 0.0f);
  int groups = a.ld / kGroup;
  for (int g = 0; g < groups; g++) {
    I total = i_zero();
    for (int i = g * kGroup; i < (g + 1) * kGroup; i += kLanes) {
      I q = i < k ? f_round(f_mul(load_tail(x, i, k), inverse)) : i_zero();
      total = i_add(total, q);
      i_store_bytes(out + i, i_add(q, i_set(offset)));
    }
    if (sums) a.sums[row * groups + g] = reduce_add_i(total);
  }
}

// Makes one row of the activations that weight `w` wants from `x` [w.k].
inline void prepare(const Matrix& w, const float* x, int row, Acts a) {
  switch (w.kind) {
    case outrider::kFloat32:
      for (int i = 0; i < a.ld; i += kLanes)
        f_store(a.floats + (size_t)row * a.ld + i, i < w.k ? load_tail(x, i, w.k) : f_zero());
      break;
    case outrider::kBfloat16:
      for (int i = 0; i < a.ld; i += kLanes)
        f_store_bf16(a.halves + (size_t)row * a.ld + i,
                     i < w.k ? load_tail(x, i, w.k) : f_zero());
      break;
    case outrider::kInt8:
      quantise_row(x, w.k, kInt8Offset, a, row, false);
      break;
    default:
      quantise_row(x, w.k, 0, a, row, true);
  }
}

#if defined(__AVX512F__)
constexpr int kMostRows = 8;
#else
constexpr int kMostRows = 2;
#endif
constexpr int kAhead = 4096;  // bytes between a weight that is used and the one that is fetched

INLINE void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

INLINE void put_tile(float* out, int r, F left, F right) {
  f_store(out + r * kBlock, left);
  f_store(out + r * kBlock + kLanes, right);
}

// Each tile computes R rows of one block: out [R, 32].
template <int R>
void tile_int8(const Matrix& w, int block, const Acts& a, int row, float* out) {
  int steps = round_up(w.k, 4) / 4;
  const int8_t* p = (const int8_t*)w.data + (size_t)block * steps * 128;
  const uint8_t* x = a.bytes + (size_t)row * a.ld;
  I left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = i_zero();
  for (int s = 0; s < steps; s++, p += 128) {
    fetch(p + kAhead);
    fetch(p + kAhead + 64);
    I w0 = i_load(p), w1 = i_load(p + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      I xr = i_set(load_i32(x + (size_t)r * a.ld + 4 * s));
      left[r] = dot_signed(left[r], xr, w0);
      right[r] = dot_signed(right[r], xr, w1);
    }
  }
  int n = block * kBlock;
  F s0 = f_load(w.scale + n), s1 = f_load(w.scale + n + 16);
  I c0 = i_zero(), c1 = i_zero();
  if (kInt8Offset) c0 = i_load(w.compensation + n), c1 = i_load(w.compensation + n + 16);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    F xs = f_set(a.scale[row + r]);
    put_tile(out, r, f_mul(f_mul(i_to_f(i_sub(left[r], c0)), s0), xs),
             f_mul(f_mul(i_to_f(i_sub(right[r], c1)), s1), xs));
  }
}

// Groups of 32 along K: integers within a group, floats over the groups in order.
// 4 bits: y = xs * sum_g (scale * dot + minimum * sum(x)). 8 bits: y = xs * sum_g scale * dot.
template <int R, bool Nibbles>
void tile_groups(const Matrix& w, int block, const Acts& a, int row, float* out) {
  constexpr int kBytes = Nibbles ? 64 + 256 : 32 + 512;  // of 16 columns and one group
  int groups = round_up(w.k, kGroup) / kGroup, all = a.ld / kGroup;
  const uint8_t* p = (const uint8_t*)w.data + (size_t)block * groups * 2 * kBytes;
  const uint8_t* x = a.bytes + (size_t)row * a.ld;
  const int32_t* sums = a.sums + (size_t)row * all;
  F total[2][R];
  for (int r = 0; r < R; r++) total[0][r] = total[1][r] = f_zero();
  for (int half = 0; half < 2; half++) {
    for (int g = 0; g < groups; g++, p += kBytes) {
      for (int i = 0; i < kBytes; i += 64) fetch(p + kAhead + i);
      const uint8_t* q = p + (Nibbles ? 64 : 32);
      const uint8_t* xg = x + g * kGroup;
      I dot[R];
      for (int r = 0; r < R; r++) dot[r] = i_zero();
      if (Nibbles) {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
          I both = i_load(q + 64 * s);
          I low = i_and(both, i_set(0x0f0f0f0f)), high = i_and(i_shr<4>(both), i_set(0x0f0f0f0f));
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            const uint8_t* xr = xg + (size_t)r * a.ld + 4 * s;
            dot[r] = dot_nibbles(dot[r], i_set(load_i32(xr)), low);
            dot[r] = dot_nibbles(dot[r], i_set(load_i32(xr + 16)), high);
          }
        }
      } else {
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++) {
          I w0 = i_load(q + 64 * s);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++)
            dot[r] = dot_offset(dot[r], i_set(load_i32(xg + (size_t)r * a.ld + 4 * s)), w0);
        }
      }
      F scale = f_load_f16((const uint16_t*)p);
      F minimum = Nibbles ? f_load_f16((const uint16_t*)p + 16) : f_zero();
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        int32_t sum = sums[r * all + g];
        if (Nibbles)
          total[half][r] = f_fma(minimum, f_set((float)sum), total[half][r]);
        else
          dot[r] = i_sub(dot[r], i_set(kOffsetWeights * sum));
        total[half][r] = f_fma(scale, i_to_f(dot[r]), total[half][r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    F xs = f_set(a.scale[row + r]);
    put_tile(out, r, f_mul(total[0][r], xs), f_mul(total[1][r], xs));
  }
}

template <int R>
void tile_bf16(const Matrix& w, int block, const Acts& a, int row, float* out) {
  int steps = round_up(w.k, 2) / 2;
  const uint8_t* p = (const uint8_t*)w.data + (size_t)block * steps * 128;
  const uint16_t* x = a.halves + (size_t)row * a.ld;
  F left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = f_zero();
  for (int s = 0; s < steps; s++, p += 128) {
    fetch(p + kAhead);
    fetch(p + kAhead + 64);
    I w0 = i_load(p), w1 = i_load(p + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int32_t xr = load_i32(x + (size_t)r * a.ld + 2 * s);
      left[r] = dot_bf16(left[r], xr, w0);
      right[r] = dot_bf16(right[r], xr, w1);
    }
  }
  for (int r = 0; r < R; r++) put_tile(out, r, left[r], right[r]);
}

template <int R>
void tile_fp32(const Matrix& w, int block, const Acts& a, int row, float* out) {
  const float* p = (const float*)w.data + (size_t)block * w.k * kBlock;
  const float* x = a.floats + (size_t)row * a.ld;
  F left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = f_zero();
  for (int s = 0; s < w.k; s++, p += kBlock) {
    fetch(p + kAhead / 4);
    fetch(p + kAhead / 4 + 16);
    F w0 = f_load(p), w1 = f_load(p + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      F xr = f_set(x[(size_t)r * a.ld + s]);
      left[r] = f_fma(xr, w0, left[r]);
      right[r] = f_fma(xr, w1, right[r]);
    }
  }
  for (int r = 0; r < R; r++) put_tile(out, r, left[r], right[r]);
}

template <int R>
inline void tile(const Matrix& w, int block, const Acts& a, int row, float* out) {
  switch (w.kind) {
    case outrider::kFloat32: return tile_fp32<R>(w, block, a, row, out);
    case outrider::kBfloat16: return tile_bf16<R>(w, block, a, row, out);
    case outrider::kInt8: return tile_int8<R>(w, block, a, row, out);
    case outrider::kInt4Groups: return tile_groups<R, true>(w, block, a, row, out);
    default: return tile_groups<R, false>(w, block, a, row, out);
  }
}

inline void any_tile(const Matrix& w, int block, const Acts& a, int row, int rows, float* out) {
  switch (rows) {
    case 1: return tile<1>(w, block, a, row, out);
    case 2: return tile<2>(w, block, a, row, out);
#if defined(__AVX512F__)
    case 3: return tile<3>(w, block, a, row, out);
    case 4: return tile<4>(w, block, a, row, out);
    case 5: return tile<5>(w, block, a, row, out);
    case 6: return tile<6>(w, block, a, row, out);
    case 7: return tile<7>(w, block, a, row, out);
    default: return tile<8>(w, block, a, row, out);
#endif
  }
}

// Computes one block of 32 columns for rows [0, rows) in tiles of nearly equal height, and hands
// (row, left 16 columns, right 16 columns) on.
template <class Out>
inline void compute_block(const Matrix& w, int block, const Acts& a, int rows, Out&& out) {
  alignas(64) float result[kMostRows * kBlock];
  int tiles = (rows + kMostRows - 1) / kMostRows;
  for (int t = 0; t < tiles; t++) {
    int first = (int)((int64_t)rows * t / tiles), last = (int)((int64_t)rows * (t + 1) / tiles);
    any_tile(w, block, a, first, last - first, result);
    for (int r = 0; r < last - first; r++)
      out(first + r, f_load(result + r * kBlock), f_load(result + r * kBlock + kLanes));
  }
}

INLINE int blocks_of(const Matrix& w) { return (w.n + kBlock - 1) / kBlock; }

}  // namespace
