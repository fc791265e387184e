// SPDX-License-Identifier: Apache-2.0
// The activations, through vectorized loops, against libm in more precision. Prints JSON.
//
//   activation_accuracy sweep <points>     the largest errors over about that many numbers, and a digest of all results
//   activation_accuracy at <x> <x> ...     value and derivative, in float, at each x
//
// An error is in units of epsilon (2^-23 in float) times the exact value; of a derivative, times the sum of the
// magnitudes of its terms. Below the normal range it is in units of the smallest subnormal number, times |x|^3 if that
// is above 1: by such a factor a result can be larger than one from which it is made. Of a Function16 it is in units of
// 2^-12, also times the value or the terms, but at most 2^-19 |x| and 2^-17, and at least 2^-115.
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#if defined(TEST_AVX2)
#define FUSED_OPS_LEVEL avx2
#define FUSED_OPS_HAS_FMA 1
#pragma GCC target("avx2,fma,f16c")
#elif defined(TEST_AVX512)
#define FUSED_OPS_LEVEL avx512
#define FUSED_OPS_HAS_FMA 1
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "core/activations.h"

namespace {

using namespace fused_ops;

template <class R>
struct Exact {
  R value, derivative;
  R scale;  // of the derivative
};

template <class R>
Exact<R> sum_of(R value, R first, R second) {
  return {value, first + second, std::fabs(first) + std::fabs(second)};
}

template <class R>
R logistic(R x) {
  return 1 / (1 + std::exp(-x));
}

// x * logistic(y), where slope is the derivative of y by x.
template <class R>
Exact<R> gated(R x, R y, R slope) {
  return sum_of(x * logistic(y), logistic(y), x * (logistic(y) * logistic(-y)) * slope);
}

// R is the type to compute in; x is a T.
struct Name {  // of an activation, as a template argument: `exact` is called many millions of times
  char text[16] = {};
  constexpr Name(const char* from) {
    for (int i = 0; from[i]; ++i) text[i] = from[i];
  }
  constexpr bool operator==(const char* other) const { return std::string_view(text) == other; }
};

template <Name name, class T, class R>
Exact<R> exact(const double* p, T input, T output) {
  const R x = input, y = output, zero = 0, one = 1;
  const R pi = std::acos(R(-1)), end = 150;
  const R bounded = std::clamp(x, -end, end);  // what is 0 beyond is not to become 0 times infinity
  const auto relative = [](R value, R derivative) { return Exact<R>{value, derivative, 0}; };
  if constexpr (name == "identity") return relative(x, 1);
  if constexpr (name == "relu") return relative(std::max(x, zero), x > 0);
  if constexpr (name == "relu_squared") return relative(x > 0 ? x * x : 0, x > 0 ? 2 * x : 0);
  if constexpr (name == "gelu") {
    const R probability = std::erfc(-x / std::sqrt(R(2))) / 2;
    return sum_of(x * probability, probability, x * std::exp(-bounded * bounded / 2) / std::sqrt(2 * pi));
  }
  if constexpr (name == "gelu_tanh") {
    const R a = 1.5957691216057308, b = 0.071354816272600249;
    return gated(x, bounded * (a + b * bounded * bounded), a + 3 * b * bounded * bounded);
  }
  if constexpr (name == "quick_gelu") return gated(x, R(1.702) * x, R(1.702));
  if constexpr (name == "silu") return gated(x, x, one);
  if constexpr (name == "mish") {
    const R t = std::tanh(std::log1p(std::exp(x)));
    const R e = std::exp(-std::fabs(x)), n = x < 0 ? e * (e + 2) : 1 + 2 * e, d = x < 0 ? n + 2 : n + 2 * e * e;
    return sum_of(x * t, t, x * (4 * (1 + e) * (x < 0 ? e : e * e) / (d * d)));
  }
  if constexpr (name == "sigmoid") return relative(logistic(x), y * (1 - y));
  if constexpr (name == "tanh") return relative(std::tanh(x), (1 - y) * (1 + y));
  if constexpr (name == "leaky_relu") return relative(x > 0 ? x : R(p[0]) * x, x > 0 ? one : R(p[0]));
  if constexpr (name == "elu")
    return relative(x > 0 ? x : R(p[0]) * std::expm1(x), x > 0 ? one : R(p[0]) * std::exp(x));
  if constexpr (name == "selu") {
    const R scale = R(1.0507009873554804934193349852946L), alpha = R(1.6732632423543772848170429916717L);
    return relative(scale * (x > 0 ? x : alpha * std::expm1(x)), scale * (x > 0 ? one : alpha * std::exp(x)));
  }
  if constexpr (name == "celu") {
    const R rate = R(1 / p[0]);
    return relative(x > 0 ? x : R(p[0]) * std::expm1(x * rate), x > 0 ? one : std::exp(x * rate));
  }
  if constexpr (name == "softplus") {
    const R beta = p[0], v = beta * x;
    if (T(p[0]) * input > T(p[1])) return relative(x, 1);
    return relative((std::max(v, zero) + std::log1p(std::exp(-std::fabs(v)))) / beta, logistic(v));
  }
  if constexpr (name == "hardtanh") return relative(std::clamp(x, R(p[0]), R(p[1])), x > R(p[0]) && x < R(p[1]));
  if constexpr (name == "relu6") return relative(std::clamp(x, zero, R(6)), x > 0 && x < 6);
  if constexpr (name == "hardswish") {
    const R value = x * (std::clamp(x + 3, zero, R(6)) / 6);
    return x <= -3 ? relative(value, 0) : x >= 3 ? relative(value, 1) : sum_of(value, x / 3, one / 2);
  }
  if constexpr (name == "hardsigmoid")
    return relative(std::clamp(x + 3, zero, R(6)) / 6, x > -3 && x < 3 ? one / 6 : 0);
}

struct Worst {
  double error = 0, at = 0;
};

template <class T, class R>
void compare(Worst& worst, T x, T result, R expected, R scale) {
  const R cube = std::clamp(std::fabs(R(x) * x * x), R(1), R(1 << 14));
  const R smallest = std::numeric_limits<T>::min() * cube;
  scale = std::max({std::fabs(expected), scale, smallest});
  double error = double(std::fabs(R(result) - expected) / (scale * std::numeric_limits<T>::epsilon()));
  if (result == T(expected)) error = 0;  // infinities
  if (error != error) error = std::numeric_limits<double>::max();
  if (error > worst.error) worst = {error, double(x)};
}

constexpr int kBlock = 1024;

template <class Activation, class T, class Function>
__attribute__((noinline)) void apply(const Function& f, const T* __restrict__ x, T* __restrict__ value,
                                     T* __restrict__ derivative) {
  const Function function = f;
  for (int i = 0; i < kBlock; ++i) {
    value[i] = function.value(x[i]);
    derivative[i] = function.derivative(Activation::kSaved == Saved::kInput ? x[i] : value[i]);
  }
}

// Bit patterns spread over all numbers, then over those of magnitudes 2^-9 to 2^7 (float) or 2^10 (double), by strides
// that are odd.
template <class T>
std::vector<T> numbers(int64_t points) {
  using Bits = typename DecayConstants<T>::Bits;
  constexpr int kFraction = DecayConstants<T>::kFractionBits, kBias = DecayConstants<T>::kBias;
  std::vector<T> all;
  const auto add = [&](Bits magnitude) {
    for (const Bits sign : {Bits(0), Bits(1)}) {
      const T x = bit_cast<T>(magnitude | sign << (8 * sizeof(T) - 1));
      all.push_back(std::isfinite(x) ? x : T(0));
    }
  };
  const auto spread = [&](Bits begin, Bits end) {
    const Bits stride = (end - begin) / Bits(points / 4) | 1;
    Bits magnitude = begin;
    for (int64_t i = 0; i < points / 4; ++i, magnitude += stride) add(magnitude);
  };
  spread(0, Bits(2 * kBias + 1) << kFraction);
  spread(Bits(kBias - 9) << kFraction, Bits(kBias + (sizeof(T) == sizeof(float) ? 7 : 10)) << kFraction);
  while (all.size() % kBlock != 0) all.push_back(T(1));
  return all;
}

void print(const char* activation, const char* oracle, const char* type, const double* parameters, uint64_t digest,
           const Worst& value, const Worst& derivative) {
  std::printf(
      "{\"activation\": \"%s\", \"oracle\": \"%s\", \"type\": \"%s\", \"parameters\": [%g, %g], \"digest\": "
      "\"%016llx\", \"value\": %.4g, \"value_at\": %.9g, \"derivative\": %.4g, \"derivative_at\": %.9g}",
      activation, oracle, type, parameters[0], parameters[1], static_cast<unsigned long long>(digest), value.error,
      value.at, derivative.error, derivative.at);
}

template <class Activation, Name oracle, class T, class R>
void sweep(const double* parameters, const std::vector<T>& x) {
  const typename Activation::template Function<T> function(parameters);
  Worst worst_value, worst_derivative;
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  for (size_t begin = 0; begin < x.size(); begin += kBlock) {
    T value[kBlock], derivative[kBlock];
    apply<Activation>(function, &x[begin], value, derivative);
    for (int i = 0; i < kBlock; ++i) {
      const T input = x[begin + size_t(i)];
      const Exact<R> expected = exact<oracle, T, R>(parameters, input, value[i]);
      compare(worst_value, input, value[i], expected.value, R(0));
      compare(worst_derivative, input, derivative[i], expected.derivative, expected.scale);
      for (const T result : {value[i], derivative[i]})
        digest = (digest ^ bit_cast<typename DecayConstants<T>::Bits>(result)) * 1099511628211u;
    }
  }
  print(Activation::kName, oracle.text, sizeof(T) == sizeof(float) ? "float32" : "float64", parameters, digest,
        worst_value, worst_derivative);
}

template <class Activation, Name oracle, class Function>
void sweep16(const std::vector<float>& x) {
  const double none[kMaxActivationParameters] = {};
  Worst worst_value, worst_derivative;
  uint64_t digest = 14695981039346656037u;
  for (size_t begin = 0; begin < x.size(); begin += kBlock) {
    float value[kBlock], derivative[kBlock];
    apply<Activation>(Function(none), &x[begin], value, derivative);
    for (int i = 0; i < kBlock; ++i) {
      const float input = x[begin + size_t(i)];
      const Exact<double> expected = exact<oracle, float, double>(none, input, value[i]);
      const auto note = [&](Worst& worst, float result, double wanted, double scale, double most) {
        const double error = std::fabs(double(result) - wanted) / std::max(0x1p-115, std::min(0x1p-12 * scale, most));
        if (!(error <= worst.error)) worst = {error == error ? error : std::numeric_limits<double>::max(), input};
        digest = (digest ^ bit_cast<uint32_t>(result)) * 1099511628211u;
      };
      note(worst_value, value[i], expected.value, std::fabs(expected.value), 0x1p-19 * std::fabs(double(input)));
      note(worst_derivative, derivative[i], expected.derivative, expected.scale, 0x1p-17);
    }
  }
  print(Activation::kName, oracle.text, "16 bits", none, digest, worst_value, worst_derivative);
}

template <class Activation, class Function>
void evaluate(const char* type, const double* parameters, float x) {
  float xs[kBlock], value[kBlock], derivative[kBlock];
  std::fill(xs, xs + kBlock, x);
  apply<Activation>(Function(parameters), xs, value, derivative);
  std::printf(
      "{\"activation\": \"%s\", \"type\": \"%s\", \"parameters\": [%g, %g], \"x\": \"%.9g\", \"value\": \"%.9g\", "
      "\"derivative\": \"%.9g\"}",
      Activation::kName, type, parameters[0], parameters[1], double(x), double(value[0]), double(derivative[0]));
}

const char* separator() {
  static bool first = true;
  return std::exchange(first, false) ? "[" : ",\n ";
}

// Calls visitor.operator()<Activation>(parameters) for each, with its defaults and with others.
template <class Visitor>
void for_each_activation(Visitor&& visitor) {
  for (int i = 0; i < kActivationCount; ++i)
    visit_activation(i, [&]<class Activation>() {
      constexpr int kCount = parameter_count<Activation>();
      double defaults[kMaxActivationParameters] = {};
      int parameter = 0;
      for (const Parameter& p : Activation::kParameters) defaults[parameter++] = p.value;
      std::printf("%s", separator());
      visitor.template operator()<Activation>(defaults);
      if constexpr (kCount > 0) {
        const double others[] = {kCount == 1 ? 0.3 : std::strcmp(Activation::kName, "softplus") == 0 ? 0.7 : -0.75, 4};
        std::printf("%s", separator());
        visitor.template operator()<Activation>(others);
      }
    });
}

}  // namespace

