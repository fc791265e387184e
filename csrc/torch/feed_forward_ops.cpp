// SPDX-License-Identifier: Apache-2.0
// The feed-forward block as an operator: autograd, autocast, transforms. Its schemas are in registry.cpp.
//
// One autograd node keeps the pre-activation as an output of its own, so that a backward pass that is itself
// differentiated finds it connected to the graph and can be a composition of aten operators. Function transforms,
// forward-mode derivatives, and tensors that are no plain CPU or CUDA ones get the composition from the start.
#include <ATen/FuncTorchTLS.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>

#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/feed_forward.h"
#include "torch/feed_forward_ops.h"

namespace fused_ops {
namespace {

using at::Tensor;
using c10::DispatchKey;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }
OptionalTensor or_none(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor or_empty(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor : at::empty({0}, like.options());
}
Tensor unless_empty(const Tensor& tensor) { return tensor.dim() == 1 ? Tensor() : tensor; }

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
using TrainingSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                                          const OptionalTensor&, const OptionalTensor&,
                                                          const OptionalTensor&, const OptionalTensor&,
                                                          std::string_view, at::ArrayRef<double>);
using BackwardSchema = std::vector<Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, std::string_view, at::ArrayRef<double>,
                                           std::array<bool, 7>);

template <class Schema>
c10::TypedOperatorHandle<Schema> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

// Whether native code may read a tensor's memory here and now: no subclass, lazy view or wrapper of a transform.
bool is_plain(const Operands& operands) {
  constexpr c10::DispatchKeySet kWrappers({DispatchKey::Python, DispatchKey::Conjugate, DispatchKey::Negative,
                                           DispatchKey::ZeroTensor, DispatchKey::Functionalize,
                                           DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                           DispatchKey::Batched});
  for (const Tensor& tensor : operands)
    if (tensor.defined() && tensor.key_set().has_any(kWrappers)) return false;
  return is_native(operands);
}

bool has_forward_gradient(const Operands& operands) {
  for (const Tensor& tensor : operands)
    if (tensor.defined() && torch::autograd::isFwGradDefined(tensor)) return true;
  return false;
}

// A batch of gradients, as for a Jacobian.
bool is_batched(const Tensor& tensor) {
  return tensor.defined() &&
         tensor.key_set().has_any(c10::DispatchKeySet({DispatchKey::FuncTorchBatched, DispatchKey::Batched}));
}

// Hooks may keep what is saved, or hand the same tensor to several graphs.
bool saved_tensors_have_hooks() {
  return at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

bool is_alone(const Tensor& tensor, size_t holders) {
  return tensor.is_contiguous() && tensor.storage().use_count() == holders;
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

// What the node remembers besides tensors.
struct BlockCall : torch::CustomClassHolder {
  ActivationCall activation;
  std::string name;
  std::vector<double> parameters;
  std::array<bool, kOperands> present{}, required{};
  bool gated = false, down = false, plain = false, saved_is_output = false, saves_nothing = false, reuse = false;
  std::vector<c10::SymInt> input_sizes;
  Operands leaves;      // weights whose gradients are to be added in place
  Operands main_grads;  // where to, if not to .grad
};

// What autograd's own accumulation locks.
struct AccumulationMutex : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& accumulator) { return accumulator.*(&AccumulationMutex::mutex_); }
};

// The mutex of a leaf whose gradient may be added to in place of a return from backward, since nobody listens to it;
// null of others.
std::mutex* mutex_of_silent_leaf(const Tensor& weight) {
  if (!weight.is_leaf() || !torch::autograd::impl::hooks(weight).empty()) return nullptr;
  if (torch::autograd::impl::post_acc_grad_hooks(weight)) return nullptr;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(weight);  // kept alive by the graph
  if (!accumulator || !accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty() ||
      !accumulator->tensor_pre_hooks().empty())
    return nullptr;
  return &AccumulationMutex::of(*accumulator);
}

