// SPDX-License-Identifier: Apache-2.0
// Records launches of optimizer steps: ptx_cases FILE.
#include <cstdlib>

#include "core/cuda/walk.h"
#include "core/optim/list.h"
#include "ptx_recorder.h"

namespace {

constexpr DType kF32 = DType::kFloat32, kF64 = DType::kFloat64, kF16 = DType::kFloat16, kB16 = DType::kBFloat16;
struct Types {
  bool in_double;
  DType dtypes[kMaxOperands];
  int misalignment;  // of all operands
  bool strided;
};
constexpr Types kTypes[] = {
    {false, {kF32, kF32, kF32, kF32, kF32}, 0, false}, {false, {kB16, kB16, kB16, kB16, kB16}, 0, false},
    {false, {kF16, kF16, kF16, kF16, kF16}, 5, false}, {false, {kF32, kF64, kB16, kF16, kF32}, 0, false},
    {false, {kB16, kB16, kF32, kF32, kF32}, 4, false}, {false, {kF32, kF32, kF32, kF32, kF32}, 0, true},
    {true, {kF64, kF64, kF64, kF64, kF64}, 1, false},  {true, {kF64, kF32, kF64, kF32, kB16}, 0, false},
    {true, {kF64, kF64, kF64, kF64, kF64}, 0, true},
};

template <class Optimizer, unsigned kStates>
void run(int optimizer, bool in_double, bool device_scalars) {
  ranges.clear();
  emulation::launches.clear();
  std::vector<Item> items;
  std::vector<float*> steps;
  Layout layout{2, {3, 5}, {{7, 1}, {1, 3}, {10, 2}, {5, 1}, {5, 1}}};
  for (const Types& types : kTypes) {
    if (types.in_double != in_double) continue;
    Item item{};
    // The first is as large as what the threads of a block move at once, and a bit.
    item.numel = types.strided ? 15 : (items.empty() ? 1100 : 40) + 16 * int64_t(items.size());
    item.layout = types.strided ? &layout : nullptr;
    for (int operand = 0; operand < kMaxOperands; ++operand) {
      item.dtype[operand] = types.dtypes[operand];
      if (operand >= kFirstState && !has_state(kStates, operand - kFirstState)) continue;
      const int64_t elements = types.strided ? 30 : item.numel;
      const int size = size_of(types.dtypes[operand]);
      char* data = allocate(size_t((elements + types.misalignment) * size), types.dtypes[operand]) +
                   types.misalignment * size;
      fill(data, types.dtypes[operand], elements, operand >= kFirstState);
      item.data[operand] = data;
    }
    items.push_back(item);
    steps.push_back(reinterpret_cast<float*>(allocate(4, kF32)));
    *steps.back() = float(items.size());
  }
  typename Optimizer::Hyperparameters hyperparameters;
  double values[16] = {0.02, 0.9, 0.99, 1e-3, 0.1, 0, 0, 0};
  std::memcpy(static_cast<void*>(&hyperparameters), values, sizeof(hyperparameters));
  const StepScalars scalars[] = {{3}};
  cuda::Walk walk{};
  walk.hyperparameters = &hyperparameters;
  walk.grad_factor = -1;
  walk.scalars = scalars;
  walk.items = items.data();
  walk.item_count = int64_t(items.size());
  if (device_scalars) {
    float* const numbers = reinterpret_cast<float*>(allocate(12, kF32));
    numbers[0] = 0.03f, numbers[1] = 8, numbers[2] = 0;
    walk.steps = steps.data();
    walk.lr = numbers;
    walk.lr_dtype = DType::kFloat32;
    walk.grad_scale = numbers + 1;
    walk.found_inf = numbers + 2;
    walk.workspace = allocate(size_t(cuda::workspace_bytes(optimizer, kStates, in_double, walk)),
                              in_double ? kF64 : kF32);
  }
  record_memory_before_launches();
  if (cuda::run(optimizer, kStates, in_double, walk) != 0) std::abort();
  for (size_t i = 0; i < emulation::launches.size(); ++i) {
    const bool prepares = device_scalars && i == 0;
    record(std::string(prepares ? "prepare" : "walk") + " " + Optimizer::kName + " " +
               (in_double ? "double" : "float") + " " + std::to_string(kStates),
           i, emulation::launches[i]);
  }
}

}  // namespace

int main(int, char** argv) {
  output = std::fopen(argv[1], "wb");
  for (int optimizer = 0; optimizer < kOptimizerCount; ++optimizer)
    for (unsigned states = 0; states < 8; ++states)
      visit_rule(optimizer, states, [&]<class Optimizer, unsigned kStates>() {
        for (bool in_double : {false, true})
          for (bool device_scalars : {false, true}) run<Optimizer, kStates>(optimizer, in_double, device_scalars);
      });
  return std::fclose(output);
}
