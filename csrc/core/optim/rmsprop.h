// SPDX-License-Identifier: Apache-2.0
// RMSprop: steps scaled by a running average of the squared gradient.
// Tieleman & Hinton, 2012, Neural Networks for Machine Learning, lecture 6.5. Centered: Graves, 2013,
// https://arxiv.org/abs/1308.0850 (equations 38 to 45).
//
//   g <- g + weight_decay * p
//   s <- alpha * s + (1 - alpha) * g^2
//   a <- a + (1 - alpha) * (g - a)                       (centered)
//   u <- g / (sqrt(s) + eps)                             (centered: sqrt(max(s - a^2, 0)) + eps)
//   b <- momentum * b + u,  u <- b                       (momentum)
//   p <- p - lr * u
//
// The clamp is a deviation from torch.optim, where rounding can make s - a^2 negative and the step NaN.
#pragma once

#include "core/math.h"
#include "core/optim/rule.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct RMSprop {
  static constexpr const char* kName = "rmsprop";
  static constexpr const char* kStateNames[] = {"square_avg", "grad_avg", "momentum_buffer"};
  enum State { kSquareAvg, kGradAvg, kMomentumBuffer };
  static constexpr unsigned kVariants[] = {0b001, 0b011, 0b101, 0b111};
  static constexpr bool kCountsSteps = true;

  struct Hyperparameters {
    double lr, alpha, eps, weight_decay, momentum, centered, maximize;
  };
  static constexpr const char* kHyperparameterNames[] = {"lr",       "alpha",    "eps",     "weight_decay",
                                                         "momentum", "centered", "maximize"};
  static unsigned states(const Hyperparameters& h) {
    return 0b001 | (h.centered != 0 ? 0b010 : 0) | (h.momentum > 0 ? 0b100 : 0);
  }

  template <class T, unsigned kStates>
  struct Rule {
    T grad_factor, weight_decay, alpha, one_minus_alpha, eps, momentum, lr;

    FUSED_OPS_HD Rule(const Hyperparameters& h, double, double grad_factor_)
        : grad_factor(T(grad_factor_)),
          weight_decay(T(h.weight_decay)),
          alpha(T(h.alpha)),
          one_minus_alpha(T(1 - h.alpha)),
          eps(T(h.eps)),
          momentum(T(h.momentum)),
          lr(T(h.lr)) {}

    template <class V>
    FUSED_OPS_HD void operator()(V& param, V grad, V* state) const {
      grad = add_decay(weight_decay, param, grad_factor * grad);
      V& square_avg = state[kSquareAvg];
      square_avg = fma(one_minus_alpha * grad, grad, alpha * square_avg);
      V variance = square_avg;
      if constexpr (has_state(kStates, kGradAvg)) {
        V& grad_avg = state[kGradAvg];
        grad_avg = lerp(grad_avg, grad, one_minus_alpha);
        variance = fma(-grad_avg, grad_avg, square_avg);
        variance = select(variance < T(0), V(T(0)), variance);
      }
      V update = grad / (sqrt(variance) + eps);
      if constexpr (has_state(kStates, kMomentumBuffer))
        update = state[kMomentumBuffer] = fma(momentum, state[kMomentumBuffer], update);
      param = fma(-lr, update, param);
    }
  };
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
