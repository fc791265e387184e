// SPDX-License-Identifier: Apache-2.0
// Adagrad: steps scaled by the sum of all squared gradients.
// Duchi, Hazan & Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html (section 1.2, diagonal form).
//
//   g <- g + weight_decay * p
//   s <- s + g^2
//   p <- p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)
#pragma once

#include "core/math.h"
#include "core/optim/rule.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr const char* kStateNames[] = {"sum"};
  enum State { kSum };
  static constexpr unsigned kVariants[] = {0b1};
  static constexpr bool kCountsSteps = true;

  struct Hyperparameters {
    double lr, lr_decay, eps, weight_decay, maximize;
  };
  static constexpr const char* kHyperparameterNames[] = {"lr", "lr_decay", "eps", "weight_decay", "maximize"};
  static unsigned states(const Hyperparameters&) { return 0b1; }

  template <class T, unsigned kStates>
  struct Rule {
    T grad_factor, weight_decay, eps, step_size;

    FUSED_OPS_HD Rule(const Hyperparameters& h, double step, double grad_factor_)
        : grad_factor(T(grad_factor_)),
          weight_decay(T(h.weight_decay)),
          eps(T(h.eps)),
          step_size(T(h.lr / (1 + (step - 1) * h.lr_decay))) {}

    template <class V>
    FUSED_OPS_HD void operator()(V& param, V grad, V* state) const {
      grad = add_decay(weight_decay, param, grad_factor * grad);
      V& sum = state[kSum];
      sum = fma(grad, grad, sum);
      param = fma(-step_size, grad / (sqrt(sum) + eps), param);
    }
  };
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
