// SPDX-License-Identifier: Apache-2.0
// torch's dtypes and devices, as the core knows them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "core/walk.h"

namespace fused_ops {

// The storage type of a dtype, as real numbers.
inline std::optional<DType> storage_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kComplexFloat: return DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble: return DType::kFloat64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    default: return std::nullopt;
  }
}

// Whether the CUDA backend does a device's work. In the emulated build of tests/emulated it does the host's.
inline bool on_cuda(at::Device device) {
#if defined(FUSED_OPS_EMULATED)
  return device.is_cpu();
#else
  return device.is_cuda();
#endif
}

}  // namespace fused_ops
