// SPDX-License-Identifier: Apache-2.0
// fused_ops._C's StepPlan and feed_forward, built so that all runs on the emulated CUDA backend, and a view of it.
#include <cuda_runtime.h>

#include "core/cuda/parameters.h"
#include "core/optim/list.h"
#include "torch/feed_forward_python.h"
#include "torch/step_plan.h"

namespace py = pybind11;
using fused_ops::StepPlan;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<StepPlan>(module, "StepPlan", py::module_local())
      .def(py::init<const std::string&, std::string>())
      .def("gather", &StepPlan::gather)
      .def("used_states", &StepPlan::used_states)
      .def("forget", &StepPlan::forget)
      .def("run", &StepPlan::run);
  fused_ops::bind_feed_forward(module);
  module.def("take_launches", [] {  // since the last call: (blocks, threads, bytes of parameters)
    py::list launches;
    for (const emulation::Launch& launch : emulation::launches)
      launches.append(py::make_tuple(launch.blocks, launch.threads, launch.parameter_bytes));
    emulation::launches.clear();
    return launches;
  });
  module.def("max_records", [](int operands) {  // tensors in one launch of Adam's kernel or of one as large
    using Rule = fused_ops::Adam::Rule<float, 3>;
    return operands == 4 ? fused_ops::cuda::WalkParameters<Rule, 4>::kMaxRecords
                         : fused_ops::cuda::WalkParameters<Rule, 5>::kMaxRecords;
  });
  module.def("set_execute", [](bool execute) { emulation::settings.execute = execute; });
  module.def("set_order", [](int order) { emulation::settings.order = emulation::Order(order); });
  module.def("fail_next_launch", [] { emulation::settings.fail_with = cudaErrorInvalidConfiguration; });
}
