// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fused_ops {

// Adds what Python calls of feed-forward blocks to fused_ops._C.
void bind_feed_forward(pybind11::module_& module);

}  // namespace fused_ops
