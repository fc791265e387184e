// SPDX-License-Identifier: Apache-2.0
#include "torch/gemm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <optional>
#include <string_view>
#include <utility>

#include "core/cpu/small_product.h"
#include "torch/buffer_pool.h"
#include "torch/storage_type.h"

namespace fused_ops {
namespace {

using OneDNNLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                std::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);

const c10::TypedOperatorHandle<OneDNNLinear>* onednn_linear() {
  static const auto handle = []() -> std::optional<c10::TypedOperatorHandle<OneDNNLinear>> {
    const auto schema = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!schema || !schema->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    return schema->typed<OneDNNLinear>();
  }();
  return handle ? &*handle : nullptr;
}

}  // namespace

at::Tensor transposed(const at::Tensor& matrix) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(matrix.storage()),
                                                             matrix.key_set(), matrix.dtype());
  c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(matrix.storage_offset());
  impl->set_sizes_and_strides(at::IntArrayRef{matrix.size(1), matrix.size(0)},
                              at::IntArrayRef{matrix.stride(1), matrix.stride(0)});
  return view;
}

bool has_onednn() { return onednn_linear() != nullptr; }

namespace {

// The factors of a role's product, as strided matrices [m, k] and [k, n].
struct Factors {
  int64_t m, k, n;
  int64_t a_row, a_column, b_row, b_column;

  Factors(Role role, const at::Tensor& a, const at::Tensor& b)
      : m(a.size(0)),
        k(a.size(1)),
        n(b.size(1)),
        a_row(a.stride(0)),
        a_column(a.stride(1)),
        b_row(b.stride(0)),
        b_column(b.stride(1)) {
    if (role == Role::kGradWeight) {
      std::swap(m, k);
      std::swap(a_row, a_column);
    }
    if (role == Role::kForward) {
      n = b.size(0);
      std::swap(b_row, b_column);
    }
  }
};

Provider provider_of(Role role, const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return Provider::kAten;
  const Factors factors(role, a, b);
  const Provider provider = choose_provider(role, a.scalar_type(), factors.m, factors.k, factors.n);
  return provider == Provider::kOneDNN && !has_onednn() ? Provider::kAten : provider;
}

at::Tensor small_product(const Factors& factors, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  const at::Tensor result = empty_buffer({factors.m, factors.n}, a.options());
  cpu::multiply({.dtype = *storage_type(a.scalar_type()),
                 .m = factors.m,
                 .k = factors.k,
                 .n = factors.n,
                 .a = a.const_data_ptr(),
                 .a_row = factors.a_row,
                 .a_column = factors.a_column,
                 .b = b.const_data_ptr(),
                 .b_row = factors.b_row,
                 .b_column = factors.b_column,
                 .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                 .out = result.mutable_data_ptr()});
  return result;
}

}  // namespace

at::Tensor product_by(Provider provider, Role role, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  if (provider == Provider::kLoop) return small_product({role, a, b}, a, b, bias);
  const at::Tensor left = role == Role::kGradWeight ? transposed(a) : a;
  if (provider == Provider::kOneDNN)
    return onednn_linear()->call(left, role == Role::kForward ? b : transposed(b),
                                 bias.defined() ? std::optional(bias) : std::nullopt, "none",
                                 c10::List<std::optional<at::Scalar>>(), std::nullopt);
  const at::Tensor right = role == Role::kForward ? transposed(b) : b;
  at::Tensor result = empty_buffer({left.size(0), right.size(1)}, a.options());
  if (bias.defined())
    at::addmm_out(result, bias, left, right);
  else if (a.is_cpu())
    at::cpu::mm_out(result, left, right);
  else
    at::mm_out(result, left, right);
  return result;
}

at::Tensor product(Role role, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  return product_by(provider_of(role, a, b), role, a, b, bias);
}

Product product_with_bias(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  const Provider provider = provider_of(Role::kForward, a, b);
  const bool adds = provider != Provider::kAten || !bias.defined() || a.element_size() <= 2;
  return {product_by(provider, Role::kForward, a, b, adds ? bias : at::Tensor()), adds};
}

}  // namespace fused_ops
