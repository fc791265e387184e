// SPDX-License-Identifier: Apache-2.0
// A product of small matrices. oneDNN, to which torch gives 16-bit ones, takes 20 us to begin with; MKL takes half a
// microsecond more than this loop for the smallest float32 ones.
#pragma once

#include "core/walk.h"

namespace fused_ops::cpu {

// out = a b [+ bias], a [m, k], b [k, n], out [m, n] dense, all in one dtype other than float64. Computed in float, the
// sums over k in ascending order, and rounded once.
struct SmallProduct {
  DType dtype;
  int64_t m, k, n;
  const void* a;
  int64_t a_row, a_column;  // strides in elements
  const void* b;
  int64_t b_row, b_column;
  const void* bias;  // [n] dense; null: none
  void* out;
};

constexpr int64_t kProductLanes = 16;    // columns that are computed side by side
constexpr int64_t kMostRows = 512;       // of a and of b
constexpr int64_t kMostElements = 2048;  // of a

// Whether multiply() takes the sizes, and is faster than torch by measurement.
constexpr bool is_small_product(DType dtype, int64_t m, int64_t k, int64_t n) {
  constexpr int64_t kMost = 32768, kOneDNN = 8192;  // multiplications
  if (dtype == DType::kFloat64) return false;
  if (m < 1 || m > kMostRows || k < 1 || k > kMostRows || n < 1 || n > kMost || m * k > kMostElements) return false;
  if (dtype == DType::kFloat32 && (m > 256 || n > 256 || m * k > 256 || k * n > 256 || m * n > 256)) return false;
  if (k * n > 1024 * m) return false;                             // elements of b are rearranged one by one
  if (k < 8 && m * n > 256 && m * k * n < kOneDNN) return false;  // torch has a loop of its own there
  return m * k * ((n + kProductLanes - 1) / kProductLanes * kProductLanes) <= kMost;
}

void multiply(const SmallProduct& product);

}  // namespace fused_ops::cpu
