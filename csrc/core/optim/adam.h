// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW: steps scaled by running averages of the gradient and of its square.
// Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980 (Algorithm 1). Decoupled weight decay: Loshchilov & Hutter, 2019,
// https://arxiv.org/abs/1711.05101 (Algorithm 2). AMSGrad: Reddi et al., 2018, https://arxiv.org/abs/1904.09237.
//
//   g <- g + weight_decay * p            (Adam)        p <- (1 - lr * weight_decay) * p     (AdamW)
//   m <- m + (1 - beta1) * (g - m)
//   v <- beta2 * v + (1 - beta2) * g^2
//   u <- v                               (AMSGrad: u, the largest v so far)
//   p <- p - lr / bias1 * m / (sqrt(u / bias2) + eps),           bias_k = 1 - beta_k^step
#pragma once

#include "core/math.h"
#include "core/optim/rule.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  enum State { kExpAvg, kExpAvgSq, kMaxExpAvgSq };
  static constexpr unsigned kVariants[] = {0b011, 0b111};
  static constexpr bool kCountsSteps = true;

  struct Hyperparameters {
    double lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize;
  };
  static constexpr const char* kHyperparameterNames[] = {
      "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize"};
  static unsigned states(const Hyperparameters& h) { return h.amsgrad != 0 ? 0b111 : 0b011; }

  template <class T, unsigned kStates>
  struct Rule {
    T grad_factor, coupled_decay, decoupled_decay, one_minus_beta1, beta2, one_minus_beta2, step_size, rsqrt_bias2, eps;

    FUSED_OPS_HD Rule(const Hyperparameters& h, double step, double grad_factor_)
        : grad_factor(T(grad_factor_)),
          coupled_decay(T(h.decoupled_weight_decay != 0 ? 0 : h.weight_decay)),
          decoupled_decay(T(h.decoupled_weight_decay != 0 ? h.lr * h.weight_decay : 0)),
          one_minus_beta1(T(1 - h.beta1)),
          beta2(T(h.beta2)),
          one_minus_beta2(T(1 - h.beta2)),
          step_size(T(h.lr / (1 - ::pow(h.beta1, step)))),
          rsqrt_bias2(T(1 / ::sqrt(1 - ::pow(h.beta2, step)))),
          eps(T(h.eps)) {}

    template <class V>
    FUSED_OPS_HD void operator()(V& param, V grad, V* state) const {
      grad = add_decay(coupled_decay, param, grad_factor * grad);
      V& exp_avg = state[kExpAvg];
      V& exp_avg_sq = state[kExpAvgSq];
      exp_avg = lerp(exp_avg, grad, one_minus_beta1);
      exp_avg_sq = fma(one_minus_beta2 * grad, grad, beta2 * exp_avg_sq);
      V second_moment = exp_avg_sq;
      if constexpr (has_state(kStates, kMaxExpAvgSq))
        second_moment = state[kMaxExpAvgSq] = maximum(state[kMaxExpAvgSq], exp_avg_sq);
      const V step = step_size * (exp_avg / fma(sqrt(second_moment), rsqrt_bias2, eps));
      // Decay and step are joined before they meet param, which then rounds once. An infinite param, from which decay
      // would subtract infinity, stays infinite.
      const V next = param - fma(decoupled_decay, param, step);
      param = select(next == next, next, param - step);
    }
  };
};

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
