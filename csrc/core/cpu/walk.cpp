// SPDX-License-Identifier: Apache-2.0
// Hands a step to the loops of the chosen instruction set.
#include "core/cpu/walk.h"

#include "core/cpu/level.h"

namespace fused_ops {

FUSED_OPS_AT_EVERY_LEVEL(cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);)
#if defined(__x86_64__)
namespace avx512_bf16 {
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);
}
#endif

namespace cpu {

void run(int optimizer, unsigned states, bool in_double, const Walk& walk) {
  if (walk.chunk_count == 0) return;
#if defined(__x86_64__)
  if (chosen_level() == Level::kAvx512Bf16 && !in_double)
    return avx512_bf16::find_walk(optimizer, states, in_double)(walk);
#endif
  FUSED_OPS_OF_LEVEL(find_walk)(optimizer, states, in_double)(walk);
}

void read_modify_write(float* data, int64_t n, int repetitions, int threads) {
  constexpr int64_t kStreams = 4, kLine = 16, kAhead = 256;  // the latter two in elements
  const int64_t stream = n / (kStreams * kLine) * kLine, chunks = (stream + kChunk - 1) / kChunk;
  volatile float one = 1.0f;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    const float factor = one;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      float* first = data + chunk * kChunk;
      const int64_t count = stream - chunk * kChunk < kChunk ? stream - chunk * kChunk : kChunk;
      for (int64_t i = 0; i < count; i += kLine) {
        for (int64_t k = 0; k < kStreams; ++k) {
          float* line = first + k * stream + i;
          __builtin_prefetch(line + kAhead);
          for (int64_t j = 0; j < kLine; ++j) line[j] *= factor;
        }
      }
    }
  }
}

}  // namespace cpu
}  // namespace fused_ops
