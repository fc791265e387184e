// SPDX-License-Identifier: Apache-2.0
// Divides the matrices of a pass among the threads of the kernels in epilogue.cuh.
#include "core/cuda/epilogue.h"

#include <algorithm>
#include <initializer_list>
#include <new>
#include <type_traits>

#include "core/cuda/epilogue.cuh"

namespace fused_ops::cuda {
inline namespace FUSED_OPS_LEVEL {
namespace {

constexpr int kWarp = 32;
constexpr int kRows = 8;           // of a thread at least, where there are as many: loads run ahead of some units then
constexpr int64_t kBlocks = 8192;  // of a large matrix: ten times what a GPU holds at once, for a short end
constexpr int64_t kRowBlocks = 2048;  // at most, and as many partial sums of a column

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_aligned(std::initializer_list<const void*> matrices) {
  for (const void* matrix : matrices)
    if (reinterpret_cast<uintptr_t>(matrix) % kVectorBytes != 0) return false;
  return true;
}

Division divide(DType dtype, int64_t rows, int64_t columns, int64_t stride, bool aligned) {
  const int vector = kVectorBytes / size_of(dtype);
  Division division;
  division.width = columns % vector == 0 && stride % vector == 0 ? vector : 1;
  // As wide as the matrix, or an equal part of it with few threads left over.
  const int64_t across = columns / division.width;
  const int64_t blocks_across = divide_up(across, kThreads);
  division.lanes = int(divide_up(across, blocks_across));
  division.groups = kThreads / division.lanes;
  if (division.groups > rows) division.groups = rows > 0 ? int(rows) : 1;
  const int64_t row_blocks = std::clamp<int64_t>(kBlocks / blocks_across, 1, kRowBlocks);
  const int64_t thread_rows = std::max<int64_t>(divide_up(rows, division.groups * row_blocks), kRows);
  division.block_rows = thread_rows * division.groups;
  division.row_blocks = rows > 0 ? int(divide_up(rows, division.block_rows)) : 1;
  if (!aligned) division.width = 1;
  division.column_blocks = int(divide_up(columns, int64_t(division.lanes) * division.width));
  return division;
}

template <class Kernel, class Parameters>
int launch(Kernel* kernel, int64_t blocks, int threads, Parameters& parameters, void* stream) {
  void* arguments[] = {&parameters};
  const int whole_warps = int(divide_up(threads, kWarp)) * kWarp;
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(unsigned(whole_warps)), arguments, 0,
                                             static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();  // it is reported from here, not again by whoever asks next
  return error;
}

template <class T, class Kernel, class Pass>
int launch_pass(Kernel* kernel, const Pass& pass, const Division& division, void* stream) {
  EpilogueParameters<Pass> parameters{pass, division, {}};
  visit_activation(pass.activation, [&]<class Activation>() {
    using Function = typename Activation::template Function<T>;
    static_assert(sizeof(Function) <= kMaxFunctionBytes && std::is_trivially_copyable_v<Function>);
    new (parameters.function) Function(pass.parameters);
  });
  return launch(kernel, int64_t(division.row_blocks) * division.column_blocks, division.lanes * division.groups,
                parameters, stream);
}

template <class T>
int run(const Activate& pass, void* stream) {
  const Division division = divide(pass.dtype, pass.rows, pass.columns, pass.stride,
                                   is_aligned({pass.pre, pass.up, pass.out}));
  const auto kernel = pass.up ? &activate_rows<AnyActivation, T, true> : &activate_rows<AnyActivation, T, false>;
  return launch_pass<T>(kernel, pass, division, stream);
}

template <class T>
int run(const Differentiate& pass, void* stream) {
  const Division division = divide(
      pass.dtype, pass.rows, pass.columns, pass.stride,
      is_aligned({pass.saved, pass.up, pass.grad_out, pass.grad_pre, pass.grad_up, pass.hidden}));
  const auto kernel = pass.up ? &differentiate_rows<AnyActivation, T, true>
                              : &differentiate_rows<AnyActivation, T, false>;
  if (const int error = launch_pass<T>(kernel, pass, division, stream)) return error;
  if (division.row_blocks == 1 || !(pass.grad_bias || pass.grad_up_bias)) return cudaSuccess;
  SumParameters sums{pass.dtype,
                     pass.columns,
                     division.row_blocks,
                     int(divide_up(pass.columns, kSumColumns)),
                     {partial_sums(pass, division.row_blocks, sizeof(T), false),
                      partial_sums(pass, division.row_blocks, sizeof(T), true)},
                     {pass.grad_bias, pass.grad_up_bias}};
  const int halves = pass.grad_up_bias ? 2 : 1;
  return launch(&sum_rows<T>, int64_t(sums.column_blocks) * halves, kSumThreads, sums, stream);
}

}  // namespace
}  // namespace FUSED_OPS_LEVEL

int activate(const Activate& pass, void* stream) {
  if (pass.rows == 0 || pass.columns == 0) return cudaSuccess;
  return pass.dtype == DType::kFloat64 ? run<double>(pass, stream) : run<float>(pass, stream);
}

int64_t workspace_bytes(const Differentiate& pass) {
  if (pass.columns == 0) return 0;
  const Division division = divide(pass.dtype, pass.rows, pass.columns, pass.stride, true);
  const int wanted = (pass.grad_bias != nullptr) + (pass.grad_up_bias != nullptr);
  const int compute_size = pass.dtype == DType::kFloat64 ? 8 : 4;
  return division.row_blocks == 1 ? 0 : int64_t(wanted) * division.row_blocks * pass.columns * compute_size;
}

int differentiate(const Differentiate& pass, void* stream) {
  if (pass.columns == 0) return cudaSuccess;
  return pass.dtype == DType::kFloat64 ? run<double>(pass, stream) : run<float>(pass, stream);
}

}  // namespace fused_ops::cuda
