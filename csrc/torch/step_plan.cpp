// SPDX-License-Identifier: Apache-2.0
#include "torch/step_plan.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "core/cpu/level.h"
#include "torch/checks.h"
#include "torch/feed_forward_python.h"

namespace fused_ops {
namespace {

// A DTensor's own part; any other tensor itself. Null for a subclass that computes differently from its storage.
const at::Tensor* local(const at::Tensor& tensor, PyObject* object) {
  if (!tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) return &tensor;
  py::object part = py::reinterpret_borrow<py::object>(object).attr("__dict__").attr("get")("_local_tensor");
  return THPVariable_Check(part.ptr()) ? &THPVariable_Unpack(part.ptr()) : nullptr;
}

PyObject* by_hash(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// The value of a key if the entry is at this place: PyDict_Next reads an entry without hashing, and the key that it
// finds there tells whether the place still holds.
PyObject* at_place(PyObject* dict, PyObject* key, Py_ssize_t place) {
  PyObject *found = nullptr, *value = nullptr;
  return PyDict_Next(dict, &place, &found, &value) && found == key ? value : nullptr;
}

at::Tensor tensor_or_undefined(const py::object& object) {
  return THPVariable_Check(object.ptr()) ? THPVariable_Unpack(object.ptr()) : at::Tensor();
}

}  // namespace

// The parameter and gradient of an entry as plain tensors, or why there are none.
struct StepPlan::Pair {
  const at::Tensor* param;
  const at::Tensor* grad;
  const char* refusal;
};

StepPlan::Pair StepPlan::local_pair(const Entry& entry) {
  const at::Tensor& param = THPVariable_Unpack(entry.object);
  const auto is_subclass = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  };
  if (C10_LIKELY(!is_subclass(param) && !is_subclass(*entry.grad))) return {&param, entry.grad, nullptr};
  const py::object param_object = py::reinterpret_borrow<py::object>(entry.object);
  const py::object grad_object = py::reinterpret_steal<py::object>(THPVariable_Wrap(*entry.grad));
  const at::Tensor* local_param = local(param, param_object.ptr());
  const at::Tensor* local_grad = local(*entry.grad, grad_object.ptr());
  if (!local_param || !local_grad) return {nullptr, nullptr, "a parameter or gradient is of a tensor subclass"};
  const bool placed = py::hasattr(param_object, "placements");
  if (placed != py::hasattr(grad_object, "placements") ||
      (placed && !param_object.attr("placements").equal(grad_object.attr("placements"))))
    return {nullptr, nullptr, "a parameter and its gradient are placed differently over the device mesh"};
  return {local_param, local_grad, nullptr};
}

void StepPlan::Seen::remember(PyObject* new_value, const at::Tensor& new_tensor) {
  value = new_value;
  tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(new_tensor.getIntrusivePtr());
  storage = new_tensor.storage().unsafeGetStorageImpl();
  data = storage->data();
}

// The weak pointer keeps the tensor's own memory, not its data, so that looking is safe after the tensor has gone.
bool StepPlan::Seen::is_still(PyObject* found_value) const {
  return value == found_value && !tensor.expired() &&
         tensor._unsafe_get_target()->unsafe_storage().unsafeGetStorageImpl() == storage && storage->data() == data;
}

bool StepPlan::is_known(const Entry& entry, const Known& known) const {
  if (!known.found.usable) return false;
  for (size_t k = 0; k < names_.size(); ++k)
    if (reads(k) && !known.seen[k].is_still(entry.values[k])) return false;
  return true;
}

// Whether the hyperparameters make the step read names_[k].
bool StepPlan::reads(size_t k) const {
  return k + 1 == names_.size() ? step_.counts_steps() : step_.states() >> k & 1u;
}

StepPlan::StepPlan(const std::string& optimizer, std::string name)
    : step_([&] {
        const int index = optimizer_index(optimizer);
        if (index < 0) fail("StepPlan: there is no optimizer named ", optimizer, ".");
        if (const char* level = cpu::unusable_level())
          fail(
              "fused_ops: expected FUSED_OPS_CPU_LEVEL to name an instruction set of this machine (baseline, avx2, "
              "avx512 or avx512_bf16), got '",
              level, "'. Unset it, or see python -m fused_ops info.");
        return OptimizerStep(index, std::move(name));
      }()) {
  for (const std::string& name : step_.state_names())
    names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str())));
  names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("step")));
}

