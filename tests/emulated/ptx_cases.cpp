// SPDX-License-Identifier: Apache-2.0
// Records what a few launches read and left in memory, for running the same launches through another interpreter of the
// same kernels: ptx_cases FILE.
//
// FILE holds, for each launch: name, blocks, threads, the parameter block, the number of memory ranges, and for each
// range its DType, its address, its contents before and its contents after. Numbers are int64; a text or a block of
// bytes has its size before it.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/walk.h"
#include "core/optim/list.h"

namespace {

using namespace fused_ops;

std::FILE* output;

void put(int64_t number) { std::fwrite(&number, sizeof(number), 1, output); }
void put(const void* data, size_t size) {
  put(int64_t(size));
  std::fwrite(data, 1, size, output);
}

struct Range {
  std::unique_ptr<char[]> memory;
  size_t bytes;
  DType dtype;
  char* data() const { return memory.get(); }
};
std::vector<Range> ranges;

char* allocate(size_t bytes, DType dtype) {
  ranges.push_back({std::make_unique<char[]>(bytes), bytes, dtype});
  return ranges.back().data();
}

uint64_t random_state = 1;
double random_number() {  // 0.25 to 1.25
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return 0.25 + double(random_state >> 33) * 0x1p-31;
}

int size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// Alternating signs where allowed; now and then zero, huge, tiny, infinite or NaN.
void fill(char* to, DType dtype, int64_t count, bool state) {
  for (int64_t i = 0; i < count; ++i) {
    double value = random_number() * (i % 2 && !state ? -1 : 1);
    if (i % 31 == 7) value = 0;
    if (i % 31 == 11) value *= state ? 1e-30 : 1e-18;
    if (i % 31 == 13) value *= 3e4;
    if (i == 17) value = HUGE_VAL;
    const float single = float(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint16_t bfloat = uint16_t(bits >> 16);
    const uint16_t half = uint16_t((bits >> 16 & 0x8000u) |
                                   (magnitude < 0x38800000u    ? 0x0123u  // a subnormal
                                    : magnitude >= 0x47800000u ? 0x7c00u
                                                               : (magnitude - (112u << 23)) >> 13));
    char* at = to + i * size_of(dtype);
    switch (dtype) {
      case DType::kFloat32: std::memcpy(at, &single, 4); break;
      case DType::kFloat64: std::memcpy(at, &value, 8); break;
      case DType::kFloat16: std::memcpy(at, &half, 2); break;
      case DType::kBFloat16: std::memcpy(at, &bfloat, 2); break;
    }
  }
}

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

void record(const std::string& name, size_t launch_index, const emulation::Launch& launch) {
  put(name.data(), name.size());
  put(launch.blocks);
  put(launch.threads);
  put(launch.parameters.data(), launch.parameters.size());
  put(int64_t(ranges.size()));
  for (size_t i = 0; i < ranges.size(); ++i) {
    put(int64_t(ranges[i].dtype));
    put(int64_t(reinterpret_cast<intptr_t>(ranges[i].data())));
    put(launch.memory[i].data(), launch.memory[i].size());
    const auto& after = launch_index + 1 < emulation::launches.size() ? emulation::launches[launch_index + 1].memory[i]
                                                                      : std::vector<char>();
    if (after.empty())
      put(ranges[i].data(), ranges[i].bytes);
    else
      put(after.data(), after.size());
  }
}

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
  emulation::settings.before_launch = [](emulation::Launch& launch) {
    for (const Range& range : ranges) launch.memory.emplace_back(range.data(), range.data() + range.bytes);
  };
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
