// SPDX-License-Identifier: Apache-2.0
// The emulated CUDA backend against the CPU backend, bit for bit: walk_test forward|backward|shuffled
//
// Every optimizer, set of states, storage type, alignment, layout and size around every boundary takes steps on random
// numbers, in many small walks. Each operand lies in a buffer of its own that ends with its last element, so that a
// sanitizer sees any access beyond it.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cpu/level.h"
#include "core/cpu/walk.h"
#include "core/cuda/walk.h"
#include "core/optim/list.h"

namespace {

using namespace fused_ops;

int failures = 0;

struct Generator {  // splitmix64
  uint64_t state = 1;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
} generator;

int size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// Random numbers as they are stored: positive, so that they can be second moments. About 1, as all dtypes hold.
void draw(DType dtype, void* to, int64_t count, bool positive) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t random = generator();
    double value = 0.25 + double(random >> 11) * 0x1p-53;
    if (!positive && random & 1) value = -value;
    if ((random >> 1) % 128 == 0) value = 0;
    const float single = float(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    char* at = static_cast<char*>(to) + i * size_of(dtype);
    const uint16_t bfloat = uint16_t(bits >> 16);
    const uint16_t half = single == 0 ? 0
                                      : uint16_t((bits >> 16 & 0x8000u) | ((bits & 0x7fffffffu) - (112u << 23)) >> 13);
    switch (dtype) {
      case DType::kFloat32: std::memcpy(at, &single, 4); break;
      case DType::kFloat64: std::memcpy(at, &value, 8); break;
      case DType::kFloat16: std::memcpy(at, &half, 2); break;
      case DType::kBFloat16: std::memcpy(at, &bfloat, 2); break;
    }
  }
}

struct Operand {
  DType dtype;
  int64_t elements;  // of the buffer
  int misalignment;  // in elements
  std::unique_ptr<char[]> device_buffer, host_buffer;

  Operand(DType dtype_, int64_t elements_, int misalignment_, bool positive)
      : dtype(dtype_), elements(elements_), misalignment(misalignment_) {
    // operator new aligns to 16 bytes.
    device_buffer.reset(new char[size_t(bytes() + offset())]);
    host_buffer.reset(new char[size_t(bytes() + offset())]);
    draw(dtype, device(), elements, positive);
    std::memcpy(host(), device(), size_t(bytes()));
  }
  int64_t offset() const { return misalignment * size_of(dtype); }
  int64_t bytes() const { return elements * size_of(dtype); }
  void* device() const { return device_buffer.get() + offset(); }
  void* host() const { return host_buffer.get() + offset(); }
  bool same() const { return std::memcmp(device(), host(), size_t(bytes())) == 0; }
};

struct Tensors {
  std::vector<Operand> operands;
  std::vector<int> places;
  std::unique_ptr<Layout> layout;
  Item device, host;
};

enum class Arrangement { kDense, kStrided, kBroadcastGrad };

struct Rule {
  std::string name;
  int optimizer;
  unsigned states;
  std::vector<double> hyperparameters;
};

std::vector<Rule> rules() {
  return {
      {"adam", 0, 0b011, {0.02, 0.8, 0.95, 1e-3, 0.1, 0, 0, 0}},
      {"adamw", 0, 0b011, {0.02, 0.8, 0.95, 1e-3, 0.1, 1, 0, 0}},
      {"adam amsgrad", 0, 0b111, {0.02, 0.8, 0.95, 1e-3, 0, 0, 1, 0}},
      {"rmsprop", 1, 0b001, {0.02, 0.9, 1e-3, 0.1, 0, 0, 0}},
      {"rmsprop centered", 1, 0b011, {0.02, 0.9, 1e-3, 0, 0, 1, 0}},
      {"rmsprop momentum", 1, 0b101, {0.02, 0.9, 1e-3, 0.1, 0.8, 0, 0}},
      {"rmsprop centered momentum", 1, 0b111, {0.02, 0.9, 1e-3, 0.1, 0.8, 1, 0}},
      {"sgd", 2, 0b0, {0.02, 0, 0, 0.1, 0, 0}},
      {"sgd momentum", 2, 0b1, {0.02, 0.8, 0.3, 0.1, 0, 0}},
      {"sgd nesterov", 2, 0b1, {0.02, 0.8, 0, 0, 1, 0}},
      {"adagrad", 3, 0b1, {0.02, 0.1, 1e-3, 0.1, 0}},
  };
}

