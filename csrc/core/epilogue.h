// SPDX-License-Identifier: Apache-2.0
// What is done to the result of a matrix product, in one pass over it: plain pointers and sizes, no tensors.
//
//   Activate       out = act(pre + bias) [* (up + up_bias)]
//   Differentiate  g = grad_out [* up];  grad_pre = g * act'(saved);  grad_bias = sum over rows of grad_pre
//                  [grad_up = grad_out * act(saved);  grad_up_bias = sum over rows of grad_up]
//                  and, where asked for, hidden = act(saved) [* up] once more
//
// Matrices are [rows, columns], columns dense. pre, up, saved, grad_pre and grad_up have rows `stride` elements apart
// (2 * columns where one product made pre and up side by side); all others are dense. Each element is read before the
// same element is written and never again, so any output may be the very same matrix as any input. Biases have
// `columns` elements, null where there are none. All in one dtype; float16 and bfloat16 are computed in float, and
// bias gradients are summed in the compute type, in an order that depends on the sizes alone.
#pragma once

#include "core/walk.h"

namespace fused_ops {

struct Activate {
  int activation;            // an index into Activations
  const double* parameters;  // of the activation
  DType dtype;
  int64_t rows, columns, stride;
  void* pre;  // written, with bias, if store_pre
  const void* bias;
  void* up;  // null: no gate; written, with up_bias, if store_pre
  const void* up_bias;
  void* out;
  bool store_pre;
};

struct Differentiate {
  int activation;
  const double* parameters;
  DType dtype;
  int64_t rows, columns, stride;
  const void* saved;  // pre + bias, or act(pre + bias) where the activation's kSaved is kOutput
  const void* up;     // null: no gate; with its bias
  const void* grad_out;
  void* grad_pre;
  void* grad_up;
  void* hidden;  // null where not wanted
  void* grad_bias;
  void* grad_up_bias;
  void* workspace;  // workspace_bytes(), for the partial sums of the bias gradients
};

}  // namespace fused_ops
