// SPDX-License-Identifier: Apache-2.0
// The CPU backend's entry: one optimizer step over any number of tensors, in one parallel region.
#pragma once

#include "core/walk.h"

namespace fused_ops::cpu {

// A run of one item's elements: the unit of work that threads take.
struct Chunk {
  int64_t begin;
  int32_t item;
  int32_t count;
};
constexpr int64_t kChunk = 16384;

struct Walk {
  const void* hyperparameters;  // the optimizer's Hyperparameters
  double grad_factor;
  const StepScalars* scalars;
  const Item* items;
  const Chunk* chunks;
  int64_t chunk_count;
  int threads;
};
using WalkFunction = void (*)(const Walk&);

// Runs `optimizer` (an index into Optimizers) with the given set of states, in double if `in_double`, else in float.
void run(int optimizer, unsigned states, bool in_double, const Walk& walk);

// Scales n floats (a multiple of 64) by 1.0 in place, `repetitions` times, as four streams side by side like an
// optimizer's operands, asking for memory ahead: the bandwidth limit that benchmarks compare with.
void read_modify_write(float* data, int64_t n, int repetitions, int threads);

}  // namespace fused_ops::cpu
