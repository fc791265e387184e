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

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {

void narrow_run(uint16_t* to, const float* from, int64_t n) {
  BFloat16* const run = reinterpret_cast<BFloat16*>(to);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_lanes(run + i, Vector(_mm512_loadu_ps(from + i)), AllLanes{});
  if (i < n) store_lanes(run + i, load_lanes(from + i, FirstLanes(n - i)), FirstLanes(n - i));
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
