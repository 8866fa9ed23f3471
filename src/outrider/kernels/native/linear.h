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

constexpr int kPanel = 8;  // rows whose activations lie side by side

// Activations as a kind of weight wants them, in panels of 8 rows, so that a tile reads one run of
// memory. Only the parts of that kind are filled.
struct Acts {
  uint8_t* bytes;    // [panels, ld / 4, 8, 4] int8
  float* scale;      // [panels, groups, 8] of 32 values along K
  int32_t* start;    // [panels, groups, 8] -kOffsetWeights * sum of the int8 values
  float* lift;       // [panels, groups, 8] scale * sum of the int8 values
  uint16_t* halves;  // [panels, ld / 2, 8, 2] bf16
  float* floats;     // [panels, ld, 8]
  int ld;            // K rounded up to 64

  // Where a row begins in an array with `each` elements per row, `together` of them in one run.
  size_t at(int row, int each, int together) const {
    return (size_t)(row / kPanel) * kPanel * each + (size_t)(row % kPanel) * together;
  }
};

// The 16 lanes at `x[k]`, with zeros behind `count`.
INLINE F load_tail(const float* x, int k, int count) {
  if (k + kLanes <= count) return f_load(x + k);
  alignas(64) float lane[kLanes] = {0};
  for (int i = 0; k + i < count; i++) lane[i] = x[k + i];
  return f_load(lane);
}

// One row to int8 in groups of 32: scale = max |x| / 127, round to nearest even. A group with a NaN
// or an infinity gets a scale that is not finite, so that the fault shows in every output.
inline void quantise_row(const float* x, int k, Acts a, int row) {
  int groups = a.ld / kGroup;
  uint8_t* out = a.bytes + a.at(row, a.ld, 4);
  size_t info = a.at(row, groups, 1);
  for (int g = 0; g < groups; g++, info += kPanel) {
    int at = g * kGroup;
    F low = at < k ? load_tail(x, at, k) : f_zero();
    F high = at + kLanes < k ? load_tail(x, at + kLanes, k) : f_zero();
    const I magnitude = i_set(0x7fffffff);
    int32_t bits = reduce_max_i(i_max(i_and(as_i(low), magnitude), i_and(as_i(high), magnitude)));
    float most;
    std::memcpy(&most, &bits, 4);
    F inverse = f_set(most > 1e-30f ? 127.0f / most : 0.0f);
    I q0 = f_round(f_mul(low, inverse)), q1 = f_round(f_mul(high, inverse));
    alignas(64) uint8_t bytes[kGroup];
    i_store_bytes(bytes, q0);
    i_store_bytes(bytes + kLanes, q1);
    for (int s = 0; s < kGroup / 4; s++, out += 4 * kPanel) std::memcpy(out, bytes + 4 * s, 4);
    int32_t sum = reduce_add_i(i_add(q0, q1));
    float scale = most / 127.0f;
    a.scale[info] = scale;
    a.start[info] = -kOffsetWeights * sum;
    a.lift[info] = scale * (float)sum;
  }
}

inline void round_row(const float* x, int k, Acts a, int row) {
  uint16_t* out = a.halves + a.at(row, a.ld, 2);
  for (int i = 0; i < a.ld; i += kLanes) {
    alignas(64) uint16_t lane[kLanes];
    f_store_bf16(lane, i < k ? load_tail(x, i, k) : f_zero());
    for (int s = 0; s < kLanes; s += 2, out += 2 * kPanel) std::memcpy(out, lane + s, 4);
  }
}

// Makes one row of the activations that weight `w` wants from `x` [w.k].
inline void prepare(const Matrix& w, const float* x, int row, Acts a) {
  switch (w.kind) {
    case outrider::kFloat32: {
      float* out = a.floats + a.at(row, a.ld, 1);
      for (int i = 0; i < w.k; i++) out[i * kPanel] = x[i];
      break;
    }
    case outrider::kBfloat16:
      round_row(x, w.k, a, row);
      break;
    default:
      quantise_row(x, w.k, a, row);
  }
}

