// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the CPU loops are compiled for, one level_NAME.cpp each, and the choice between them.
#pragma once

namespace fused_ops::cpu {

enum class Level { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };
constexpr int kLevelCount = 4;
const char* level_name(Level level);
bool level_compiled(Level level);
bool level_supported(Level level);  // compiled, and this machine has the instructions
Level chosen_level();               // the highest supported, or what FUSED_OPS_CPU_LEVEL names
const char* unusable_level();       // what FUSED_OPS_CPU_LEVEL names, if that is no supported level; else null

// The version of a function that the chosen level runs. avx512_bf16 runs those of avx512, but for a few of its own.
template <class Function>
Function* of_level(Function* baseline, Function* avx2, Function* avx512) {
  if (chosen_level() >= Level::kAvx512) return avx512;
  return chosen_level() == Level::kAvx2 ? avx2 : baseline;
}

}  // namespace fused_ops::cpu

// FUSED_OPS_AT_EVERY_LEVEL(declarations) in namespace fused_ops declares what each level defines;
// FUSED_OPS_OF_LEVEL(function) is the version to run.
#if defined(__x86_64__)
#define FUSED_OPS_AT_EVERY_LEVEL(...) \
  inline namespace baseline {         \
  __VA_ARGS__                         \
  }                                   \
  namespace avx2 {                    \
  __VA_ARGS__                         \
  }                                   \
  namespace avx512 {                  \
  __VA_ARGS__                         \
  }
#define FUSED_OPS_OF_LEVEL(function)                                                          \
  (::fused_ops::cpu::of_level(&::fused_ops::baseline::function, &::fused_ops::avx2::function, \
                              &::fused_ops::avx512::function))
#else
#define FUSED_OPS_AT_EVERY_LEVEL(...) \
  inline namespace baseline {         \
  __VA_ARGS__                         \
  }
#define FUSED_OPS_OF_LEVEL(function) (&::fused_ops::baseline::function)
#endif
