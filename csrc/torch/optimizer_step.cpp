// SPDX-License-Identifier: Apache-2.0
#include "torch/optimizer_step.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "core/optim/list.h"
#include "torch/checks.h"
#include "torch/storage_type.h"

#if defined(FUSED_OPS_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/cuda/walk.h"
#endif

namespace fused_ops {
namespace {

// Calls visitor.operator()<Optimizer>() and returns what it returns.
template <class Visitor>
auto with_optimizer(int optimizer, Visitor&& visitor) {
  decltype(visitor.template operator()<Adam>()) result {};
  visit_optimizer(optimizer, [&]<class Optimizer>() { result = visitor.template operator()<Optimizer>(); });
  return result;
}

template <size_t kCount>
std::vector<std::string> strings(const char* const (&names)[kCount]) {
  return {names, names + kCount};
}

bool same_sizes(const at::Tensor& a, const at::Tensor& b) {
  const at::IntArrayRef first = a.sizes(), second = b.sizes();
  bool same = first.size() == second.size();
  for (size_t d = 0; same && d < first.size(); ++d) same = first[d] == second[d];
  return same;
}

double host_scalar(const at::Tensor& tensor) { return tensor.item().toDouble(); }

double read_step(const void* data, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return *static_cast<const float*>(data);
    case at::kDouble: return *static_cast<const double*>(data);
    default: return double(*static_cast<const int64_t*>(data));
  }
}

void increment_step(void* data, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: *static_cast<float*>(data) += 1; break;
    case at::kDouble: *static_cast<double*>(data) += 1; break;
    default: *static_cast<int64_t*>(data) += 1; break;
  }
}

void expect_dtype(const std::string& op, const std::function<std::string()>& what, const at::Tensor& tensor) {
  if (storage_type(tensor.scalar_type())) return;
  fail(op, ": expected ", what(),
       ".dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, ",
       "torch.complex128), got ", describe(tensor.scalar_type()), ". Convert it, or leave it out of the optimizer.");
}

// Whether two index tuples of these strides lead to the same element.
template <class Dims>
bool overlaps(const Dims& dims) {
  int64_t extent = 1;
  bool nested = true;  // each dimension steps over all that the inner ones reach: the usual case
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    nested &= dim->stride[kParam] >= extent;
    extent += dim->stride[kParam] * (dim->size - 1);
  }
  if (nested) return false;
  std::vector<bool> taken(extent);
  std::vector<int64_t> offsets{0};
  for (const auto& dim : dims) {
    const size_t count = offsets.size();
    for (int64_t i = 1; i < dim.size; ++i)
      for (size_t k = 0; k < count; ++k) offsets.push_back(offsets[k] + i * dim.stride[kParam]);
  }
  for (const int64_t offset : offsets) {
    if (taken[offset]) return true;
    taken[offset] = true;
  }
  return false;
}

bool is_host_step_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kLong;
}

}  // namespace

int optimizer_index(const std::string& name) {
  const std::vector<std::string> names = optimizer_names();
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : int(found - names.begin());
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kOptimizerCount; ++i)
    names.push_back(with_optimizer(i, []<class Optimizer>() { return std::string(Optimizer::kName); }));
  return names;
}

std::vector<std::string> hyperparameter_names(int optimizer) {
  return with_optimizer(optimizer, []<class Optimizer>() {
    static_assert(sizeof(typename Optimizer::Hyperparameters) ==
                  sizeof(Optimizer::kHyperparameterNames) / sizeof(char*) * sizeof(double));
    return strings(Optimizer::kHyperparameterNames);
  });
}

OptimizerStep::OptimizerStep(int optimizer) : OptimizerStep(optimizer, optimizer_names()[optimizer]) {}

OptimizerStep::OptimizerStep(int optimizer, std::string name)
    : optimizer_(optimizer),
      name_(std::move(name)),
      state_names_(with_optimizer(optimizer, []<class Optimizer>() { return strings(Optimizer::kStateNames); })),
      counts_steps_(with_optimizer(optimizer, []<class Optimizer>() { return Optimizer::kCountsSteps; })) {
  const std::vector<std::string> names = hyperparameter_names(optimizer);
  maximize_index_ = int(std::find(names.begin(), names.end(), "maximize") - names.begin());
}