int main(int argument_count, char** arguments) {
  const std::string command = argument_count > 1 ? arguments[1] : "";
  if (command == "sweep" && argument_count == 3) {
    const std::vector<float> floats = numbers<float>(std::atoll(arguments[2]));
    const std::vector<double> doubles = numbers<double>(std::min(std::atoll(arguments[2]), 1LL << 16));
    for_each_activation([&]<class Activation>(const double* parameters) {
      sweep<Activation, Activation::kName, float, double>(parameters, floats);
      std::printf("%s", separator());
      sweep<Activation, Activation::kName, double, long double>(parameters, doubles);
      if constexpr (requires { typename Activation::Function16; }) {
        std::printf("%s", separator());
        sweep16<Activation, Activation::kName, typename Activation::Function16>(floats);
      }
    });
    // Functions that are nearly the oracle's: their errors must be seen.
    const double none[kMaxActivationParameters] = {};
    std::printf("%s", separator());
    sweep<GELUTanh, "gelu", float, double>(none, floats);
    std::printf("%s", separator());
    sweep16<GELU, "gelu_tanh", GELU::Function16>(floats);
  } else if (command == "at") {
    for (int i = 2; i < argument_count; ++i)
      for_each_activation([&]<class Activation>(const double* parameters) {
        const float x = std::strtof(arguments[i], nullptr);
        evaluate<Activation, typename Activation::template Function<float>>("float32", parameters, x);
        if constexpr (requires { typename Activation::Function16; }) {
          std::printf("%s", separator());
          evaluate<Activation, typename Activation::Function16>("16 bits", parameters, x);
        }
      });
  } else {
    std::fprintf(stderr, "activation_accuracy sweep <points> | at <x> <x> ...\n");
    return 1;
  }
  std::printf("]\n");
}
