// SPDX-License-Identifier: Apache-2.0
// The table of what is faster where: the provider of a matrix product, and stock operators in place of a fused block.
// Python fills it (fused_ops/dispatch.py); sizes count by their power of two.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fused_ops {

enum class Role : uint8_t { kForward, kGradInput, kGradWeight };
enum class Provider : uint8_t { kAten, kOneDNN };

struct Choice {
  std::string operation;  // forward, grad_input, grad_weight: a product's role; or an activation's name
  bool training;          // of an activation: with gradients
  at::ScalarType dtype;
  int64_t m, k, n;
  bool alternative;  // oneDNN and not aten, or stock operators and not the fused block
};

// Replaces the table. Raises where an operation is neither a role nor an activation.
void set_choices(const std::vector<Choice>& choices);

Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n);
bool prefers_stock(int activation, bool training, at::ScalarType dtype, int64_t m, int64_t k, int64_t n);

}  // namespace fused_ops
