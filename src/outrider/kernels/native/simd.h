// Sixteen lanes of fp32 or int32, as one AVX-512 register or two AVX2 registers.
//
// Every function does the same IEEE operations on both, so that code above gives the same bits on
// both machines unless it asks for `dot_bf16`. Included by the isa_*.cpp files only; everything is
// in an unnamed namespace so that no function built for one machine can be linked into another.
#pragma once
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;

INLINE int32_t load_i32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

#if defined(__AVX512F__)

using F = __m512;
using I = __m512i;

INLINE F f_zero() { return _mm512_setzero_ps(); }
INLINE F f_set(float v) { return _mm512_set1_ps(v); }
INLINE F f_load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float* p, F v) { _mm512_storeu_ps(p, v); }
INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F f_load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE F f_load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE I i_zero() { return _mm512_setzero_si512(); }
INLINE I i_set(int32_t v) { return _mm512_set1_epi32(v); }
INLINE I i_load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void i_store(void* p, I v) { _mm512_storeu_si512(p, v); }
INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
template <int S> INLINE I i_shl(I a) { return _mm512_slli_epi32(a, S); }
template <int S> INLINE I i_shr(I a) { return _mm512_srli_epi32(a, S); }
INLINE F i_to_f(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I f_round(F a) { return _mm512_cvtps_epi32(a); }
INLINE F as_f(I a) { return _mm512_castsi512_ps(a); }
INLINE I as_i(F a) { return _mm512_castps_si512(a); }
INLINE void i_store_bytes(void* p, I v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v));
}
INLINE I i_load_words(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
INLINE void i_store_words(void* p, I v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v));
}

#else

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};
#define OUTRIDER_PAIR(op, a, b) \
  { op((a).lo, (b).lo), op((a).hi, (b).hi) }

