// SPDX-License-Identifier: Apache-2.0
// Every activation, once: a struct below and its name in the list at the end.
//
//   kName, kParameters     as in Python; parameters with their defaults
//   kSaved                 what the derivative is computed from: the input, or the output where that is enough
//   kMasks                 if true: where the derivative is 0 the gradient is 0 even if what it multiplies is not
//   Function<T>            built from the parameters; value(input) and derivative(saved), of one element
//   Function16             optional: a faster one, in float, for what comes from and goes to 16 bits on the CPU
//
// T is float or double. Everything is branch-free, so that a loop over elements vectorizes. Where value and derivative
// are both wanted, what they share is computed once: the compiler sees that the expressions are the same.
//
// At a kink the derivative is torch's. NaN gives NaN. With fused multiply-add the error of a value is below 2.25
// epsilon of the value, also in the tails, and that of a derivative below 2.5 epsilon of the sum of the magnitudes of
// its terms; without, both are below 3. Those of a Function16 are below 2^-12, and 2^-19 |x| and 2^-17 at
// the most, which vanishes when it is rounded to 16 bits.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "core/host_device.h"
#include "core/math.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct Parameter {
  const char* name;
  double value;  // the default
};
constexpr int kMaxActivationParameters = 2;

struct NoParameters {
  constexpr const Parameter* begin() const { return nullptr; }
  constexpr const Parameter* end() const { return nullptr; }
};

template <class Activation>
constexpr int parameter_count() {
  int count = 0;
  for (const Parameter& parameter : Activation::kParameters) count += parameter.name != nullptr;
  return count;
}

enum class Saved { kInput, kOutput };

template <class T>
FUSED_OPS_HD T relu(T x) {
  return x < T(0) ? T(0) : x;
}

template <class T>
FUSED_OPS_HD T clamp(T x, T min, T max) {
  return x < min ? min : x > max ? max : x;
}

// x.
struct Identity {
  static constexpr const char* kName = "identity";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kOutput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x; }
    FUSED_OPS_HD T derivative(T) const { return T(1); }
  };
};

// max(x, 0). Nair & Hinton, 2010, https://www.cs.toronto.edu/~fritz/absps/reluICML.pdf.
struct ReLU {
  static constexpr const char* kName = "relu";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kOutput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return relu(x); }
    FUSED_OPS_HD T derivative(T y) const { return y <= T(0) ? T(0) : T(1); }
  };
};

// max(x, 0)^2. So et al., 2021, https://arxiv.org/abs/2109.08668.
struct ReLUSquared {
  static constexpr const char* kName = "relu_squared";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return relu(x) * relu(x); }
    FUSED_OPS_HD T derivative(T x) const { return T(2) * relu(x); }
  };
};

