// SPDX-License-Identifier: Apache-2.0
// Runs the threads of a block as fibers.
//
// A fiber that has finished a thread starts the next, so threads that never wait cost no switch. For ThreadSanitizer
// each thread of a block has a fiber of its own, because that is what it tells threads apart by. This file itself is
// compiled without sanitizers, with EMULATION_ASAN or EMULATION_TSAN defined, so that only the kernels' accesses are
// seen. Only a fiber's first switch is swapcontext's: that makes system calls, and AddressSanitizer then clears what it
// knows of the whole stack, many times slower than the thread that runs.
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#if defined(EMULATION_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATION_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;

using Place = void* [5];  // where __builtin_setjmp was

struct Fiber {
  ucontext_t context;
  Place place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  int thread = -1;       // what it runs; -1: nothing
  bool waiting = false;  // at a barrier
#if defined(EMULATION_ASAN)
  void* fake_stack = nullptr;
#endif
#if defined(EMULATION_TSAN)
  void* tsan = nullptr;
  ~Fiber() { __tsan_destroy_fiber(tsan); }
#endif
};

class Block {
 public:
  void run(dim3 shape, const std::function<void()>& body, const std::vector<int>& order) {
    active_ = this;
    shape_ = shape;
    body_ = &body;
    order_ = &order;
    next_ = 0;
    finished_ = 0;
#if defined(EMULATION_TSAN)
    main_tsan_ = __tsan_get_current_fiber();
    __tsan_release(this);
#endif
    while (next_ < order.size()) resume(*idle_fiber());
    while (finished_ < int(order.size())) {
      // Everybody who is left has to be at one and the same barrier.
      int waiting = 0;
      for (const auto& fiber : fibers_) waiting += fiber->waiting;
      if (waiting != int(order.size())) fail("divergent barrier: some threads have ended, others wait", barrier_line_);
      for (const auto& fiber : fibers_) fiber->waiting = false;
      barrier_line_ = 0;
      for (size_t i = 0; i < fibers_.size(); ++i)
        if (fibers_[i]->thread >= 0) resume(*fibers_[i]);
    }
#if defined(EMULATION_TSAN)
    __tsan_acquire(&finished_);
#endif
  }

  void wait(int line) {
    if (barrier_line_ != 0 && barrier_line_ != line) fail("divergent barrier: threads wait at different ones", line);
    barrier_line_ = line;
    Fiber& fiber = *current_;
    fiber.waiting = true;
#if defined(EMULATION_TSAN)
    __tsan_release(&barrier_line_);
#endif
    suspend(fiber);
#if defined(EMULATION_TSAN)
    __tsan_acquire(&barrier_line_);
#endif
  }

 private:
  [[noreturn]] void fail(const char* what, int line) {
    std::fprintf(stderr, "emulation: %s (block %u, line %d)\n", what, blockIdx.x, line);
    std::abort();
  }

  Fiber* idle_fiber() {
#if defined(EMULATION_TSAN)
    if (next_ < fibers_.size()) return fibers_[next_].get();
#else
    for (const auto& fiber : fibers_)
      if (fiber->thread < 0) return fiber.get();
#endif
    Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::begin, 0);
#if defined(EMULATION_TSAN)
    fiber.tsan = __tsan_create_fiber(0);
#endif
    return &fiber;
  }

  void set_thread(int thread) {
    threadIdx = {thread % shape_.x, thread / shape_.x % shape_.y, thread / (shape_.x * shape_.y)};
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    if (fiber.thread >= 0) set_thread(fiber.thread);
#if defined(EMULATION_ASAN)
    __sanitizer_start_switch_fiber(&main_fake_stack_, fiber.stack.get(), kStackBytes);
#endif
#if defined(EMULATION_TSAN)
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    if (__builtin_setjmp(main_) == 0) enter(fiber);
#if defined(EMULATION_ASAN)
    __sanitizer_finish_switch_fiber(main_fake_stack_, nullptr, nullptr);
#endif
  }

  void suspend(Fiber& fiber) {
#if defined(EMULATION_ASAN)
    __sanitizer_start_switch_fiber(&fiber.fake_stack, main_stack_, main_stack_bytes_);
#endif
#if defined(EMULATION_TSAN)
    __tsan_switch_to_fiber(main_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
    if (__builtin_setjmp(fiber.place) == 0) leave();
#if defined(EMULATION_ASAN)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
  }

  void work(Fiber& fiber) {
#if defined(EMULATION_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &main_stack_, &main_stack_bytes_);
#endif
    for (;;) {
#if defined(EMULATION_TSAN)
      __tsan_acquire(this);
#endif
      while (next_ < order_->size()) {
        fiber.thread = (*order_)[next_++];
        set_thread(fiber.thread);
        (*body_)();
        fiber.thread = -1;
        ++finished_;
#if defined(EMULATION_TSAN)
        __tsan_release(&finished_);
        break;
#endif
      }
      suspend(fiber);
    }
  }

  // Apart from where the place is set, as __builtin_longjmp must be.
  [[gnu::noinline]] void enter(Fiber& fiber) {
    if (fiber.started) __builtin_longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  [[gnu::noinline]] void leave() { __builtin_longjmp(main_, 1); }

  static void begin() { active_->work(*active_->current_); }

  static inline thread_local Block* active_ = nullptr;
  dim3 shape_;
  const std::function<void()>* body_ = nullptr;
  const std::vector<int>* order_ = nullptr;
  size_t next_ = 0;
  int finished_ = 0;
  int barrier_line_ = 0;  // 0: nobody waits
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  Place main_;
#if defined(EMULATION_ASAN)
  void* main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  size_t main_stack_bytes_ = 0;
#endif
#if defined(EMULATION_TSAN)
  void* main_tsan_ = nullptr;
#endif

 public:
  static Block& active() { return *active_; }
};

std::vector<int> thread_order(int count) {
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = settings.order == Order::kBackward ? count - 1 - i : i;
  if (settings.order == Order::kShuffled) {
    std::mt19937 generator(12345);
    for (int i = count - 1; i > 0; --i) std::swap(order[i], order[generator() % unsigned(i + 1)]);
  }
  return order;
}

}  // namespace

void run(dim3 grid, dim3 block, const std::function<void()>& thread) {
  gridDim = grid;
  blockDim = block;
  const std::vector<int> order = thread_order(int(block.x * block.y * block.z));
  static thread_local Block fibers;  // kept from launch to launch, as making a fiber is slow
  const int64_t first = settings.first_block < 0 ? int64_t(grid.x) + settings.first_block : settings.first_block;
  for (int64_t x = first; x < int64_t(grid.x); ++x) {
    blockIdx = {unsigned(x), 0, 0};
    fibers.run(block, thread, order);
  }
}

void wait_for_block(int line) { Block::active().wait(line); }

bool check_access(const void* address, size_t bytes) {
  ++(bytes == 16 ? wide_accesses : narrow_accesses);
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return true;
  fault = cudaErrorMisalignedAddress;
  return false;
}

}  // namespace emulation
