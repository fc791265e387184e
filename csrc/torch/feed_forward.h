// SPDX-License-Identifier: Apache-2.0
// A feed-forward block in native code, without autograd:
//
//   hidden = act(input W^T + b) [* (input U^T + c)],     output = hidden [D^T + d]
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>

#include "torch/activations.h"

namespace fused_ops {

// The tensors of one call, in the order of the operator's arguments; undefined where there is none.
enum Operand { kInput, kWeight, kBias, kUpWeight, kUpBias, kDownWeight, kDownBias, kOperands };
using Operands = std::array<at::Tensor, kOperands>;
const char* operand_name(Operand operand);

struct Forward {
  at::Tensor output;
  at::Tensor saved;  // undefined where backward needs nothing, or the output itself
  at::Tensor up;     // undefined without a gate
};

// Raises where the operands do not fit together, before anything is computed.
void check_operands(const Operands& operands);

// Whether this file can do the work: floating-point strided tensors of one dtype on the CPU or a CUDA device.
bool is_native(const Operands& operands);

// Whether it may read their memory here and now, too: no subclass, lazy view or wrapper of a transform.
bool is_plain(const Operands& operands);

Forward forward(const ActivationCall& activation, const Operands& operands, bool training);

// Where the gradient of a weight is added instead of being returned, if it is defined: by one thread at a time, and if
// it is a leaf's .grad, as long as it is that.
struct GradientSum {
  at::Tensor into;
  std::mutex* mutex = nullptr;
  at::Tensor leaf;  // undefined: `into` is no .grad
};
using GradientSums = std::array<GradientSum, kOperands>;

// The gradients of the operands that are `wanted`. Of the operands, those are needed that the wanted ones are made of:
// input for weights, weights for input. With `overwrite`, saved and up are nobody else's any more and may be changed.
Operands backward(const ActivationCall& activation, const at::Tensor& grad_out, const Operands& operands,
                  const at::Tensor& saved, const at::Tensor& up, const std::array<bool, kOperands>& wanted,
                  bool overwrite, const GradientSums& sums = {});

// What `forward` saves where it saves neither the output nor nothing: act(pre) where the activation is differentiated
// from its output, else pre; with its bias.
bool saves_output(const ActivationCall& activation, const Operands& operands);
bool saves_nothing(const ActivationCall& activation, const Operands& operands);

}  // namespace fused_ops