// Where backward adds the gradients of weights; undefined where it returns them.
GradientSums gradients_to_add_to(const BlockCall& call, const std::array<bool, kOperands>& wanted) {
  GradientSums sums;
  // Non-empty where torch.autograd.grad, or backward with inputs=, collects gradients itself.
  if (!torch::autograd::get_current_graph_task_exec_info()->empty()) return sums;
  for (const Operand operand : {kWeight, kUpWeight, kDownWeight}) {
    const Tensor& leaf = call.leaves[operand];
    if (!wanted[operand] || !leaf.defined() || !leaf.requires_grad()) continue;
    std::mutex* const mutex = mutex_of_silent_leaf(leaf);
    if (!mutex) continue;
    const Tensor& main_grad = call.main_grads[operand];
    if (main_grad.defined()) {
      if (!main_grad.is_floating_point() || main_grad.layout() != at::kStrided || main_grad.requires_grad() ||
          !main_grad.sizes().equals(leaf.sizes()) || main_grad.device() != leaf.device() ||
          at::has_internal_overlap(main_grad) == at::MemOverlap::Yes)
        fail("accumulate_grad: expected main_grad of a weight of shape ", describe(leaf.sizes()), " on ", leaf.device(),
             " to be a strided floating-point tensor of its shape, there, that does not require grad and of which no ",
             "elements share memory, got ", describe(main_grad.scalar_type()), " of shape ",
             describe(main_grad.sizes()), " and strides ", describe(main_grad.strides()), " on ", main_grad.device(),
             ". Make another one.");
      sums[operand] = {main_grad, mutex, {}};
      continue;
    }
    const std::lock_guard lock(*mutex);
    const Tensor& grad = leaf.grad();
    if (grad.defined() && !grad.requires_grad() && grad.layout() == at::kStrided) sums[operand] = {grad, mutex, leaf};
  }
  return sums;
}

struct BlockFunction : torch::autograd::Function<BlockFunction> {
  // Saved tensors, in this order.
  enum { kSavedInput, kSavedWeight, kSavedUpWeight, kSavedDownWeight, kSavedHidden, kSavedUp };

