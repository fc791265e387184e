// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's entry to the two passes of core/epilogue.h: one launch, and a second, small one where a bias
// gradient is summed over many rows.
//
// Nothing here synchronizes, allocates or copies. The caller has made the tensors' device current. Each returns a
// cudaError_t: 0, or what the first launch that failed returned.
#pragma once

#include "core/epilogue.h"

namespace fused_ops::cuda {

int activate(const Activate& pass, void* stream);

// Depends on the sizes and on which bias gradients are wanted; 0 where there are few rows.
int64_t workspace_bytes(const Differentiate& pass);

// The workspace begins at a multiple of 16 bytes and is the pass's alone until it has run.
int differentiate(const Differentiate& pass, void* stream);

}  // namespace fused_ops::cuda
