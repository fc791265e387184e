// SPDX-License-Identifier: Apache-2.0
#include "torch/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <utility>

#include "torch/checks.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fused_ops {
namespace {

constexpr size_t kSmallest = size_t{1} << 20;  // bytes; below, malloc keeps memory itself
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kAlignment = 64;

struct Block {
  void* data;
  size_t capacity;
};

size_t default_limit() {
#if defined(__linux__)
  return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE)) / 8;
#else
  return size_t{1} << 30;
#endif
}

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return c10::GetCPUAllocator()->allocate(bytes);
    auto* const block = new Block(take(bytes));
    return {block->data, block, &give_back, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  void set_limit(size_t limit) {
    const std::lock_guard lock(mutex_);
    limit_ = limit;
    shrink();
  }

  void release() {
    const std::lock_guard lock(mutex_);
    const size_t limit = std::exchange(limit_, 0);
    shrink();
    limit_ = limit;
  }

  PoolStatistics statistics() {
    const std::lock_guard lock(mutex_);
    return {int64_t(kept_bytes_), int64_t(limit_), reused_, fresh_};
  }

  static Pool& instance() {
    static Pool* const pool = new Pool;  // outlives every tensor
    return *pool;
  }

 private:
  // A kept block at most a quarter larger, the last given back first: it is most likely in a cache; or a fresh one.
  Block take(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      for (auto block = kept_.begin(); block != kept_.end(); ++block) {
        if (block->capacity < bytes || block->capacity - bytes > bytes / 4) continue;
        const Block found = *block;
        kept_bytes_ -= found.capacity;
        kept_.erase(block);
        ++reused_;
        return found;
      }
      ++fresh_;
    }
    const size_t alignment = bytes >= 4 * kHugePage ? kHugePage : kAlignment;
    const size_t capacity = (bytes + alignment - 1) / alignment * alignment;
    void* data = std::aligned_alloc(alignment, capacity);
    if (!data) {
      release();  // what is kept may be what is missing
      data = std::aligned_alloc(alignment, capacity);
    }
    if (!data) fail("fused_ops: ", bytes, " bytes of memory could not be had. Use a smaller batch.");
#if defined(__linux__)
    if (alignment == kHugePage) madvise(data, capacity, MADV_HUGEPAGE);
#endif
    return {data, capacity};
  }

  static void give_back(void* context) {
    auto* const block = static_cast<Block*>(context);
    Pool& pool = instance();
    {
      const std::lock_guard lock(pool.mutex_);
      pool.kept_.push_front(*block);
      pool.kept_bytes_ += block->capacity;
      pool.shrink();
    }
    delete block;
  }

  // Frees the blocks that have waited longest.
  void shrink() {
    while (kept_bytes_ > limit_) {
      kept_bytes_ -= kept_.back().capacity;
      std::free(kept_.back().data);
      kept_.pop_back();
    }
  }

  std::mutex mutex_;
  std::list<Block> kept_;
  size_t kept_bytes_ = 0, limit_ = default_limit();
  int64_t reused_ = 0, fresh_ = 0;
};

}  // namespace

at::Tensor empty_buffer(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kSmallest) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &Pool::instance(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

at::Tensor empty_buffer_like(const at::Tensor& tensor) { return empty_buffer(tensor.sizes(), tensor.options()); }

PoolStatistics pool_statistics() { return Pool::instance().statistics(); }

void release_pool() { Pool::instance().release(); }

void set_pool_limit(int64_t bytes) { Pool::instance().set_limit(bytes < 0 ? default_limit() : size_t(bytes)); }

}  // namespace fused_ops
