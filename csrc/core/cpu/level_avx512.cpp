// SPDX-License-Identifier: Apache-2.0
// The CPU loops for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include <cstddef>
#include <tuple>
#include <utility>

#define FUSED_OPS_LEVEL avx512
#define FUSED_OPS_HAS_FMA 1
#define FUSED_OPS_HAS_VECTOR 1
#if defined(__clang__)
#pragma clang attribute push(                                                                            \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "core/cpu/epilogue_impl.h"
#include "core/cpu/small_product_impl.h"
#include "core/cpu/vector_avx512.h"
#include "core/cpu/walk_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
