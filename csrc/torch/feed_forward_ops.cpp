// SPDX-License-Identifier: Apache-2.0
// The feed-forward block as an operator: autograd, autocast, transforms. Its schemas are in registry.cpp.
//
// Function transforms, forward-mode derivatives, and tensors that are no plain CPU or CUDA ones get a composition of
// aten operators; others one node of autograd's graph.
#include <ATen/FuncTorchTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/autocast.h"
#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/feed_forward.h"
#include "torch/feed_forward_node.h"
#include "torch/feed_forward_ops.h"
#include "torch/operators.h"

namespace fused_ops {
namespace {

using at::Tensor;
using c10::DispatchKey;

Tensor or_empty(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor : at::empty({0}, like.options());
}

Operands operands_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& up_weight, const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                     const OptionalTensor& down_bias) {
  return {input,
          weight,
          or_undefined(bias),
          or_undefined(up_weight),
          or_undefined(up_bias),
          or_undefined(down_weight),
          or_undefined(down_bias)};
}

// act(input W^T + b) [* (input U^T + c)] [D^T + d], in aten's operators.
Tensor compose(const ActivationCall& activation, const Operands& operands) {
  Tensor hidden = aten_value(activation, at::linear(operands[kInput], operands[kWeight], or_none(operands[kBias])));
  if (operands[kUpWeight].defined())
    hidden = hidden * at::linear(operands[kInput], operands[kUpWeight], or_none(operands[kUpBias]));
  if (!operands[kDownWeight].defined()) return hidden;
  return at::linear(hidden, operands[kDownWeight], or_none(operands[kDownBias]));
}

using BlockSchema = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, std::string_view,
                           at::ArrayRef<double>);

bool has_forward_gradient(const Operands& operands) {
  for (const Tensor& tensor : operands)
    if (tensor.defined() && torch::autograd::isFwGradDefined(tensor)) return true;
  return false;
}

// Hooks may keep what is saved, or hand the same tensor to several graphs.
bool saved_tensors_have_hooks() {
  return at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// Whether a function transform is under way in this thread. functorch says so by raising alone: the headers that could
// tell otherwise are not installed.
bool in_transform() {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (!functorch) return false;
  try {
    functorch->checkSupportsCppAutogradFunction();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

bool stock_is_faster(const ActivationCall& activation, const Operands& operands, bool differentiable) {
  const Tensor &input = operands[kInput], &weight = operands[kWeight];
  const bool layer = !operands[kUpWeight].defined() && !operands[kDownWeight].defined();  // more saves memory as well
  if (!layer || !is_plain(operands) || weight.dim() != 2 || weight.size(1) == 0) return false;
  const int64_t rows = input.numel() / weight.size(1), columns = weight.size(0);
  constexpr int64_t kFew = 1 << 14;  // elements, for which the call matters more
  if (input.is_cpu() && input.scalar_type() == at::kDouble && rows * columns > kFew && is_scalar_in_double(activation))
    return true;
  return prefers_stock(activation.index, differentiable, input.scalar_type(), rows, weight.size(1), columns);
}

// Where the composition of aten operators runs instead.
bool needs_composition(const ActivationCall& activation, const Operands& operands, bool differentiable,
                       bool accumulate) {
  return in_transform() || c10::impl::tls_is_dispatch_key_included(DispatchKey::Tracer) || !is_native(operands) ||
         !is_fusible(activation) || (activation.index == identity().index && operands[kUpWeight].defined()) ||
         has_forward_gradient(operands) || (!accumulate && stock_is_faster(activation, operands, differentiable));
}

Tensor differentiable_block(const Operands& operands, std::string_view name, at::ArrayRef<double> parameters,
                            bool accumulate, const Operands& main_grads) {
  const ActivationCall activation = find_activation(name, parameters);
  bool differentiable = false;
  std::array<bool, kOperands> required{};
  if (at::GradMode::is_enabled())
    for (int operand = 0; operand < kOperands; ++operand)
      differentiable |= required[operand] = operands[operand].defined() && operands[operand].requires_grad();
  if (needs_composition(activation, operands, differentiable, accumulate)) return compose(activation, operands);
  const bool plain = is_plain(operands) && !c10::impl::dispatch_mode_enabled();
  if (plain) check_operands(operands);
  if (!differentiable) {
    at::AutoDispatchBelowADInplaceOrView guard;
    if (plain) return forward(activation, operands, /*training=*/false).output;
    static const auto op = find_operator<BlockSchema>("fused_ops::feed_forward");
    return op.call(operands[kInput], operands[kWeight], or_none(operands[kBias]), or_none(operands[kUpWeight]),
                   or_none(operands[kUpBias]), or_none(operands[kDownWeight]), or_none(operands[kDownBias]), name,
                   parameters);
  }
  const bool hidden = required[kInput] || required[kWeight] || required[kBias] || required[kUpWeight] ||
                      required[kUpBias];
  if (!hidden && operands[kDownWeight].defined()) {  // the hidden layer is a constant, and all that is to be kept
    const at::NoGradGuard constant;
    Operands first = operands, last, last_main_grads;
    first[kDownWeight] = first[kDownBias] = Tensor();
    last[kInput] = differentiable_block(first, name, parameters, false, {});
    last[kWeight] = operands[kDownWeight];
    last[kBias] = operands[kDownBias];
    last_main_grads[kWeight] = main_grads[kDownWeight];
    const at::AutoGradMode differentiable_again(true);
    return differentiable_block(last, "identity", {}, accumulate, last_main_grads);
  }
  BlockCall call;
  call.activation = activation;
  call.name = name;
  call.parameters = parameters.vec();
  call.required = required;
  call.gated = operands[kUpWeight].defined();
  call.down = operands[kDownWeight].defined();
  call.plain = plain;
  call.saves_nothing = saves_nothing(activation, operands);
  call.saved_is_output = !call.saves_nothing && saves_output(activation, operands);
  call.reuse = !saved_tensors_have_hooks();
  call.input_sizes = operands[kInput].sym_sizes();
  if (accumulate && plain) {
    for (const Operand operand : {kWeight, kUpWeight, kDownWeight})
      if (required[operand]) call.leaves[operand] = operands[operand];
    call.main_grads = main_grads;
  }
  return differentiable_forward(operands, std::move(call));
}

// The operators' kernels.

Tensor block_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& up_weight, const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                      const OptionalTensor& down_bias, std::string_view activation, at::ArrayRef<double> parameters) {
  return differentiable_block(operands_of(input, weight, bias, up_weight, up_bias, down_weight, down_bias), activation,
                              parameters, /*accumulate=*/false, {});
}

Tensor block_composed(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& up_weight, const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                      const OptionalTensor& down_bias, std::string_view activation, at::ArrayRef<double> parameters) {
  return compose(find_activation(activation, parameters),
                 operands_of(input, weight, bias, up_weight, up_bias, down_weight, down_bias));
}

template <DispatchKey kKey, c10::DeviceType kDevice>
Tensor block_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& up_weight, const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                      const OptionalTensor& down_bias, std::string_view activation, at::ArrayRef<double> parameters) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); };
  const auto cast_any = [&](const OptionalTensor& tensor) { return tensor ? OptionalTensor(cast(*tensor)) : tensor; };
  static const auto op = find_operator<BlockSchema>("fused_ops::feed_forward");
  return op.call(cast(input), cast(weight), cast_any(bias), cast_any(up_weight), cast_any(up_bias),
                 cast_any(down_weight), cast_any(down_bias), activation, parameters);
}

