// SPDX-License-Identifier: Apache-2.0
// Every optimizer, once. A backend turns an Optimizers index and a set of states into a compiled rule with
// visit_rule().
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "core/optim/adagrad.h"
#include "core/optim/adam.h"
#include "core/optim/rmsprop.h"
#include "core/optim/sgd.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

using Optimizers = std::tuple<Adam, RMSprop, SGD, Adagrad>;
constexpr int kOptimizerCount = std::tuple_size_v<Optimizers>;

// Calls visitor.operator()<Optimizer>() for the optimizer of that index.
template <class Visitor, size_t... kIndex>
void visit_optimizer(int optimizer, Visitor&& visitor, std::index_sequence<kIndex...>) {
  ((int(kIndex) == optimizer ? (visitor.template operator()<std::tuple_element_t<kIndex, Optimizers>>(), true)
                             : false) ||
   ...);
}

template <class Visitor>
void visit_optimizer(int optimizer, Visitor&& visitor) {
  visit_optimizer(optimizer, visitor, std::make_index_sequence<kOptimizerCount>{});
}

// Calls visitor.operator()<Optimizer, kStates>() for a compiled variant; does nothing where there is no such variant.
template <class Optimizer, class Visitor, size_t... kIndex>
void visit_variant(unsigned states, Visitor&& visitor, std::index_sequence<kIndex...>) {
  ((Optimizer::kVariants[kIndex] == states
        ? (visitor.template operator()<Optimizer, Optimizer::kVariants[kIndex]>(), true)
        : false) ||
   ...);
}

template <class Visitor>
void visit_rule(int optimizer, unsigned states, Visitor&& visitor) {
  visit_optimizer(optimizer, [&]<class Optimizer>() {
    visit_variant<Optimizer>(states, visitor,
                             std::make_index_sequence<sizeof(Optimizer::kVariants) / sizeof(unsigned)>{});
  });
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
