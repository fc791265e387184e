// SPDX-License-Identifier: Apache-2.0
// What is used of torch's <ATen/autocast_mode.h>, which reads the declarations of all of aten's operators.
#pragma once

#include <ATen/core/Tensor.h>

namespace at::autocast {

TORCH_API bool is_autocast_enabled(at::DeviceType device);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device);
TORCH_API at::Tensor cached_cast(at::ScalarType dtype, const at::Tensor& tensor, c10::DeviceType device);

}  // namespace at::autocast
