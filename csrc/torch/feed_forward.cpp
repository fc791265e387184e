// SPDX-License-Identifier: Apache-2.0
#include "torch/feed_forward.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "core/cpu/epilogue.h"
#include "torch/buffer_pool.h"
#include "torch/checks.h"
#include "torch/gemm.h"
#include "torch/storage_type.h"

#if defined(FUSED_OPS_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/cuda/epilogue.h"
#include "core/cuda/walk.h"
#endif

namespace fused_ops {
namespace {

constexpr const char* kOp = "feed_forward";

#if defined(FUSED_OPS_CUDA)
template <class Launch>
void on_stream(const at::Tensor& tensor, Launch&& launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  const int error = launch(c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream());
  if (error != 0)
    fail(kOp, ": the CUDA launch over a tensor of ", describe(tensor.sizes()), " on ", tensor.device(),
         " failed: ", cuda::error_string(error), ". Set CUDA_LAUNCH_BLOCKING=1 to find an earlier kernel's error.");
}
#endif

void run(const Activate& pass, const at::Tensor& tensor) {
  if (pass.rows == 0 || pass.columns == 0) return;
#if defined(FUSED_OPS_CUDA)
  if (on_cuda(tensor.device())) return on_stream(tensor, [&](auto stream) { return cuda::activate(pass, stream); });
#endif
  cpu::activate(pass, at::get_num_threads());
}

void run(Differentiate& pass, const at::Tensor& tensor) {
  if (pass.rows == 0 || pass.columns == 0) return;
  at::Tensor workspace;
  const auto allocate = [&](int64_t bytes) {
    if (bytes == 0) return;
    workspace = at::empty({bytes}, tensor.options().dtype(at::kByte));
    pass.workspace = workspace.mutable_data_ptr();
  };
#if defined(FUSED_OPS_CUDA)
  if (on_cuda(tensor.device())) {
    allocate(cuda::workspace_bytes(pass));
    return on_stream(tensor, [&](auto stream) { return cuda::differentiate(pass, stream); });
  }
#endif
  allocate(cpu::workspace_bytes(pass));
  cpu::differentiate(pass, at::get_num_threads());
}

const void* data_or_null(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* mutable_data_or_null(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

at::Tensor contiguous_or_undefined(const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

Activate activate_pass(const ActivationCall& activation, const at::Tensor& pre, const at::Tensor& bias,
                       const at::Tensor& out) {
  Activate pass{};
  pass.activation = activation.index;
  pass.parameters = activation.parameters;
  pass.dtype = *storage_type(pre.scalar_type());
  pass.rows = pre.size(0);
  pass.columns = pass.stride = pre.size(1);
  pass.pre = pre.mutable_data_ptr();
  pass.bias = data_or_null(bias);
  pass.out = out.mutable_data_ptr();
  return pass;
}

at::Tensor rows_of(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const int64_t last = tensor.dim() == 0 ? 1 : tensor.size(-1);
  return tensor.reshape({last == 0 ? tensor.sizes().slice(0, tensor.dim() - 1).empty()
                                         ? 1
                                         : c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1))
                                   : tensor.numel() / last,
                         last});
}

// rows^T [out, M] times input [M, in], in the memory order of the weight that it is the gradient of.
at::Tensor weight_gradient(const at::Tensor& rows, const at::Tensor& input, const at::Tensor& weight) {
  if (weight.defined() && weight.stride(0) == 1 && weight.stride(1) > 1)
    return product(Role::kGradWeight, input, rows).t();
  return product(Role::kGradWeight, rows, input);
}

// Adds rows^T times input, rounded once to the sum's dtype, as autograd's own accumulation: whoever saved the old value
// is told. False where the sum is no leaf's gradient any more.
bool add(const GradientSum& sum, const at::Tensor& rows, const at::Tensor& input) {
  const std::lock_guard lock(*sum.mutex);
  if (sum.leaf.defined() && !sum.leaf.grad().is_same(sum.into)) return false;
  sum.into.unsafeGetTensorImpl()->bump_version();
  const at::ScalarType dtype = c10::promoteTypes(sum.into.scalar_type(), rows.scalar_type());
  const at::Tensor left = transposed(rows).to(dtype), right = input.to(dtype);
  if (dtype == sum.into.scalar_type())
    sum.into.addmm_(left, right);
  else
    sum.into.add_(at::mm(left, right));
  return true;
}

}  // namespace

const char* operand_name(Operand operand) {
  constexpr const char* kNames[kOperands] = {"input",   "weight",      "bias",     "up_weight",
                                             "up_bias", "down_weight", "down_bias"};
  return kNames[operand];
}

bool saves_output(const ActivationCall& activation, const Operands& operands) {
  return activation.saved == Saved::kOutput && !operands[kUpWeight].defined() && !operands[kDownWeight].defined();
}

bool saves_nothing(const ActivationCall& activation, const Operands& operands) {
  return activation.index == identity().index && !operands[kUpWeight].defined() && !operands[kDownWeight].defined();
}

void check_operands(const Operands& operands) {
  const at::Tensor& input = operands[kInput];
  const auto expect_shape = [&](Operand operand, at::IntArrayRef wanted) {
    if (operands[operand].defined() && !operands[operand].sizes().equals(wanted))
      fail_expectation(kOp, std::string(operand_name(operand)) + ".shape", describe(wanted),
                       describe(operands[operand].sizes()), "Weights are [out_features, in_features].");
  };
  if (input.dim() == 0)
    fail(kOp, ": expected input to have at least 1 dimension, got none. Its last one holds the features.");
  for (const Operand operand : {kWeight, kUpWeight, kDownWeight})
    if (operands[operand].defined() && operands[operand].dim() != 2)
      fail_expectation(kOp, std::string(operand_name(operand)) + ".dim()", 2, operands[operand].dim(),
                       "Weights are [out_features, in_features].");
  const int64_t in = operands[kWeight].size(1), hidden = operands[kWeight].size(0);
  if (input.size(-1) != in) fail_expectation(kOp, "input.size(-1)", in, input.size(-1), "It must be weight.size(1).");
  expect_shape(kUpWeight, {hidden, in});
  for (const Operand operand : {kBias, kUpBias}) expect_shape(operand, {hidden});
  if (operands[kDownWeight].defined()) {
    const int64_t out = operands[kDownWeight].size(0);
    expect_shape(kDownWeight, {out, hidden});
    expect_shape(kDownBias, {out});
  }
  const auto expect_partner = [&](Operand operand, Operand partner) {
    if (operands[operand].defined() && !operands[partner].defined())
      fail(kOp, ": expected ", operand_name(partner), " where there is a ", operand_name(operand),
           ", got none. Pass both.");
  };
  expect_partner(kUpBias, kUpWeight);
  expect_partner(kDownBias, kDownWeight);
  for (int operand = kWeight; operand < kOperands; ++operand) {
    const at::Tensor& tensor = operands[operand];
    if (!tensor.defined()) continue;
    if (tensor.scalar_type() != input.scalar_type())
      fail_expectation(kOp, std::string(operand_name(Operand(operand))) + ".dtype", describe(input.scalar_type()),
                       describe(tensor.scalar_type()), "It must be the input's; convert one, or use autocast.");
    if (tensor.device() != input.device())
      fail_expectation(kOp, std::string(operand_name(Operand(operand))) + ".device", input.device(), tensor.device(),
                       "Move all to one device.");
  }
}

bool is_native(const Operands& operands) {
  for (const at::Tensor& tensor : operands) {
    if (!tensor.defined()) continue;
    if (tensor.layout() != at::kStrided || tensor.is_nested() || !(tensor.is_cpu() || tensor.is_cuda()) ||
        tensor.is_complex() || !storage_type(tensor.scalar_type()))
      return false;
  }
  return true;
}

bool is_plain(const Operands& operands) {
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
                                           c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                           c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched});
  for (const at::Tensor& tensor : operands)
    if (tensor.defined() && tensor.key_set().has_any(kWrappers)) return false;
  return is_native(operands);
}