Tensor block(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& up_weight,
             const OptionalTensor& up_bias, const OptionalTensor& down_weight, const OptionalTensor& down_bias,
             std::string_view activation, at::ArrayRef<double> parameters) {
  const Operands operands = operands_of(input, weight, bias, up_weight, up_bias, down_weight, down_bias);
  check_operands(operands);
  return forward(find_activation(activation, parameters), operands, /*training=*/false).output;
}

std::tuple<Tensor, Tensor, Tensor> block_training(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                                  const OptionalTensor& up_weight, const OptionalTensor& up_bias,
                                                  const OptionalTensor& down_weight, const OptionalTensor& down_bias,
                                                  std::string_view activation, at::ArrayRef<double> parameters) {
  const Operands operands = operands_of(input, weight, bias, up_weight, up_bias, down_weight, down_bias);
  check_operands(operands);
  const Forward result = forward(find_activation(activation, parameters), operands, /*training=*/true);
  return {result.output, or_empty(result.saved, input), or_empty(result.up, input)};
}

std::vector<Tensor> block_backward(const Tensor& grad_out, const OptionalTensor& input, const OptionalTensor& weight,
                                   const OptionalTensor& up_weight, const OptionalTensor& down_weight,
                                   const OptionalTensor& saved, const OptionalTensor& up, std::string_view activation,
                                   at::ArrayRef<double> parameters, std::array<bool, 7> wanted) {
  Operands operands;
  operands[kInput] = or_undefined(input);
  operands[kWeight] = or_undefined(weight);
  operands[kUpWeight] = or_undefined(up_weight);
  operands[kDownWeight] = or_undefined(down_weight);
  const Operands grads = backward(find_activation(activation, parameters), grad_out, operands, or_undefined(saved),
                                  or_undefined(up), wanted, /*overwrite=*/false);
  std::vector<Tensor> list;
  for (int operand = 0; operand < kOperands; ++operand)
    if (wanted[operand]) list.push_back(grads[operand]);
  return list;
}

#if !defined(FUSED_OPS_EMULATED)  // the emulated build is loaded beside the library that registers them
TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("feed_forward", &block);
  library.impl("feed_forward_training", &block_training);
  library.impl("feed_forward_backward", &block_backward);
}
TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("feed_forward", &block);
  library.impl("feed_forward_training", &block_training);
  library.impl("feed_forward_backward", &block_backward);
}
TORCH_LIBRARY_IMPL(fused_ops, Autograd, library) { library.impl("feed_forward", &block_autograd); }
TORCH_LIBRARY_IMPL(fused_ops, FuncTorchBatched, library) { library.impl("feed_forward", &block_composed); }
TORCH_LIBRARY_IMPL(fused_ops, AutocastCPU, library) {
  library.impl("feed_forward", &block_autocast<DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(fused_ops, AutocastCUDA, library) {
  library.impl("feed_forward", &block_autocast<DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}
#endif

}  // namespace

Tensor feed_forward(const Operands& operands, std::string_view activation, at::ArrayRef<double> parameters,
                    bool accumulate, const Operands& main_grads) {
  const Tensor& input = operands[kInput];
  if (is_plain(operands) && !at::autocast::is_autocast_enabled(input.device().type()) &&
      !c10::impl::dispatch_mode_enabled())
    return differentiable_block(operands, activation, parameters, accumulate, main_grads);
  static const auto op = find_operator<BlockSchema>("fused_ops::feed_forward");
  return op.call(input, operands[kWeight], or_none(operands[kBias]), or_none(operands[kUpWeight]),
                 or_none(operands[kUpBias]), or_none(operands[kDownWeight]), or_none(operands[kDownBias]), activation,
                 parameters);
}

}  // namespace fused_ops
