// SPDX-License-Identifier: Apache-2.0
// For programs that record what launches read and left in memory, to run them again through another interpreter of the
// same kernels. Their FILE holds, for each launch: name, blocks, threads, the parameter block, the number of memory
// ranges, and for each range its DType, its address, its contents before and its contents after. Numbers are int64; a
// text or a block of bytes has its size before it.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/walk.h"

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

void record_memory_before_launches() {
  emulation::settings.before_launch = [](emulation::Launch& launch) {
    for (const Range& range : ranges) launch.memory.emplace_back(range.data(), range.data() + range.bytes);
  };
}

}  // namespace