Forward forward(const ActivationCall& activation, const Operands& operands, bool training) {
  const at::Tensor& input = operands[kInput];
  const at::Tensor rows = rows_of(input);
  const at::Tensor bias = contiguous_or_undefined(operands[kBias]);
  const bool gated = operands[kUpWeight].defined(), down = operands[kDownWeight].defined();
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = down ? operands[kDownWeight].size(0) : operands[kWeight].size(0);

  Forward result;
  at::Tensor hidden;
  if (!gated && activation.index == identity().index) {
    hidden = product(Role::kForward, rows, operands[kWeight], bias);
    if (training && down) result.saved = hidden;
  } else {
    auto [pre, has_bias] = product_with_bias(rows, operands[kWeight], bias);
    const bool from_output = activation.saved == Saved::kOutput;
    hidden = training && !from_output ? empty_buffer_like(pre) : pre;
    Activate pass = activate_pass(activation, pre, has_bias ? at::Tensor() : bias, hidden);
    pass.store_pre = training && !from_output;
    at::Tensor up, up_bias;
    if (gated) {
      if (training && from_output) {  // what is saved is act(pre), which has a pass of its own
        run(pass, pre);
        hidden = empty_buffer_like(pre);
        pass = activate_pass(identity(), pre, {}, hidden);
        pass.store_pre = true;
      }
      auto up_product = product_with_bias(rows, operands[kUpWeight], contiguous_or_undefined(operands[kUpBias]));
      up = up_product.result;
      if (!up_product.has_bias) up_bias = contiguous_or_undefined(operands[kUpBias]);
      pass.up = up.mutable_data_ptr();
      pass.up_bias = data_or_null(up_bias);
    }
    run(pass, pre);
    if (training) {
      if (gated || !from_output)
        result.saved = pre;
      else if (down)
        result.saved = hidden;
      result.up = up;
    }
  }
  const at::Tensor output = down ? product(Role::kForward, hidden, operands[kDownWeight],
                                           contiguous_or_undefined(operands[kDownBias]))
                                 : hidden;
  result.output = input.dim() == 2 ? output : output.view(sizes);
  return result;
}

