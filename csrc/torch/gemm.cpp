// SPDX-License-Identifier: Apache-2.0
#include "torch/gemm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <optional>
#include <string_view>

#include "torch/buffer_pool.h"

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

Provider provider_of(Role role, const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu()) return Provider::kAten;
  const Provider provider = choose_provider(role, a.scalar_type(), a.size(0), a.size(1), b.size(1));
  return has_onednn() ? provider : Provider::kAten;
}

}  // namespace

at::Tensor product_by(Provider provider, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  if (provider == Provider::kOneDNN)
    return onednn_linear()->call(a, transposed(b), bias.defined() ? std::optional(bias) : std::nullopt, "none",
                                 c10::List<std::optional<at::Scalar>>(), std::nullopt);
  at::Tensor result = empty_buffer({a.size(0), b.size(1)}, a.options());
  if (bias.defined())
    at::addmm_out(result, bias, a, b);
  else if (a.is_cpu())
    at::cpu::mm_out(result, a, b);
  else
    at::mm_out(result, a, b);
  return result;
}

at::Tensor product(Role role, const at::Tensor& a, const at::Tensor& b) {
  return product_by(provider_of(role, a, b), a, b, {});
}

Product product_with_bias(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  const Provider provider = provider_of(Role::kForward, a, b);
  const bool adds = provider == Provider::kOneDNN || !bias.defined() || a.element_size() <= 2;
  return {product_by(provider, a, b, adds ? bias : at::Tensor()), adds};
}

}  // namespace fused_ops
