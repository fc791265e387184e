// SPDX-License-Identifier: Apache-2.0
#include "torch/gemm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <atomic>
#include <bit>
#include <memory>
#include <unordered_map>

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

using Table = std::unordered_map<uint64_t, Provider>;
std::shared_ptr<const Table> table;  // replaced as a whole: readers keep the one that they began with

uint64_t key(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const auto power = [](int64_t size) { return uint64_t(std::bit_width(uint64_t(size))); };
  return (((uint64_t(role) << 8 | uint64_t(dtype)) << 8 | power(m)) << 8 | power(k)) << 8 | power(n);
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

void set_gemm_choices(const std::vector<GemmChoice>& choices) {
  auto fresh = std::make_shared<Table>();
  for (const GemmChoice& choice : choices)
    (*fresh)[key(choice.role, choice.dtype, choice.m, choice.k, choice.n)] = choice.provider;
  std::atomic_store(&table, std::shared_ptr<const Table>(fresh->empty() ? nullptr : std::move(fresh)));
}

Provider choose_provider(Role role, at::ScalarType dtype, int64_t m, int64_t k, int64_t n) {
  const std::shared_ptr<const Table> choices = std::atomic_load(&table);
  if (!choices) return Provider::kAten;
  const auto found = choices->find(key(role, dtype, m, k, n));
  return found == choices->end() || !onednn_linear() ? Provider::kAten : found->second;
}

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
  if (!a.is_cpu()) return product_by(Provider::kAten, a, b, {});
  return product_by(choose_provider(role, a.scalar_type(), a.size(0), a.size(1), b.size(1)), a, b, {});
}

Product product_with_bias(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  if (!a.is_cpu() || !bias.defined()) return {product(Role::kForward, a, b), !bias.defined()};
  const Provider provider = choose_provider(Role::kForward, a.scalar_type(), a.size(0), a.size(1), b.size(1));
  if (provider == Provider::kAten) return {product_by(provider, a, b, {}), false};
  return {product_by(provider, a, b, bias), true};
}

}  // namespace fused_ops
