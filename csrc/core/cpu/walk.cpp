// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set of the CPU loops, once, when first needed.
#include "core/cpu/walk.h"

#include <cstdlib>
#include <cstring>

namespace fused_ops {

inline namespace baseline {
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);
}
#if defined(__x86_64__)
namespace avx2 {
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);
}
namespace avx512 {
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);
}
namespace avx512_bf16 {
cpu::WalkFunction find_walk(int optimizer, unsigned states, bool in_double);
}
#endif

namespace cpu {
namespace {

const char* wanted_level() { return std::getenv("FUSED_OPS_CPU_LEVEL"); }

Level choose_level() {
  const char* wanted = wanted_level();
  int best = 0;
  for (int level = 0; level < kLevelCount; ++level) {
    if (!level_supported(Level(level))) continue;
    if (wanted && std::strcmp(wanted, level_name(Level(level))) == 0) return Level(level);
    best = level;
  }
  return Level(best);
}

}  // namespace

const char* level_name(Level level) {
  constexpr const char* kNames[kLevelCount] = {"baseline", "avx2", "avx512", "avx512_bf16"};
  return kNames[int(level)];
}

bool level_compiled(Level level) {
#if defined(__x86_64__)
  return int(level) < kLevelCount;
#else
  return level == Level::kBaseline;
#endif
}

bool level_supported(Level level) {
#if defined(__x86_64__)
  switch (level) {
    case Level::kBaseline: return true;
    case Level::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Level::kAvx512:
      return level_supported(Level::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Level::kAvx512Bf16: return level_supported(Level::kAvx512) && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return level_compiled(level);
}

Level chosen_level() {
  static const Level level = choose_level();
  return level;
}

const char* unusable_level() {
  const char* wanted = wanted_level();
  return wanted && std::strcmp(wanted, level_name(chosen_level())) != 0 ? wanted : nullptr;
}

void run(int optimizer, unsigned states, bool in_double, const Walk& walk) {
  if (walk.chunk_count == 0) return;
#if defined(__x86_64__)
  if (chosen_level() == Level::kAvx512Bf16 && !in_double)
    return avx512_bf16::find_walk(optimizer, states, in_double)(walk);
  if (chosen_level() >= Level::kAvx512) return avx512::find_walk(optimizer, states, in_double)(walk);
  if (chosen_level() == Level::kAvx2) return avx2::find_walk(optimizer, states, in_double)(walk);
#endif
  baseline::find_walk(optimizer, states, in_double)(walk);
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
