// Attention of rows over a bf16 cache, for trees of many sequences.
//
// The result of a (row, head) is a function of the keys and values on its path in the order of
// their positions, and of nothing else: a score is a sum over the head in order, weights are summed
// in 16 lanes by position, and values are added position after position. Where a key lies, which
// rows are computed beside and how many there are changes no bit.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

// A row's path: position p lies in cache row p below `plain`, and in path[p - plain] from there.
struct Path {
  int visible;  // keys that the row sees
  int plain;
  const int32_t* past;
};

INLINE int cache_row(const Path& path, int position) {
  return position < path.plain ? position : path.past[position - path.plain];
}

// One head of one row.
struct Pair {
  const float* query;  // [head_dim], scaled
  float* out;          // [head_dim]
  float* scores;       // [visible rounded up to 16]
  Path path;
  int row;
};

// Keys of 16 cache rows as fp32 [head_dim, 16].
inline void transpose_keys(const uint16_t* const rows[16], int head_dim, float* out) {
  int done = 0;
#if defined(__AVX512F__)
  for (; done + 32 <= head_dim; done += 32) {
    I a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = i_load(rows[i] + done);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 g + c], quarter q: pair 4 q + c of keys 4 g .. 4 g + 3
    for (int c = 0; c < 4; c++) {
      I low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);
      I low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
      I high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
      I high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
      b[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
      b[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
      b[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
      b[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
    for (int i = 0; i < 16; i++) {
      float* to = out + (size_t)(done + 2 * i) * kLanes;
      i_store(to, i_shl<16>(b[i]));
      i_store(to + kLanes, i_and(b[i], i_set((int32_t)0xffff0000u)));
    }
  }
#endif
  for (int h = done; h < head_dim; h++)
    for (int i = 0; i < kLanes; i++) {
      uint32_t bits = (uint32_t)rows[i][h] << 16;
      std::memcpy(out + (size_t)h * kLanes + i, &bits, 4);
    }
}

template <int P>
INLINE void score(const Pair* pair, const float* keys, int head_dim, int position) {
  F sum[P];
  for (int i = 0; i < P; i++) sum[i] = f_zero();
  for (int h = 0; h < head_dim; h++) {
    F k = f_load(keys + (size_t)h * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < P; i++) sum[i] = f_fma(f_set(pair[i].query[h]), k, sum[i]);
  }
  for (int i = 0; i < P; i++) f_store(pair[i].scores + position, sum[i]);
}

inline void score_all(const Pair* pair, int count, const float* keys, int head_dim, int position) {
  for (; count >= 6; count -= 6, pair += 6) score<6>(pair, keys, head_dim, position);
  switch (count) {
    case 5: score<5>(pair, keys, head_dim, position); break;
    case 4: score<4>(pair, keys, head_dim, position); break;
    case 3: score<3>(pair, keys, head_dim, position); break;
    case 2: score<2>(pair, keys, head_dim, position); break;
    case 1: score<1>(pair, keys, head_dim, position); break;
    default: break;
  }
}

// Scores to weights exp(score - best); returns one over their sum.
inline float soften(float* scores, int visible) {
  int padded = (visible + kLanes - 1) / kLanes * kLanes;
  for (int i = visible; i < padded; i++) scores[i] = scores[visible - 1];
  F best = f_load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = f_max(best, f_load(scores + i));
  F most = f_set(reduce_max(best)), sum = f_zero();
  for (int i = 0; i < padded; i += kLanes) {
    f_store(scores + i, f_exp(f_sub(f_load(scores + i), most)));
    if (i + kLanes > visible)
      for (int j = visible; j < padded; j++) scores[j] = 0.0f;
    sum = f_add(sum, f_load(scores + i));
  }
  return 1.0f / reduce_add(sum);
}

// out += weight * value for cache rows [first, last), V * 16 lanes of the head, P pairs at once.
template <int P, int V>
INLINE void mix(const Pair* pair, const uint16_t* values, int head_dim, int lane, int first,
                int last) {
  F sum[P][V];
  for (int i = 0; i < P; i++)
    for (int v = 0; v < V; v++) sum[i][v] = f_load(pair[i].out + lane + v * kLanes);
  for (int row = first; row < last; row++) {
    const uint16_t* value = values + (size_t)row * head_dim + lane;
    F x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = f_load_bf16(value + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < P; i++) {
      F weight = f_set(pair[i].scores[row]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[i][v] = f_fma(weight, x[v], sum[i][v]);
    }
  }
  for (int i = 0; i < P; i++)
    for (int v = 0; v < V; v++) f_store(pair[i].out + lane + v * kLanes, sum[i][v]);
}

template <int P>
inline void mix_head(const Pair* pair, const uint16_t* values, int head_dim, int first, int last) {
  int lane = 0;
  for (; lane + 64 <= head_dim; lane += 64)
    mix<P, 4>(pair, values, head_dim, lane, first, last);
  for (; lane < head_dim; lane += kLanes)
    mix<P, 1>(pair, values, head_dim, lane, first, last);
}

inline void mix_path(const Pair& pair, const uint16_t* values, int head_dim, int first) {
  for (int p = first; p < pair.path.visible; p++) {
    const uint16_t* value = values + (size_t)cache_row(pair.path, p) * head_dim;
    F weight = f_set(pair.scores[p]);
    for (int lane = 0; lane < head_dim; lane += kLanes)
      f_store(pair.out + lane,
              f_fma(weight, f_load_bf16(value + lane), f_load(pair.out + lane)));
  }
}

INLINE int least(int a, int b) { return a < b ? a : b; }

// How many keys of the row lie where their position says.
INLINE int plain_keys(const Path& path) { return least(path.visible, path.plain); }

inline void mix_all(const Pair* pair, int count, const uint16_t* values, int head_dim) {
  while (count > 0) {
#if defined(__AVX512F__)
    int now = count >= 6 ? 6 : count >= 3 ? 3 : 1;
#else
    int now = 1;
#endif
    int common = plain_keys(pair[0].path);
    for (int i = 1; i < now; i++) common = least(common, plain_keys(pair[i].path));
    if (now == 6) mix_head<6>(pair, values, head_dim, 0, common);
    else if (now == 3) mix_head<3>(pair, values, head_dim, 0, common);
    else mix_head<1>(pair, values, head_dim, 0, common);
    for (int i = 0; i < now; i++) mix_path(pair[i], values, head_dim, common);
    pair += now, count -= now;
  }
}

// Attention of pairs of one sequence and one key head. Pairs of a row are neighbours.
// `written`: rows of the slot that hold keys; `scratch`: [head_dim, 16] floats.
inline void attend(const Pair* pair, int count, const uint16_t* keys, const uint16_t* values,
                   int head_dim, int written, float* scratch) {
  int most = 0;
  for (int i = 0; i < count; i++) most = pair[i].path.visible > most ? pair[i].path.visible : most;
  const uint16_t* rows[kLanes];
  for (int position = 0; position < most; position += kLanes) {
    bool shared_ready = false;
    for (int i = 0; i < count;) {
      const Path& path = pair[i].path;
      int end = least(position + kLanes, path.visible);
      if (position >= path.visible) {
        i++;
        continue;
      }
      int stop = i + 1;
      if (end <= path.plain) {
        while (stop < count && pair[stop].path.visible > position &&
               least(position + kLanes, pair[stop].path.visible) <= pair[stop].path.plain)
          stop++;
        if (!shared_ready) {
          for (int l = 0; l < kLanes; l++)
            rows[l] = keys + (size_t)least(position + l, written - 1) * head_dim;
          transpose_keys(rows, head_dim, scratch);
          shared_ready = true;
        }
      } else {
        while (stop < count && pair[stop].row == pair[i].row) stop++;
        for (int l = 0; l < kLanes; l++)
          rows[l] = keys + (size_t)cache_row(path, least(position + l, end - 1)) * head_dim;
        transpose_keys(rows, head_dim, scratch);
        shared_ready = false;
      }
      score_all(pair + i, stop - i, scratch, head_dim, position);
      i = stop;
    }
  }
  for (int i = 0; i < count; i++)
    for (int lane = 0; lane < head_dim; lane += kLanes) f_store(pair[i].out + lane, f_zero());
  float inverse[32];
  for (int i = 0; i < count; i++) inverse[i] = soften(pair[i].scores, pair[i].path.visible);
  mix_all(pair, count, values, head_dim);
  for (int i = 0; i < count; i++)
    for (int lane = 0; lane < head_dim; lane += kLanes)
      f_store(pair[i].out + lane, f_mul(f_load(pair[i].out + lane), f_set(inverse[i])));
}

}  // namespace
