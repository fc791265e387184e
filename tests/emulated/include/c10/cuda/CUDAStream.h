// SPDX-License-Identifier: Apache-2.0
// In the emulated build a stream is only a name, by which tests tell where a launch went.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  void* stream() const { return const_cast<char*>(&name_); }
  static inline char name_ = 0;
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex) { return {}; }

}  // namespace c10::cuda
