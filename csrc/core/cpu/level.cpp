// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set of the CPU loops, once, when first needed.
#include "core/cpu/level.h"

#include <cstdlib>
#include <cstring>

namespace fused_ops::cpu {
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

}  // namespace fused_ops::cpu
