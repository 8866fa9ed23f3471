// Attention of rows over a bf16 cache, for trees of many sequences.
//
// The result of a (row, head) is a function of the keys and values on its path in the order of
// their positions, and of nothing else: a score is a sum over the head in order, weights are summed
// in 16 lanes by position, and values are added two positions after two. Where a key lies, which
// rows are computed beside and how many there are changes no bit. Queries and weights are rounded
// to bf16, like the cache, for the processor's products of bf16 pairs.
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
  const Factor* query;  // [head_dim], scaled
  float* out;           // [head_dim]
  float* scores;        // [visible rounded up to 16]; later weights, as factors, at the same place
  Path path;
  int row;
};

// Keys of 16 cache rows as bf16 pairs [head_dim / 2, 16, 2].
inline void transpose_keys(const uint16_t* const rows[16], int head_dim, uint16_t* out) {
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
    for (int i = 0; i < 16; i++) i_store(out + (size_t)(done + 2 * i) * kLanes, b[i]);
  }
#endif
  for (int h = done; h < head_dim; h += 2)
    for (int i = 0; i < kLanes; i++) std::memcpy(out + (size_t)h * kLanes + 2 * i, rows[i] + h, 4);
}

template <int P>
INLINE void score(const Pair* pair, const uint16_t* keys, int head_dim, int position) {
  F sum[P];
  for (int i = 0; i < P; i++) sum[i] = f_zero();
  for (int h = 0; h < head_dim; h += 2) {
    I k = i_load(keys + (size_t)h * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < P; i++) sum[i] = dot_factors(sum[i], pair[i].query + h, k);
  }
  for (int i = 0; i < P; i++) f_store(pair[i].scores + position, sum[i]);
}

inline void score_all(const Pair* pair, int count, const uint16_t* keys, int head_dim,
                      int position) {
  for (; count >= 8; count -= 8, pair += 8) score<8>(pair, keys, head_dim, position);
  switch (count) {
    case 7: score<7>(pair, keys, head_dim, position); break;
    case 6: score<6>(pair, keys, head_dim, position); break;
    case 5: score<5>(pair, keys, head_dim, position); break;
    case 4: score<4>(pair, keys, head_dim, position); break;
    case 3: score<3>(pair, keys, head_dim, position); break;
    case 2: score<2>(pair, keys, head_dim, position); break;
    case 1: score<1>(pair, keys, head_dim, position); break;
    default: break;
  }
}

// Scores to weights exp(score - best), rounded to bf16 in place (zeros up to the next 16); returns
// one over the sum of the rounded weights.
inline float soften(float* scores, int visible) {
  int padded = (visible + kLanes - 1) / kLanes * kLanes;
  for (int i = visible; i < padded; i++) scores[i] = scores[visible - 1];
  F best = f_load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = f_max(best, f_load(scores + i));
  F most = f_set(reduce_max(best)), sum = f_zero();
  Factor* weights = reinterpret_cast<Factor*>(scores);  // in place, over what has been read
  for (int i = 0; i < padded; i += kLanes) {
    I rounded = to_bf16(f_exp(f_sub(f_load(scores + i), most)));
    if (i + kLanes > visible) {
      alignas(64) int32_t lane[kLanes];
      i_store(lane, rounded);
      for (int j = visible - i; j < kLanes; j++) lane[j] = 0;
      rounded = i_load(lane);
    }
    sum = f_add(sum, as_f(i_shl<16>(rounded)));
    store_factors(weights + i, rounded);
  }
  return 1.0f / reduce_add(sum);
}

// Sixteen lanes of the values of two neighbouring positions, as bf16 pairs.
INLINE I value_pairs(const uint16_t* even, const uint16_t* odd) {
  return i_or(i_load_words(even), i_shl<16>(i_load_words(odd)));
}

// The same for V * 16 lanes.
template <int V>
INLINE void load_values(const uint16_t* even, const uint16_t* odd, I* x) {
#if defined(__AVX512F__)
  if (V % 2 == 0) {
    const I low = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a,
                                   0x290009, 0x280008, 0x270007, 0x260006, 0x250005, 0x240004,
                                   0x230003, 0x220002, 0x210001, 0x200000);
    const I high = i_add(low, i_set(0x100010));
#pragma GCC unroll 2
    for (int v = 0; v < V; v += 2) {
      I a = i_load(even + v * kLanes), b = i_load(odd + v * kLanes);
      x[v] = _mm512_permutex2var_epi16(a, low, b);
      x[v + 1] = _mm512_permutex2var_epi16(a, high, b);
    }
    return;
  }
