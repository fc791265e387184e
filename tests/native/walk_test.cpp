// SPDX-License-Identifier: Apache-2.0
// The CPU loops without torch, for machines and emulators that cannot run Python: walk_test [expected level]
//
// Every optimizer, set of states, storage type and layout takes two steps on random numbers. After each one, every
// element is compared with the update computed here in double, from the values that were stored before the step.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/level.h"
#include "core/cpu/walk.h"
#include "core/optim/list.h"

namespace {

using namespace fused_ops;

constexpr uint8_t kGap = 0x5a;  // fills the memory between the elements of a strided operand
constexpr double kGradFactor = -0.5;
constexpr double kLr = 0.02, kEps = 1e-3, kDecay = 0.1, kMomentum = 0.9;

struct Values {  // of one element, before or after a step
  double param, grad, state[kMaxStates];
};

struct Case {
  std::string name;
  int optimizer;
  unsigned states;
  std::vector<double> hyperparameters;
  std::function<void(Values&, double step)> update;  // its grad is already scaled
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int decoupled = 0; decoupled < 2; ++decoupled) {
    for (int amsgrad = 0; amsgrad < 2; ++amsgrad) {
      const auto update = [=](Values& v, double step) {
        const double grad = decoupled ? v.grad : v.grad + kDecay * v.param;
        if (decoupled) v.param *= 1 - kLr * kDecay;
        v.state[0] = 0.8 * v.state[0] + 0.2 * grad;
        v.state[1] = 0.95 * v.state[1] + 0.05 * grad * grad;
        if (amsgrad) v.state[2] = std::fmax(v.state[2], v.state[1]);
        const double second_moment = v.state[amsgrad ? 2 : 1] / (1 - std::pow(0.95, step));
        v.param -= kLr * v.state[0] / (1 - std::pow(0.8, step)) / (std::sqrt(second_moment) + kEps);
      };
      all.push_back({decoupled ? "adamw" : "adam",
                     0,
                     amsgrad ? 0b111u : 0b011u,
                     {kLr, 0.8, 0.95, kEps, kDecay, double(decoupled), double(amsgrad), 1},
                     update});
    }
  }
  for (int centered = 0; centered < 2; ++centered) {
    for (int momentum = 0; momentum < 2; ++momentum) {
      const auto update = [=](Values& v, double) {
        const double grad = v.grad + kDecay * v.param;
        v.state[0] = 0.9 * v.state[0] + 0.1 * grad * grad;
        double variance = v.state[0];
        if (centered) {
          v.state[1] = 0.9 * v.state[1] + 0.1 * grad;
          variance -= v.state[1] * v.state[1];
        }
        double change = grad / (std::sqrt(variance) + kEps);
        if (momentum) change = v.state[2] = kMomentum * v.state[2] + change;
        v.param -= kLr * change;
      };
      all.push_back({"rmsprop",
                     1,
                     0b001u | (centered ? 0b010u : 0) | (momentum ? 0b100u : 0),
                     {kLr, 0.9, kEps, kDecay, momentum ? kMomentum : 0, double(centered), 1},
                     update});
    }
  }
  for (int momentum = 0; momentum < 2; ++momentum) {
    const auto update = [=](Values& v, double step) {
      const double grad = v.grad + kDecay * v.param;
      double change = grad;
      if (momentum) {
        v.state[0] = step > 1 ? kMomentum * v.state[0] + 0.7 * grad : grad;
        change = grad + kMomentum * v.state[0];
      }
      v.param -= kLr * change;
    };
    all.push_back({"sgd",
                   2,
                   momentum ? 0b1u : 0b0u,
                   {kLr, momentum ? kMomentum : 0, momentum ? 0.3 : 0, kDecay, double(momentum), 1},
                   update});
  }
  all.push_back({"adagrad", 3, 0b1, {kLr, 0.5, kEps, kDecay, 1}, [](Values& v, double step) {
                   const double grad = v.grad + kDecay * v.param;
                   v.state[0] += grad * grad;
                   v.param -= kLr / (1 + (step - 1) * 0.5) * grad / (std::sqrt(v.state[0]) + kEps);
                 }});
  return all;
}

struct Format {  // of a storage type
  const char* name;
  int bytes, digits;  // digits: of the significand, with the hidden one
};
Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return {"float32", 4, 24};
    case DType::kFloat64: return {"float64", 8, 53};
    case DType::kFloat16: return {"float16", 2, 11};
    case DType::kBFloat16: return {"bfloat16", 2, 8};
  }
  std::abort();
}

