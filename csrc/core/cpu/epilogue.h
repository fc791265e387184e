// SPDX-License-Identifier: Apache-2.0
// The CPU backend's entry to the two passes of core/epilogue.h.
#pragma once

#include "core/epilogue.h"

namespace fused_ops::cpu {

// Rounds a run to bfloat16 by this machine's instruction for it; false where there is none.
bool narrow_by_instruction(uint16_t* to, const float* from, int64_t n);

void activate(const Activate& pass, int threads);

int64_t workspace_bytes(const Differentiate& pass);
void differentiate(const Differentiate& pass, int threads);

}  // namespace fused_ops::cpu
