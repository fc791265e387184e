// SPDX-License-Identifier: Apache-2.0
// One optimizer step over tensors: checks them, turns them into items, and runs a backend's walk.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/walk.h"
#include "core/walk.h"

namespace fused_ops {

// Device scalars of mixed-precision training and CUDA graphs; undefined where absent.
struct StepTensors {
  at::Tensor lr, grad_scale, found_inf;
};

class OptimizerStep {
 public:
  // A step counter in host memory: float32 as torch.optim makes it, or what an old checkpoint held.
  struct HostStep {
    void* data;
    at::ScalarType dtype;
  };

  // A parameter's states and step counter. Usable again if all were contiguous and the counter is on the host.
  struct Found {
    bool usable = false;
    bool in_double;
    at::ScalarType param_dtype;
    Item item;  // its param and grad are of no use
    HostStep step;
  };

  // `name` is what errors call the optimizer; the rule's own unless another is given.
  explicit OptimizerStep(int optimizer);
  OptimizerStep(int optimizer, std::string name);

  const std::string& name() const { return name_; }
  const std::vector<std::string>& state_names() const { return state_names_; }
  bool counts_steps() const { return counts_steps_; }

  // Starts a new step. `hyperparameters` are in the order of the optimizer's kHyperparameterNames.
  void reset(std::vector<double> hyperparameters);
  unsigned states() const { return states_; }  // the states these hyperparameters use: a bit mask over state_names()

  // Checks a gradient against its parameter, by position `index`. Throws what no optimizer could take; returns why the
  // fused path cannot take what stock PyTorch may, or nothing.
  std::optional<std::string> check(int64_t index, const at::Tensor& param, const at::Tensor& grad);

  // Adds a checked parameter with its states (state_names() order, null where unused) and its step counter.
  // `first`: this is the parameter's first step; told by the counter where the optimizer counts steps.
  // Returns why the fused path cannot take it, or nothing.
  // What it found out about the states is kept in `found`, for add_again().
  std::optional<std::string> add(int64_t index, const at::Tensor& param, at::Tensor grad,
                                 const at::Tensor* const* states, const at::Tensor* step, bool first, Found& found);

  // As add(), where states and step counter are known to be what they were. Returns false if that is not enough.
  bool add_again(const at::Tensor& param, at::Tensor grad, const Found& found);

  // Call when all have been checked. Returns as check().
  std::optional<std::string> check_together();

  // Updates every parameter that was added; with a non-zero found_inf, none. Returns whether it did, as far as the host
  // can know (true where found_inf is on a device).
  bool run(const StepTensors& tensors);

  // Drops what was added, and with it the gradients that it keeps alive.
  void forget();

 private:
  // What one walk covers: tensors of one device and one compute type.
  struct Bucket {
    at::Device device;
    bool in_double;
    bool device_steps;
    std::vector<Item> items;
    std::vector<cpu::Chunk> chunks;
    std::vector<StepScalars> scalars;
    std::vector<float*> steps;  // device counters, one for each item, if device_steps
  };

  Bucket& bucket(at::Device device, bool in_double, bool device_steps);
  void push(const at::Tensor& param, Item& item, bool in_double, float* device_step, double count);
  std::optional<std::string> lay_out(int64_t index, Item& item, const at::Tensor* const* tensors,
                                     std::deque<Layout>& layouts) const;
  std::string argument(const char* what, int64_t index) const;
  void run_bucket(Bucket& bucket, size_t first, size_t last, const StepTensors& tensors);

  int optimizer_;
  std::string name_;
  std::vector<std::string> state_names_;
  bool counts_steps_;
  int maximize_index_;

  std::vector<double> hyperparameters_;
  unsigned states_ = 0;
  std::vector<Bucket> buckets_;
  size_t bucket_count_ = 0;  // those beyond are spare: their memory is used again
  std::deque<Layout> layouts_;
  std::vector<at::Tensor> keep_alive_;    // gradients: another thread may set them to None while we run
  std::vector<c10::TensorImpl*> params_;  // what autograd must see as modified
  std::vector<HostStep> host_steps_;
  std::vector<std::pair<const char*, const char*>> memory_, checked_memory_;  // [begin, end) of each parameter
  bool serially_ = false;  // two parameters may share memory: one walk each, in their order
};

// Optimizers' index of a name; -1 where there is none.
int optimizer_index(const std::string& name);
std::vector<std::string> optimizer_names();
std::vector<std::string> hyperparameter_names(int optimizer);

}  // namespace fused_ops
