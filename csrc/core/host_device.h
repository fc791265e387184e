// SPDX-License-Identifier: Apache-2.0
// Function qualifiers and the per-instruction-set namespace shared by host and device code.
#pragma once

#if defined(__CUDACC__)
#define FUSED_OPS_HD __host__ __device__ __forceinline__
#else
#define FUSED_OPS_HD inline __attribute__((always_inline))
#endif

// Everything that holds arithmetic lives in an inline namespace named after the instruction set it is compiled for, so
// that two translation units compiled for different sets can never share an emitted function.
#if !defined(FUSED_OPS_LEVEL)
#define FUSED_OPS_LEVEL baseline
#endif
