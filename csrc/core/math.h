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

// The smaller of |x| and a limit; the limit if x is NaN. Of integers, since the compiler would carry the choice between
// floating-point numbers into what follows, at the cost of a choice each time.
FUSED_OPS_HD float magnitude(float x, float limit) {
  const int32_t a = bit_cast<int32_t>(abs(x)), b = bit_cast<int32_t>(limit);
  return bit_cast<float>(a < b ? a : b);
}
FUSED_OPS_HD double magnitude(double x, double limit) {
  const int64_t a = bit_cast<int64_t>(abs(x)), b = bit_cast<int64_t>(limit);
  return bit_cast<double>(a < b ? a : b);
}

// A choice of which both sides are computed, wherever it stands: what they share with others is shared. It has an
// overload for vectors.
template <class T>
FUSED_OPS_HD T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

// The larger of two values; NaN if either is NaN, as torch.maximum.
template <class T>
FUSED_OPS_HD T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}

// start + weight * (end - start).
template <class T, class Weight>
FUSED_OPS_HD T lerp(T start, T end, Weight weight) {
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

// c0 + c1 * x + c2 * x^2 + ..., two coefficients at a time: the chain of roundings is half as long as Horner's.
template <class T>
FUSED_OPS_HD T polynomial(T, T, T c0) {
  return c0;
}
template <class T>
FUSED_OPS_HD T polynomial(T x, T, T c0, T c1) {
  return fma(x, c1, c0);
}
template <class T, class... Rest>
FUSED_OPS_HD T polynomial(T x, T square, T c0, T c1, Rest... rest) {
  return fma(square, polynomial(x, square, rest...), fma(x, c1, c0));
}

// The polynomials and the ratio of polynomials below have nearly the smallest greatest relative error, by exchange
// (Remez, 1934) or reweighted least squares (Lawson, 1961), fitted anew each time that a coefficient was rounded to T.

template <class T>
struct DecayConstants;

template <>
struct DecayConstants<float> {
  using Bits = uint32_t;
  static constexpr int kFractionBits = 23, kBias = 127, kLift = 24;
  static constexpr float kUnlift = 0x1p-24f;
  static constexpr float kEnd = 105.0f;         // e^-t rounds to 0 from here on
  static constexpr float kRounder = 0x1.8p23f;  // adding it leaves an integer in the low bits
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kLn2High = 0x1.62e4p-1f;  // exact times 8 bits
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
};

template <>
struct DecayConstants<double> {
  using Bits = uint64_t;
  static constexpr int kFractionBits = 52, kBias = 1023, kLift = 53;
  static constexpr double kUnlift = 0x1p-53;
  static constexpr double kEnd = 746.0;
  static constexpr double kRounder = 0x1.8p52;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLn2High = 0x1.62e42fefa3800p-1;  // exact times 11 bits
  static constexpr double kLn2Low = 0x1.ef35793c76730p-45;
};

// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2.
FUSED_OPS_HD float exponential_remainder(float r, float square) {
  return polynomial(r, square, 0x1.fffffep-2f, 0x1.5554a8p-3f, 0x1.555796p-5f, 0x1.122e32p-7f, 0x1.6ac176p-10f);
}
FUSED_OPS_HD double exponential_remainder(double r, double square) {
  return polynomial(r, square, 0.5, 0x1.5555555555559p-3, 0x1.555555555553ep-5, 0x1.111111110f685p-7,
                    0x1.6c16c16c1f19bp-10, 0x1.a01a01affa79fp-13, 0x1.a01a017ba2536p-16, 0x1.71ddf81185b4fp-19,
                    0x1.27e535fe51745p-22, 0x1.af5f4781daba8p-26, 0x1.1ee992047b8c5p-29);
}

// e^-t for t >= 0, not yet rounded: t = n ln(2) - r, |r| <= ln(2) / 2, e^-t = 2^-n (1 + (e^r - 1)).
template <class T>
class Decay {
  using C = DecayConstants<T>;
  T scale_;   // 2^-n, which is subnormal at the end: it is made 2^kLift times larger, then multiplied back
  T growth_;  // e^r - 1

 public:
  FUSED_OPS_HD explicit Decay(T t) {
    t = t > C::kEnd ? C::kEnd : t;
    const T n = split(t);
    const T r = fma(n, C::kLn2Low, fma(n, C::kLn2High, -t));
    growth_ = add_higher_orders(r, r);
  }
  // t.high <= kEnd: see limited().
  FUSED_OPS_HD explicit Decay(const Extended<T>& t) {
    const T n = split(t.high);
    const T high = fma(n, C::kLn2High, -t.high), low = fma(n, C::kLn2Low, -t.low);
    growth_ = high + add_higher_orders(low, high + low);
  }
  FUSED_OPS_HD static Extended<T> limited(const Extended<T>& t) {
    return {t.high > C::kEnd ? C::kEnd : t.high, t.high > C::kEnd ? T(0) : t.low};
  }

  FUSED_OPS_HD T value() const { return fma(scale_, growth_, scale_); }
  FUSED_OPS_HD T times(T factor) const { return scale_ * fma(growth_, factor, factor); }
  FUSED_OPS_HD T one_plus() const { return fma(scale_, growth_, T(1) + scale_); }
  FUSED_OPS_HD T one_minus() const { return fma(-scale_, growth_, T(1) - scale_); }

 private:
  // Sets scale_; returns n.
  FUSED_OPS_HD T split(T t) {
    const T rounded = fma(t, C::kLog2E, C::kRounder);
    using Bits = typename C::Bits;
    const Bits lifted = (Bits(C::kBias + C::kLift) - bit_cast<Bits>(rounded)) << C::kFractionBits;
    scale_ = bit_cast<T>(lifted) * C::kUnlift;
    return rounded - C::kRounder;
  }
  // first_order + (e^r - 1 - r).
  FUSED_OPS_HD static T add_higher_orders(T first_order, T r) {
    const T square = r * r;
    return fma(square, exponential_remainder(r, square), first_order);
  }
};

// ln(1 + u) for 0 <= u <= 1.
FUSED_OPS_HD float log1p(float u) {
  const float square = u * u;
  return fma(square,
             polynomial(u, square, -0x1.ffffd2p-2f, 0x1.554dd4p-2f, -0x1.ff249ep-3f, 0x1.9350ecp-3f, -0x1.3a5890p-3f,
                        0x1.b50602p-4f, -0x1.d77cdep-5f, 0x1.4a113ap-6f, -0x1.b13bdep-9f),
             u);
}
FUSED_OPS_HD double log1p(double u) { return ::log1p(u); }

template <class T>
FUSED_OPS_HD T tanh(T x) {
  const T fall = Decay<T>(T(2) * abs(x)).one_minus();
  return copysign(fall / (T(2) - fall), x);
}

// The logistic function 1 / (1 + e^-x) and its complement, 1 / (1 + e^x), both with a small relative error.
template <class T>
struct Logistic {
  T value, complement;
  FUSED_OPS_HD explicit Logistic(T x) : Logistic(x, Decay<T>(abs(x))) {}
  // From e^-|x|, and any number of x's sign.
  FUSED_OPS_HD Logistic(T sign, const Decay<T>& decay) {
    const T smaller = decay.times(T(1) / decay.one_plus());
    const T larger = T(1) - smaller;
    value = sign < T(0) ? smaller : larger;
    complement = sign < T(0) ? larger : smaller;
  }
};

// The standard normal distribution at -a, 0 <= a <= kEnd: P(X <= -a) and its density, both with a small relative error.
template <class T>
struct NormalTail {
  static constexpr T kEnd = sizeof(T) == sizeof(float) ? T(14.45) : T(38.615);  // both round to 0
  T probability, density;
  FUSED_OPS_HD explicit NormalTail(T a) {
    const T square = a * a, square_error = fma_cancelling(a, a, -square);
    const Decay<T> decay(Extended<T>(T(0.5) * square, T(0.5) * square_error));
    density = decay.times(T(0.39894228040143268));
    probability = tail(a, square, density, decay);
  }

 private:
  // The ratio of the two (Mills, 1926) falls like 1 / a. In the form p / (1 + a * (sqrt(2 pi) * p + q)) the
  // coefficients are positive, and cannot cancel, and far out the errors of p and q hardly matter.
  FUSED_OPS_HD static float tail(float a, float square, float, const Decay<float>& decay) {
    const float p = fma(
        a, polynomial(a, square, 0x1.15d08cp-1f, 0x1.218d94p-2f, 0x1.5d6054p-4f, 0x1.e80aeep-7f, 0x1.45e45ep-10f),
        0.5f);
    const float q = polynomial(a, square, 0x1.427306p-1f, 0x1.a9cf86p-3f, 0x1.31b544p-5f, 0x1.987c52p-9f);
    return decay.times(p / fma(a, fma(0x1.40d932p+1f, p, q), 1.0f));
  }
  // libm's error function, and what the rounding of its argument takes from it.
  FUSED_OPS_HD static double tail(double a, double, double density, const Decay<double>&) {
    const Extended<double> x = multiply(a, Extended<double>(0x1.6a09e667f3bcdp-1, -0x1.bdd3413b26456p-55));
    return fma(-1.4142135623730950 * x.low, density, 0.5 * ::erfc(x.high));
  }
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