void OptimizerStep::reset(std::vector<double> hyperparameters) {
  const size_t wanted = hyperparameter_names(optimizer_).size();
  if (hyperparameters.size() != wanted)
    fail_expectation(name_, "len(hyperparameters)", wanted, hyperparameters.size(),
                     "Pass them in the order of the schema.");
  hyperparameters_ = std::move(hyperparameters);
  states_ = with_optimizer(optimizer_, [&]<class Optimizer>() {
    typename Optimizer::Hyperparameters values;
    std::memcpy(&values, hyperparameters_.data(), sizeof(values));
    return Optimizer::states(values);
  });
  forget();
  layouts_.clear();
  params_.clear();
  host_steps_.clear();
  memory_.clear();
}

std::string OptimizerStep::argument(const char* what, int64_t index) const {
  return std::string(what) + "[" + std::to_string(index) + "]";
}

std::optional<std::string> OptimizerStep::check(int64_t index, const at::Tensor& param, const at::Tensor& grad) {
  if (grad.layout() != at::kStrided) return "a gradient is " + std::string(grad.is_sparse() ? "sparse" : "not strided");
#if !defined(FUSED_OPS_CUDA)
  if (param.is_cuda()) return "this build of fused_ops has no CUDA kernels (python -m fused_ops info says why)";
#endif
  if (!param.is_cpu() && !param.is_cuda()) return "a parameter is on device " + param.device().str();
  if (param.layout() != at::kStrided) return "a parameter is not strided";
  if (!same_sizes(param, grad))
    fail_expectation(name_, argument("grads", index) + ".shape", describe(param.sizes()), describe(grad.sizes()),
                     "A gradient has the shape of its parameter.");
  if (param.device() != grad.device())
    fail_expectation(name_, argument("grads", index) + ".device", param.device(), grad.device(),
                     "Move the gradient to its parameter's device.");
  if (param.is_complex() != grad.is_complex())
    fail_expectation(name_, argument("grads", index) + ".is_complex()", param.is_complex() ? "True" : "False",
                     grad.is_complex() ? "True" : "False", "Parameter and gradient are both real or both complex.");
  expect_dtype(name_, [&] { return argument("params", index); }, param);
  expect_dtype(name_, [&] { return argument("grads", index); }, grad);
  if (param.is_conj() || param.is_neg()) return "a parameter is a conjugate or negative view";
  if (param.is_inference() && !c10::InferenceMode::is_enabled()) return "a parameter is an inference tensor";

  params_.push_back(param.unsafeGetTensorImpl());
  const char* begin = static_cast<const char*>(param.mutable_data_ptr());
  int64_t extent = param.numel();
  if (!param.is_contiguous() && extent > 0) {
    extent = 1;
    for (int64_t d = 0; d < param.dim(); ++d) extent += (param.size(d) - 1) * param.stride(d);
  }
  memory_.push_back({begin, begin + extent * int64_t(param.element_size())});

  if (param.is_contiguous() && grad.is_contiguous()) return std::nullopt;
  const at::Tensor* tensors[kMaxOperands] = {&param, &grad};
  std::deque<Layout> layouts;
  Item item{};
  return lay_out(index, item, tensors, layouts);
}

OptimizerStep::Bucket& OptimizerStep::bucket(at::Device device, bool in_double, bool device_steps) {
  for (size_t i = 0; i < bucket_count_; ++i) {
    Bucket& bucket = buckets_[i];
    if (bucket.device == device && bucket.in_double == in_double && bucket.device_steps == device_steps) return bucket;
  }
  if (bucket_count_ == buckets_.size()) buckets_.push_back({device, false, false, {}, {}, {}, {}});
  Bucket& bucket = buckets_[bucket_count_++];
  bucket.device = device;
  bucket.in_double = in_double;
  bucket.device_steps = device_steps;
  bucket.items.clear();
  bucket.chunks.clear();
  bucket.scalars.clear();
  bucket.steps.clear();
  return bucket;
}

