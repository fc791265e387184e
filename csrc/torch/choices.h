// SPDX-License-Identifier: Apache-2.0
// The table of what is faster where: the provider of a matrix product, and stock operators in place of a fused block.
// Python fills it (fused_ops/dispatch.py); sizes count by their power of two.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fused_ops {

enum class Role : uint8_t { kForward, kGradInput, kGradWeight };
enum class Provider : uint8_t { kAten, kOneDNN, kLoop };  // kLoop: core/cpu/small_product.h

constexpr const char* kRoleNames[] = {"forward", "grad_input", "grad_weight"};
constexpr const char* kProviderNames[] = {"aten", "onednn", "loop"};

template <size_t kCount>
std::optional<uint8_t> index_of(const std::string& name, const char* const (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i)
    if (name == names[i]) return uint8_t(i);
  return std::nullopt;
}

struct Choice {
  std::string operation;  // forward, grad_input, grad_weight: a product's role; or an activation's name
  bool training;          // of an activation: with gradients
  at::ScalarType dtype;
  int64_t m, k, n;
  std::string faster;  // of a product: aten, onednn, loop; of an activation: fused, stock
};

// Replaces the table. Raises where an operation is neither a role nor an activation, or there is no such alternative.
void set_choices(const std::vector<Choice>& choices);

bool is_small_product(at::ScalarType dtype, int64_t m, int64_t k, int64_t n);  // for which there is the loop

// Where the table says nothing it is the loop for what that takes, else aten.
Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n);
bool prefers_stock(int activation, bool training, at::ScalarType dtype, int64_t m, int64_t k, int64_t n);

}  // namespace fused_ops
