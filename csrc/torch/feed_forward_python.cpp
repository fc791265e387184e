// SPDX-License-Identifier: Apache-2.0
#include "torch/feed_forward_python.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "torch/autocast.h"
#include "torch/buffer_pool.h"
#include "torch/checks.h"
#include "torch/feed_forward_ops.h"
#include "torch/gemm.h"

namespace py = pybind11;

namespace fused_ops {
namespace {

constexpr Py_ssize_t kActivation = kOperands, kParameters = kOperands + 1, kMainGrads = kOperands + 2;

// Below this many multiplications a call is shorter than it takes to hand the interpreter lock over.
constexpr int64_t kBriefWork = 1 << 18;

const at::Tensor& tensor_of(PyObject* object, const char* what) {
  if (!THPVariable_Check(object))
    fail_expectation("feed_forward", std::string("type of ") + what, "Tensor", Py_TYPE(object)->tp_name,
                     "Pass a tensor.");
  return THPVariable_Unpack(object);
}

// Whether a tensor is of a class that overrides torch's functions.
bool overrides(PyObject* object) {
  static PyObject* const parameter = py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  static PyObject* const disabled =
      py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl")).release().ptr();
  PyTypeObject* const type = Py_TYPE(object);
  if (object == Py_None || THPVariable_CheckTypeExact(type) || reinterpret_cast<PyObject*>(type) == parameter)
    return false;
  const py::object override = py::getattr(py::handle(reinterpret_cast<PyObject*>(type)), "__torch_function__",
                                          py::none());
  return !override.is_none() && override.ptr() != disabled;
}

at::Tensor run(PyObject* const* arguments, Py_ssize_t count) {
  Operands operands, main_grads;
  for (int operand = 0; operand < kOperands; ++operand)
    if (arguments[operand] != Py_None || operand <= kWeight)
      operands[operand] = tensor_of(arguments[operand], operand_name(Operand(operand)));
  Py_ssize_t length = 0;
  const char* const name = PyUnicode_AsUTF8AndSize(arguments[kActivation], &length);
  if (!name) throw py::error_already_set();
  c10::SmallVector<double, kMaxActivationParameters> parameters;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[kParameters]); ++i)
    parameters.push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(arguments[kParameters], i)));
  if (PyErr_Occurred()) throw py::error_already_set();
  const bool accumulate = count > kMainGrads;
  for (Py_ssize_t i = 0; accumulate && i < 3; ++i) {
    PyObject* const main_grad = PyTuple_GetItem(arguments[kMainGrads], i);
    if (!main_grad) throw py::error_already_set();
    if (main_grad != Py_None)
      main_grads[std::array{kWeight, kUpWeight, kDownWeight}[i]] = tensor_of(main_grad, "main_grad");
  }
  const auto compute = [&] {
    return feed_forward(operands, {name, size_t(length)}, parameters, accumulate, main_grads);
  };
  // Autocast has a lock that other threads hold while they wait for the interpreter's.
  if (operands[kInput].is_cpu() && !at::autocast::is_autocast_enabled(at::kCPU) &&
      operands[kInput].numel() * operands[kWeight].size(0) < kBriefWork)
    return compute();
  const py::gil_scoped_release release;
  return compute();
}

// feed_forward(input, weight, bias, up_weight, up_bias, down_weight, down_bias, activation, parameters[, main_grads]):
// gradients of weights are added in place if main_grads, three tensors or Nones, are given. NotImplemented where an
// argument overrides torch's functions. Not bound by pybind11, whose conversion of so many arguments takes as long as a
// small layer.
PyObject* feed_forward_from_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count <= kParameters || count > kMainGrads + 1 || !PyTuple_Check(arguments[kParameters]))
    fail("feed_forward: expected 9 or 10 arguments, the last ones tuples, got ", count, ".");
  bool overridden = at::impl::torch_function_mode_enabled();
  for (int operand = 0; operand < kOperands; ++operand) overridden |= overrides(arguments[operand]);
  if (overridden && !at::impl::torch_function_all_disabled()) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(run(arguments, count));
  END_HANDLE_TH_ERRORS
}

PyMethodDef method = {"feed_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&feed_forward_from_python)),
                      METH_FASTCALL, nullptr};

}  // namespace

void bind_feed_forward(py::module_& module) {
  module.add_object("feed_forward", py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
  module.def("activation_schemas", &activation_schemas);
  // Choices are (operation, training, dtype, m, k, n, faster).
  module.def("set_choices", [](const py::list& list) {
    std::vector<Choice> choices;
    for (const py::handle item : list) {
      const py::tuple line = py::cast<py::tuple>(item);
      choices.push_back({line[0].cast<std::string>(), line[1].cast<bool>(),
                         reinterpret_cast<THPDtype*>(line[2].ptr())->scalar_type, line[3].cast<int64_t>(),
                         line[4].cast<int64_t>(), line[5].cast<int64_t>(), line[6].cast<std::string>()});
    }
    set_choices(choices);
  });
  module.def("has_onednn", &has_onednn);
  module.def("is_small_product", [](const py::object& dtype, int64_t m, int64_t k, int64_t n) {
    return is_small_product(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, m, k, n);
  });
  module.def("product",
             [](const std::string& provider, const std::string& role, const at::Tensor& a, const at::Tensor& b) {
               return product_by(Provider(index_of(provider, kProviderNames).value()),
                                 Role(index_of(role, kRoleNames).value()), a, b);
             });
  module.def("pool_statistics", [] {
    const PoolStatistics statistics = pool_statistics();
    return py::dict(py::arg("kept_bytes") = statistics.kept_bytes, py::arg("limit_bytes") = statistics.limit_bytes,
                    py::arg("reused") = statistics.reused, py::arg("fresh") = statistics.fresh);
  });
  module.def("release_pool", &release_pool);
  module.def("set_pool_limit", &set_pool_limit);
}

}  // namespace fused_ops
