// SPDX-License-Identifier: Apache-2.0
// The wording of every error: `op: expected <fact> == <value>, got <value>. <what to do>`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace fused_ops {

// Streams its arguments into the message of a std::runtime_error, which Python sees as a RuntimeError.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string describe(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string describe(at::ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

// expected `fact` == `wanted`, got `found`.
template <class Wanted, class Found>
[[noreturn]] void fail_expectation(const std::string& op, const std::string& fact, const Wanted& wanted,
                                   const Found& found, const std::string& advice) {
  fail(op, ": expected ", fact, " == ", wanted, ", got ", found, ". ", advice);
}

}  // namespace fused_ops