// A state is mostly in the order of its parameters: the place after the previous parameter's is the next best guess.
PyObject* StepPlan::state_of(PyObject* param, PyObject* state, size_t index) {
  Py_ssize_t& place = known_[index].place;
  if (PyObject* value = at_place(state, param, place)) return value;
  place = index > 0 ? known_[index - 1].place : 0;
  PyObject *key = nullptr, *value = nullptr;
  if (index > 0) PyDict_Next(state, &place, &key, &value);
  value = at_place(state, param, place);
  return value ? value : by_hash(state, param);
}

std::vector<std::string> StepPlan::used_states() const {
  std::vector<std::string> used;
  for (size_t k = 0; k < step_.state_names().size(); ++k)
    if (reads(k)) used.push_back(step_.state_names()[k]);
  return used;
}

// What gather() is about to read lies scattered: some 20 cache lines a parameter, most of them found through others.
// One hop at a time for a whole block of parameters, the waits for memory overlap.
void StepPlan::find(Entry* block, size_t first, size_t count, PyObject* params, PyObject* state) {
  const auto fetch = [](const void* object, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(object) + offset);
  };
  const auto fetch_tensor = [&](const at::Tensor* tensor) {
    fetch(tensor->unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
  };
  const auto fetch_storage = [&](const at::Tensor* tensor) {
    if (tensor->has_storage()) fetch(tensor->storage().unsafeGetStorageImpl(), 1);
  };
  for (size_t i = 0; i < count; ++i) {
    block[i] = {};
    block[i].object = PyList_GET_ITEM(params, first + i);
    fetch(block[i].object, 64);
  }
  for (size_t i = 0; i < count; ++i) {
    if (!THPVariable_Check(block[i].object))
      fail(step_.name(), ": expected params to hold tensors, got ", Py_TYPE(block[i].object)->tp_name, ".");
    fetch_tensor(&THPVariable_Unpack(block[i].object));
    block[i].entries = state_of(block[i].object, state, first + i);
    if (block[i].entries) fetch(block[i].entries, sizeof(PyDictObject));
  }
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& param = THPVariable_Unpack(block[i].object);
    fetch(param.unsafeGetTensorImpl()->autograd_meta(), 1);
    fetch_storage(&param);
    if (block[i].entries && PyDict_Check(block[i].entries))
      fetch(reinterpret_cast<PyDictObject*>(block[i].entries)->ma_keys, 128);
  }
  for (size_t i = 0; i < count; ++i) {
    block[i].grad = &THPVariable_Unpack(block[i].object).unsafeGetTensorImpl()->grad();
    if (block[i].grad->defined()) fetch_tensor(block[i].grad);
    const bool has_dict = block[i].entries && PyDict_Check(block[i].entries);
    for (size_t k = 0; k < names_.size(); ++k) {
      if (!reads(k)) continue;
      const Seen& seen = known_[first + i].seen[k];
      if (has_dict) block[i].values[k] = by_hash(block[i].entries, names_[k].ptr());
      fetch(seen.tensor._unsafe_get_target(), 64);
      fetch(seen.storage, 64);
    }
  }
  for (size_t i = 0; i < count; ++i)
    if (block[i].grad->defined()) fetch_storage(block[i].grad);
}

