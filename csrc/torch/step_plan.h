// SPDX-License-Identifier: Apache-2.0
// A parameter group's step, read straight from the Python objects that hold it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torch/optimizer_step.h"

namespace fused_ops {

// Keeps no tensor alive between steps, and reads again at each what may have changed. What it remembers is where it
// found things, so that a look at the same place tells that they are the same.
class StepPlan {
 public:
  // Of the rule named `optimizer`; errors call it `name`.
  StepPlan(const std::string& optimizer, std::string name);

  // Checks every parameter of `params` (a group's list) that has a gradient, and all that moves with it. Changes
  // nothing. Throws what no optimizer could take. Returns
  //   what hinders the fused path: None, or the reason;
  //   the positions of parameters that lack some of their state, or, with device_steps, whose step counter is not on
  //   their device: to be made before gathering again.
  // `first` holds the positions, ascending, of parameters that take their first step.
  std::pair<py::object, std::vector<int64_t>> gather(const py::list& params, const py::dict& state,
                                                     std::vector<double> hyperparameters, bool device_steps,
                                                     const std::vector<int64_t>& first);

  // Names of the states that the hyperparameters given to gather() use.
  std::vector<std::string> used_states() const;

  // Updates what was gathered; returns whether it did, as OptimizerStep::run.
  bool run(const py::object& lr, const py::object& grad_scale, const py::object& found_inf);

  // Drops what was gathered, where it will not run.
  void forget();

 private:
  struct Entry {  // where one parameter's things are
    PyObject* object;
    PyObject* entries;                 // its dict in the optimizer's state, or null
    const at::Tensor* grad;            // undefined if there is none
    PyObject* values[kMaxStates + 1];  // of names_, null where not read or absent
  };
  struct Pair;

  // A state or step counter as it was: the same object in the optimizer's state with the same memory behind it.
  struct Seen {
    PyObject* value = nullptr;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    const c10::StorageImpl* storage = nullptr;
    const void* data = nullptr;

    void remember(PyObject* value, const at::Tensor& tensor);
    bool is_still(PyObject* value) const;
  };
  struct Known {
    Py_ssize_t place = 0;  // in the optimizer's state
    Seen seen[kMaxStates + 1];
    OptimizerStep::Found found;
  };
  static constexpr size_t kBlock = 12;

  std::unique_lock<std::mutex> wait_until_idle();
  void find(Entry* block, size_t first, size_t count, PyObject* params, PyObject* state);
  PyObject* state_of(PyObject* param, PyObject* state, size_t index);
  static Pair local_pair(const Entry& entry);
  bool reads(size_t k) const;
  bool is_known(const Entry& entry, const Known& known) const;

  std::mutex busy_;  // run() holds no interpreter lock: another thread that steps the same optimizer must wait
  OptimizerStep step_;
  std::vector<py::object> names_;  // of the states, then "step"
  std::vector<Known> known_;       // by position in the group
  unsigned known_states_ = 0;
};

}  // namespace fused_ops