double decode(const uint8_t* from, DType dtype) {
  float single;
  double result;
  uint16_t half;
  switch (dtype) {
    case DType::kFloat32: std::memcpy(&single, from, 4); return single;
    case DType::kFloat64: std::memcpy(&result, from, 8); return result;
    default: std::memcpy(&half, from, 2);
  }
  const int fraction_bits = format_of(dtype).digits - 1, exponent_bits = 15 - fraction_bits;
  const int exponent = (half & 0x7fff) >> fraction_bits, fraction = half & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double significand = exponent ? (1 << fraction_bits) + fraction : fraction;
  const double magnitude = std::ldexp(significand, (exponent ? exponent : 1) - bias - fraction_bits);
  return half >> 15 ? -magnitude : magnitude;
}

// Half the distance between neighbours: what storing `value` may change.
double rounding(double value, DType dtype) {
  int exponent;
  std::frexp(value, &exponent);
  if (dtype == DType::kFloat16 && exponent < -13) exponent = -13;  // subnormal
  return std::ldexp(0.5, exponent - format_of(dtype).digits);
}

// A random value that the type holds exactly, with magnitude in [low, 2 * low).
void encode_random(uint8_t* to, DType dtype, double low, bool may_be_negative, std::mt19937& random) {
  const int digits = format_of(dtype).digits < 24 ? format_of(dtype).digits : 24;
  const double fraction = std::ldexp(double(random() & ((1u << (digits - 1)) - 1)), 1 - digits);
  const double value = low * (1 + fraction) * (may_be_negative && random() & 1 ? -1 : 1);
  const float single = float(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  uint16_t half = uint16_t(bits >> 16);
  if (dtype == DType::kFloat16) half = uint16_t((bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - ((127 - 15) << 10)));
  if (dtype == DType::kFloat64) std::memcpy(to, &value, 8);
  if (dtype == DType::kFloat32) std::memcpy(to, &single, 4);
  if (format_of(dtype).bytes == 2) std::memcpy(to, &half, 2);
}

struct Operand {
  std::vector<uint8_t> memory;
  std::vector<int64_t> offset;  // in elements, of each one
};

struct Tensors {
  std::vector<Operand> operands;
  Layout layout;
  Item item;
};

Tensors make_tensors(const Case& c, const DType (&dtypes)[3], int64_t rows, int64_t columns, bool dense,
                     int32_t scalars, std::mt19937& random) {
  Tensors tensors{std::vector<Operand>(kMaxOperands), {}, {}};
  tensors.layout.dims = 2;
  tensors.layout.size[0] = rows;
  tensors.layout.size[1] = columns;
  tensors.item.scalars = scalars;
  tensors.item.numel = rows * columns;
  for (int operand = 0; operand < kMaxOperands; ++operand) {
    const bool used = operand < kFirstState || has_state(c.states, operand - kFirstState);
    const DType dtype = dtypes[operand < kFirstState ? operand : kFirstState];
    const int bytes = format_of(dtype).bytes;
    // Strided: parameters with a gap after each row, gradients transposed, states every other element.
    const int64_t row_stride = dense ? columns : operand == kParam ? columns + 3 : operand == kGrad ? 1 : 2 * columns;
    const int64_t column_stride = dense || operand == kParam ? 1 : operand == kGrad ? rows : 2;
    tensors.layout.stride[operand][0] = row_stride;
    tensors.layout.stride[operand][1] = column_stride;
    tensors.item.dtype[operand] = dtype;
    if (!used) continue;
    Operand& o = tensors.operands[operand];
    o.memory.assign(size_t(bytes * ((rows - 1) * row_stride + (columns - 1) * column_stride + 1)), kGap);
    const bool squares = operand >= kFirstState && (c.optimizer == 3 || (c.optimizer == 1 && operand == kFirstState) ||
                                                    (c.optimizer == 0 && operand > kFirstState));
    for (int64_t i = 0; i < rows * columns; ++i) {
      o.offset.push_back(i / columns * row_stride + i % columns * column_stride);
      encode_random(&o.memory[size_t(o.offset.back() * bytes)], dtype, squares ? 1 : 0.25, !squares, random);
    }
    tensors.item.data[operand] = o.memory.data();
  }
  return tensors;
}

int check(const Case& c, const Tensors& before, const Tensors& after, double step, bool in_double, const char* label) {
  const double eps = in_double ? 0x1p-52 : 0x1p-23;
  int failures = 0;
  for (int64_t i = 0; i < before.item.numel; ++i) {
    double old[kMaxOperands] = {}, now[kMaxOperands] = {};
    for (int operand = 0; operand < kMaxOperands; ++operand) {
      if (before.operands[operand].memory.empty()) continue;
      const int64_t at = before.operands[operand].offset[size_t(i)] * format_of(before.item.dtype[operand]).bytes;
      old[operand] = decode(&before.operands[operand].memory[size_t(at)], before.item.dtype[operand]);
      now[operand] = decode(&after.operands[operand].memory[size_t(at)], before.item.dtype[operand]);
    }
    Values expected{old[0], kGradFactor * old[1], {old[2], old[3], old[4]}};
    c.update(expected, step);
    const double wanted[kMaxOperands] = {expected.param, old[1], expected.state[0], expected.state[1],
                                         expected.state[2]};
    for (int operand = 0; operand < kMaxOperands; ++operand) {
      if (before.operands[operand].memory.empty()) continue;
      // A handful of roundings of terms of about this size, and one to store the result.
      const double scale = std::fabs(wanted[operand]) + std::fabs(old[operand]) + 1;
      const double bound = 4 * eps * scale + rounding(wanted[operand], before.item.dtype[operand]);
      if (std::fabs(now[operand] - wanted[operand]) <= bound) continue;
      if (failures++ == 0)
        std::printf("%s: element %lld of operand %d: expected %.9g, got %.9g\n", label, static_cast<long long>(i),
                    operand, wanted[operand], now[operand]);
    }
  }
  for (int operand = 0; operand < kMaxOperands; ++operand) {
    const Operand& o = after.operands[operand];
    if (o.memory.empty()) continue;
    const size_t bytes = size_t(format_of(before.item.dtype[operand]).bytes);
    std::vector<bool> is_element(o.memory.size() / bytes);
    for (int64_t offset : o.offset) is_element[size_t(offset)] = true;
    for (size_t i = 0; i < o.memory.size(); ++i)
      if (!is_element[i / bytes] && o.memory[i] != kGap && failures++ == 0)
        std::printf("%s: operand %d was written between its elements\n", label, operand);
  }
  return failures;
}

}  // namespace

