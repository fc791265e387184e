// SPDX-License-Identifier: Apache-2.0
// What one optimizer step over many tensors of one device is made of: plain pointers and sizes, no tensors.
#pragma once

#include <cstdint>

namespace fused_ops {

enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

constexpr int kMaxStates = 3;
constexpr int kMaxOperands = 2 + kMaxStates;  // param, grad, states
constexpr int kParam = 0, kGrad = 1, kFirstState = 2;
constexpr int kMaxDims = 16;  // after dimensions that can be walked as one have been merged

// The iteration space of an item whose operands are not all one dense run in the same order. Innermost dimension last.
struct Layout {
  int dims;
  int64_t size[kMaxDims];
  int64_t stride[kMaxOperands][kMaxDims];  // in elements
};

// One parameter and all that moves with it.
struct Item {
  void* data[kMaxOperands];  // null where the rule has no such state
  DType dtype[kMaxOperands];
  int32_t scalars;       // index into the walk's StepScalars
  int64_t numel;         // real elements: a complex one counts as two
  const Layout* layout;  // null: every operand is one dense run in the same order
};

// What of the hyperparameters differs from one parameter to the next.
struct StepScalars {
  double step;  // the number of this step, 1 for a parameter's first
};

}  // namespace fused_ops
