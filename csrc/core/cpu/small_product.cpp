// SPDX-License-Identifier: Apache-2.0
// Hands the product to the loop of the chosen instruction set.
#include "core/cpu/small_product.h"

#include "core/cpu/level.h"

namespace fused_ops {

FUSED_OPS_AT_EVERY_LEVEL(void multiply(const cpu::SmallProduct& product);)

void cpu::multiply(const SmallProduct& product) { FUSED_OPS_OF_LEVEL(multiply)(product); }

}  // namespace fused_ops
