// SPDX-License-Identifier: Apache-2.0
// Hands the passes to the loops of the chosen instruction set.
#include "core/cpu/epilogue.h"

#include "core/cpu/epilogue_tiles.h"
#include "core/cpu/level.h"

namespace fused_ops {

FUSED_OPS_AT_EVERY_LEVEL(void activate(const Activate& pass, int threads);
                         void differentiate(const Differentiate& pass, int threads);)
#if defined(__x86_64__)
namespace avx512_bf16 {
void narrow_run(uint16_t* to, const float* from, int64_t n);
}
#endif

namespace cpu {

bool narrow_by_instruction([[maybe_unused]] uint16_t* to, [[maybe_unused]] const float* from,
                           [[maybe_unused]] int64_t n) {
#if defined(__x86_64__)
  if (chosen_level() == Level::kAvx512Bf16) {
    avx512_bf16::narrow_run(to, from, n);
    return true;
  }
#endif
  return false;
}

void activate(const Activate& pass, int threads) { FUSED_OPS_OF_LEVEL(activate)(pass, threads); }

int64_t workspace_bytes(const Differentiate& pass) {
  const int64_t sums = (pass.grad_bias != nullptr) + (pass.grad_up_bias != nullptr);
  const Tiling tiling = tile(pass.rows, pass.columns, pass.stride);
  return sums * tiling.row_chunks * pass.columns * (pass.dtype == DType::kFloat64 ? 8 : 4);
}

void differentiate(const Differentiate& pass, int threads) { FUSED_OPS_OF_LEVEL(differentiate)(pass, threads); }

}  // namespace cpu
}  // namespace fused_ops