// Rows of a tile, and halves of a block that go side by side: an activation is then read once for
// both, and memory hands out two runs of weights at once. AVX2 lacks the registers for that.
#if defined(__AVX512F__)
constexpr int kMostRows = kPanel, kHalves = 2;
#else
constexpr int kMostRows = 2, kHalves = 1;
#endif
constexpr int kAhead = 8192;  // bytes between a weight that is used and the one that is fetched

INLINE void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

INLINE void put_tile(float* out, int r, F left, F right) {
  f_store(out + r * kBlock, left);
  f_store(out + r * kBlock + kLanes, right);
}

// Each tile computes R rows of one block: out [R, 32].
// Bytes of 16 columns and one group of 32.
constexpr int group_bytes(int kind) {
  return kind == outrider::kInt8 ? 512 : kind == outrider::kInt8Groups ? 32 + 512 : 64 + 256;
}

// sum[half][r] += products of R rows with one group of each half: integers, exact. The halves lie
// `apart` bytes from each other.
template <int R, int Kind>
INLINE void dot_group(const uint8_t* q, size_t apart, const uint8_t* x, I (*sum)[R]) {
  if (Kind == outrider::kInt4Groups) {
    const I nibble = i_set(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
      I low[kHalves], high[kHalves];
      for (int h = 0; h < kHalves; h++) {
        I both = i_load(q + h * apart + 64 * s);
        low[h] = i_and(both, nibble), high[h] = i_and(i_shr<4>(both), nibble);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const uint8_t* xr = x + 4 * kPanel * s + 4 * r;
        I first = i_set(load_i32(xr)), later = i_set(load_i32(xr + 16 * kPanel));
        for (int h = 0; h < kHalves; h++) {
          sum[h][r] = dot_nibbles(sum[h][r], first, low[h]);
          sum[h][r] = dot_nibbles(sum[h][r], later, high[h]);
        }
      }
    }
    return;
  }
#pragma GCC unroll 8
  for (int s = 0; s < 8; s++) {
    I w[kHalves];
    for (int h = 0; h < kHalves; h++) w[h] = i_load(q + h * apart + 64 * s);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      I xr = i_set(load_i32(x + 4 * kPanel * s + 4 * r));
      for (int h = 0; h < kHalves; h++) sum[h][r] = dot_offset(sum[h][r], xr, w[h]);
    }
  }
}