std::pair<py::object, std::vector<int64_t>> StepPlan::gather(const py::list& params, const py::dict& state,
                                                             std::vector<double> hyperparameters, bool device_steps,
                                                             const std::vector<int64_t>& first) {
  const std::unique_lock<std::mutex> lock = wait_until_idle();
  step_.reset(std::move(hyperparameters));
  std::optional<std::string> reason;
  std::vector<int64_t> lacking;
  const size_t count = PyList_GET_SIZE(params.ptr());
  if (known_.size() != count || known_states_ != step_.states()) known_ = std::vector<Known>(count);
  known_states_ = step_.states();
  Entry block[kBlock];
  for (size_t i = 0; i < count; ++i) {
    if (i % kBlock == 0) find(block, i, std::min(kBlock, count - i), params.ptr(), state.ptr());
    const Entry& entry = block[i % kBlock];
    if (!entry.grad->defined()) continue;
    const Pair pair = local_pair(entry);
    std::optional<std::string> found;
    if (pair.refusal)
      found = pair.refusal;
    else
      found = step_.check(int64_t(i), *pair.param, *pair.grad);
    if (found && !reason) reason = std::move(found);
    if (reason) continue;  // later gradients are still checked for what no optimizer could take

    Known& known = known_[i];
    if (is_known(entry, known) && step_.add_again(*pair.param, *pair.grad, known.found)) continue;
    known.found.usable = false;  // until add() has seen all of what is remembered below
    const at::Tensor* tensors[kMaxStates + 1] = {};
    bool lacks = false;
    for (size_t k = 0; k < names_.size() && !lacks; ++k) {
      if (!reads(k)) continue;
      PyObject* value = entry.values[k];
      lacks = !value || !THPVariable_Check(value);
      if (lacks) continue;
      const at::Tensor* tensor = local(THPVariable_Unpack(value), value);
      if (!tensor)
        fail(step_.name(), ": expected state['", py::str(names_[k]).cast<std::string>(), "'] of params[", i,
             "] to be a plain tensor. Load a state_dict that was saved for this model.");
      const bool is_step = k + 1 == names_.size();
      lacks = is_step && device_steps && tensor->device() != pair.param->device();
      tensors[is_step ? kMaxStates : k] = tensor;
      known.seen[k].remember(value, *tensor);
    }
    if (lacks) {
      lacking.push_back(int64_t(i));
      continue;
    }
    const bool is_first = std::binary_search(first.begin(), first.end(), int64_t(i));
    reason = step_.add(int64_t(i), *pair.param, *pair.grad, tensors, tensors[kMaxStates], is_first, known.found);
  }
  if (!reason) reason = step_.check_together();
  return {reason ? py::object(py::str(*reason)) : py::object(py::none()), std::move(lacking)};
}

bool StepPlan::run(const py::object& lr, const py::object& grad_scale, const py::object& found_inf) {
  const StepTensors tensors{tensor_or_undefined(lr), tensor_or_undefined(grad_scale), tensor_or_undefined(found_inf)};
  const py::gil_scoped_release release;
  const std::lock_guard lock(busy_);  // taken after the interpreter lock is released, given back before it is taken
  return step_.run(tensors);
}

void StepPlan::forget() {
  const std::unique_lock<std::mutex> lock = wait_until_idle();
  step_.forget();
}

// Never waits with the interpreter lock held: who holds the other one may need it.
std::unique_lock<std::mutex> StepPlan::wait_until_idle() {
  std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const py::gil_scoped_release release;
    lock.lock();
  }
  return lock;
}

namespace {

py::dict optimizer_schemas() {
  py::dict schemas;
  for (const std::string& name : optimizer_names()) {
    const int index = optimizer_index(name);
    const OptimizerStep step(index);
    schemas[py::str(name)] = py::dict(py::arg("states") = step.state_names(),
                                      py::arg("counts_steps") = step.counts_steps(),
                                      py::arg("hyperparameters") = hyperparameter_names(index));
  }
  return schemas;
}

py::dict cpu_info() {
  std::vector<std::string> levels, supported;
  for (int i = 0; i < cpu::kLevelCount; ++i) {
    const auto level = cpu::Level(i);
    if (cpu::level_compiled(level)) levels.push_back(cpu::level_name(level));
    if (cpu::level_supported(level)) supported.push_back(cpu::level_name(level));
  }
  return py::dict(py::arg("levels") = levels, py::arg("supported") = supported,
                  py::arg("chosen") = cpu::level_name(cpu::chosen_level()));
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  using fused_ops::StepPlan;
  py::class_<StepPlan>(module, "StepPlan")
      .def(py::init<const std::string&, std::string>())
      .def("gather", &StepPlan::gather)
      .def("used_states", &StepPlan::used_states)
      .def("forget", &StepPlan::forget)
      .def("run", &StepPlan::run);
  module.def("optimizer_schemas", &fused_ops::optimizer_schemas);
  fused_ops::bind_feed_forward(module);
  module.def("cpu_info", &fused_ops::cpu_info);
  module.def("read_modify_write", [](const at::Tensor& tensor, int repetitions, int threads) {
    if (!tensor.is_contiguous() || tensor.scalar_type() != at::kFloat)
      fused_ops::fail("read_modify_write: expected a contiguous torch.float32 tensor.");
    fused_ops::cpu::read_modify_write(tensor.data_ptr<float>(), tensor.numel(), repetitions, threads);
  });
}
