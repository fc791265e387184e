// SPDX-License-Identifier: Apache-2.0
// Sources of csrc/torch that are compiled as one, since reading torch's headers takes longer than all else.
#include "torch/feed_forward_node.cpp"
#include "torch/feed_forward_ops.cpp"
#include "torch/feed_forward_python.cpp"
#include "torch/step_plan.cpp"
#if !defined(FUSED_OPS_EMULATED)  // that build has bindings of its own
#include "torch/registry.cpp"
#endif
