// SPDX-License-Identifier: Apache-2.0
// What every optimizer rule shares. A rule file defines one struct:
//
//   kName, kStateNames         as in torch.optim's state_dict
//   kVariants                  the sets of states it is compiled for, each a bit mask over kStateNames
//   kCountsSteps               whether the state holds `step`
//   Hyperparameters            doubles only, in the order of kHyperparameterNames
//   states(h)                  the set of states that these hyperparameters use: one of kVariants
//   Rule<T, kStates>           built from (hyperparameters, step, grad_factor) in double; called for one element, of
//                              type V: T or a vector of T, to which T converts
//
// grad_factor is 1 / grad_scale, negated to maximize.
#pragma once

#include "core/host_device.h"
#include "core/math.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

FUSED_OPS_HD constexpr bool has_state(unsigned states, int index) { return states >> index & 1u; }

// grad + weight_decay * param. Without decay an infinite param leaves grad alone.
template <class T, class V>
FUSED_OPS_HD V add_decay(T weight_decay, V param, V grad) {
  return weight_decay != T(0) ? fma(weight_decay, param, grad) : grad;
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