// The kinds of few bits, with xs the scale of the row's group: integers within a group, floats over
// the groups in order.
//   kInt8        y = scale * sum_g xs * dot
//   kInt8Groups  y = sum_g xs * (scale * dot)
//   kInt4Groups  y = sum_g minimum * (xs * sum(x)) + xs * (scale * dot)
template <int R, int Kind>
void tile_groups(const Matrix& w, int block, const Acts& a, int row, float* out) {
  constexpr int kBytes = group_bytes(Kind), kScales = kBytes % 256;
  constexpr bool kFour = Kind == outrider::kInt4Groups;
  constexpr int kGroupsAhead = kAhead / 512 / kHalves;
  int groups = round_up(w.k, kGroup) / kGroup, all = a.ld / kGroup;
  size_t apart = (size_t)groups * kBytes;  // bytes of a half
  for (int half = 0; half < 2; half += kHalves) {
    const uint8_t* p = (const uint8_t*)w.data + ((size_t)block * 2 + half) * apart;
    const uint8_t* x = a.bytes + a.at(row, a.ld, 4);
    size_t info = a.at(row, all, 1);
    F total[kHalves][R];
    for (int h = 0; h < kHalves; h++)
      for (int r = 0; r < R; r++) total[h][r] = f_zero();
    for (int g = 0; g < groups; g++, p += kBytes, x += kGroup * kPanel, info += kPanel) {
      // Behind the end of a half comes the next one that is read by the same run.
      const uint8_t* ahead = p + kGroupsAhead * kBytes;
      if (g + kGroupsAhead >= groups) ahead += (kHalves - 1) * apart;
      for (int h = 0; h < kHalves; h++)
        for (int i = 0; i < kBytes; i += 64) fetch(ahead + h * apart + i);
      I dot[kHalves][R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        for (int h = 0; h < kHalves; h++) dot[h][r] = kFour ? i_zero() : i_set(a.start[info + r]);
      dot_group<R, Kind>(p + kScales, apart, x, dot);
      for (int h = 0; h < kHalves; h++) {
        const uint16_t* scales = (const uint16_t*)(p + h * apart);
        F scale = kScales ? f_load_f16(scales) : f_zero();
        F minimum = kFour ? f_load_f16(scales + 16) : f_zero();
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          F value = i_to_f(dot[h][r]);
          if (kScales) value = f_mul(value, scale);
          if (kFour) total[h][r] = f_fma(minimum, f_set(a.lift[info + r]), total[h][r]);
          total[h][r] = f_fma(value, f_set(a.scale[info + r]), total[h][r]);
        }
      }
    }
    for (int h = 0; h < kHalves; h++) {
      int column = (half + h) * kLanes;
      F scale = kScales ? f_zero() : f_load(w.scale + block * kBlock + column);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        f_store(out + r * kBlock + column, kScales ? total[h][r] : f_mul(total[h][r], scale));
    }
  }
}

template <int R>
void tile_bf16(const Matrix& w, int block, const Acts& a, int row, float* out) {
  int steps = round_up(w.k, 2) / 2;
  const uint8_t* p = (const uint8_t*)w.data + (size_t)block * steps * 128;
  const uint16_t* x = a.halves + a.at(row, a.ld, 2);
  F left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = f_zero();
  for (int s = 0; s < steps; s++, p += 128, x += 2 * kPanel) {
    fetch(p + kAhead);
    fetch(p + kAhead + 64);
    I w0 = i_load(p), w1 = i_load(p + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int32_t xr = load_i32(x + 2 * r);
      left[r] = dot_bf16(left[r], xr, w0);
      right[r] = dot_bf16(right[r], xr, w1);
    }
  }
  for (int r = 0; r < R; r++) put_tile(out, r, left[r], right[r]);
}

template <int R>
void tile_fp32(const Matrix& w, int block, const Acts& a, int row, float* out) {
  const float* p = (const float*)w.data + (size_t)block * w.k * kBlock;
  const float* x = a.floats + a.at(row, a.ld, 1);
  F left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = f_zero();
  for (int s = 0; s < w.k; s++, p += kBlock, x += kPanel) {
    fetch(p + kAhead / 4);
    fetch(p + kAhead / 4 + 16);
    F w0 = f_load(p), w1 = f_load(p + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      F xr = f_set(x[r]);
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
    case outrider::kInt8: return tile_groups<R, outrider::kInt8>(w, block, a, row, out);
    case outrider::kInt4Groups:
      return tile_groups<R, outrider::kInt4Groups>(w, block, a, row, out);
    default: return tile_groups<R, outrider::kInt8Groups>(w, block, a, row, out);
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

// Computes one block of 32 columns for rows [0, rows) and hands (row, left 16 columns, right 16
// columns) on.
template <class Out>
inline void compute_block(const Matrix& w, int block, const Acts& a, int rows, Out&& out) {
  alignas(64) float result[kMostRows * kBlock];
  for (int first = 0; first < rows; first += kMostRows) {
    int count = rows - first < kMostRows ? rows - first : kMostRows;
    any_tile(w, block, a, first, count, result);
    for (int r = 0; r < count; r++)
      out(first + r, f_load(result + r * kBlock), f_load(result + r * kBlock + kLanes));
  }
}

INLINE int blocks_of(const Matrix& w) { return (w.n + kBlock - 1) / kBlock; }

}  // namespace
