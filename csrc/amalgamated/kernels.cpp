// SPDX-License-Identifier: Apache-2.0
// Sources of csrc/torch that are compiled as one, since reading torch's headers takes longer than all else.
#include "torch/activations.cpp"
#include "torch/buffer_pool.cpp"
#include "torch/choices.cpp"
#include "torch/feed_forward.cpp"
#include "torch/gemm.cpp"
#include "torch/optimizer_step.cpp"
