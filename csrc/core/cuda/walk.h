// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's entry: one optimizer step over any number of tensors of one device, in one launch per about 800.
//
// Nothing here synchronizes, allocates or copies: what a launch needs travels in its parameters, so a step is safe
// under stream capture. The caller has made the tensors' device current.
#pragma once

#include "core/walk.h"

namespace fused_ops::cuda {

struct Walk {
  const void* hyperparameters;  // the optimizer's Hyperparameters, in host memory
  double grad_factor;           // 1, or -1 to maximize; a grad_scale divides it
  const StepScalars* scalars;   // in host memory, indexed by Item::scalars; read where steps is null
  const Item* items;
  int64_t item_count;
  // What the device reads when the step runs, null where the host knows it. All but `steps` point to one scalar.
  float* const* steps;      // an item's step counter, incremented by the step; the array itself is in host memory
  const void* lr;           // replaces the hyperparameters' lr
  DType lr_dtype;           // kFloat32 or kFloat64
  const float* grad_scale;  // what the gradients have been multiplied by
  const float* found_inf;   // not 0: the step changes nothing
  void* workspace;          // workspace_bytes() of device memory, the step's alone until it has run
  void* stream;
};

// 0 unless the device has a scalar to read.
int64_t workspace_bytes(int optimizer, unsigned states, bool in_double, const Walk& walk);

// Enqueues `optimizer` (an index into Optimizers) with the given set of states, computing in double if `in_double`,
// else in float. Returns a cudaError_t: 0, or what the first launch that failed returned.
//
// Items that share one step counter each take a number of their own from it, in no particular order.
int run(int optimizer, unsigned states, bool in_double, const Walk& walk);

const char* error_string(int error);

}  // namespace fused_ops::cuda