// Finds the fewest dimensions that walk all operands in the parameter's memory order.
std::optional<std::string> OptimizerStep::lay_out(int64_t index, Item& item, const at::Tensor* const* tensors,
                                                  std::deque<Layout>& layouts) const {
  const at::Tensor& param = *tensors[kParam];
  const bool complex = param.is_complex();
  struct Dim {
    int64_t size, stride[kMaxOperands];
  };
  c10::SmallVector<Dim, kMaxDims> dims;
  for (int64_t d = 0; d < param.dim(); ++d) {
    if (param.size(d) == 1) continue;
    Dim dim{param.size(d), {}};
    for (int operand = 0; operand < kMaxOperands; ++operand)
      if (tensors[operand]) dim.stride[operand] = tensors[operand]->stride(d) * (complex ? 2 : 1);
    dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return a.stride[kParam] > b.stride[kParam]; });
  if (complex) {
    Dim parts{2, {}};
    std::fill_n(parts.stride, kMaxOperands, 1);
    dims.push_back(parts);
  }
  for (int operand = 0; operand < kMaxOperands; ++operand) {
    if (!tensors[operand] || operand == kGrad) continue;
    for (const Dim& dim : dims)
      if (dim.stride[operand] == 0)
        fail(name_, ": expected ", operand == kParam ? argument("params", index) : state_names_[operand - kFirstState],
             " not to be expanded, got stride 0 in a dimension of size ", dim.size,
             ". Call .contiguous() on it first.");
  }
  if (overlaps(dims))
    fail(name_, ": expected ", argument("params", index), " to have each element in a place of its own, got sizes ",
         describe(param.sizes()), " with strides ", describe(param.strides()), ". Call .contiguous() on it first.");
  c10::SmallVector<Dim, kMaxDims> merged;
  for (const Dim& dim : dims) {
    bool merges = !merged.empty();
    for (int operand = 0; merges && operand < kMaxOperands; ++operand)
      merges = !tensors[operand] || merged.back().stride[operand] == dim.stride[operand] * dim.size;
    if (!merges) {
      merged.push_back(dim);
      continue;
    }
    const int64_t size = merged.back().size;
    merged.back() = dim;
    merged.back().size *= size;
  }
  const auto is_dense = [&] {
    if (merged.size() > 1) return false;
    for (int operand = 0; operand < kMaxOperands; ++operand)
      if (tensors[operand] && !merged.empty() && merged[0].stride[operand] != 1) return false;
    return true;
  };
  if (is_dense()) return std::nullopt;
  if (merged.size() > kMaxDims) return "a parameter has more than " + std::to_string(kMaxDims) + " separate dimensions";
  Layout& layout = layouts.emplace_back();
  layout.dims = int(merged.size());
  for (int d = 0; d < layout.dims; ++d) {
    layout.size[d] = merged[d].size;
    for (int operand = 0; operand < kMaxOperands; ++operand) layout.stride[operand][d] = merged[d].stride[operand];
  }
  item.layout = &layout;
  return std::nullopt;
}