#endif
  for (int v = 0; v < V; v++) x[v] = value_pairs(even + v * kLanes, odd + v * kLanes);
}

INLINE const Factor* weights_at(const Pair& pair, int position) {
  return reinterpret_cast<const Factor*>(pair.scores) + position;
}

// out += weight * value for cache rows [0, end), end even, V * 16 lanes of the head, P pairs.
template <int P, int V>
INLINE void mix(const Pair* pair, const uint16_t* values, int head_dim, int lane, int end) {
  F sum[P][V];
  for (int i = 0; i < P; i++)
    for (int v = 0; v < V; v++) sum[i][v] = f_zero();
  for (int row = 0; row < end; row += 2) {
    const uint16_t* value = values + (size_t)row * head_dim + lane;
    I x[V];
    load_values<V>(value, value + head_dim, x);
#pragma GCC unroll 8
    for (int i = 0; i < P; i++) {
      const Factor* weights = weights_at(pair[i], row);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[i][v] = dot_factors(sum[i][v], weights, x[v]);
    }
  }
  for (int i = 0; i < P; i++)
    for (int v = 0; v < V; v++) f_store(pair[i].out + lane + v * kLanes, sum[i][v]);
}

template <int P>
inline void mix_head(const Pair* pair, const uint16_t* values, int head_dim, int end) {
  int lane = 0;
  for (; lane + 64 <= head_dim; lane += 64) mix<P, 4>(pair, values, head_dim, lane, end);
  for (; lane < head_dim; lane += kLanes) mix<P, 1>(pair, values, head_dim, lane, end);
}

// The rest of a path, from an even position on.
inline void mix_path(const Pair& pair, const uint16_t* values, int head_dim, int first) {
  alignas(64) static const uint16_t nothing[kLanes] = {0};
  for (int p = first; p < pair.path.visible; p += 2) {
    bool whole = p + 1 < pair.path.visible;
    const uint16_t* even = values + (size_t)cache_row(pair.path, p) * head_dim;
    const uint16_t* odd = whole ? values + (size_t)cache_row(pair.path, p + 1) * head_dim : nothing;
    const Factor* weights = weights_at(pair, p);
    for (int lane = 0; lane < head_dim; lane += kLanes) {
      I x = value_pairs(even + lane, whole ? odd + lane : nothing);
      f_store(pair.out + lane, dot_factors(f_load(pair.out + lane), weights, x));
    }
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
    common &= ~1;
    if (now == 6) mix_head<6>(pair, values, head_dim, common);
    else if (now == 3) mix_head<3>(pair, values, head_dim, common);
    else mix_head<1>(pair, values, head_dim, common);
    for (int i = 0; i < now; i++) mix_path(pair[i], values, head_dim, common);
    pair += now, count -= now;
  }
}

// What will be read after this: keys and values of so many rows. They lie far from those of this
// tile, where the processor does not look ahead by itself.
struct Ahead {
  const uint16_t *keys, *values;
  int rows;
};

// Has 16 rows of it brought nearer while there is something else to compute.
INLINE void fetch(const Ahead& ahead, int row, int head_dim) {
  size_t end = (size_t)least(row + kLanes, ahead.rows) * head_dim;
  for (size_t i = (size_t)row * head_dim; i < end; i += 64 / sizeof(uint16_t)) {  // a cache line
    __builtin_prefetch(ahead.keys + i, 0, 2);
    __builtin_prefetch(ahead.values + i, 0, 2);
  }
}

// Attention of pairs of one sequence and one key head. Pairs of a row are neighbours.
// `written`: rows of the slot that hold keys; `scratch`: [head_dim, 16] bf16.
inline void attend(const Pair* pair, int count, const uint16_t* keys, const uint16_t* values,
                   int head_dim, int written, const Ahead& ahead, uint16_t* scratch) {
  int most = 0;
  for (int i = 0; i < count; i++) most = pair[i].path.visible > most ? pair[i].path.visible : most;
  const uint16_t* rows[kLanes];
  for (int position = 0; position < most; position += kLanes) {
    fetch(ahead, position, head_dim);
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
  float inverse[32];
  for (int i = 0; i < count; i++) inverse[i] = soften(pair[i].scores, pair[i].path.visible);
  mix_all(pair, count, values, head_dim);
  for (int i = 0; i < count; i++)
    for (int lane = 0; lane < head_dim; lane += kLanes)
      f_store(pair[i].out + lane, f_mul(f_load(pair[i].out + lane), f_set(inverse[i])));
}

}  // namespace
