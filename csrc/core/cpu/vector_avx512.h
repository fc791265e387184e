// SPDX-License-Identifier: Apache-2.0
// Sixteen floats, with the arithmetic of core/math.h: what a rule takes for one number at the AVX-512 levels.
//
// The compiler vectorizes the rules as well, but knows no rounding to bfloat16 other than by integers, and sends the
// last elements of a run through a loop of their own.
#pragma once

#include <immintrin.h>

#include "core/dtype.h"
#include "core/host_device.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

// The intrinsics without a mask start from an undefined vector, of which GCC 12 warns.
constexpr __mmask16 kAll = 0xffff;

struct Vector {
  __m512 lanes;
  FUSED_OPS_HD Vector() {}
  FUSED_OPS_HD Vector(__m512 lanes_) : lanes(lanes_) {}
  FUSED_OPS_HD Vector(float x) : lanes(_mm512_set1_ps(x)) {}
};

struct Mask {
  __mmask16 lanes;
};

FUSED_OPS_HD Vector operator-(Vector a) { return -a.lanes; }
FUSED_OPS_HD Vector operator+(Vector a, Vector b) { return _mm512_add_ps(a.lanes, b.lanes); }
FUSED_OPS_HD Vector operator-(Vector a, Vector b) { return _mm512_sub_ps(a.lanes, b.lanes); }
FUSED_OPS_HD Vector operator*(Vector a, Vector b) { return _mm512_mul_ps(a.lanes, b.lanes); }
FUSED_OPS_HD Vector operator/(Vector a, Vector b) { return _mm512_div_ps(a.lanes, b.lanes); }
FUSED_OPS_HD Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a.lanes, b.lanes, c.lanes); }
FUSED_OPS_HD Vector sqrt(Vector x) { return _mm512_maskz_sqrt_ps(kAll, x.lanes); }

FUSED_OPS_HD Mask operator<(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LT_OQ)}; }
FUSED_OPS_HD Mask operator>(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_GT_OQ)}; }
FUSED_OPS_HD Mask operator==(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_EQ_OQ)}; }
FUSED_OPS_HD Vector select(Mask condition, Vector yes, Vector no) {
  return _mm512_mask_mov_ps(no.lanes, condition.lanes, yes.lanes);
}
// The larger of two values; NaN if either is NaN.
FUSED_OPS_HD Vector maximum(Vector a, Vector b) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.lanes, a.lanes, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_maskz_max_ps(kAll, a.lanes, b.lanes), nan, a.lanes);
}

// To bfloat16 as narrow<BFloat16>(float) rounds.
FUSED_OPS_HD __m256i narrow_by_integers(Vector x) {
  const __m512i bits = _mm512_castps_si512(x.lanes);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.lanes, x.lanes, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, result, 16));
}

FUSED_OPS_HD __m256i narrow_bfloat16(Vector x) {
#if FUSED_OPS_HAS_BF16
  // The instruction takes a subnormal number, and only that, for zero.
  constexpr int kSubnormal = 0x20;
  const __mmask16 subnormal = _mm512_fpclass_ps_mask(x.lanes, kSubnormal);
  if (__builtin_expect(subnormal == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(x.lanes);
#endif
  return narrow_by_integers(x);
}

// Which of sixteen elements in memory there are: all, or the first few.
constexpr int64_t kLanes = 16;
struct AllLanes {
  using Value = Vector;
};
struct FirstLanes {
  using Value = Vector;
  __mmask16 lanes;
  FUSED_OPS_HD explicit FirstLanes(int64_t n) : lanes(__mmask16((1u << n) - 1)) {}
};

// A cache line of each operand, well before its turn: processors fetch ahead within a page only, and not far enough.
FUSED_OPS_HD void fetch_ahead(const void* from) {
  constexpr int64_t kBytes = 1024;
  _mm_prefetch(static_cast<const char*>(from) + kBytes, _MM_HINT_T0);
}

FUSED_OPS_HD Vector load_lanes(const float* from, AllLanes) {
  fetch_ahead(from);
  return _mm512_loadu_ps(from);
}
FUSED_OPS_HD Vector load_lanes(const float* from, FirstLanes first) { return _mm512_maskz_loadu_ps(first.lanes, from); }
FUSED_OPS_HD void store_lanes(float* to, Vector x, AllLanes) { _mm512_storeu_ps(to, x.lanes); }
FUSED_OPS_HD void store_lanes(float* to, Vector x, FirstLanes first) {
  _mm512_mask_storeu_ps(to, first.lanes, x.lanes);
}

FUSED_OPS_HD Vector widen_bfloat16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, x), 16));
}
FUSED_OPS_HD Vector load_lanes(const BFloat16* from, AllLanes) {
  fetch_ahead(from);
  return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
FUSED_OPS_HD Vector load_lanes(const BFloat16* from, FirstLanes first) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(first.lanes, from));
}
FUSED_OPS_HD void store_lanes(BFloat16* to, Vector x, AllLanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_bfloat16(x));
}
FUSED_OPS_HD void store_lanes(BFloat16* to, Vector x, FirstLanes first) {
  _mm256_mask_storeu_epi16(to, first.lanes, narrow_bfloat16(x));
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
