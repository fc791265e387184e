// SPDX-License-Identifier: Apache-2.0
// Matrix products by whichever provider is fastest for the shape: aten's (MKL, cuBLAS), or oneDNN's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fused_ops {

// A plain matrix's transposed view, without autograd and without the dispatcher, which costs as much as a small product.
at::Tensor transposed(const at::Tensor& matrix);

enum class Role : uint8_t { kForward, kGradInput, kGradWeight };
enum class Provider : uint8_t { kAten, kOneDNN };

// a [M, K] times b [K, N].
at::Tensor product(Role role, const at::Tensor& a, const at::Tensor& b);

// a [M, K] times b [K, N], and whether bias [N] has been added too: only a provider that does so for nothing adds it.
struct Product {
  at::Tensor result;
  bool has_bias;
};
Product product_with_bias(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias);

// One line of the table that providers are chosen by: sizes count by their power of two.
struct GemmChoice {
  Role role;
  at::ScalarType dtype;
  int64_t m, k, n;
  Provider provider;
};
void set_gemm_choices(const std::vector<GemmChoice>& choices);
Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n);
bool has_onednn();
at::Tensor product_by(Provider provider, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias);

}  // namespace fused_ops
