// SPDX-License-Identifier: Apache-2.0
// The loop of core/cpu/small_product.h. Included by one translation unit an instruction set, like walk_impl.h.
#pragma once

#include "core/cpu/small_product.h"
#include "core/dtype.h"
#include "core/math.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {
namespace {

template <class Storage>
__attribute__((noinline)) void multiply(const cpu::SmallProduct& p) {
  constexpr int64_t kLanes = cpu::kProductLanes;
  alignas(64) float a[cpu::kMostElements], b[cpu::kMostRows * kLanes], sum[cpu::kMostRows * kLanes];
  const Storage* const from_a = static_cast<const Storage*>(p.a);
  const Storage* const from_b = static_cast<const Storage*>(p.b);
  const Storage* const bias = static_cast<const Storage*>(p.bias);
  Storage* const out = static_cast<Storage*>(p.out);
  for (int64_t i = 0; i < p.m; ++i)
    for (int64_t l = 0; l < p.k; ++l) a[l * p.m + i] = widen(from_a[i * p.a_row + l * p.a_column]);
  for (int64_t first = 0; first < p.n; first += kLanes) {
    const int64_t width = p.n - first < kLanes ? p.n - first : kLanes;
    for (int64_t l = 0; l < p.k; ++l) {
      for (int64_t j = 0; j < width; ++j) b[l * kLanes + j] = widen(from_b[l * p.b_row + (first + j) * p.b_column]);
      for (int64_t j = width; j < kLanes; ++j) b[l * kLanes + j] = 0;
    }
    for (int64_t i = 0; i < p.m * kLanes; ++i) sum[i] = 0;
    for (int64_t l = 0; l < p.k; ++l)
      for (int64_t i = 0; i < p.m; ++i)  // inside, since the sums of a row wait for one another
        for (int64_t j = 0; j < kLanes; ++j)
          sum[i * kLanes + j] = fma(a[l * p.m + i], b[l * kLanes + j], sum[i * kLanes + j]);
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t j = 0; j < width; ++j)
        out[i * p.n + first + j] = narrow<Storage>(sum[i * kLanes + j] + (bias ? widen(bias[first + j]) : 0.0f));
  }
}

}  // namespace

void multiply(const cpu::SmallProduct& product) {
  if (product.dtype == DType::kFloat32) return multiply<float>(product);
  product.dtype == DType::kBFloat16 ? multiply<BFloat16>(product) : multiply<Float16>(product);
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
