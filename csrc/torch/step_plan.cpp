// SPDX-License-Identifier: Apache-2.0
#include "torch/step_plan.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "torch/checks.h"

namespace fused_ops {
namespace {

// A DTensor's own part; any other tensor itself. Null for a subclass that computes differently from its storage.
const at::Tensor* local(const at::Tensor& tensor, PyObject* object) {
  if (!tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) return &tensor;
  py::object part = py::reinterpret_borrow<py::object>(object).attr("__dict__").attr("get")("_local_tensor");
  return THPVariable_Check(part.ptr()) ? &THPVariable_Unpack(part.ptr()) : nullptr;
}

struct Gradient {
  const at::Tensor* param = nullptr;
  at::Tensor grad;
  const char* refusal = nullptr;
};

// The parameter and gradient as plain tensors; param is null where there is no gradient.
Gradient read(PyObject* object) {
  if (!THPVariable_Check(object)) fail("expected params to hold tensors, got ", Py_TYPE(object)->tp_name, ".");
  const at::Tensor& param = THPVariable_Unpack(object);
  const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
  if (!grad.defined()) return {};
  if (C10_LIKELY(!param.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) &&
                 !grad.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)))
    return {&param, grad, nullptr};
  const py::object grad_object = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  const py::object param_object = py::reinterpret_borrow<py::object>(object);
  const at::Tensor* local_param = local(param, object);
  const at::Tensor* local_grad = local(grad, grad_object.ptr());
  if (!local_param || !local_grad) return {&param, grad, "a parameter or gradient is of a tensor subclass"};
  if (py::hasattr(param_object, "placements") != py::hasattr(grad_object, "placements") ||
      (py::hasattr(param_object, "placements") &&
       !param_object.attr("placements").equal(grad_object.attr("placements"))))
    return {&param, grad, "a parameter and its gradient are placed differently over the device mesh"};
  return {local_param, *local_grad, nullptr};
}

// The value of a key, or null; also where there is no dict.
PyObject* get(PyObject* dict, const py::object& key) {
  if (!dict || !PyDict_Check(dict)) return nullptr;
  PyObject* value = PyDict_GetItemWithError(dict, key.ptr());
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

at::Tensor tensor_or_undefined(const py::object& object) {
  return THPVariable_Check(object.ptr()) ? THPVariable_Unpack(object.ptr()) : at::Tensor();
}

py::object reason_or_none(const std::optional<std::string>& reason) {
  return reason ? py::object(py::str(*reason)) : py::object(py::none());
}

}  // namespace

StepPlan::StepPlan(const std::string& optimizer)
    : step_([&] {
        const int index = optimizer_index(optimizer);
        if (index < 0) fail("StepPlan: there is no optimizer named ", optimizer, ".");
        return OptimizerStep(index);
      }()) {
  for (const std::string& name : step_.state_names())
    names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str())));
  names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("step")));
}

py::object StepPlan::check(const py::list& params, std::vector<double> hyperparameters) {
  step_.reset(std::move(hyperparameters));
  std::optional<std::string> reason;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
    const Gradient gradient = read(PyList_GET_ITEM(params.ptr(), i));
    if (!gradient.param) continue;
    if (!reason && gradient.refusal) reason = gradient.refusal;
    if (gradient.refusal) continue;
    const std::optional<std::string> found = step_.check(i, *gradient.param, gradient.grad);
    if (!reason) reason = found;
  }
  return reason_or_none(reason);
}

// PyDict_Next reads the entry at a place without hashing; the key it finds there tells whether the place still holds.
// A state is mostly in the order of its parameters, so the place after the previous parameter's is the next best guess.
PyObject* StepPlan::state_of(PyObject* param, PyObject* state, size_t index) {
  if (places_.size() <= index) places_.resize(index + 1, 0);
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t next = places_[index];
  if (PyDict_Next(state, &next, &key, &value) && key == param) return value;
  Py_ssize_t place = index > 0 ? places_[index - 1] : 0;
  if (index > 0) PyDict_Next(state, &place, &key, &value);
  next = place;
  if (PyDict_Next(state, &next, &key, &value) && key == param) {
    places_[index] = place;
    return value;
  }
  value = PyDict_GetItemWithError(state, param);
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::vector<std::string> StepPlan::used_states() const {
  std::vector<std::string> used;
  for (size_t k = 0; k < step_.state_names().size(); ++k)
    if (step_.states() >> k & 1u) used.push_back(step_.state_names()[k]);
  return used;
}

std::vector<int64_t> StepPlan::lacking(const py::list& params, const py::dict& state, bool device_steps) {
  std::vector<int64_t> positions;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
    PyObject* object = PyList_GET_ITEM(params.ptr(), i);
    const at::Tensor& param = THPVariable_Unpack(object);
    if (!param.unsafeGetTensorImpl()->grad().defined()) continue;
    PyObject* entries = state_of(object, state.ptr(), i);
    bool lacks = false;
    for (size_t k = 0; k < names_.size() && !lacks; ++k) {
      const bool is_step = k + 1 == names_.size();
      if (is_step ? !step_.counts_steps() : !(step_.states() >> k & 1u)) continue;
      PyObject* value = get(entries, names_[k]);
      lacks = !value || !THPVariable_Check(value) ||
              (is_step && device_steps && THPVariable_Unpack(value).device() != param.device());
    }
    if (lacks) positions.push_back(i);
  }
  return positions;
}

py::object StepPlan::bind(const py::list& params, const py::dict& state, const std::vector<int64_t>& first) {
  std::optional<std::string> reason;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()) && !reason; ++i) {
    PyObject* object = PyList_GET_ITEM(params.ptr(), i);
    const Gradient gradient = read(object);
    if (!gradient.param) continue;
    PyObject* entries = state_of(object, state.ptr(), i);
    at::Tensor states[kMaxStates], step;
    for (size_t k = 0; k < names_.size(); ++k) {
      const bool is_step = k + 1 == names_.size();
      if (is_step ? !step_.counts_steps() : !(step_.states() >> k & 1u)) continue;
      PyObject* value = get(entries, names_[k]);
      const at::Tensor* tensor = value && THPVariable_Check(value) ? local(THPVariable_Unpack(value), value) : nullptr;
      if (!tensor) fail(step_.name(), ": expected state['", py::str(names_[k]), "'] of params[", i, "] to be a tensor. ",
                        "Load a state_dict that was saved for this model.");
      (is_step ? step : states[k]) = *tensor;
    }
    const bool is_first = std::binary_search(first.begin(), first.end(), int64_t(i));
    reason = step_.add(i, *gradient.param, gradient.grad, states, step, is_first);
  }
  return reason_or_none(reason);
}

bool StepPlan::run(const py::object& lr, const py::object& grad_scale, const py::object& found_inf) {
  const StepTensors tensors{tensor_or_undefined(lr), tensor_or_undefined(grad_scale), tensor_or_undefined(found_inf)};
  py::gil_scoped_release release;
  return step_.run(tensors);
}

}  // namespace fused_ops
