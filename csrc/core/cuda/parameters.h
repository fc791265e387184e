// SPDX-License-Identifier: Apache-2.0
// What one launch is told, by value, in its parameter block.
#pragma once

#include <cuda_runtime.h>

#include "core/optim/rule.h"
#include "core/walk.h"

namespace fused_ops::cuda {

#if CUDART_VERSION >= 12010
constexpr int kParameterBytes = 32760;  // 32,764 from compute capability 7.0 on, in whole words
#else
constexpr int kParameterBytes = 4096;
#endif

constexpr int kThreads = 128;  // a block
constexpr int kVectorBytes = 16;

// Elements that a thread moves at once: two vectors of an operand in the compute type, one of a 16-bit operand.
template <class T>
constexpr int kVector = kVectorBytes / int(sizeof(T));
template <class T>
constexpr int kElements = 2 * kVector<T>;

// Blocks that a multiprocessor holds: as many as leave a thread the registers it needs. Each keeps
// kThreads * kOperands * 2 vectors of loads in flight, together at least 60 KB (docs/sass.md says why that is enough).
template <class T, int kOperands>
constexpr int kMinBlocks = sizeof(T) == 4 ? (kOperands < 4 ? 8 : 11 - kOperands) : (kOperands < 5 ? 4 : 3);

// A block's share of an item: a power of two, at least what its threads move at once.
constexpr int kMinChunk = 1024;
constexpr int kMaxChunk = 16384;

FUSED_OPS_HD constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The operands a rule has, packed: param, grad, then the states that it keeps.
FUSED_OPS_HD constexpr int operand_count(unsigned states) {
  int count = kFirstState;
  for (int index = 0; index < kMaxStates; ++index) count += has_state(states, index);
  return count;
}

enum class Path : uint32_t {
  kVectors,   // all operands reach a 16-byte boundary at the same element
  kElements,  // dense, one element at a time
  kStrided,   // one element at a time, each operand with strides of its own
};

constexpr int kMaxRules = 8;

// Chunks are cut where all operands are aligned: an item's first begins `phase` elements before its data.
struct Traits {
  uint32_t missing : 14;  // elements by which the last chunk is short
  uint32_t dtypes : 10;   // two bits an operand
  uint32_t phase : 3;
  uint32_t path : 2;
  uint32_t rule : 3;
};
static_assert(sizeof(Traits) == 4 && kMaxChunk <= 1 << 14 && kMaxOperands * 2 <= 10 && kMaxRules <= 1 << 3);

template <int kOperands>
struct Record {
  int32_t first_chunk;
  Traits traits;
  union {
    void* data[kOperands];
    int64_t strided;  // Path::kStrided: the index of its Strided in the block's words, counted from their end
  };
};

// The words of an item that has a layout: the data of each operand, dims, sizes, then the strides of each operand.
constexpr int strided_words(int operands, int dims) { return operands + 1 + dims * (1 + operands); }

template <class Rule>
struct WalkHeader {
  union {
    Rule rules[kMaxRules];
  };
  const Rule* prepared;    // null, or a rule an item in device memory instead
  const float* found_inf;  // null, or not 0: change nothing
  int32_t chunk;           // elements
  int32_t chunks;
  int64_t records;
  WalkHeader() {}
};

// Records fill the words from the front, layouts from the back.
template <class Rule, int kOperands>
struct WalkParameters : WalkHeader<Rule> {
  static constexpr int kWords = (kParameterBytes - int(sizeof(WalkHeader<Rule>))) / 8;
  static constexpr int kMaxRecords = kWords * 8 / int(sizeof(Record<kOperands>));
  union {
    Record<kOperands> record[kMaxRecords];
    int64_t words[kWords];
  };
  WalkParameters() {}
};

union Step {
  float* counter;
  double number;
};

template <class Hyperparameters>
struct PrepareHeader {
  Hyperparameters hyperparameters;
  double grad_factor;
  const void* lr;
  DType lr_dtype;
  bool counted;  // steps are counters in device memory
  const float* grad_scale;
  const float* found_inf;
  void* rules;
  int64_t items;
};

template <class Hyperparameters>
struct PrepareParameters : PrepareHeader<Hyperparameters> {
  static constexpr int kMaxItems = (kParameterBytes - int(sizeof(PrepareHeader<Hyperparameters>))) / int(sizeof(Step));
  Step step[kMaxItems];
};

}  // namespace fused_ops::cuda
