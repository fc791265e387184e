// SPDX-License-Identifier: Apache-2.0
// Matrix products by whichever provider is fastest for the shape: aten's (MKL, cuBLAS), oneDNN's, or our own loop.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch/choices.h"

namespace fused_ops {

// A plain matrix's transposed view, without autograd and without the dispatcher, which costs as much as a small
// product.
at::Tensor transposed(const at::Tensor& matrix);

// By role: forward is a b^T [+ bias], grad_input a b, grad_weight a^T b. Matrices have any strides, bias is dense.
at::Tensor product(Role role, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});
at::Tensor product_by(Provider provider, Role role, const at::Tensor& a, const at::Tensor& b,
                      const at::Tensor& bias = {});

// a b^T, and whether bias has been added too. It has where the provider does so for nothing, and
// in 16 bits, where the sum is to be rounded only once.
struct Product {
  at::Tensor result;
  bool has_bias;
};
Product product_with_bias(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias);

bool has_onednn();

}  // namespace fused_ops
