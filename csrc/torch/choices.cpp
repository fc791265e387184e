// SPDX-License-Identifier: Apache-2.0
#include "torch/choices.h"

#include <atomic>
#include <bit>
#include <iterator>
#include <unordered_map>

#include "core/cpu/small_product.h"
#include "torch/activations.h"
#include "torch/checks.h"
#include "torch/storage_type.h"

namespace fused_ops {
namespace {

constexpr const char* kBlocks[] = {"fused", "stock"};
constexpr uint8_t kStock = 1;

using Table = std::unordered_map<uint64_t, uint8_t>;  // a Provider, or an index into kBlocks
std::atomic<const Table*> table = nullptr;  // replaced as a whole and never freed: a reader may still be in the old one

uint64_t key(uint64_t operation, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const auto power = [](int64_t size) { return uint64_t(std::bit_width(uint64_t(size))); };
  return (((operation << 8 | uint64_t(dtype)) << 8 | power(m)) << 8 | power(k)) << 8 | power(n);
}

uint64_t activation_operation(int activation, bool training) {
  return std::size(kRoleNames) + uint64_t(activation) * 2 + training;
}

uint8_t chosen(uint64_t operation, at::ScalarType dtype, int64_t m, int64_t k, int64_t n, uint8_t otherwise) {
  const Table* const current = table.load(std::memory_order_acquire);
  if (!current) return otherwise;
  const auto found = current->find(key(operation, dtype, m, k, n));
  return found == current->end() ? otherwise : found->second;
}

}  // namespace

void set_choices(const std::vector<Choice>& choices) {
  Table fresh;
  for (const Choice& choice : choices) {
    const auto role = index_of(choice.operation, kRoleNames);
    const auto faster = role ? index_of(choice.faster, kProviderNames) : index_of(choice.faster, kBlocks);
    if (!faster) fail("set_choices: ", choice.operation, " has no alternative '", choice.faster, "'.");
    const uint64_t operation = role
                                   ? *role
                                   : activation_operation(find_activation(choice.operation, {}).index, choice.training);
    fresh[key(operation, choice.dtype, choice.m, choice.k, choice.n)] = *faster;  // a later line overrides
  }
  table.store(fresh.empty() ? nullptr : new Table(std::move(fresh)), std::memory_order_release);
}

bool is_small_product(at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const auto type = storage_type(dtype);
  return type && cpu::is_small_product(*type, m, k, n);
}

Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const bool loop = is_small_product(dtype, m, k, n);
  const auto provider = Provider(
      chosen(uint64_t(role), dtype, m, k, n, uint8_t(loop ? Provider::kLoop : Provider::kAten)));
  return provider == Provider::kLoop && !loop ? Provider::kAten : provider;
}

bool prefers_stock(int activation, bool training, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  return chosen(activation_operation(activation, training), dtype, m, k, n, 0) == kStock;
}

}  // namespace fused_ops