Tensors make(const Rule& rule, const DType (&dtypes)[kMaxOperands], int64_t numel,
             const int (&misalignments)[kMaxOperands], Arrangement arrangement, int32_t scalars) {
  Tensors tensors;
  tensors.device = {};
  tensors.device.numel = numel;
  tensors.device.scalars = scalars;
  if (arrangement != Arrangement::kDense) {
    tensors.layout = std::make_unique<Layout>();
    tensors.layout->dims = numel % 3 == 0 ? 2 : 1;
    tensors.layout->size[0] = numel % 3 == 0 ? 3 : numel;
    tensors.layout->size[1] = numel / 3;
  }
  for (int operand = 0; operand < kMaxOperands; ++operand) {
    tensors.device.dtype[operand] = dtypes[operand];
    if (operand >= kFirstState && !(rule.states >> (operand - kFirstState) & 1)) continue;
    int64_t elements = numel;
    if (tensors.layout) {
      int64_t* stride = tensors.layout->stride[operand];
      const int64_t inner = 1 + operand % 3;  // every, every other, every third
      stride[tensors.layout->dims - 1] = inner;
      if (tensors.layout->dims == 2) stride[0] = numel / 3 * inner + operand;
      if (operand == kGrad && arrangement == Arrangement::kBroadcastGrad) stride[0] = 0;
      elements = numel > 0;
      for (int dim = 0; dim < tensors.layout->dims; ++dim) elements += (tensors.layout->size[dim] - 1) * stride[dim];
      if (numel == 0) elements = 0;
    }
    tensors.operands.emplace_back(dtypes[operand], elements, misalignments[operand], operand >= kFirstState);
    tensors.places.push_back(operand);
  }
  tensors.device.layout = numel ? tensors.layout.get() : nullptr;
  tensors.host = tensors.device;
  for (size_t i = 0; i < tensors.places.size(); ++i) {
    tensors.device.data[tensors.places[i]] = tensors.operands[i].device();
    tensors.host.data[tensors.places[i]] = tensors.operands[i].host();
  }
  return tensors;
}

enum class Scalars { kHost, kDevice, kFoundInf };

