// SPDX-License-Identifier: Apache-2.0
// The CPU backend's entry to the two passes of core/epilogue.h.
#pragma once

#include "core/epilogue.h"

namespace fused_ops::cpu {

void activate(const Activate& pass, int threads);

int64_t workspace_bytes(const Differentiate& pass);
void differentiate(const Differentiate& pass, int threads);

}  // namespace fused_ops::cpu