  static variable_list forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& up_weight,
                               const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                               const OptionalTensor& down_bias, const c10::intrusive_ptr<BlockCall>& call) {
    const Operands operands = operands_of(input, weight, bias, up_weight, up_bias, down_weight, down_bias);
    Forward result;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      if (call->plain) {
        result = fused_ops::forward(call->activation, operands, /*training=*/true);
      } else {
        static const auto op = find<TrainingSchema>("fused_ops::feed_forward_training");
        auto [output, saved, up] = op.call(input, weight, bias, up_weight, up_bias, down_weight, down_bias, call->name,
                                           call->parameters);
        result = {output, unless_empty(saved), unless_empty(up)};
      }
    }
    const auto& required = call->required;
    const bool weights = required[kWeight] || required[kUpWeight];
    const bool pre = required[kInput] || required[kWeight] || required[kBias];
    const bool up_side = call->gated && (required[kInput] || required[kUpWeight] || required[kUpBias]);
    const bool linear = call->activation.index == identity().index && !call->gated;  // its derivative needs nothing
    const bool hidden = required[kDownWeight] || (!linear && (pre || up_side));
    const Tensor& saved = call->saved_is_output ? result.output : result.saved;
    context->set_materialize_grads(false);
    context->save_for_backward({weights ? input : Tensor(), required[kInput] ? weight : Tensor(),
                                required[kInput] ? operands[kUpWeight] : Tensor(),
                                pre || up_side ? operands[kDownWeight] : Tensor(), hidden ? saved : Tensor(),
                                pre || required[kDownWeight] ? result.up : Tensor()});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    variable_list outputs{result.output};
    if (result.saved.defined()) outputs.push_back(result.saved);
    if (result.up.defined()) outputs.push_back(result.up);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list grads_out) {
    auto call = c10::static_intrusive_pointer_cast<BlockCall>(context->saved_data["call"].toCapsule());
    const variable_list saved = context->get_saved_variables();
    Operands operands;
    operands[kInput] = saved[kSavedInput];
    operands[kWeight] = saved[kSavedWeight];
    operands[kUpWeight] = saved[kSavedUpWeight];
    operands[kDownWeight] = saved[kSavedDownWeight];
    std::array<bool, kOperands> wanted{};
    for (size_t operand = 0, edge = 0; operand < kOperands; ++operand)
      if (call->present[operand]) {
        wanted[operand] = call->required[operand] && context->needs_input_grad(edge);
        ++edge;
      }
    const bool extra = std::any_of(grads_out.begin() + 1, grads_out.end(), [](const Tensor& g) { return g.defined(); });
    Operands grads;
    if (extra || at::GradMode::is_enabled() || is_batched(grads_out[0])) {
      grads = compose_backward(*call, grads_out, operands, saved[kSavedHidden], saved[kSavedUp], wanted);
    } else if (grads_out[0].defined()) {
      at::AutoDispatchBelowADInplaceOrView guard;
      const Tensor& grad_out = grads_out[0];
      const Operands given = {grad_out, {}, {}, {}, {}, {}, {}};
      if (call->plain && is_plain(given)) {
        const bool last = call->reuse && !torch::autograd::get_current_graph_task_keep_graph();
        const bool overwrite = last && !call->saved_is_output && saved[kSavedHidden].defined() &&
                               is_alone(saved[kSavedHidden], 2) &&
                               (!saved[kSavedUp].defined() || is_alone(saved[kSavedUp], 2));
        grads = fused_ops::backward(call->activation, grad_out, operands, saved[kSavedHidden], saved[kSavedUp], wanted,
                                    overwrite, gradients_to_add_to(*call, wanted));
      } else {
        static const auto op = find<BackwardSchema>("fused_ops::feed_forward_backward");
        const auto list = op.call(grad_out, or_none(operands[kInput]), or_none(operands[kWeight]),
                                  or_none(operands[kUpWeight]), or_none(operands[kDownWeight]),
                                  or_none(saved[kSavedHidden]), or_none(saved[kSavedUp]), call->name, call->parameters,
                                  wanted);
        for (size_t i = 0, next = 0; i < kOperands; ++i)
          if (wanted[i]) grads[i] = list[next++];
      }
    }
    variable_list result(grads.begin(), grads.end());
    result.emplace_back();  // of the call
    return result;
  }

  // The same as fused_ops::backward, of differentiable operators, with gradients of the saved outputs added.
  static Operands compose_backward(const BlockCall& call, const variable_list& grads_out, const Operands& operands,
                                   const Tensor& saved, const Tensor& up, const std::array<bool, kOperands>& wanted) {
    Operands grads;
    const auto rows = [](const Tensor& tensor) {
      const c10::SymIntArrayRef sizes = tensor.sym_sizes();
      return tensor.reshape_symint({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
    };
    const auto sum = [](const Tensor& a, const Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; };
    const auto weight_grad = [&](Operand operand, const Tensor& grad, const Tensor& input) {
      if (wanted[operand] && grad.defined()) grads[operand] = at::mm(grad.t(), input);
    };
    const auto bias_grad = [&](Operand operand, const Tensor& grad) {
      if (wanted[operand] && grad.defined()) grads[operand] = grad.sum(0);
    };
    const bool pre_wanted = wanted[kInput] || wanted[kWeight] || wanted[kBias];
    const bool up_wanted = call.gated && (wanted[kInput] || wanted[kUpWeight] || wanted[kUpBias]);
    const bool from_output = call.activation.saved == Saved::kOutput;
    const Tensor saved_rows = saved.defined() ? rows(saved) : saved;
    const auto value = [&] { return from_output ? saved_rows : aten_value(call.activation, saved_rows); };

    Tensor grad_hidden = grads_out[0].defined() ? rows(grads_out[0]) : Tensor();
    if (call.down && grad_hidden.defined()) {
      bias_grad(kDownBias, grad_hidden);
      if (wanted[kDownWeight]) {
        Tensor hidden = value();
        weight_grad(kDownWeight, grad_hidden, call.gated ? hidden * up : hidden);
      }
      if (pre_wanted || up_wanted) grad_hidden = at::mm(grad_hidden, operands[kDownWeight]);
    }
    if (pre_wanted || up_wanted) {
      Tensor grad_saved = grads_out.size() > 1 && grads_out[1].defined() ? rows(grads_out[1]) : Tensor();
      Tensor grad_value = grad_hidden, grad_up;
      if (call.gated) {
        if (grad_hidden.defined()) {
          grad_up = grad_hidden * value();
          if (up.defined()) grad_value = grad_hidden * up;
        }
        if (grads_out.size() > 2 && grads_out[2].defined()) grad_up = sum(grad_up, rows(grads_out[2]));
      }
      if (from_output) grad_value = sum(grad_value, grad_saved);
      Tensor grad_pre = grad_value;
      if (grad_value.defined() && !call.saves_nothing)
        grad_pre = aten_gradient(call.activation, grad_value, saved_rows);
      if (!from_output) grad_pre = sum(grad_pre, grad_saved);
      bias_grad(kBias, grad_pre);
      bias_grad(kUpBias, grad_up);
      const Tensor& input = operands[kInput];
      if (input.defined()) {
        weight_grad(kWeight, grad_pre, rows(input));
        weight_grad(kUpWeight, grad_up, rows(input));
      }
      if (wanted[kInput]) {
        Tensor grad_input = grad_pre.defined() ? at::mm(grad_pre, operands[kWeight]) : Tensor();
        if (grad_up.defined()) grad_input = sum(grad_input, at::mm(grad_up, operands[kUpWeight]));
        if (grad_input.defined()) grads[kInput] = grad_input.reshape_symint(call.input_sizes);
      }
    }
    return grads;
  }
};

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
    static const auto op = find<BlockSchema>("fused_ops::feed_forward");
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
  auto call = c10::make_intrusive<BlockCall>();
  call->activation = activation;
  call->required = required;
  for (int operand = 0; operand < kOperands; ++operand) call->present[operand] = operands[operand].defined();
  call->gated = operands[kUpWeight].defined();
  call->down = operands[kDownWeight].defined();
  call->plain = plain;
  call->saves_nothing = saves_nothing(activation, operands);
  call->saved_is_output = !call->saves_nothing && saves_output(activation, operands);
  call->reuse = !saved_tensors_have_hooks();
  call->input_sizes = operands[kInput].sym_sizes().vec();
  if (!plain) {
    call->name = name;
    call->parameters = parameters.vec();
  }
  if (accumulate && plain) {
    for (const Operand operand : {kWeight, kUpWeight, kDownWeight})
      if (required[operand]) call->leaves[operand] = operands[operand];
    call->main_grads = main_grads;
  }
  return BlockFunction::apply(operands[kInput], operands[kWeight], or_none(operands[kBias]),
                              or_none(operands[kUpWeight]), or_none(operands[kUpBias]), or_none(operands[kDownWeight]),
                              or_none(operands[kDownBias]), call)[0];
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

template <c10::DeviceType kDevice>
Tensor block_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& up_weight, const OptionalTensor& up_bias, const OptionalTensor& down_weight,
                      const OptionalTensor& down_bias, std::string_view activation, at::ArrayRef<double> parameters) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const auto& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); };
  static const auto op = find<BlockSchema>("fused_ops::feed_forward");
  return op.call(cast(input), cast(weight), cast(bias), cast(up_weight), cast(up_bias), cast(down_weight),
                 cast(down_bias), activation, parameters);
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
  library.impl("feed_forward", &block_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(fused_ops, AutocastCUDA, library) {
  library.impl("feed_forward", &block_autocast<c10::DeviceType::CUDA>);
}
#endif

}  // namespace

Tensor feed_forward(const Operands& operands, std::string_view activation, at::ArrayRef<double> parameters,
                    bool accumulate, const Operands& main_grads) {
  const Tensor& input = operands[kInput];
  if (is_plain(operands) && !at::autocast::is_autocast_enabled(input.device().type()) &&
      !c10::impl::dispatch_mode_enabled())
    return differentiable_block(operands, activation, parameters, accumulate, main_grads);
  static const auto op = find<BlockSchema>("fused_ops::feed_forward");
  return op.call(input, operands[kWeight], or_none(operands[kBias]), or_none(operands[kUpWeight]),
                 or_none(operands[kUpBias]), or_none(operands[kDownWeight]), or_none(operands[kDownBias]), activation,
                 parameters);
}

}  // namespace fused_ops