// x * P(X <= x) for a standard normal X. Hendrycks & Gimpel, 2016, https://arxiv.org/abs/1606.08415.
struct GELU {
  static constexpr const char* kName = "gelu";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const {
      const T a = magnitude(x, NormalTail<T>::kEnd);
      return fma(x < T(0) ? x : -a, NormalTail<T>(a).probability, x < T(0) ? T(-0.0) : x);
    }
    FUSED_OPS_HD T derivative(T x) const {
      const NormalTail<T> tail(magnitude(x, NormalTail<T>::kEnd));
      const T at_minus = fma(-abs(x), tail.density, tail.probability);
      return x < T(0) ? at_minus : T(1) - at_minus;
    }
  };

  // P(X <= -a) as a power of 2 whose exponent is a polynomial in a, and the derivative there by that and the ratio of
  // density and probability, another one: no division, and no precision that 16 bits do not keep.
  struct Function16 {
    FUSED_OPS_HD explicit Function16(const double*) {}
    FUSED_OPS_HD float value(float x) const {
      const float a = magnitude(x, kEnd);
      return fma(x < 0.0f ? x : -a, probability(a), x < 0.0f ? -0.0f : x);
    }
    FUSED_OPS_HD float derivative(float x) const {
      const float a = magnitude(x, kEnd), v = centred(a);
      const float ratio = polynomial(v, v * v, 0x1.a329e6p+2f, 0x1.9115dcp+2f, 0x1.fd6ef2p-4f, -0x1.1a6844p-3f,
                                     0x1.b91db8p-5f, 0x1.135914p-6f, 0x1.bff91p-4f, -0x1.b5709cp-4f);
      const float at_minus = probability(a) * fma(-a, ratio, 1.0f);
      return fma(0.0f, x, x < 0.0f ? at_minus : 1.0f - at_minus);  // NaN at infinities, as torch's
    }

   private:
    static constexpr float kEnd = 12.8f;  // 0 from here on; just before it is 2^-123
    FUSED_OPS_HD static float centred(float a) { return fma(a, 2 / kEnd, -1.0f); }
    FUSED_OPS_HD static float probability(float a) {
      constexpr float kRounder = DecayConstants<float>::kRounder;
      const float v = centred(a);
      const float per_a = polynomial(v, v * v, 0x1.45d54p+2f, 0x1.16e1e2p+2f, 0x1.4a5276p-3f, -0x1.9fd77cp-4f,
                                     0x1.df3572p-5f, -0x1.46c308p-5f, 0x1.241b6p-5f, -0x1.2cbfcep-6f, 0x1.344bap-9f);
      const float halvings = fma(a, per_a, 1.0f);
      const float rounded = halvings + kRounder, rest = halvings - (rounded - kRounder);
      const float power = polynomial(rest, rest * rest, 0x1.ffffe8p-1f, -0x1.62e0dcp-1f, 0x1.ec06dap-3f, -0x1.ca144p-5f,
                                     0x1.3997d4p-7f);  // 2^-rest
      const float result = bit_cast<float>(bit_cast<uint32_t>(power) - (bit_cast<uint32_t>(rounded) << 23));
      return a < kEnd ? result : 0.0f;
    }
  };
};

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), which is x * logistic(a * x + b * x^3).
// Hendrycks & Gimpel, 2016, https://arxiv.org/abs/1606.08415.
struct GELUTanh {
  static constexpr const char* kName = "gelu_tanh";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x * logistic(x).value; }
    FUSED_OPS_HD T derivative(T x) const {
      const T m = magnitude(x, kEnd), slope = fma(T(3 * kB), m * m, T(kA));
      return fma(x, logistic(x).value * logistic(x).complement * slope, logistic(x).value);
    }

   private:
    static constexpr double kA = 1.5957691216057308, kB = 0.071354816272600249;
    static constexpr T kEnd = sizeof(T) == sizeof(float) ? T(10.7) : T(21.52);  // the logistic function rounds to 0

    // The exponent with more precision than T has, since its absolute error is the relative error of the result.
    FUSED_OPS_HD static Logistic<T> logistic(T x) {
      constexpr T kAHigh = T(0x1.988p+0), kALow = T(kA - 0x1.988p+0);  // the sum below is exact
      constexpr T kBHigh = T(kB), kBLow = T(kB - double(T(kB)));
      const T m = magnitude(x, kEnd);
      const T square = m * m, square_low = fma_cancelling(m, m, -square);
      const T factor = fma(kBHigh, square, kAHigh);
      const T factor_low = fma_cancelling(kBHigh, square, kAHigh - factor) +
                           fma(kBHigh, square_low, fma(kBLow, square, kALow));
      return Logistic<T>(x, Decay<T>(multiply(m, Extended<T>(factor, factor_low))));
    }
  };
};

// x * logistic(1.702 * x). Hendrycks & Gimpel, 2016, https://arxiv.org/abs/1606.08415.
struct QuickGELU {
  static constexpr const char* kName = "quick_gelu";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x * logistic(x).value; }
    FUSED_OPS_HD T derivative(T x) const {
      return fma(x, T(1.702) * logistic(x).value * logistic(x).complement, logistic(x).value);
    }

   private:
    FUSED_OPS_HD static Logistic<T> logistic(T x) {
      return Logistic<T>(x, Decay<T>(Decay<T>::limited(multiply(abs(x), Extended<T>(1.702)))));
    }
  };
};

// x * logistic(x), also known as Swish. Elfwing et al., 2017, https://arxiv.org/abs/1702.03118.
struct SiLU {
  static constexpr const char* kName = "silu";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x * Logistic<T>(x).value; }
    FUSED_OPS_HD T derivative(T x) const {
      const Logistic<T> logistic(x);
      return fma(x, logistic.value * logistic.complement, logistic.value);
    }
  };
};

// x * tanh(softplus(x)). Misra, 2019, https://arxiv.org/abs/1908.08681.
//
// With e = exp(-|x|), tanh(softplus(x)) is e * (2 + e) / (2 + e * (2 + e)) for x < 0, or
// (1 + 2e) / (1 + e * (2 + 2e)) for x >= 0: the same as 1 - e * w, times e for x < 0, with a small w.
struct Mish {
  static constexpr const char* kName = "mish";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x * Parts(x).tanh_softplus; }
    FUSED_OPS_HD T derivative(T x) const {
      const Parts parts(x);
      return fma(x, parts.slope, parts.tanh_softplus);
    }

   private:
    struct Parts {
      T tanh_softplus, slope;  // and its derivative
      FUSED_OPS_HD explicit Parts(T x) {
        const Decay<T> decay(abs(x));
        const T e = decay.value();
        const bool negative = x < T(0);
        const T denominator = fma(e, negative ? T(2) + e : T(2) + T(2) * e, negative ? T(2) : T(1));
        const T w = (negative ? T(1) + e : T(2) * e) / denominator;
        const T rest = fma(-e, w, T(1));
        tanh_softplus = select(negative, decay.times(rest), rest);
        const T root = negative ? T(1) - tanh_softplus : w;
        const T square = (T(1) + e) * root * root;
        slope = select(negative, decay.times(square), square);
      }
    };
  };
};