void check(const std::string& what, const Rule& rule, bool in_double, std::vector<Tensors>& tensors, Scalars scalars) {
  std::vector<StepScalars> steps{{1}, {7}, {1000}};
  double host_hyperparameters[16];
  std::memcpy(host_hyperparameters, rule.hyperparameters.data(), rule.hyperparameters.size() * sizeof(double));
  std::vector<Item> device, host;
  std::vector<cpu::Chunk> chunks;
  std::vector<float> counters;
  for (Tensors& item : tensors) {
    for (int64_t begin = 0; begin < item.host.numel; begin += cpu::kChunk)
      chunks.push_back({begin, int32_t(host.size()), int32_t(std::min(cpu::kChunk, item.host.numel - begin))});
    counters.push_back(float(steps[size_t(item.host.scalars)].step - 1));
    device.push_back(item.device);
    host.push_back(item.host);
  }
  const double lr = 0.0625;
  const float grad_scale = 4, found_inf = scalars == Scalars::kFoundInf;
  std::vector<float*> counter_pointers;
  for (float& counter : counters) counter_pointers.push_back(&counter);
  cuda::Walk walk{};
  walk.hyperparameters = rule.hyperparameters.data();
  walk.grad_factor = -1;
  walk.scalars = steps.data();
  walk.items = device.data();
  walk.item_count = int64_t(device.size());
  walk.stream = &generator;  // any address
  double grad_factor = -1;
  std::vector<double> workspace;
  if (scalars != Scalars::kHost) {
    walk.steps = counter_pointers.data();
    walk.lr = &lr;
    walk.lr_dtype = DType::kFloat64;
    walk.grad_scale = &grad_scale;
    walk.found_inf = &found_inf;
    host_hyperparameters[0] = lr;
    grad_factor /= grad_scale;
    workspace.resize(size_t(cuda::workspace_bytes(rule.optimizer, rule.states, in_double, walk) + 7) / 8);
    walk.workspace = workspace.data();
  }
  emulation::launches.clear();
  if (const int error = cuda::run(rule.optimizer, rule.states, in_double, walk)) {
    std::printf("FAIL %s %s: %s\n", rule.name.c_str(), what.c_str(), cuda::error_string(error));
    ++failures;
    return;
  }
  bool launched_there = true;
  for (const emulation::Launch& launch : emulation::launches) launched_there &= launch.stream == walk.stream;
  if (!launched_there) {
    std::printf("FAIL %s %s: a launch into another stream\n", rule.name.c_str(), what.c_str());
    ++failures;
  }
  if (scalars != Scalars::kFoundInf)
    cpu::run(rule.optimizer, rule.states, in_double,
             {host_hyperparameters, grad_factor, steps.data(), host.data(), chunks.data(), int64_t(chunks.size()), 1});
  for (size_t i = 0; i < tensors.size(); ++i) {
    const double expected = steps[size_t(tensors[i].host.scalars)].step - (scalars != Scalars::kDevice);
    bool same = counters[i] == float(expected);
    for (const Operand& operand : tensors[i].operands) same = same && operand.same();
    if (same) continue;
    std::printf("FAIL %s %s: item %zu of %zu, %lld elements, differs from the CPU\n", rule.name.c_str(), what.c_str(),
                i, tensors.size(), static_cast<long long>(tensors[i].host.numel));
    if (++failures > 20) std::exit(1);
    return;
  }
}

constexpr DType kF32 = DType::kFloat32, kF64 = DType::kFloat64, kF16 = DType::kFloat16, kB16 = DType::kBFloat16;

struct Types {
  const char* name;
  bool in_double;
  DType dtypes[kMaxOperands];
};
constexpr Types kTypes[] = {
    {"float32", false, {kF32, kF32, kF32, kF32, kF32}},
    {"bfloat16", false, {kB16, kB16, kB16, kB16, kB16}},
    {"float16", false, {kF16, kF16, kF16, kF16, kF16}},
    {"float64", true, {kF64, kF64, kF64, kF64, kF64}},
    {"bfloat16 states", false, {kF32, kF32, kB16, kB16, kB16}},
    {"float32 states", false, {kB16, kB16, kF32, kF32, kF32}},
    {"bfloat16 grads", false, {kF32, kB16, kF32, kF32, kF32}},
    {"all mixed", false, {kF16, kF32, kB16, kF32, kF16}},
    {"float64 grads", false, {kF32, kF64, kF32, kB16, kF32}},
    {"float32 in double", true, {kF64, kF32, kF64, kF32, kB16}},
};

void check_types_and_alignments(const Rule& rule) {
  for (const Types& types : kTypes) {
    for (Arrangement arrangement : {Arrangement::kDense, Arrangement::kStrided, Arrangement::kBroadcastGrad}) {
      for (Scalars scalars : {Scalars::kHost, Scalars::kDevice, Scalars::kFoundInf}) {
        // Alike in all operands, then in one of them only.
        for (int misalignment : {0, 1, 3, 4, 5, 7}) {
          for (bool alike : {true, false}) {
            if ((misalignment == 0 && !alike) || (arrangement != Arrangement::kDense && misalignment > 1)) continue;
            if (scalars != Scalars::kHost && misalignment > 0) continue;
            int misalignments[kMaxOperands] = {misalignment, misalignment, misalignment, misalignment, misalignment};
            if (!alike) std::fill_n(misalignments, kMaxOperands - 1, 0), std::swap(misalignments[4], misalignments[2]);
            std::vector<Tensors> tensors;
            for (int64_t numel : {0, 1, 2, 7, 8, 9, 15, 33, 130, 1023, 1024, 1031, 2055})
              tensors.push_back(make(rule, types.dtypes, numel, misalignments, arrangement, int32_t(numel % 3)));
            check(std::string(types.name) + " misaligned by " + std::to_string(misalignment) +
                      (alike ? "" : " in one") + " arrangement " + std::to_string(int(arrangement)) + " scalars " +
                      std::to_string(int(scalars)),
                  rule, types.in_double, tensors, scalars);
          }
        }
      }
    }
  }
}

