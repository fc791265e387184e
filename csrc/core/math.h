// SPDX-License-Identifier: Apache-2.0
// Scalar arithmetic that vectorizes on the CPU and rounds identically on CUDA.
//
// The library is compiled with floating-point contraction off on both sides; a rule asks for a fused multiply-add with
// fma(), which is one rounding wherever the hardware has the instruction.
#pragma once

#include <math.h>

#include "core/dtype.h"
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

// The upper half of a significand.
FUSED_OPS_HD float upper_half(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0xfffff000u); }
FUSED_OPS_HD double upper_half(double x) { return bit_cast<double>(bit_cast<uint64_t>(x) & 0xfffffffff8000000u); }

// a * b + c where c nearly cancels the product: what is left of it also without the instruction, from products of
// halves, which are exact. Dekker, 1971, A floating-point technique for extending the available precision.
template <class T>
FUSED_OPS_HD T fma_cancelling(T a, T b, T c) {
#if FUSED_OPS_HAS_FMA
  return fma(a, b, c);
#else
  const T a_high = upper_half(a), a_low = a - a_high, b_high = upper_half(b), b_low = b - b_high;
  return ((a_high * b_high + c) + (a_high * b_low + a_low * b_high)) + a_low * b_low;
#endif
}

FUSED_OPS_HD float sqrt(float x) { return ::sqrtf(x); }
FUSED_OPS_HD double sqrt(double x) { return ::sqrt(x); }

FUSED_OPS_HD float abs(float x) { return ::fabsf(x); }
FUSED_OPS_HD double abs(double x) { return ::fabs(x); }
FUSED_OPS_HD float copysign(float x, float sign) { return ::copysignf(x, sign); }
FUSED_OPS_HD double copysign(double x, double sign) { return ::copysign(x, sign); }

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

// A number of twice the precision of T: the sum of two.
template <class T>
struct Extended {
  T high, low;
  FUSED_OPS_HD Extended(T high_, T low_) : high(high_), low(low_) {}
  FUSED_OPS_HD explicit Extended(double x) : high(T(x)), low(T(x - double(T(x)))) {}
};

template <class T>
FUSED_OPS_HD Extended<T> multiply(T x, const Extended<T>& y) {
  const T high = x * y.high;
  return {high, fma(x, y.low, fma_cancelling(x, y.high, -high))};
}

// c0 + c1 * x + c2 * x^2 + ...
template <class T>
FUSED_OPS_HD T polynomial(T, T coefficient) {
  return coefficient;
}
template <class T, class... Coefficients>
FUSED_OPS_HD T polynomial(T x, T coefficient, Coefficients... rest) {
  return fma(x, polynomial(x, rest...), coefficient);
}

// The polynomials below have the smallest greatest relative error (Remez, 1934), fitted anew to the remaining
// coefficients as each is rounded to T.

template <class T>
struct ExponentialConstants;

template <>
struct ExponentialConstants<float> {
  using Bits = uint32_t;
  static constexpr int kFractionBits = 23, kBias = 127, kLift = 24;
  static constexpr float kUnlift = 0x1p-24f;
  static constexpr float kLowest = -105.0f;     // the exponential rounds to 0 from here on
  static constexpr float kRounder = 0x1.8p23f;  // adding it leaves an integer in the low bits
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // high: exact times 8 bits
};

template <>
struct ExponentialConstants<double> {
  using Bits = uint64_t;
  static constexpr int kFractionBits = 52, kBias = 1023, kLift = 53;
  static constexpr double kUnlift = 0x1p-53;
  static constexpr double kLowest = -746.0;
  static constexpr double kRounder = 0x1.8p52;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;  // exact times 11 bits
};

// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2.
FUSED_OPS_HD float exponential_remainder(float r) {
  return polynomial(r, 0x1.fffffep-2f, 0x1.5554a8p-3f, 0x1.555796p-5f, 0x1.122e32p-7f, 0x1.6ac176p-10f);
}
FUSED_OPS_HD double exponential_remainder(double r) {
  return polynomial(r, 0.5, 0x1.5555555555559p-3, 0x1.555555555553ep-5, 0x1.111111110f685p-7, 0x1.6c16c16c1f19bp-10,
                    0x1.a01a01affa79fp-13, 0x1.a01a017ba2536p-16, 0x1.71ddf81185b4fp-19, 0x1.27e535fe51745p-22,
                    0x1.af5f4781daba8p-26, 0x1.1ee992047b8c5p-29);
}

