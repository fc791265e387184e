// SPDX-License-Identifier: Apache-2.0
// The feed-forward block as a node of autograd's graph.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <string>
#include <vector>

#include "torch/feed_forward.h"

namespace fused_ops {

// What a node remembers of its call, besides the tensors that autograd saves.
struct BlockCall {
  ActivationCall activation;
  std::string name;
  std::vector<double> parameters;
  std::array<bool, kOperands> required{};
  bool gated = false, down = false;
  bool plain = false;  // computed here, not through the dispatcher
  bool saved_is_output = false, saves_nothing = false;
  bool reuse = false;  // what is saved is the node's alone
  c10::SmallVector<c10::SymInt, 5> input_sizes;
  Operands leaves;      // weights whose gradients are to be added in place
  Operands main_grads;  // where to, if not to .grad
};

// The block's output, of which the operands' gradients can be asked: needs at least one of them that is `required`.
at::Tensor differentiable_forward(const Operands& operands, BlockCall call);

}  // namespace fused_ops
