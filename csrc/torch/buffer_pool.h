// SPDX-License-Identifier: Apache-2.0
// Host memory for large results that come and go every step. Fresh memory costs a page fault a page, which for large
// outputs takes longer than to compute them; here freed blocks are kept for the next tensor of about the same size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fused_ops {

// An uninitialised tensor: from the pool where it is large and on the CPU, else from torch's allocator.
at::Tensor empty_buffer(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_buffer_like(const at::Tensor& tensor);  // contiguous

struct PoolStatistics {
  int64_t kept_bytes, limit_bytes, reused, fresh;
};
PoolStatistics pool_statistics();
void release_pool();                 // frees what is kept
void set_pool_limit(int64_t bytes);  // of what is kept while no tensor uses it; negative: an eighth of the memory

}  // namespace fused_ops