// e^x for x <= 0, not yet rounded: x = n ln(2) + r, |r| <= ln(2) / 2, e^x = 2^n (1 + (e^r - 1)).
template <class T>
class Exponential {
  using C = ExponentialConstants<T>;
  T scale_;   // 2^(n + kLift), since 2^n may be subnormal
  T growth_;  // e^r - 1

 public:
  FUSED_OPS_HD explicit Exponential(T x) : Exponential(x, T(0)) {}
  FUSED_OPS_HD explicit Exponential(const Extended<T>& x) : Exponential(x.high, x.high < C::kLowest ? T(0) : x.low) {}

  FUSED_OPS_HD T value() const { return scale_ * (T(1) + growth_) * C::kUnlift; }
  FUSED_OPS_HD T times(T factor) const { return scale_ * fma(growth_, factor, factor) * C::kUnlift; }
  FUSED_OPS_HD T minus_one() const {
    const T scale = scale_ * C::kUnlift;
    return fma(scale, growth_, scale - T(1));
  }

 private:
  FUSED_OPS_HD Exponential(T x, T low) {
    x = x < C::kLowest ? C::kLowest : x;
    const T rounded = fma(x, C::kLog2E, C::kRounder);
    const T n = rounded - C::kRounder;
    const T r = fma(-n, C::kLn2Low, fma(-n, C::kLn2High, x)) + low;
    growth_ = fma(r * r, exponential_remainder(r), r);
    using Bits = typename C::Bits;
    scale_ = bit_cast<T>((bit_cast<Bits>(rounded) + Bits(C::kBias + C::kLift)) << C::kFractionBits);
  }
};

// ln(1 + u) for 0 <= u <= 1.
FUSED_OPS_HD float log1p(float u) {
  return fma(u * u,
             polynomial(u, -0x1.ffffd2p-2f, 0x1.554dd4p-2f, -0x1.ff249ep-3f, 0x1.9350ecp-3f, -0x1.3a5890p-3f,
                        0x1.b50602p-4f, -0x1.d77cdep-5f, 0x1.4a113ap-6f, -0x1.b13bdep-9f),
             u);
}
FUSED_OPS_HD double log1p(double u) { return ::log1p(u); }

template <class T>
FUSED_OPS_HD T tanh(T x) {
  const T fall = -Exponential<T>(T(-2) * abs(x)).minus_one();
  return copysign(fall / (T(2) - fall), x);
}

// The logistic function 1 / (1 + e^-x) and its complement, 1 / (1 + e^x), both with a small relative error.
template <class T>
struct Logistic {
  T value, complement;
  FUSED_OPS_HD explicit Logistic(T x) : Logistic(x, Exponential<T>(-abs(x))) {}
  // From e^-|x|, and any number of x's sign.
  FUSED_OPS_HD Logistic(T sign, const Exponential<T>& decay) {
    const T larger = T(1) / (T(1) + decay.value());
    const T smaller = decay.times(larger);
    value = sign < T(0) ? smaller : larger;
    complement = sign < T(0) ? larger : smaller;
  }
};

// The standard normal distribution at a <= 0: P(X <= a) and its density, both with a small relative error.
template <class T>
struct NormalTail {
  T probability, density;
  FUSED_OPS_HD explicit NormalTail(T a) {
    const T square = a * a;
    const Exponential<T> decay(Extended<T>(T(-0.5) * square, T(-0.5) * fma_cancelling(a, a, -square)));
    density = decay.times(T(0.39894228040143268));
    probability = tail(a, decay);
  }

 private:
  // The ratio of the two is a smooth function, here a rational one; its positive coefficients cannot cancel.
  FUSED_OPS_HD static float tail(float a, const Exponential<float>& decay) {
    const float m = -a;
    return decay.times(
        polynomial(m, 0.5f, 0x1.c04cd0p-2f, 0x1.766df4p-3f, 0x1.4ba738p-5f, 0x1.0c1e3cp-8f) /
        polynomial(m, 1.0f, 0x1.ac6896p+0f, 0x1.336d4ep+0f, 0x1.df9fe8p-2f, 0x1.9fb130p-4f, 0x1.500844p-7f));
  }
  FUSED_OPS_HD static double tail(double a, const Exponential<double>&) {
    return 0.5 * ::erfc(a * -0.70710678118654752);
  }
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