int main(int argument_count, char** arguments) {
  const char* level = cpu::level_name(cpu::chosen_level());
  if (argument_count > 1 && std::strcmp(level, arguments[1]) != 0) {
    std::printf("expected level == %s, got %s\n", arguments[1], level);
    return 1;
  }
  using enum DType;
  const DType storages[][3] = {{kFloat32, kFloat32, kFloat32},  {kFloat64, kFloat64, kFloat64},
                               {kFloat16, kFloat16, kFloat16},  {kBFloat16, kBFloat16, kBFloat16},
                               {kFloat32, kFloat32, kBFloat16}, {kBFloat16, kBFloat16, kFloat32},
                               {kFloat32, kBFloat16, kFloat16}};
  std::mt19937 random(20240607);
  int passed = 0, failed = 0;
  for (const Case& c : cases()) {
    for (const auto& dtypes : storages) {
      for (const bool dense : {true, false}) {
        // Around the widths of vectors and of a block, and once longer than a chunk; items of a walk at different
        // steps.
        std::vector<std::pair<int, int>> sizes = {{1, 1}, {1, 7}, {3, 11}, {5, 205}};
        if (&dtypes == &storages[0]) sizes.push_back({37, 450});
        std::vector<Tensors> all;
        for (const auto& [rows, columns] : sizes)
          all.push_back(make_tensors(c, dtypes, rows, columns, dense, int32_t(all.size() % 2), random));
        for (int repeat = 0; repeat < 2; ++repeat) {
          const StepScalars scalars[] = {{1.0 + repeat}, {5.0 + repeat}};
          const std::vector<Tensors> before = all;
          std::vector<Item> items;
          std::vector<cpu::Chunk> chunks;
          for (Tensors& tensors : all) {
            tensors.item.layout = dense ? nullptr : &tensors.layout;
            for (int64_t begin = 0; begin < tensors.item.numel; begin += cpu::kChunk)
              chunks.push_back(
                  {begin, int32_t(items.size()), int32_t(std::min<int64_t>(cpu::kChunk, tensors.item.numel - begin))});
            items.push_back(tensors.item);
          }
          const bool in_double = dtypes[0] == kFloat64;
          cpu::run(
              c.optimizer, c.states, in_double,
              {c.hyperparameters.data(), kGradFactor, scalars, items.data(), chunks.data(), int64_t(chunks.size()), 2});
          for (size_t i = 0; i < all.size(); ++i) {
            const std::string label = c.name + " states " + std::to_string(c.states) + ", " +
                                      format_of(dtypes[0]).name + "/" + format_of(dtypes[1]).name + "/" +
                                      format_of(dtypes[2]).name + (dense ? ", dense, " : ", strided, ") +
                                      std::to_string(all[i].item.numel);
            const double step = scalars[i % 2].step;
            check(c, before[i], all[i], step, in_double, label.c_str()) ? ++failed : ++passed;
          }
        }
      }
    }
  }
  std::printf("%s: %d passed, %d failed\n", level, passed, failed);
  return failed ? 1 : 0;
}
