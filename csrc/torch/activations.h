// SPDX-License-Identifier: Apache-2.0
// Activations by name, and what each is in aten's operators: for tensors and transforms that only aten knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/activations.h"

namespace fused_ops {

// An activation with the values of its parameters.
struct ActivationCall {
  int index = 0;
  double parameters[kMaxActivationParameters] = {};
  Saved saved = Saved::kInput;
};

// Raises where there is no such activation or the number of parameters is another.
ActivationCall find_activation(std::string_view name, at::ArrayRef<double> parameters);

const ActivationCall& identity();

// Whether the native loops take the parameters.
bool is_fusible(const ActivationCall& call);

// Whether the CPU loops compute it one element at a time: erfc and log1p of a double are libm's.
bool is_scalar_in_double(const ActivationCall& call);

// Differentiable compositions of aten operators: act(x), and grad * act'(x), from x or from act(x) as `saved` says.
at::Tensor aten_value(const ActivationCall& call, const at::Tensor& x);
at::Tensor aten_gradient(const ActivationCall& call, const at::Tensor& grad, const at::Tensor& saved);

// Every activation's name, its parameters with their defaults, and whether it saves its output.
using ActivationParameters = std::vector<std::pair<std::string, double>>;
std::vector<std::tuple<std::string, ActivationParameters, bool>> activation_schemas();

}  // namespace fused_ops
