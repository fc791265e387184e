// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's epilogues, kernels and launcher unchanged, as host C++.
#define FUSED_OPS_LEVEL emulated
#define FUSED_OPS_HAS_FMA 1

#include "core/cuda/epilogue.cu"
