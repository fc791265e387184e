// SPDX-License-Identifier: Apache-2.0
// Hands the product to the loop of the chosen instruction set.
#include "core/cpu/small_product.h"

#include "core/cpu/walk.h"

namespace fused_ops {

inline namespace baseline {
void multiply(const cpu::SmallProduct& product);
}
#if defined(__x86_64__)
namespace avx2 {
void multiply(const cpu::SmallProduct& product);
}
namespace avx512 {
void multiply(const cpu::SmallProduct& product);
}
#endif

namespace cpu {

void multiply(const SmallProduct& product) {
#if defined(__x86_64__)
  if (chosen_level() >= Level::kAvx512) return avx512::multiply(product);
  if (chosen_level() == Level::kAvx2) return avx2::multiply(product);
#endif
  baseline::multiply(product);
}

}  // namespace cpu
}  // namespace fused_ops