void check_every_size(const Rule& rule) {
  std::vector<Tensors> tensors;
  for (int64_t numel = 0; numel <= 4097; ++numel) {
    const int shift = int(numel / 3 % 2 * 3);
    const int misalignments[kMaxOperands] = {shift, shift, shift, shift, shift};
    tensors.push_back(
        make(rule, kTypes[numel % 3].dtypes, numel, misalignments, Arrangement::kDense, int32_t(numel % 2)));
  }
  check("every size", rule, false, tensors, Scalars::kHost);
}

// Chunks of each size, and counts of tensors around what one launch takes.
void check_boundaries(const Rule& rule) {
  constexpr int kAligned[kMaxOperands] = {}, kShifted[kMaxOperands] = {2, 2, 2, 2, 2};
  for (int multiprocessors : {1, 4}) {
    emulation::settings.multiprocessors = multiprocessors;
    for (int64_t chunk : {1024, 4096, 16384}) {
      std::vector<Tensors> tensors;
      for (int64_t numel : {chunk - 2, chunk, chunk + 1, 2 * chunk + 7})
        for (const Types& types : {kTypes[0], kTypes[1], kTypes[4]})
          for (const auto* misalignments : {&kAligned, &kShifted})
            tensors.push_back(make(rule, types.dtypes, numel, *misalignments, Arrangement::kDense, 0));
      tensors.push_back(make(rule, kTypes[0].dtypes, 2 * chunk + 4, kAligned, Arrangement::kStrided, 0));
      check("chunk boundaries", rule, false, tensors, Scalars::kHost);
    }
  }
  emulation::settings.multiprocessors = 132;
  for (int count : {1, 2, 500, 600, 800, 850, 1000, 1100}) {
    for (Scalars scalars : {Scalars::kHost, Scalars::kDevice}) {
      std::vector<Tensors> tensors;
      for (int i = 0; i < count; ++i)  // an empty one now and then, and at the end
        tensors.push_back(make(rule, kTypes[i % 3].dtypes, i % 7 == 3 || i + 1 == count ? 0 : 1 + i % 40, kAligned,
                               i % 50 == 49 ? Arrangement::kStrided : Arrangement::kDense, i % 3));
      check("many tensors", rule, false, tensors, scalars);
    }
  }
}

// The last block of an item of 2^31 + 1 elements or more, of which only what that block touches exists.
void check_huge(const Rule& rule) {
  for (const Types& types : {kTypes[0], kTypes[1]}) {
    for (int64_t numel : {(int64_t(1) << 31) + 1, (int64_t(1) << 32) + 9, (int64_t(1) << 33) + 4097}) {
      const int64_t tail = numel % 16384;
      constexpr int kAligned[kMaxOperands] = {};
      std::vector<Tensors> tensors;
      tensors.push_back(make(rule, types.dtypes, tail, kAligned, Arrangement::kDense, 0));
      Tensors& item = tensors[0];
      item.device.numel = numel;
      for (size_t i = 0; i < item.places.size(); ++i)
        item.device.data[item.places[i]] = reinterpret_cast<void*>(
            reinterpret_cast<intptr_t>(item.operands[i].device()) - (numel - tail) * size_of(item.operands[i].dtype));
      emulation::settings.first_block = -1;
      check(std::string(types.name) + " huge", rule, types.in_double, tensors, Scalars::kHost);
      emulation::settings.first_block = 0;
    }
  }
}

