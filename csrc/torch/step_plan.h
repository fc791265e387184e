// SPDX-License-Identifier: Apache-2.0
// A parameter group's step, read straight from the Python objects that hold it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "torch/optimizer_step.h"

namespace fused_ops {

// Holds no tensor between steps: what may have changed is read again at each. It keeps only where each parameter was
// found in the optimizer's state, so that looking there first saves hashing it.
class StepPlan {
 public:
  explicit StepPlan(const std::string& optimizer);

  // Checks every gradient of `params` (a group's list) against its parameter. Changes nothing. Throws what no optimizer
  // could take. Returns what hinders the fused path: None, or the reason.
  py::object check(const py::list& params, std::vector<double> hyperparameters);

  // Names of the states that the hyperparameters given to check() use.
  std::vector<std::string> used_states() const;

  // Positions of the parameters that have a gradient but lack some of their state. device_steps: a step counter must be
  // on its parameter's device, or it counts as lacking.
  std::vector<int64_t> lacking(const py::list& params, const py::dict& state, bool device_steps);

  // Reads states and step counters. `first` holds the positions of parameters that take their first step. Changes
  // nothing. Returns as check().
  py::object bind(const py::list& params, const py::dict& state, const std::vector<int64_t>& first);

  // Updates what was bound; returns whether it did, as OptimizerStep::run.
  bool run(const py::object& lr, const py::object& grad_scale, const py::object& found_inf);

 private:
  PyObject* state_of(PyObject* param, PyObject* state, size_t index);

  OptimizerStep step_;
  std::vector<py::object> names_;  // of the states, then "step"
  std::vector<Py_ssize_t> places_;
};

}  // namespace fused_ops
