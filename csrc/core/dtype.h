// SPDX-License-Identifier: Apache-2.0
// Conversion between storage and compute types, one element at a time, in integer arithmetic that vectorizes; GPUs
// have instructions that give the same bits, but for a NaN's payload.
//
// IEEE 754: to a narrower type round to nearest, ties to even, subnormals kept; NaN stays NaN (quiet).
#pragma once

#include <stdint.h>

#include "core/host_device.h"
#include "core/walk.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
FUSED_OPS_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// A choice between words, which the vectorizer turns into a masked move.
FUSED_OPS_HD uint32_t select(bool condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

FUSED_OPS_HD float widen(float x) { return x; }
FUSED_OPS_HD double widen(double x) { return x; }
FUSED_OPS_HD float widen(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

FUSED_OPS_HD float widen(Float16 x) {
#if defined(__CUDA_ARCH__)
  float converted;
  asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(x.bits));
  return converted;
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // The exponent bias moves from 15 to 127; a subnormal is an integer multiple of 2^-24; infinity and NaN keep theirs.
  const uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
  const uint32_t subnormal = bit_cast<uint32_t>(float(int32_t(magnitude)) * 0x1p-24f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u | select(magnitude > 0x7c00u, 0x00400000u, 0u);
  const uint32_t finite = select(magnitude < 0x0400u, subnormal, normal);
  return bit_cast<float>(sign | select(magnitude >= 0x7c00u, special, finite));
#endif
}

template <class To>
FUSED_OPS_HD To narrow(float x);
template <class To>
FUSED_OPS_HD To narrow(double x);

template <>
FUSED_OPS_HD float narrow<float>(float x) {
  return x;
}
template <>
FUSED_OPS_HD double narrow<double>(float x) {
  return x;
}
template <>
FUSED_OPS_HD double narrow<double>(double x) {
  return x;
}
template <>
FUSED_OPS_HD float narrow<float>(double x) {
  return float(x);
}

// Both choose between 32-bit words and shift last: a choice between 16-bit halves costs the vectorizer a permutation
// each.
template <>
FUSED_OPS_HD BFloat16 narrow<BFloat16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t converted;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(converted) : "f"(x));
  return {converted};
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return {uint16_t(select(x != x, bits | 0x00400000u, rounded) >> 16)};
#endif
}

template <>
FUSED_OPS_HD Float16 narrow<Float16>(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t converted;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted) : "f"(x));
  return {converted};
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 65520 and above round to infinity. Below 2^-14 the result is subnormal: adding 0.5 leaves the multiple of 2^-24,
  // rounded to nearest even, in the low bits of the sum.
  const uint32_t normal = magnitude - ((127 - 15) << 23) + 0x0fffu + (magnitude >> 13 & 1u);
  const uint32_t subnormal = (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u) << 13;
  const uint32_t special = select(magnitude > 0x7f800000u, 0x7e00u << 13, 0x7c00u << 13);
  const uint32_t finite = select(magnitude < 0x38800000u, subnormal, normal);
  const uint32_t result = select(magnitude >= 0x477ff000u, special, finite);
  return {uint16_t(((bits >> 3 & 0x10000000u) | result) >> 13)};
#endif
}

// To a 16-bit type from double through float rounded to odd, so that rounding twice equals rounding once.
FUSED_OPS_HD float round_to_odd(double x) {
  const float nearest = float(x);
  const uint32_t bits = bit_cast<uint32_t>(nearest);
  const double back = double(nearest);
  if (back == x || x != x || (bits & 0x7f800000u) == 0x7f800000u) return nearest;
  const bool too_large = (x < 0 ? -back : back) > (x < 0 ? -x : x);
  const uint32_t truncated = too_large ? bits - 1 : bits;
  return bit_cast<float>(truncated | 1u);
}
template <>
FUSED_OPS_HD BFloat16 narrow<BFloat16>(double x) {
  return narrow<BFloat16>(round_to_odd(x));
}
template <>
FUSED_OPS_HD Float16 narrow<Float16>(double x) {
  return narrow<Float16>(round_to_odd(x));
}

// Calls visitor.operator()<Storage>() for the storage type of a DType.
template <class Visitor>
FUSED_OPS_HD void visit_dtype(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::kFloat32: return visitor.template operator()<float>();
    case DType::kFloat64: return visitor.template operator()<double>();
    case DType::kFloat16: return visitor.template operator()<Float16>();
    case DType::kBFloat16: return visitor.template operator()<BFloat16>();
  }
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
