// SPDX-License-Identifier: Apache-2.0
// Scalar arithmetic that vectorizes on the CPU and rounds identically on CUDA.
//
// The library is compiled with floating-point contraction off on both sides; a rule asks for a fused multiply-add with
// fma(), which is one rounding wherever the hardware has the instruction.
#pragma once

#include <math.h>

#include "core/host_device.h"

// A target pragma does not define __FMA__ in time for the preprocessor: a translation unit that uses one says so
// itself.
#if !defined(FUSED_OPS_HAS_FMA)
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED_OPS_HAS_FMA 1
#else
#define FUSED_OPS_HAS_FMA 0
#endif
#endif

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

// a * b + c. Without the instruction (x86-64 before FMA3) it is two roundings: libm's exact emulation does not
// vectorize.
FUSED_OPS_HD float fma(float a, float b, float c) {
#if FUSED_OPS_HAS_FMA
  return ::fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

FUSED_OPS_HD double fma(double a, double b, double c) {
#if FUSED_OPS_HAS_FMA
  return ::fma(a, b, c);
#else
  return a * b + c;
#endif
}

FUSED_OPS_HD float sqrt(float x) { return ::sqrtf(x); }
FUSED_OPS_HD double sqrt(double x) { return ::sqrt(x); }

// The larger of two values; NaN if either is NaN, as torch.maximum.
template <class T>
FUSED_OPS_HD T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}

// start + weight * (end - start).
template <class T>
FUSED_OPS_HD T lerp(T start, T end, T weight) {
  return fma(weight, end - start, start);
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
