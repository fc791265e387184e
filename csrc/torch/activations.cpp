// SPDX-License-Identifier: Apache-2.0
#include "torch/activations.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/celu.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/relu6.h>
#include <ATen/ops/selu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <unordered_map>

#include "torch/checks.h"

namespace fused_ops {
namespace {

using at::Tensor;
using Parameters = const double*;

// aten's own constants of SELU.
constexpr double kSeluAlpha = 1.6732632423543772848170429916717;
constexpr double kSeluScale = 1.0507009873554804934193349852946;
constexpr double kQuickGelu = 1.702;

struct AtenActivation {
  const char* name;
  Tensor (*value)(const Tensor& x, Parameters);
  Tensor (*gradient)(const Tensor& grad, const Tensor& saved, Parameters);
};

constexpr AtenActivation kAtenActivations[] = {
    {"identity", [](const Tensor& x, Parameters) { return x; },
     [](const Tensor& g, const Tensor&, Parameters) { return g; }},
    {"relu", [](const Tensor& x, Parameters) { return at::relu(x); },
     [](const Tensor& g, const Tensor& y, Parameters) { return at::threshold_backward(g, y, 0); }},
    {"relu_squared", [](const Tensor& x, Parameters) { return at::relu(x).square(); },
     [](const Tensor& g, const Tensor& x, Parameters) { return g * at::relu(x) * 2; }},
    {"gelu", [](const Tensor& x, Parameters) { return at::gelu(x); },
     [](const Tensor& g, const Tensor& x, Parameters) { return at::gelu_backward(g, x); }},
    {"gelu_tanh", [](const Tensor& x, Parameters) { return at::gelu(x, "tanh"); },
     [](const Tensor& g, const Tensor& x, Parameters) { return at::gelu_backward(g, x, "tanh"); }},
    {"quick_gelu", [](const Tensor& x, Parameters) { return x * at::sigmoid(x * kQuickGelu); },
     [](const Tensor& g, const Tensor& x, Parameters) {
       const Tensor s = at::sigmoid(x * kQuickGelu);
       return g * (s + x * kQuickGelu * s * (1 - s));
     }},
    {"silu", [](const Tensor& x, Parameters) { return at::silu(x); },
     [](const Tensor& g, const Tensor& x, Parameters) {  // silu_backward has no derivative
       const Tensor s = at::sigmoid(x);
       return g * (s + x * s * (1 - s));
     }},
    {"mish", [](const Tensor& x, Parameters) { return at::mish(x); },
     [](const Tensor& g, const Tensor& x, Parameters) {  // nor has mish_backward
       const Tensor t = at::tanh(at::softplus(x));
       return g * (t + x * at::sigmoid(x) * (1 - t * t));
     }},
    {"sigmoid", [](const Tensor& x, Parameters) { return at::sigmoid(x); },
     [](const Tensor& g, const Tensor& y, Parameters) { return at::sigmoid_backward(g, y); }},
    {"tanh", [](const Tensor& x, Parameters) { return at::tanh(x); },
     [](const Tensor& g, const Tensor& y, Parameters) { return at::tanh_backward(g, y); }},
    {"leaky_relu", [](const Tensor& x, Parameters p) { return at::leaky_relu(x, p[0]); },
     [](const Tensor& g, const Tensor& x, Parameters p) { return at::leaky_relu_backward(g, x, p[0], false); }},
    {"elu", [](const Tensor& x, Parameters p) { return at::elu(x, p[0]); },
     [](const Tensor& g, const Tensor& x, Parameters p) { return at::elu_backward(g, p[0], 1, 1, false, x); }},
    {"selu", [](const Tensor& x, Parameters) { return at::selu(x); },
     [](const Tensor& g, const Tensor& x, Parameters) {
       return at::elu_backward(g, kSeluAlpha, kSeluScale, 1, false, x);
     }},
    {"celu", [](const Tensor& x, Parameters p) { return at::celu(x, p[0]); },
     [](const Tensor& g, const Tensor& x, Parameters p) { return at::elu_backward(g, p[0], 1, 1 / p[0], false, x); }},
    {"softplus", [](const Tensor& x, Parameters p) { return at::softplus(x, p[0], p[1]); },
     [](const Tensor& g, const Tensor& x, Parameters p) { return at::softplus_backward(g, x, p[0], p[1]); }},
    {"hardtanh", [](const Tensor& x, Parameters p) { return at::hardtanh(x, p[0], p[1]); },
     [](const Tensor& g, const Tensor& x, Parameters p) { return at::hardtanh_backward(g, x, p[0], p[1]); }},
    {"relu6", [](const Tensor& x, Parameters) { return at::relu6(x); },
     [](const Tensor& g, const Tensor& x, Parameters) { return at::hardtanh_backward(g, x, 0, 6); }},
    {"hardswish", [](const Tensor& x, Parameters) { return at::hardswish(x); },
     [](const Tensor& g, const Tensor& x, Parameters) { return at::hardswish_backward(g, x); }},
    {"hardsigmoid", [](const Tensor& x, Parameters) { return at::hardsigmoid(x); },
     [](const Tensor& g, const Tensor& x, Parameters) {  // nor has hardsigmoid_backward
       return g * ((x > -3) & (x < 3)) / 6;
     }},
};

const AtenActivation& aten_activation(int index) {
  static const std::vector<const AtenActivation*> by_index = [] {
    std::vector<const AtenActivation*> found(kActivationCount);
    for (int i = 0; i < kActivationCount; ++i) {
      visit_activation(i, [&]<class Activation>() {
        for (const AtenActivation& row : kAtenActivations)
          if (std::string_view(row.name) == Activation::kName) found[i] = &row;
      });
      if (!found[i]) fail("fused_ops: activation ", i, " has no composition of aten operators in activations.cpp.");
    }
    return found;
  }();
  return *by_index[index];
}

}  // namespace

ActivationCall find_activation(std::string_view name, at::ArrayRef<double> parameters) {
  static const auto defaults = [] {
    std::unordered_map<std::string_view, std::pair<ActivationCall, size_t>> by_name;
    for (int i = 0; i < kActivationCount; ++i) {
      visit_activation(i, [&]<class Activation>() {
        ActivationCall call{i, {}, Activation::kSaved};
        size_t count = 0;
        for (const Parameter& parameter : Activation::kParameters) call.parameters[count++] = parameter.value;
        by_name.emplace(Activation::kName, std::pair(call, count));
      });
    }
    return by_name;
  }();
  const auto found = defaults.find(name);
  if (found == defaults.end()) {
    std::string names;
    for (const auto& schema : activation_schemas()) names += (names.empty() ? "" : ", ") + std::get<0>(schema);
    fail("feed_forward: expected activation in (", names, "), got '", std::string(name), "'. Use one of these names.");
  }
  auto [call, count] = found->second;
  if (!parameters.empty() && parameters.size() != count)
    fail_expectation("feed_forward", "len(parameters) of " + std::string(name), count, parameters.size(),
                     "Give a value for each, or none for the defaults.");
  std::copy(parameters.begin(), parameters.end(), call.parameters);
  return call;
}

const ActivationCall& identity() {
  static const ActivationCall call = find_activation("identity", {});
  return call;
}

bool is_fusible(const ActivationCall& call) {
  const std::string_view name = aten_activation(call.index).name;
  if (name == "celu") return call.parameters[0] > 0;
  if (name == "hardtanh") return call.parameters[0] <= call.parameters[1];
  return true;
}

bool is_scalar_in_double(const ActivationCall& call) {
  const std::string_view name = aten_activation(call.index).name;
  return name == "gelu" || name == "softplus";
}

at::Tensor aten_value(const ActivationCall& call, const at::Tensor& x) {
  return aten_activation(call.index).value(x, call.parameters);
}

at::Tensor aten_gradient(const ActivationCall& call, const at::Tensor& grad, const at::Tensor& saved) {
  return aten_activation(call.index).gradient(grad, saved, call.parameters);
}

std::vector<std::tuple<std::string, ActivationParameters, bool>> activation_schemas() {
  std::vector<std::tuple<std::string, ActivationParameters, bool>> schemas;
  for (int i = 0; i < kActivationCount; ++i) {
    visit_activation(i, [&]<class Activation>() {
      ActivationParameters parameters;
      for (const Parameter& parameter : Activation::kParameters)
        parameters.emplace_back(parameter.name, parameter.value);
      schemas.emplace_back(Activation::kName, std::move(parameters), Activation::kSaved == Saved::kOutput);
    });
  }
  return schemas;
}

}  // namespace fused_ops