// 1 / (1 + exp(-x)).
struct Sigmoid {
  static constexpr const char* kName = "sigmoid";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kOutput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return Logistic<T>(x).value; }
    FUSED_OPS_HD T derivative(T y) const { return y * (T(1) - y); }
  };
};

// tanh(x).
struct Tanh {
  static constexpr const char* kName = "tanh";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kOutput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return tanh(x); }
    FUSED_OPS_HD T derivative(T y) const { return (T(1) - y) * (T(1) + y); }
  };
};

// x where x > 0, negative_slope * x elsewhere; negative_slope >= 0. Maas et al., 2013,
// https://ai.stanford.edu/~amaas/papers/relu_hybrid_icml2013_final.pdf.
struct LeakyReLU {
  static constexpr const char* kName = "leaky_relu";
  static constexpr Parameter kParameters[] = {{"negative_slope", 0.01}};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    T negative_slope;
    FUSED_OPS_HD explicit Function(const double* parameters) : negative_slope(T(parameters[0])) {}
    FUSED_OPS_HD T value(T x) const { return x > T(0) ? x : negative_slope * x; }
    FUSED_OPS_HD T derivative(T x) const { return x > T(0) ? T(1) : negative_slope; }
  };
};

// x where x > 0, alpha * (exp(x) - 1) elsewhere. Clevert et al., 2015, https://arxiv.org/abs/1511.07289.
struct ELU {
  static constexpr const char* kName = "elu";
  static constexpr Parameter kParameters[] = {{"alpha", 1.0}};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    T alpha;
    FUSED_OPS_HD explicit Function(const double* parameters) : alpha(T(parameters[0])) {}
    FUSED_OPS_HD T value(T x) const { return select(x < T(0), -alpha * decay(x).one_minus(), x); }
    FUSED_OPS_HD T derivative(T x) const { return select(x > T(0), T(1), decay(x).times(alpha)); }

   private:
    FUSED_OPS_HD static Decay<T> decay(T x) { return Decay<T>(x > T(0) ? T(0) : -x); }  // e^x for x < 0
  };
};

// scale * ELU(x) with the one alpha and scale that keep mean 0 and variance 1. Klambauer et al., 2017,
// https://arxiv.org/abs/1706.02515.
struct SELU {
  static constexpr const char* kName = "selu";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return select(x < T(0), -kScaledAlpha * decay(x).one_minus(), kScale * x); }
    FUSED_OPS_HD T derivative(T x) const { return select(x > T(0), kScale, decay(x).times(kScaledAlpha)); }

   private:
    static constexpr T kScale = T(1.0507009873554804934), kScaledAlpha = T(1.7580993408473768600);
    FUSED_OPS_HD static Decay<T> decay(T x) { return Decay<T>(x > T(0) ? T(0) : -x); }  // e^x for x < 0
  };
};

// x where x > 0, alpha * (exp(x / alpha) - 1) elsewhere; alpha > 0. Barron, 2017, https://arxiv.org/abs/1704.07483.
struct CELU {
  static constexpr const char* kName = "celu";
  static constexpr Parameter kParameters[] = {{"alpha", 1.0}};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    T alpha;
    Extended<T> rate;
    FUSED_OPS_HD explicit Function(const double* parameters) : alpha(T(parameters[0])), rate(1 / parameters[0]) {}
    FUSED_OPS_HD T value(T x) const { return select(x < T(0), -alpha * decay(x).one_minus(), x); }
    FUSED_OPS_HD T derivative(T x) const { return select(x > T(0), T(1), decay(x).value()); }

   private:
    FUSED_OPS_HD Decay<T> decay(T x) const {  // e^(x / alpha) for x < 0
      return Decay<T>(Decay<T>::limited(multiply(x > T(0) ? T(0) : -x, rate)));
    }
  };
};

