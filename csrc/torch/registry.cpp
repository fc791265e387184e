// SPDX-License-Identifier: Apache-2.0
// Every operator's schema.
#include <torch/library.h>

#include "torch/checks.h"
#include "torch/optimizer_step.h"

namespace fused_ops {
namespace {

const std::string kNamespace = "fused_ops::";

// An optimizer step as an operator. Lists are as long as params, or empty where the hyperparameters use no such state.
// Every optimizer's arguments are params, grads, its states, steps, its hyperparameters; see step_schema().
void step_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& schema_name = op.schema().name();  // fused_ops::adam_
  const int optimizer = optimizer_index(
      schema_name.substr(kNamespace.size(), schema_name.size() - kNamespace.size() - 1));
  OptimizerStep step(optimizer);
  const size_t state_count = step.state_names().size();
  const size_t list_count = 2 + state_count + step.counts_steps();
  const size_t hyperparameter_count = hyperparameter_names(optimizer).size();
  const auto arguments = torch::jit::last(*stack, list_count + hyperparameter_count);
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < list_count; ++i) lists.push_back(arguments[i].toTensorVector());
  std::vector<double> hyperparameters;
  for (size_t i = 0; i < hyperparameter_count; ++i) hyperparameters.push_back(arguments[list_count + i].toDouble());
  step.reset(hyperparameters);
  const std::vector<at::Tensor>& params = lists[0];
  const std::vector<at::Tensor>& grads = lists[1];
  for (size_t i = 1; i < list_count; ++i) {
    const bool used = i == 1 || i >= 2 + state_count || (step.states() >> (i - 2) & 1u);
    if (lists[i].size() != (used ? params.size() : 0))
      fail_expectation(step.name(), "length of list argument " + std::to_string(i), used ? params.size() : 0,
                       lists[i].size(), "Pass one tensor a parameter, and an empty list for a state that is not used.");
  }
  for (size_t i = 0; i < params.size(); ++i)
    if (const auto reason = step.check(int64_t(i), params[i], grads[i]))
      fail(step.name(), ": ", *reason, ". Use the torch.optim optimizer.");
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor* states[kMaxStates] = {};
    for (size_t k = 0; k < state_count; ++k)
      if (!lists[2 + k].empty()) states[k] = &lists[2 + k][i];
    const at::Tensor* counter = step.counts_steps() ? &lists[2 + state_count][i] : nullptr;
    OptimizerStep::Found found;
    if (const auto reason = step.add(int64_t(i), params[i], grads[i], states, counter, /*first=*/false, found))
      fail(step.name(), ": ", *reason, ". Use the torch.optim optimizer.");
  }
  if (const auto reason = step.check_together()) fail(step.name(), ": ", *reason, ". Use the torch.optim optimizer.");
  step.run({});
  torch::jit::drop(*stack, list_count + hyperparameter_count);
}

// E.g. adagrad_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] sums, Tensor(a3!)[] steps, *, float lr, ...) -> ()
std::string step_schema(int optimizer) {
  const OptimizerStep step(optimizer);
  std::string schema = step.name() + "_(Tensor(a0!)[] params, Tensor[] grads";
  size_t list = 2;
  for (const std::string& state : step.state_names())
    schema += ", Tensor(a" + std::to_string(list++) + "!)[] " + state + "s";
  if (step.counts_steps()) schema += ", Tensor(a" + std::to_string(list) + "!)[] steps";
  schema += ", *";
  for (const std::string& name : hyperparameter_names(optimizer)) schema += ", float " + name;
  return schema + ") -> ()";
}

TORCH_LIBRARY(fused_ops, library) {
  // Which backend runs is read from the tensors themselves: one call may hold several devices.
  for (const std::string& name : optimizer_names()) {
    library.def(step_schema(optimizer_index(name)).c_str());
    library.impl((name + "_").c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                                       torch::CppFunction::makeFromBoxedFunction<&step_operator>()));
  }

  // hidden = act(input W^T + b) [* (input U^T + c)], output = hidden [D^T + d]; kernels in feed_forward_ops.cpp.
  const std::string block =
      "(Tensor input, Tensor weight, Tensor? bias, Tensor? up_weight, Tensor? up_bias, Tensor? down_weight, "
      "Tensor? down_bias, str activation, float[] parameters) -> ";
  library.def(("feed_forward" + block + "Tensor").c_str());
  // Also what backward needs: the saved hidden tensor and the up projection, each empty where there is none.
  library.def(("feed_forward_training" + block + "(Tensor, Tensor, Tensor)").c_str());
  // The gradients of those arguments that are wanted.
  library.def(
      "feed_forward_backward(Tensor grad_out, Tensor? input, Tensor? weight, Tensor? up_weight, Tensor? down_weight, "
      "Tensor? saved, Tensor? up, str activation, float[] parameters, bool[7] wanted) -> Tensor[]");
}

}  // namespace
}  // namespace fused_ops
