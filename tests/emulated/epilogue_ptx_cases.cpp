// SPDX-License-Identifier: Apache-2.0
// Records launches of the epilogues: epilogue_ptx_cases FILE. A name is of the kernel, "float" or "double", "gated" or
// "plain", and the index of the activation.
#include <cstdlib>

#include "core/activations.h"
#include "core/cuda/epilogue.h"
#include "ptx_recorder.h"

namespace {

constexpr double kParameters[2] = {0.5, 1.25};

void run(int activation, DType dtype, bool gated, int64_t rows, int64_t columns, bool backward) {
  ranges.clear();
  emulation::launches.clear();
  const auto matrix = [&](int64_t elements) {
    char* const data = allocate(size_t(elements) * size_t(size_of(dtype)), dtype);
    fill(data, dtype, elements, false);
    return data;
  };
  const int64_t size = rows * columns;
  int error;
  if (backward) {
    Differentiate pass{};
    pass.activation = activation;
    pass.parameters = kParameters;
    pass.dtype = dtype;
    pass.rows = rows, pass.columns = pass.stride = columns;
    pass.saved = matrix(size);
    pass.grad_out = matrix(size);
    pass.grad_pre = matrix(size);
    pass.hidden = matrix(size);
    pass.grad_bias = matrix(columns);
    if (gated) {
      pass.up = matrix(size);
      pass.grad_up = matrix(size);
      pass.grad_up_bias = matrix(columns);
    }
    if (const int64_t bytes = cuda::workspace_bytes(pass))
      pass.workspace = allocate(size_t(bytes), dtype == DType::kFloat64 ? dtype : DType::kFloat32);
    error = cuda::differentiate(pass, nullptr);
  } else {
    Activate pass{};
    pass.activation = activation;
    pass.parameters = kParameters;
    pass.dtype = dtype;
    pass.rows = rows, pass.columns = pass.stride = columns;
    pass.pre = matrix(size);
    pass.bias = matrix(columns);
    if (gated) {
      pass.up = matrix(size);
      pass.up_bias = matrix(columns);
    }
    pass.out = matrix(size);
    pass.store_pre = true;
    error = cuda::activate(pass, nullptr);
  }
  if (error != 0) std::abort();
  const std::string type = dtype == DType::kFloat64 ? " double " : " float ";
  for (size_t i = 0; i < emulation::launches.size(); ++i)
    record((i > 0      ? "sum" + type + "plain "
            : backward ? "differentiate" + type + (gated ? "gated " : "plain ")
                       : "activate" + type + (gated ? "gated " : "plain ")) +
               std::to_string(activation),
           i, emulation::launches[i]);
}

}  // namespace

int main(int, char** argv) {
  output = std::fopen(argv[1], "wb");
  record_memory_before_launches();
  for (int activation = 0; activation < kActivationCount; ++activation)
    for (const DType dtype : {DType::kFloat32, DType::kFloat64})
      for (const bool backward : {false, true}) run(activation, dtype, activation % 2, 5, 16, backward);
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16})
    for (const bool gated : {false, true})
      for (const bool backward : {false, true}) {
        run(6, dtype, gated, 3, 7, backward);     // element by element
        run(8, dtype, gated, 13, 520, backward);  // more than one block of rows and of columns
        run(5, dtype, gated, 40, 24, backward);   // several groups of rows
      }
  return std::fclose(output);
}