// ln(1 + exp(beta * x)) / beta; x where beta * x > threshold. Dugas et al., 2001, Incorporating second-order functional
// knowledge for better option pricing.
struct Softplus {
  static constexpr const char* kName = "softplus";
  static constexpr Parameter kParameters[] = {{"beta", 1.0}, {"threshold", 20.0}};
  static constexpr Saved kSaved = Saved::kInput;
  template <class T>
  struct Function {
    T beta, inverse_beta, threshold;
    Extended<T> rate;
    FUSED_OPS_HD explicit Function(const double* parameters)
        : beta(T(parameters[0])),
          inverse_beta(T(1 / parameters[0])),
          threshold(T(parameters[1])),
          rate(abs(parameters[0])) {}
    FUSED_OPS_HD T value(T x) const {
      const T smooth = fma(log1p(decay(x).value()), inverse_beta, beta * x > T(0) ? x : T(0));
      return select(beta * x > threshold, x, smooth);
    }
    FUSED_OPS_HD T derivative(T x) const {
      return select(beta * x > threshold, T(1), Logistic<T>(beta * x, decay(x)).value);
    }

   private:
    FUSED_OPS_HD Decay<T> decay(T x) const {  // e^-|beta * x|
      return Decay<T>(Decay<T>::limited(multiply(abs(x), rate)));
    }
  };
};

// x between min_val and max_val, else the nearer of them. Collobert, 2004, Large scale machine learning.
struct Hardtanh {
  static constexpr const char* kName = "hardtanh";
  static constexpr Parameter kParameters[] = {{"min_val", -1.0}, {"max_val", 1.0}};
  static constexpr Saved kSaved = Saved::kInput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    T min, max;
    FUSED_OPS_HD explicit Function(const double* parameters) : min(T(parameters[0])), max(T(parameters[1])) {}
    FUSED_OPS_HD T value(T x) const { return clamp(x, min, max); }
    FUSED_OPS_HD T derivative(T x) const { return x > min && x < max ? T(1) : T(0); }
  };
};

// min(max(x, 0), 6). Krizhevsky, 2010, Convolutional deep belief networks on CIFAR-10.
struct ReLU6 {
  static constexpr const char* kName = "relu6";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return clamp(x, T(0), T(6)); }
    FUSED_OPS_HD T derivative(T x) const { return x > T(0) && x < T(6) ? T(1) : T(0); }
  };
};

// x * min(max(x + 3, 0), 6) / 6. Howard et al., 2019, https://arxiv.org/abs/1905.02244.
struct Hardswish {
  static constexpr const char* kName = "hardswish";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return x * (clamp(x + T(3), T(0), T(6)) * T(1.0 / 6)); }
    FUSED_OPS_HD T derivative(T x) const { return x <= T(-3) ? T(0) : x >= T(3) ? T(1) : fma(x, T(1.0 / 3), T(0.5)); }
  };
};

// min(max(x + 3, 0), 6) / 6. Howard et al., 2019, https://arxiv.org/abs/1905.02244.
struct Hardsigmoid {
  static constexpr const char* kName = "hardsigmoid";
  static constexpr NoParameters kParameters{};
  static constexpr Saved kSaved = Saved::kInput;
  static constexpr bool kMasks = true;
  template <class T>
  struct Function {
    FUSED_OPS_HD explicit Function(const double*) {}
    FUSED_OPS_HD T value(T x) const { return clamp(x + T(3), T(0), T(6)) * T(1.0 / 6); }
    FUSED_OPS_HD T derivative(T x) const { return x > T(-3) && x < T(3) ? T(1.0 / 6) : T(0); }
  };
};

// What computes an activation of elements that are stored as `Storage`, in T.
template <class Activation, class T, class Storage>
struct FunctionFor {
  using Type = typename Activation::template Function<T>;
};
template <class Activation, class T, class Storage>
  requires(sizeof(Storage) == 2 && requires { typename Activation::Function16; })
struct FunctionFor<Activation, T, Storage> {
  using Type = typename Activation::Function16;
};

template <class Activation>
constexpr bool kMasks = requires { Activation::kMasks; };

// The product of the derivative and of the gradient that comes from above.
template <class Activation, class T>
FUSED_OPS_HD T chain(T grad, T derivative) {
  return kMasks<Activation> && derivative == T(0) ? T(0) : grad * derivative;
}

using Activations = std::tuple<Identity, ReLU, ReLUSquared, GELU, GELUTanh, QuickGELU, SiLU, Mish, Sigmoid, Tanh,
                               LeakyReLU, ELU, SELU, CELU, Softplus, Hardtanh, ReLU6, Hardswish, Hardsigmoid>;
constexpr int kActivationCount = std::tuple_size_v<Activations>;

// Calls visitor.operator()<Activation>() for the activation of that index.
template <class Visitor, size_t... kIndex>
void visit_activation(int activation, Visitor&& visitor, std::index_sequence<kIndex...>) {
  ((int(kIndex) == activation ? (visitor.template operator()<std::tuple_element_t<kIndex, Activations>>(), true)
                              : false) ||
   ...);
}

template <class Visitor>
void visit_activation(int activation, Visitor&& visitor) {
  visit_activation(activation, visitor, std::make_index_sequence<kActivationCount>{});
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