INLINE F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F f_set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void f_store(float* p, F v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
INLINE F f_add(F a, F b) { return OUTRIDER_PAIR(_mm256_add_ps, a, b); }
INLINE F f_sub(F a, F b) { return OUTRIDER_PAIR(_mm256_sub_ps, a, b); }
INLINE F f_mul(F a, F b) { return OUTRIDER_PAIR(_mm256_mul_ps, a, b); }
INLINE F f_div(F a, F b) { return OUTRIDER_PAIR(_mm256_div_ps, a, b); }
INLINE F f_fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
INLINE F f_max(F a, F b) { return OUTRIDER_PAIR(_mm256_max_ps, a, b); }
INLINE F f_min(F a, F b) { return OUTRIDER_PAIR(_mm256_min_ps, a, b); }
INLINE __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F f_load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
INLINE F f_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I i_set(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INLINE I i_load(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void i_store(void* p, I v) {
  _mm256_storeu_si256((__m256i*)p, v.lo);
  _mm256_storeu_si256((__m256i*)p + 1, v.hi);
}
INLINE I i_add(I a, I b) { return OUTRIDER_PAIR(_mm256_add_epi32, a, b); }
INLINE I i_sub(I a, I b) { return OUTRIDER_PAIR(_mm256_sub_epi32, a, b); }
INLINE I i_and(I a, I b) { return OUTRIDER_PAIR(_mm256_and_si256, a, b); }
INLINE I i_or(I a, I b) { return OUTRIDER_PAIR(_mm256_or_si256, a, b); }
INLINE I i_max(I a, I b) { return OUTRIDER_PAIR(_mm256_max_epi32, a, b); }
template <int S> INLINE I i_shl(I a) {
  return {_mm256_slli_epi32(a.lo, S), _mm256_slli_epi32(a.hi, S)};
}
template <int S> INLINE I i_shr(I a) {
  return {_mm256_srli_epi32(a.lo, S), _mm256_srli_epi32(a.hi, S)};
}
INLINE F i_to_f(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
INLINE I f_round(F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
INLINE F as_f(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
INLINE I as_i(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
INLINE void i_store_bytes(void* p, I v) {  // truncates, like the AVX-512 instruction
  alignas(32) int32_t lane[16];
  i_store(lane, v);
  for (int i = 0; i < 16; i++) ((uint8_t*)p)[i] = (uint8_t)lane[i];
}
INLINE I i_load_words(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE void i_store_words(void* p, I v) {
  alignas(32) int32_t lane[16];
  i_store(lane, v);
  for (int i = 0; i < 16; i++) ((uint16_t*)p)[i] = (uint16_t)lane[i];
}
#undef OUTRIDER_PAIR

#endif

// Round to bf16, to nearest even. NaN stays NaN for the payloads that arithmetic makes.
INLINE I to_bf16(F v) {
  I bits = as_i(v);
  I odd = i_and(i_shr<16>(bits), i_set(1));
  return i_shr<16>(i_add(bits, i_add(odd, i_set(0x7fff))));
}
INLINE void f_store_bf16(uint16_t* p, F v) { i_store_words(p, to_bf16(v)); }

// The sum of the lanes in one fixed order, the same on every machine.
INLINE float reduce_add(F v) {
  alignas(64) float lane[16];
  f_store(lane, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}
INLINE float reduce_max(F v) {
  alignas(64) float lane[16];
  f_store(lane, v);
  float best = lane[0];
  for (int i = 1; i < 16; i++) best = lane[i] > best ? lane[i] : best;
  return best;
}
#if defined(__AVX512F__)
INLINE int32_t reduce_max_i(I v) { return _mm512_reduce_max_epi32(v); }
INLINE int32_t reduce_add_i(I v) { return _mm512_reduce_add_epi32(v); }
#else
INLINE int32_t reduce_max_i(I v) {
  alignas(64) int32_t lane[16];
  i_store(lane, v);
  int32_t best = lane[0];
  for (int i = 1; i < 16; i++) best = lane[i] > best ? lane[i] : best;
  return best;
}
INLINE int32_t reduce_add_i(I v) {
  alignas(64) int32_t lane[16];
  i_store(lane, v);
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += lane[i];
  return sum;
}
#endif

// exp for x <= 88, by x = n ln 2 + r and a polynomial in r of degree 6; error below 2 ulp.
INLINE F f_exp(F x) {
  x = f_min(f_set(88.0f), f_max(f_set(-87.0f), x));  // this order of operands keeps NaN
  I n = f_round(f_mul(x, f_set(1.44269504f)));
  F nf = i_to_f(n);
  F r = f_fma(nf, f_set(-0.693145752f), x);
  r = f_fma(nf, f_set(-1.42860677e-6f), r);
  F p = f_set(1.0f / 720);
  p = f_fma(p, r, f_set(1.0f / 120));
  p = f_fma(p, r, f_set(1.0f / 24));
  p = f_fma(p, r, f_set(1.0f / 6));
  p = f_fma(p, r, f_set(0.5f));
  p = f_fma(p, r, f_set(1.0f));
  p = f_fma(p, r, f_set(1.0f));
  return f_mul(p, as_f(i_shl<23>(i_add(n, i_set(127)))));
}

// x * sigmoid(x).
INLINE F f_silu(F x) {
  return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), x))));
}

// --- dot products of four bytes, exact in int32 -------------------------------------------------
// dot_nibbles: sum += x * q for int8 x and q in 0 .. 15.
// dot_offset: sum += x * w + kOffsetWeights * x for int8 x and w, given q = w + 128 as a byte.
#if defined(__AVX512F__)
constexpr int32_t kOffsetWeights = 128;
INLINE I dot_nibbles(I sum, I x, I q) { return _mm512_dpbusd_epi32(sum, q, x); }
INLINE I dot_offset(I sum, I x, I q) { return _mm512_dpbusd_epi32(sum, q, x); }
#else
constexpr int32_t kOffsetWeights = 0;
INLINE __m256i add_pairs(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE I dot_nibbles(I sum, I x, I q) {
  return {add_pairs(sum.lo, _mm256_maddubs_epi16(q.lo, x.lo)),
          add_pairs(sum.hi, _mm256_maddubs_epi16(q.hi, x.hi))};
}
// |w| <= 128 and |x| <= 127: the 16-bit sums of two products do not saturate.
INLINE __m256i offset_pairs(__m256i x, __m256i q) {
  __m256i w = _mm256_xor_si256(q, _mm256_set1_epi8((char)0x80));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
INLINE I dot_offset(I sum, I x, I q) {
  return {add_pairs(sum.lo, offset_pairs(x.lo, q.lo)), add_pairs(sum.hi, offset_pairs(x.hi, q.hi))};
}
#endif

// --- bf16 pairs: sum += x[0] * w[0] + x[1] * w[1] -------------------------------------------------
// `Factor` holds a bf16 number that is used again and again as x: as it is where the processor
// multiplies bf16, and as fp32 where its products are made of fp32 ones.
#if defined(__AVX512BF16__)
using Factor = uint16_t;

INLINE F dot_bf16(F sum, int32_t x, I w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)i_set(x), (__m512bh)w);
}

INLINE F dot_factors(F sum, const Factor* x, I w) { return dot_bf16(sum, load_i32(x), w); }

INLINE void store_factors(Factor* p, I rounded) { i_store_words(p, rounded); }
#else
using Factor = float;

INLINE F low_half(I pair) { return as_f(i_shl<16>(pair)); }
INLINE F high_half(I pair) { return as_f(i_and(pair, i_set((int32_t)0xffff0000u))); }

INLINE F dot_bf16(F sum, int32_t x, I w) {
  I pair = i_set(x);
  return f_fma(high_half(pair), high_half(w), f_fma(low_half(pair), low_half(w), sum));
}

INLINE F dot_factors(F sum, const Factor* x, I w) {
  return f_fma(f_set(x[1]), high_half(w), f_fma(f_set(x[0]), low_half(w), sum));
}

INLINE void store_factors(Factor* p, I rounded) { f_store(p, low_half(rounded)); }
#endif

}  // namespace