std::optional<std::string> OptimizerStep::add(int64_t index, const at::Tensor& param, at::Tensor grad,
                                              const at::Tensor* const* states, const at::Tensor* step, bool first,
                                              Found& found) {
  if (grad.is_conj() || grad.is_neg()) grad = grad.resolve_conj().resolve_neg();
  keep_alive_.push_back(std::move(grad));
  const at::Tensor* tensors[kMaxOperands] = {&param, &keep_alive_.back()};
  for (int i = 0; i < int(state_names_.size()); ++i) {
    if (!has_state(states_, i)) continue;
    const at::Tensor& state = *states[i];
    tensors[kFirstState + i] = &state;
    const auto fact = [&](const char* what) {
      return "state['" + state_names_[i] + "'] of " + argument("params", index) + what;
    };
    constexpr const char* kAdvice = "Load a state_dict that was saved for this model.";
    if (!state.sizes().equals(param.sizes()))
      fail_expectation(name_, fact(".shape"), describe(param.sizes()), describe(state.sizes()), kAdvice);
    if (state.device() != param.device())
      fail_expectation(name_, fact(".device"), param.device(), state.device(), kAdvice);
    if (state.is_complex() != param.is_complex())
      fail_expectation(name_, fact(".dtype"), describe(param.scalar_type()), describe(state.scalar_type()), kAdvice);
    expect_dtype(name_, [&] { return fact(""); }, state);
    if (state.layout() != at::kStrided || state.is_conj() || state.is_neg())
      fail(name_, ": expected ", fact(""), " to be a plain strided tensor. ", kAdvice);
  }

  Item item{};
  bool in_double = false, contiguous = true;
  for (int operand = 0; operand < kMaxOperands; ++operand) {
    if (!tensors[operand]) continue;
    const at::Tensor& tensor = *tensors[operand];
    item.data[operand] = operand == kGrad ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
    item.dtype[operand] = *storage_type(tensor.scalar_type());
    in_double |= operand != kGrad && item.dtype[operand] == DType::kFloat64;
    contiguous &= tensor.is_contiguous();
  }
  item.numel = param.numel() * (param.is_complex() ? 2 : 1);
  if (!contiguous && item.numel > 0)
    if (auto refusal = lay_out(index, item, tensors, layouts_)) return refusal;

  float* device_step = nullptr;
  HostStep host_step{};
  double count = first ? 1 : 2;
  if (counts_steps_) {
    if (!step || step->numel() != 1)
      fail(name_, ": expected state['step'] of ", argument("params", index), " to be a one-element tensor. ",
           "Load a state_dict that was saved for this model.");
    const bool on_host = step->is_cpu();
    const bool plain = on_host ? is_host_step_dtype(step->scalar_type())
                               : step->device() == param.device() && step->scalar_type() == at::kFloat;
    if (!plain) return "state['step'] is a " + describe(step->scalar_type()) + " on " + step->device().str();
    void* data = step->mutable_data_ptr();
    if (on_host) {
      host_step = {data, step->scalar_type()};
      host_steps_.push_back(host_step);
      count = read_step(data, host_step.dtype) + 1;
    } else {
      device_step = static_cast<float*>(data);
    }
  }
  push(param, item, in_double, device_step, count);
  found = {contiguous && !device_step && !first, in_double, param.scalar_type(), item, host_step};
  return std::nullopt;
}

bool OptimizerStep::add_again(const at::Tensor& param, at::Tensor grad, const Found& found) {
  const int64_t numel = param.numel() * (param.is_complex() ? 2 : 1);
  if (!found.usable || found.param_dtype != param.scalar_type() || found.item.numel != numel ||
      !param.is_contiguous() || !grad.is_contiguous() || grad.is_conj() || grad.is_neg())
    return false;
  Item item = found.item;
  item.data[kParam] = param.mutable_data_ptr();
  item.data[kGrad] = const_cast<void*>(grad.const_data_ptr());
  item.dtype[kGrad] = *storage_type(grad.scalar_type());
  keep_alive_.push_back(std::move(grad));
  double count = 2;
  if (counts_steps_) {
    host_steps_.push_back(found.step);
    count = read_step(found.step.data, found.step.dtype) + 1;
  }
  push(param, item, found.in_double, nullptr, count);
  return true;
}

// Puts an item into the bucket that it belongs to.
void OptimizerStep::push(const at::Tensor& param, Item& item, bool in_double, float* device_step, double count) {
  Bucket& target = bucket(param.device(), in_double, device_step != nullptr);
  if (target.scalars.empty() || target.scalars.back().step != count) target.scalars.push_back({count});
  item.scalars = int32_t(target.scalars.size() - 1);
  if (device_step) target.steps.push_back(device_step);
  if (!param.is_cuda())
    for (int64_t begin = 0; begin < item.numel; begin += cpu::kChunk)
      target.chunks.push_back(
          {begin, int32_t(target.items.size()), int32_t(std::min(cpu::kChunk, item.numel - begin))});
  target.items.push_back(item);
}

// Sorting is needed only when a pointer has changed since the last step.
std::optional<std::string> OptimizerStep::check_together() {
  if (memory_ == checked_memory_ && !serially_) return std::nullopt;
  checked_memory_ = memory_;
  std::sort(memory_.begin(), memory_.end());
  const char* end = nullptr;
  serially_ = false;
  for (const auto& [first, last] : memory_) {
    if (first == last) continue;
    serially_ |= first < end;
    end = std::max(end, last);
  }
  if (!serially_) return std::nullopt;
  std::vector<c10::TensorImpl*> params = params_;
  std::sort(params.begin(), params.end());
  if (std::adjacent_find(params.begin(), params.end()) != params.end())
    return "a parameter group holds the same parameter twice";
  return std::nullopt;
}

