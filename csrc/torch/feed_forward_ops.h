// SPDX-License-Identifier: Apache-2.0
// The feed-forward block with autograd, as called from Python.
#pragma once

#include <string_view>

#include "torch/feed_forward.h"

namespace fused_ops {

// What torch.ops.fused_ops.feed_forward computes, without the dispatcher where nothing but this library could want to
// see the call. With `accumulate`, backward adds the gradients of weights to `main_grads`, or to an existing .grad,
// instead of returning them, unless a hook or a collector of gradients would be bypassed.
at::Tensor feed_forward(const Operands& operands, std::string_view activation, at::ArrayRef<double> parameters,
                        bool accumulate, const Operands& main_grads);

}  // namespace fused_ops
