// SPDX-License-Identifier: Apache-2.0
// The CPU loops for what the compiler targets by default: any machine of the architecture.
#include "core/cpu/epilogue_impl.h"
#include "core/cpu/small_product_impl.h"
#include "core/cpu/walk_impl.h"