bool OptimizerStep::run(const StepTensors& tensors) {
  bool host_decides = !host_steps_.empty();
  for (size_t i = 0; i < bucket_count_; ++i) host_decides |= !on_cuda(buckets_[i].device);
  if (host_decides && tensors.found_inf.defined() && host_scalar(tensors.found_inf) != 0) return false;
  for (const HostStep& step : host_steps_) increment_step(step.data, step.dtype);
  for (c10::TensorImpl* param : params_)
    if (!param->is_inference()) param->bump_version();
  for (size_t i = 0; i < bucket_count_; ++i) {
    Bucket& bucket = buckets_[i];
    if (!serially_) {
      run_bucket(bucket, 0, bucket.items.size(), tensors);
    } else {
      for (size_t item = 0; item < bucket.items.size(); ++item) run_bucket(bucket, item, item + 1, tensors);
    }
  }
  forget();
  return true;
}

void OptimizerStep::forget() {
  bucket_count_ = 0;
  for (const at::Tensor& tensor : keep_alive_) __builtin_prefetch(tensor.unsafeGetTensorImpl());
  keep_alive_.clear();
}

void OptimizerStep::run_bucket(Bucket& bucket, size_t first, size_t last, const StepTensors& tensors) {
  double grad_factor = hyperparameters_[maximize_index_] != 0 ? -1 : 1;
  if (!on_cuda(bucket.device)) {
    if (tensors.grad_scale.defined()) grad_factor /= host_scalar(tensors.grad_scale);
    const auto before = [](const cpu::Chunk& chunk, size_t item) { return size_t(chunk.item) < item; };
    const auto from = std::lower_bound(bucket.chunks.begin(), bucket.chunks.end(), first, before);
    const auto to = std::lower_bound(from, bucket.chunks.end(), last, before);
    int64_t elements = 0;
    for (auto chunk = from; chunk != to && elements < cpu::kChunk; ++chunk) elements += chunk->count;
    const int threads = elements < cpu::kChunk ? 1 : at::get_num_threads();
    cpu::run(optimizer_, states_, bucket.in_double,
             {hyperparameters_.data(), grad_factor, bucket.scalars.data(), bucket.items.data(),
              bucket.chunks.data() + (from - bucket.chunks.begin()), to - from, threads});
    return;
  }
#if defined(FUSED_OPS_CUDA)
  const c10::cuda::CUDAGuard guard(bucket.device);
  const auto on_device = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    if (!tensor.defined()) return tensor;
    return keep_alive_.emplace_back(tensor.to(at::TensorOptions(bucket.device).dtype(dtype), /*non_blocking=*/true));
  };
  const at::Tensor grad_scale = on_device(tensors.grad_scale, at::kFloat);
  const at::Tensor found_inf = on_device(tensors.found_inf, at::kFloat);
  const at::Tensor lr = on_device(
      tensors.lr, tensors.lr.defined() && tensors.lr.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  cuda::Walk walk{};
  walk.hyperparameters = hyperparameters_.data();
  walk.grad_factor = grad_factor;
  walk.scalars = bucket.scalars.data();
  walk.items = bucket.items.data() + first;
  walk.item_count = int64_t(last - first);
  walk.steps = bucket.device_steps ? bucket.steps.data() + first : nullptr;
  walk.grad_scale = grad_scale.defined() ? grad_scale.const_data_ptr<float>() : nullptr;
  walk.found_inf = found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr;
  walk.lr = lr.defined() ? lr.const_data_ptr() : nullptr;
  if (lr.defined()) walk.lr_dtype = *storage_type(lr.scalar_type());
  walk.stream = c10::cuda::getCurrentCUDAStream(bucket.device.index()).stream();
  const int64_t bytes = cuda::workspace_bytes(optimizer_, states_, bucket.in_double, walk);
  if (bytes > 0)
    walk.workspace = keep_alive_.emplace_back(at::empty({bytes}, at::TensorOptions(bucket.device).dtype(at::kByte)))
                         .mutable_data_ptr();
  const int error = cuda::run(optimizer_, states_, bucket.in_double, walk);
  if (error != 0)
    fail(name_, ": the CUDA launch over ", last - first, " parameters on ", bucket.device,
         " failed: ", cuda::error_string(error), ". Set CUDA_LAUNCH_BLOCKING=1 to find an earlier kernel's error.");
#endif
}

}  // namespace fused_ops
