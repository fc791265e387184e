// SPDX-License-Identifier: Apache-2.0
// The node keeps the pre-activation as an output of its own, so that a backward pass that is itself differentiated
// finds it connected to the graph and can be a composition of aten operators.
#include "torch/feed_forward_node.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "torch/checks.h"
#include "torch/operators.h"

namespace fused_ops {
namespace {

using at::Tensor;
using c10::DispatchKey;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using TrainingSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                                          const OptionalTensor&, const OptionalTensor&,
                                                          const OptionalTensor&, const OptionalTensor&,
                                                          std::string_view, at::ArrayRef<double>);
using BackwardSchema = std::vector<Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, std::string_view, at::ArrayRef<double>,
                                           std::array<bool, 7>);

Tensor unless_empty(const Tensor& tensor) { return tensor.dim() == 1 ? Tensor() : tensor; }

// A batch of gradients, as for a Jacobian.
bool is_batched(const Tensor& tensor) {
  return tensor.defined() &&
         tensor.key_set().has_any(c10::DispatchKeySet({DispatchKey::FuncTorchBatched, DispatchKey::Batched}));
}

bool is_alone(const Tensor& tensor, size_t holders) {
  return tensor.is_contiguous() && tensor.storage().use_count() == holders;
}

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

// The same as fused_ops::backward, of differentiable operators, with gradients of the saved outputs added.
Operands compose_backward(const BlockCall& call, const variable_list& grads_out, const Operands& operands,
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
    if (grad_value.defined() && !call.saves_nothing) grad_pre = aten_gradient(call.activation, grad_value, saved_rows);
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

// What the node saves, in this order.
enum { kSavedInput, kSavedWeight, kSavedUpWeight, kSavedDownWeight, kSavedHidden, kSavedUp, kSavedTensors };
using SavedTensors = std::array<Tensor, kSavedTensors>;

// With `in_place`, as a part of autograd's own backward pass: what is saved may be changed where nobody needs it any
// more, and gradients of weights be added to those that are there.
variable_list gradients(const BlockCall& call, const variable_list& grads_out, const SavedTensors& saved,
                        const std::array<bool, kOperands>& wanted, bool in_place) {
  Operands operands;
  operands[kInput] = saved[kSavedInput];
  operands[kWeight] = saved[kSavedWeight];
  operands[kUpWeight] = saved[kSavedUpWeight];
  operands[kDownWeight] = saved[kSavedDownWeight];
  const Tensor &grad_out = grads_out[0], &hidden = saved[kSavedHidden], &up = saved[kSavedUp];
  const bool extra = std::any_of(grads_out.begin() + 1, grads_out.end(), [](const Tensor& g) { return g.defined(); });
  Operands grads;
  if (extra || at::GradMode::is_enabled() || is_batched(grad_out)) {
    grads = compose_backward(call, grads_out, operands, hidden, up, wanted);
  } else if (grad_out.defined()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    if (call.plain && is_plain({grad_out, {}, {}, {}, {}, {}, {}}) && !c10::impl::dispatch_mode_enabled()) {
      const bool overwrite = in_place && call.reuse && !torch::autograd::get_current_graph_task_keep_graph() &&
                             !call.saved_is_output && hidden.defined() && is_alone(hidden, 2) &&
                             (!up.defined() || is_alone(up, 2));
      grads = backward(call.activation, grad_out, operands, hidden, up, wanted, overwrite,
                       in_place ? gradients_to_add_to(call, wanted) : GradientSums());
    } else {
      static const auto op = find_operator<BackwardSchema>("fused_ops::feed_forward_backward");
      const auto list = op.call(grad_out, or_none(operands[kInput]), or_none(operands[kWeight]),
                                or_none(operands[kUpWeight]), or_none(operands[kDownWeight]), or_none(hidden),
                                or_none(up), call.name, call.parameters, wanted);
      for (size_t i = 0, next = 0; i < kOperands; ++i)
        if (wanted[i]) grads[i] = list[next++];
    }
  }
  return {grads.begin(), grads.end()};
}

struct FeedForwardBackward final : Node {
  BlockCall call;
  std::array<SavedVariable, kSavedTensors> saved;

  std::string name() const override { return "FeedForwardBackward"; }

  variable_list apply(variable_list&& grads_out) override {
    const std::lock_guard lock(mutex_);
    return gradients(call, grads_out, unpack(), wanted(), /*in_place=*/true);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& variable : saved) variable.reset_data();
  }

  SavedTensors unpack() {
    SavedTensors tensors;
    for (int i = 0; i < kSavedTensors; ++i) tensors[i] = saved[i].unpack(getptr());
    return tensors;
  }

  std::array<bool, kOperands> wanted() const {
    std::array<bool, kOperands> result{};
    for (int operand = 0; operand < kOperands; ++operand) result[operand] = task_should_compute_output(operand);
    return result;
  }

  // Compiled autograd: what it compiles the node for, ...
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name() + ' ' + call.name);
    args.collect(call.parameters);
    for (const bool flag : {call.plain, call.saved_is_output, call.saves_nothing, call.gated, call.down})
      args.collect(flag);
    for (const bool flag : wanted()) args.collect(flag);
    for (const SavedVariable& variable : saved) args.collect(variable, /*is_output=*/true);
    for (const c10::SymInt& size : call.input_sizes) args.collect(size);
  }

  // ... and the call of it that is compiled.
  variable_list apply_with_saved(const variable_list& grads_out,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    using Sizes = std::vector<c10::SymInt>;
    for (SavedVariable& variable : saved) swap.before(variable);
    swap.before(call.input_sizes);

    const SavedTensors tensors = unpack();
    PackedArgs arguments;
    arguments.pack(variable_list(tensors.begin(), tensors.end()));
    arguments.pack(Sizes(call.input_sizes.begin(), call.input_sizes.end()));
    std::vector<at::TypePtr> types;
    for (const at::IValue& argument : arguments.vec()) types.push_back(argument.type());
    BlockCall constants = call;
    constants.leaves = constants.main_grads = {};
    constants.input_sizes.clear();
    const auto function = [constants, wanted = wanted()](const variable_list& grads_out,
                                                         const std::vector<at::IValue>& values) {
      PackedArgs arguments(values);
      const auto list = arguments.unpack<variable_list>();
      const auto sizes = arguments.unpack<Sizes>();
      BlockCall call = constants;
      call.input_sizes.assign(sizes.begin(), sizes.end());
      SavedTensors tensors;
      std::copy(list.begin(), list.end(), tensors.begin());
      return gradients(call, grads_out, tensors, wanted, /*in_place=*/false);
    };
    const auto& compiler = getPyCompilerInterface();
    const std::string bound = compiler->bind_function(swap.get_py_compiler(), name(), function, types,
                                                      /*is_custom_function=*/true, /*is_traceable=*/true);
    variable_list grads = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", bound, grads_out, arguments.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            get_input_metadata(next_edges())));

    for (SavedVariable& variable : saved) swap.after(variable);
    swap.after(call.input_sizes);
    return grads;
  }
};

