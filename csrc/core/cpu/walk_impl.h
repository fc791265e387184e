// SPDX-License-Identifier: Apache-2.0
// The CPU loops. Included by one translation unit an instruction set, after it has set FUSED_OPS_LEVEL and the target.
//
// No standard container or function template is used here: an instance compiled for AVX-512 must not be the one that
// the linker keeps for everybody.
#pragma once

#include "core/cpu/walk.h"
#include "core/dtype.h"
#include "core/optim/list.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {
namespace {

// Elements converted at a time: five operands in float fit in a 32 KB first-level cache.
constexpr int64_t kBlock = 1024;

// A single element as what a rule is applied to. The other kinds are core/cpu/vector_avx512.h's.
template <class T>
struct OneLane {
  using Value = T;
};
template <class T, class From>
FUSED_OPS_HD T load_lanes(const From* from, OneLane<T>) {
  return T(widen(*from));
}
template <class T, class To>
FUSED_OPS_HD void store_lanes(To* to, T x, OneLane<T>) {
  *to = narrow<To>(x);
}

template <unsigned kStates, class Lanes, class Param, class Grad, class State, class Rule>
FUSED_OPS_HD void apply_to(Lanes lanes, const Rule& rule, Param* param, const Grad* grad, State* state0, State* state1,
                           State* state2) {
  typename Lanes::Value state[kMaxStates];
  if constexpr (has_state(kStates, 0)) state[0] = load_lanes(state0, lanes);
  if constexpr (has_state(kStates, 1)) state[1] = load_lanes(state1, lanes);
  if constexpr (has_state(kStates, 2)) state[2] = load_lanes(state2, lanes);
  typename Lanes::Value value = load_lanes(param, lanes);
  rule(value, load_lanes(grad, lanes), state);
  store_lanes(param, value, lanes);
  if constexpr (has_state(kStates, 0)) store_lanes(state0, state[0], lanes);
  if constexpr (has_state(kStates, 1)) store_lanes(state1, state[1], lanes);
  if constexpr (has_state(kStates, 2)) store_lanes(state2, state[2], lanes);
}

// The rule over n elements, in T whatever the storage types are.
template <class T, unsigned kStates, class Param, class Grad, class State, class Rule>
__attribute__((noinline)) void apply(const Rule& rule_reference, int64_t n, void* const* operands) {
  const Rule rule = rule_reference;
  Param* __restrict__ param = static_cast<Param*>(operands[kParam]);
  const Grad* __restrict__ grad = static_cast<const Grad*>(operands[kGrad]);
  State* __restrict__ state0 = static_cast<State*>(operands[kFirstState]);
  State* __restrict__ state1 = static_cast<State*>(operands[kFirstState + 1]);
  State* __restrict__ state2 = static_cast<State*>(operands[kFirstState + 2]);
  static_assert(kMaxStates == 3);
  int64_t i = 0;
#if FUSED_OPS_HAS_VECTOR
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; i + kLanes <= n; i += kLanes)
      apply_to<kStates>(AllLanes{}, rule, param + i, grad + i, state0 + i, state1 + i, state2 + i);
    if (i < n) apply_to<kStates>(FirstLanes(n - i), rule, param + i, grad + i, state0 + i, state1 + i, state2 + i);
    return;
  }
#endif
  for (; i < n; ++i) apply_to<kStates>(OneLane<T>{}, rule, param + i, grad + i, state0 + i, state1 + i, state2 + i);
}

template <class T, class From>
__attribute__((noinline)) void load(T* __restrict__ to, const From* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = T(widen(from[i]));
}

template <class T, class To>
__attribute__((noinline)) void store(To* __restrict__ to, const T* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow<To>(from[i]);
}

// Where an item's elements lie when its operands are not one dense run: visits [begin, begin + n) as strided runs.
template <class Visitor>
void for_each_run(const Layout& layout, int operand, int64_t begin, int64_t n, Visitor&& visit) {
  int64_t index[kMaxDims];
  int64_t offset = 0, rest = begin;
  for (int dim = layout.dims - 1; dim >= 0; --dim) {
    index[dim] = rest % layout.size[dim];
    rest /= layout.size[dim];
    offset += index[dim] * layout.stride[operand][dim];
  }
  const int inner = layout.dims - 1;
  const int64_t inner_stride = layout.stride[operand][inner];
  for (int64_t done = 0; done < n;) {
    const int64_t left = layout.size[inner] - index[inner];
    const int64_t count = left < n - done ? left : n - done;
    visit(done, offset, inner_stride, count);
    done += count;
    offset += count * inner_stride;
    index[inner] += count;
    for (int dim = inner; dim > 0 && index[dim] == layout.size[dim]; --dim) {
      offset += layout.stride[operand][dim - 1] - layout.size[dim] * layout.stride[operand][dim];
      index[dim] = 0;
      ++index[dim - 1];
    }
  }
}

template <class T>
void load_block(T* to, const Item& item, int operand, int64_t begin, int64_t n) {
  visit_dtype(item.dtype[operand], [&]<class From>() {
    const From* from = static_cast<const From*>(item.data[operand]);
    if (!item.layout) return load(to, from + begin, n);
    for_each_run(*item.layout, operand, begin, n, [&](int64_t at, int64_t offset, int64_t stride, int64_t count) {
      for (int64_t i = 0; i < count; ++i) to[at + i] = T(widen(from[offset + i * stride]));
    });
  });
}

template <class T>
void store_block(const Item& item, int operand, int64_t begin, const T* from, int64_t n) {
  visit_dtype(item.dtype[operand], [&]<class To>() {
    To* to = static_cast<To*>(item.data[operand]);
    if (!item.layout) return store(to + begin, from, n);
    for_each_run(*item.layout, operand, begin, n, [&](int64_t at, int64_t offset, int64_t stride, int64_t count) {
      for (int64_t i = 0; i < count; ++i) to[offset + i * stride] = narrow<To>(from[at + i]);
    });
  });
}

