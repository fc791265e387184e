// SPDX-License-Identifier: Apache-2.0
// The CPU loops for AVX-512 with instructions for bfloat16: those in float, which are all that the instructions change.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include <cstddef>
#include <tuple>
#include <utility>

#define FUSED_OPS_LEVEL avx512_bf16
#define FUSED_OPS_HAS_FMA 1
#define FUSED_OPS_HAS_VECTOR 1
#define FUSED_OPS_HAS_BF16 1
#define FUSED_OPS_FLOAT_ONLY 1
#if defined(__clang__)
#pragma clang attribute push(                                                                                       \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif

#include "core/cpu/vector_avx512.h"
#include "core/cpu/walk_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