// Sixteen-byte accesses wherever the alignment allows them.
void check_widths(const Rule& rule) {
  for (const Types& types : kTypes) {
    int sizes = 0;
    for (int operand = 0; operand < kMaxOperands; ++operand) sizes |= size_of(types.dtypes[operand]);
    if (types.in_double ? sizes != 8 : (sizes & 8) != 0) continue;
    for (int misalignment : {0, 4}) {
      const int misalignments[kMaxOperands] = {misalignment, misalignment, misalignment, misalignment, misalignment};
      std::vector<Tensors> tensors;
      tensors.push_back(make(rule, types.dtypes, 8192 + misalignment, misalignments, Arrangement::kDense, 0));
      emulation::narrow_accesses = 0;
      check("widths", rule, types.in_double, tensors, Scalars::kHost);
      if (emulation::narrow_accesses > 16 * kMaxOperands * 2) {
        std::printf("FAIL %s %s: %lld accesses of fewer than 16 bytes\n", rule.name.c_str(), types.name,
                    static_cast<long long>(emulation::narrow_accesses));
        ++failures;
      }
    }
  }
}

// The error of a launch, of whichever launch it is, comes back.
void check_errors(const Rule& rule) {
  constexpr int kAligned[kMaxOperands] = {};
  std::vector<Tensors> tensors;
  std::vector<Item> items;
  for (int i = 0; i < 1500; ++i) {
    tensors.push_back(make(rule, kTypes[0].dtypes, 1, kAligned, Arrangement::kDense, 0));
    items.push_back(tensors.back().device);
  }
  const StepScalars step{1};
  cuda::Walk walk{};
  walk.hyperparameters = rule.hyperparameters.data();
  walk.grad_factor = 1;
  walk.scalars = &step;
  walk.items = items.data();
  walk.item_count = int64_t(items.size());
  emulation::settings.fail_with = cudaErrorInvalidConfiguration;
  if (cuda::run(rule.optimizer, rule.states, false, walk) != cudaErrorInvalidConfiguration) {
    std::printf("FAIL %s: a failed launch is not reported\n", rule.name.c_str());
    ++failures;
  }
}

// Items that share a step counter each count once.
void check_shared_counter(const Rule& rule) {
  float param[40] = {}, grad[40] = {}, state[80] = {}, counter = 3;
  std::vector<Item> items;
  std::vector<float*> counters;
  for (int i = 0; i < 10; ++i) {
    items.push_back({{param + 4 * i, grad + 4 * i, state + 8 * i, state + 8 * i + 4, nullptr}, {}, 0, 4, nullptr});
    counters.push_back(&counter);
  }
  double workspace[200];
  cuda::Walk walk{};
  walk.hyperparameters = rule.hyperparameters.data();
  walk.grad_factor = 1;
  walk.items = items.data();
  walk.item_count = 10;
  walk.steps = counters.data();
  walk.workspace = workspace;
  if (cuda::run(rule.optimizer, rule.states, false, walk) != 0 || counter != 13) {
    std::printf("FAIL shared counter: %g\n", double(counter));
    ++failures;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string order = argc > 1 ? argv[1] : "forward";
  emulation::settings.order = order == "backward"   ? emulation::Order::kBackward
                              : order == "shuffled" ? emulation::Order::kShuffled
                                                    : emulation::Order::kForward;
  const bool brief = argc > 2;  // one rule: for slow sanitizers and planted faults
#if defined(__x86_64__)
  if (cpu::chosen_level() == cpu::Level::kBaseline) {
    std::printf("this CPU has no fused multiply-add to compare with\n");
    return 77;
  }
#endif
  check_shared_counter(brief ? rules()[8] : rules()[0]);
  for (const Rule& rule : rules()) {
    if (brief && rule.name != argv[2]) continue;
    check_types_and_alignments(rule);
    check_boundaries(rule);
    check_huge(rule);
    check_widths(rule);
    check_errors(rule);
    check_every_size(rule);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
