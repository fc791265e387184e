// SPDX-License-Identifier: Apache-2.0
// What implementations of operators, and calls of them through the dispatcher, have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace fused_ops {

using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : at::Tensor(); }
inline OptionalTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

template <class Schema>
c10::TypedOperatorHandle<Schema> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

}  // namespace fused_ops