// A pointer as torch keeps its nodes: older versions by std::shared_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_same_v<decltype(std::declval<T>().getptr()), std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>();
}

Forward call_forward(const BlockCall& call, const Operands& operands) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (call.plain) return forward(call.activation, operands, /*training=*/true);
  const at::NoGradGuard no_grad;
  static const auto op = find_operator<TrainingSchema>("fused_ops::feed_forward_training");
  auto [output, saved, up] = op.call(operands[kInput], operands[kWeight], or_none(operands[kBias]),
                                     or_none(operands[kUpWeight]), or_none(operands[kUpBias]),
                                     or_none(operands[kDownWeight]), or_none(operands[kDownBias]), call.name,
                                     call.parameters);
  return {output, unless_empty(saved), unless_empty(up)};
}

}  // namespace

Tensor differentiable_forward(const Operands& operands, BlockCall call) {
  const Forward result = call_forward(call, operands);
  const auto node = make_node<FeedForwardBackward>();
  torch::autograd::edge_list edges(kOperands);
  for (int operand = 0; operand < kOperands; ++operand)
    if (operands[operand].defined()) edges[operand] = torch::autograd::impl::gradient_edge(operands[operand]);
  node->set_next_edges(std::move(edges));
  for (const Tensor& output : {result.output, result.saved, result.up})
    if (output.defined()) torch::autograd::set_history(output, node);

  const auto& required = call.required;
  const bool pre = required[kInput] || required[kWeight] || required[kBias];
  const bool up_side = call.gated && (required[kInput] || required[kUpWeight] || required[kUpBias]);
  const bool linear = call.activation.index == identity().index && !call.gated;  // its derivative needs nothing
  const auto save = [&](int index, const Tensor& tensor, bool needed, bool is_output) {
    if (needed && tensor.defined()) node->saved[index] = SavedVariable(tensor, is_output);
  };
  save(kSavedInput, operands[kInput], required[kWeight] || required[kUpWeight], false);
  save(kSavedWeight, operands[kWeight], required[kInput], false);
  save(kSavedUpWeight, operands[kUpWeight], required[kInput], false);
  save(kSavedDownWeight, operands[kDownWeight], pre || up_side, false);
  save(kSavedHidden, call.saved_is_output ? result.output : result.saved,
       required[kDownWeight] || (!linear && (pre || up_side)), true);
  save(kSavedUp, result.up, pre || required[kDownWeight], true);
  node->call = std::move(call);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(node);
#endif
  return result.output;
}

}  // namespace fused_ops
