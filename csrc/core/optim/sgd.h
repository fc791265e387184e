// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent with momentum, as torch.optim.SGD defines it.
// Sutskever et al., 2013, On the importance of initialization and momentum in deep learning (Nesterov: section 2).
//
//   g <- g + weight_decay * p
//   b <- momentum * b + (1 - dampening) * g              (the first step: b <- g)
//   u <- g + momentum * b  (Nesterov)   or   u <- b      (without momentum: u <- g)
//   p <- p - lr * u
#pragma once

#include "core/math.h"
#include "core/optim/rule.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct SGD {
  static constexpr const char* kName = "sgd";
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  enum State { kMomentumBuffer };
  static constexpr unsigned kVariants[] = {0b0, 0b1};
  static constexpr bool kCountsSteps = false;

  struct Hyperparameters {
    double lr, momentum, dampening, weight_decay, nesterov, maximize;
  };
  static constexpr const char* kHyperparameterNames[] = {"lr",           "momentum", "dampening",
                                                         "weight_decay", "nesterov", "maximize"};
  static unsigned states(const Hyperparameters& h) { return h.momentum != 0 ? 0b1 : 0b0; }

  template <class T, unsigned kStates>
  struct Rule {
    T grad_factor, weight_decay, buffer_factor, buffer_grad_factor, nesterov_momentum, lr;

    FUSED_OPS_HD Rule(const Hyperparameters& h, double step, double grad_factor_)
        : grad_factor(T(grad_factor_)),
          weight_decay(T(h.weight_decay)),
          buffer_factor(T(step > 1 ? h.momentum : 0)),
          buffer_grad_factor(T(step > 1 ? 1 - h.dampening : 1)),
          nesterov_momentum(T(h.nesterov != 0 ? h.momentum : 0)),
          lr(T(h.lr)) {}

    template <class V>
    FUSED_OPS_HD void operator()(V& param, V grad, V* state) const {
      grad = add_decay(weight_decay, param, grad_factor * grad);
      V update = grad;
      if constexpr (has_state(kStates, kMomentumBuffer)) {
        V& buffer = state[kMomentumBuffer];
        buffer = fma(buffer_factor, buffer, buffer_grad_factor * grad);
        update = nesterov_momentum != T(0) ? fma(nesterov_momentum, buffer, grad) : buffer;
      }
      param = fma(-lr, update, param);
    }
  };
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