Operands backward(const ActivationCall& activation, const at::Tensor& grad_out, const Operands& operands,
                  const at::Tensor& saved, const at::Tensor& up, const std::array<bool, kOperands>& wanted,
                  bool overwrite, const GradientSums& sums) {
  Operands grads;
  const bool down = operands[kDownWeight].defined() || wanted[kDownWeight] || wanted[kDownBias];
  const bool hidden_wanted = wanted[kDownWeight];
  const bool pre_wanted = wanted[kInput] || wanted[kWeight] || wanted[kBias];
  const bool up_wanted = up.defined() && (wanted[kInput] || wanted[kUpWeight] || wanted[kUpBias]);
  const at::Tensor grad_rows = rows_of(grad_out).contiguous();

  const auto weight_grad = [&](Operand operand, const at::Tensor& rows, const at::Tensor& input) {
    if (!wanted[operand] || (sums[operand].into.defined() && add(sums[operand], rows, input))) return;
    grads[operand] = weight_gradient(rows, input, operands[operand]);
  };

  at::Tensor grad_hidden = grad_rows;
  bool own_grad = !grad_rows.is_alias_of(grad_out);
  if (down) {
    if (wanted[kDownBias]) grads[kDownBias] = at::sum(grad_rows, 0);
    if (pre_wanted || up_wanted || wanted[kUpWeight] || wanted[kUpBias])
      grad_hidden = product(Role::kGradInput, grad_rows, operands[kDownWeight]);
    own_grad = true;
  }

  at::Tensor grad_pre = grad_hidden, grad_up, hidden = saved;
  const bool up_alone = !up.defined() && !pre_wanted && (wanted[kUpWeight] || wanted[kUpBias]);
  const bool trivial = activation.index == identity().index && !up.defined() && !up_alone;
  if (trivial) {
    if (wanted[kBias]) grads[kBias] = at::sum(grad_hidden, 0);
  } else if (up_alone) {  // grad_up = act(saved) * grad_hidden: the forward pass, with the gradient for its gate
    grad_up = empty_buffer_like(grad_hidden);
    Activate pass = activate_pass(activation.saved == Saved::kInput ? activation : identity(), saved, {}, grad_up);
    pass.up = grad_hidden.mutable_data_ptr();
    run(pass, saved);
    if (wanted[kUpBias]) grads[kUpBias] = at::sum(grad_up, 0);
  } else if (pre_wanted || up_wanted) {
    Differentiate pass{};
    pass.activation = activation.index;
    pass.parameters = activation.parameters;
    const at::Tensor matrix = rows_of(saved);
    pass.dtype = *storage_type(matrix.scalar_type());
    pass.rows = matrix.size(0);
    pass.columns = pass.stride = matrix.size(1);
    pass.saved = matrix.const_data_ptr();
    pass.up = data_or_null(up);
    pass.grad_out = grad_hidden.const_data_ptr();
    if (!own_grad) grad_pre = overwrite && !hidden_wanted ? matrix : empty_buffer_like(grad_hidden);
    pass.grad_pre = grad_pre.mutable_data_ptr();
    if (up.defined()) {
      grad_up = overwrite ? up : empty_buffer_like(up);
      pass.grad_up = grad_up.mutable_data_ptr();
    }
    if (hidden_wanted && (up.defined() || activation.saved == Saved::kInput)) {
      hidden = overwrite ? matrix : empty_buffer_like(matrix);
      pass.hidden = hidden.mutable_data_ptr();
    }
    if (wanted[kBias]) grads[kBias] = at::empty({pass.columns}, matrix.options());
    if (wanted[kUpBias]) grads[kUpBias] = at::empty({pass.columns}, matrix.options());
    if (pass.rows == 0) {
      for (const Operand bias : {kBias, kUpBias})
        if (grads[bias].defined()) grads[bias].zero_();
    }
    pass.grad_bias = mutable_data_or_null(grads[kBias]);
    pass.grad_up_bias = mutable_data_or_null(grads[kUpBias]);
    run(pass, matrix);
  } else if (hidden_wanted && (up.defined() || activation.saved == Saved::kInput)) {
    hidden = empty_buffer_like(saved);
    const ActivationCall& value = activation.saved == Saved::kInput ? activation : identity();
    Activate pass = activate_pass(value, saved, {}, hidden);
    pass.up = mutable_data_or_null(up);
    run(pass, saved);
  }

  if (down) weight_grad(kDownWeight, grad_rows, hidden);
  const at::Tensor rows = operands[kInput].defined() ? rows_of(operands[kInput]) : at::Tensor();
  if (wanted[kInput]) {
    at::Tensor grad_input = product(Role::kGradInput, grad_pre, operands[kWeight]);
    if (grad_up.defined()) grad_input.addmm_(grad_up, operands[kUpWeight]);
    at::DimVector sizes(grad_out.sizes().begin(), grad_out.sizes().end());
    sizes.back() = grad_input.size(1);
    grads[kInput] = grad_out.dim() == 2 ? grad_input : grad_input.view(sizes);
  }
  weight_grad(kWeight, grad_pre, rows);
  weight_grad(kUpWeight, grad_up, rows);
  return grads;
}

}  // namespace fused_ops