constexpr bool has_operand(unsigned states, int operand) {
  return operand < kFirstState || has_state(states, operand - kFirstState);
}

// Storage types that have a loop of their own; all others are converted in blocks.
enum class Storage { kCompute, kBFloat16, kBFloat16States, kBFloat16Params, kOther };

template <class T, unsigned kStates>
Storage storage_of(const Item& item) {
  constexpr DType kCompute = sizeof(T) == sizeof(float) ? DType::kFloat32 : DType::kFloat64;
  if (item.layout || item.dtype[kParam] != item.dtype[kGrad]) return Storage::kOther;
  const DType param = item.dtype[kParam];
  DType state = param;
  for (int operand = kFirstState, first = 1; operand < kMaxOperands; ++operand) {
    if (!has_operand(kStates, operand)) continue;
    if (!first && item.dtype[operand] != state) return Storage::kOther;
    state = item.dtype[operand];
    first = 0;
  }
  if (param == kCompute && state == kCompute) return Storage::kCompute;
  if (sizeof(T) != sizeof(float)) return Storage::kOther;
  if (param == DType::kBFloat16 && state == DType::kBFloat16) return Storage::kBFloat16;
  if (param == DType::kFloat32 && state == DType::kBFloat16) return Storage::kBFloat16States;
  if (param == DType::kBFloat16 && state == DType::kFloat32) return Storage::kBFloat16Params;
  return Storage::kOther;
}

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

template <class T, unsigned kStates, class Rule>
void apply_converted(const Rule& rule, const Item& item, const cpu::Chunk& chunk) {
  alignas(64) T scratch[kMaxOperands][kBlock];
  void* operands[kMaxOperands] = {};
  for (int operand = 0; operand < kMaxOperands; ++operand)
    if (has_operand(kStates, operand)) operands[operand] = scratch[operand];
  for (int64_t done = 0; done < chunk.count; done += kBlock) {
    const int64_t begin = chunk.begin + done;
    const int64_t n = kBlock < chunk.count - done ? kBlock : chunk.count - done;
    for (int operand = 0; operand < kMaxOperands; ++operand)
      if (has_operand(kStates, operand)) load_block(scratch[operand], item, operand, begin, n);
    apply<T, kStates, T, T, T>(rule, n, operands);
    for (int operand = 0; operand < kMaxOperands; ++operand)
      if (has_operand(kStates, operand) && operand != kGrad) store_block(item, operand, begin, scratch[operand], n);
  }
}

template <class T, unsigned kStates, class Rule>
void apply_chunk(const Rule& rule, const Item& item, const cpu::Chunk& chunk) {
  const Storage storage = storage_of<T, kStates>(item);
  if (storage == Storage::kOther) return apply_converted<T, kStates>(rule, item, chunk);
  void* operands[kMaxOperands] = {};
  for (int operand = 0; operand < kMaxOperands; ++operand)
    if (has_operand(kStates, operand))
      operands[operand] = static_cast<char*>(item.data[operand]) + chunk.begin * size_of(item.dtype[operand]);
  if (storage == Storage::kCompute) return apply<T, kStates, T, T, T>(rule, chunk.count, operands);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (storage == Storage::kBFloat16)
      return apply<T, kStates, BFloat16, BFloat16, BFloat16>(rule, chunk.count, operands);
    if (storage == Storage::kBFloat16States)
      return apply<T, kStates, float, float, BFloat16>(rule, chunk.count, operands);
    if (storage == Storage::kBFloat16Params)
      return apply<T, kStates, BFloat16, BFloat16, float>(rule, chunk.count, operands);
  }
}

template <class Optimizer, class T, unsigned kStates>
void walk(const cpu::Walk& walk) {
  using Rule = typename Optimizer::template Rule<T, kStates>;
  const auto& hyperparameters = *static_cast<const typename Optimizer::Hyperparameters*>(walk.hyperparameters);
  // Few atomic operations, yet enough pieces that a thread slowed by another process leaves its share to the rest.
  const int64_t pieces = int64_t(walk.threads) * 64;
  const int64_t batch = walk.chunk_count > pieces ? walk.chunk_count / pieces : 1;
  int64_t next = 0;
#pragma omp parallel num_threads(walk.threads) if (walk.threads > 1)
  {
    int32_t scalars = walk.items[walk.chunks[0].item].scalars;
    Rule rule(hyperparameters, walk.scalars[scalars].step, walk.grad_factor);
    for (;;) {
      const int64_t first = __atomic_fetch_add(&next, batch, __ATOMIC_RELAXED);
      if (first >= walk.chunk_count) break;
      const int64_t last = first + batch < walk.chunk_count ? first + batch : walk.chunk_count;
      for (int64_t i = first; i < last; ++i) {
        const Item& item = walk.items[walk.chunks[i].item];
        if (item.scalars != scalars) {
          scalars = item.scalars;
          rule = Rule(hyperparameters, walk.scalars[scalars].step, walk.grad_factor);
        }
        apply_chunk<T, kStates>(rule, item, walk.chunks[i]);
      }
    }
  }
}

}  // namespace

// The compiled walk of an optimizer, a set of states and a compute type; null where there is none.
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double) {
  cpu::WalkFunction found = nullptr;
  visit_rule(optimizer, states, [&]<class Optimizer, unsigned kStates>() {
    if (!in_double) found = &walk<Optimizer, float, kStates>;
#if !FUSED_OPS_FLOAT_ONLY
    if (in_double) found = &walk<Optimizer, double, kStates>;
#endif
  });
  return found;
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
