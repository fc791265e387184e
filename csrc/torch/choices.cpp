// SPDX-License-Identifier: Apache-2.0
#include "torch/choices.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <unordered_set>

#include "torch/activations.h"

namespace fused_ops {
namespace {

constexpr const char* kRoles[] = {"forward", "grad_input", "grad_weight"};

using Table = std::unordered_set<uint64_t>;  // where the alternative is chosen
std::atomic<const Table*> table = nullptr;  // replaced as a whole and never freed: a reader may still be in the old one

uint64_t key(uint64_t operation, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const auto power = [](int64_t size) { return uint64_t(std::bit_width(uint64_t(size))); };
  return (((operation << 8 | uint64_t(dtype)) << 8 | power(m)) << 8 | power(k)) << 8 | power(n);
}

uint64_t activation_operation(int activation, bool training) {
  return std::size(kRoles) + uint64_t(activation) * 2 + training;
}

bool holds(uint64_t operation, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const Table* const current = table.load(std::memory_order_acquire);
  return current && current->count(key(operation, dtype, m, k, n)) != 0;
}

}  // namespace

void set_choices(const std::vector<Choice>& choices) {
  Table fresh;
  for (const Choice& choice : choices) {
    const auto role = std::find(std::begin(kRoles), std::end(kRoles), choice.operation);
    const uint64_t operation = role != std::end(kRoles)
                                   ? uint64_t(role - std::begin(kRoles))
                                   : activation_operation(find_activation(choice.operation, {}).index, choice.training);
    const uint64_t place = key(operation, choice.dtype, choice.m, choice.k, choice.n);
    if (choice.alternative)
      fresh.insert(place);
    else
      fresh.erase(place);  // a later line overrides
  }
  table.store(fresh.empty() ? nullptr : new Table(std::move(fresh)), std::memory_order_release);
}

Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  return holds(uint64_t(role), dtype, m, k, n) ? Provider::kOneDNN : Provider::kAten;
}

bool prefers_stock(int activation, bool training, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  return holds(activation_operation(activation, training), dtype, m, k, n);
}

}  // namespace fused_ops
