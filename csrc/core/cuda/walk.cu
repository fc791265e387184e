// SPDX-License-Identifier: Apache-2.0
// Packs items into launches of the kernels in walk.cuh.
#include "core/cuda/walk.h"

#include "core/cuda/walk.cuh"

namespace fused_ops::cuda {
inline namespace FUSED_OPS_LEVEL {
namespace {

bool reads_device_scalars(const Walk& walk) { return walk.steps || walk.lr || walk.grad_scale || walk.found_inf; }

template <class Kernel, class Parameters>
int launch(Kernel* kernel, int64_t blocks, Parameters& parameters, void* stream) {
  void* arguments[] = {&parameters};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(kThreads), arguments, 0,
                                             static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();  // it is reported from here, not again by whoever asks next
  return error;
}

// Small enough that each multiprocessor gets several chunks, which evens out their sizes.
int chunk_size(const Walk& walk) {
  constexpr int kChunksPerMultiprocessor = 16;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  int64_t elements = 0;
  for (int64_t i = 0; i < walk.item_count; ++i) elements += walk.items[i].numel;
  int chunk = kMaxChunk;
  while (chunk > kMinChunk && elements / chunk < int64_t(multiprocessors) * kChunksPerMultiprocessor) chunk /= 2;
  return chunk;
}

// The elements before a 16-byte boundary of all operands at which the item begins; -1 if they share none.
template <class T>
int phase_of(const Item& item, const int (&operands)[kMaxOperands], int operand_count) {
  for (int phase = 0; phase < kElements<T>; ++phase) {
    bool aligned = true;
    for (int i = 0; i < operand_count; ++i) {
      const DType dtype = item.dtype[operands[i]];
      if (dtype != kCompute<T> && (sizeof(T) == 8 || dtype == DType::kFloat64)) return -1;
      const uintptr_t address = reinterpret_cast<uintptr_t>(item.data[operands[i]]);
      aligned = aligned && (address - uintptr_t(phase * size_of(dtype))) % kVectorBytes == 0;
    }
    if (aligned) return phase;
  }
  return -1;
}

// The parameters of the launch that is being filled.
template <class Optimizer, class T, unsigned kStates>
class Launch {
 public:
  using Rule = typename Optimizer::template Rule<T, kStates>;
  static constexpr int kOperands = operand_count(kStates);

  explicit Launch(const Walk& walk) : walk_(walk) {
    for (int operand = 0, packed = 0; operand < kMaxOperands; ++operand)
      if (operand < kFirstState || has_state(kStates, operand - kFirstState)) operands_[packed++] = operand;
    parameters_.found_inf = walk.found_inf;
    parameters_.chunk = chunk_size(walk);
    start(0);
  }

  // Returns a cudaError_t.
  int add(int64_t index) {
    const Item& item = walk_.items[index];
    const int words = item.layout ? strided_words(kOperands, item.layout->dims) : 0;
    const double step = parameters_.prepared ? 0 : walk_.scalars[item.scalars].step;
    int rule = rule_of(step);
    if (rule == kMaxRules ||
        (parameters_.records + 1) * int(sizeof(Record<kOperands>)) / 8 + strided_words_ + words > parameters_.kWords) {
      if (const int error = run()) return error;
      start(index);
      rule = rule_of(step);
    }
    if (rule == rules_ && !parameters_.prepared) {
      steps_[rules_++] = step;
      parameters_.rules[rule] = Rule(*static_cast<const typename Optimizer::Hyperparameters*>(walk_.hyperparameters),
                                     step, walk_.grad_factor);
    }
    const int phase = item.layout || item.numel == 0 ? -1 : phase_of<T>(item, operands_, kOperands);
    const Path path = item.layout ? Path::kStrided : phase < 0 ? Path::kElements : Path::kVectors;
    const int64_t elements = item.numel + (phase < 0 ? 0 : phase);
    const int64_t chunks = (elements + parameters_.chunk - 1) / parameters_.chunk;
    Record<kOperands>& record = parameters_.record[parameters_.records++];
    record.first_chunk = parameters_.chunks;
    record.traits = {uint32_t(chunks * parameters_.chunk - elements), 0, uint32_t(phase < 0 ? 0 : phase),
                     uint32_t(path), uint32_t(rule)};
    for (int i = 0; i < kOperands; ++i) record.traits.dtypes |= uint32_t(item.dtype[operands_[i]]) << 2 * i;
    parameters_.chunks += int32_t(chunks);
    if (item.layout) {
      record.strided = strided_words_ += words;
      write_strided(parameters_.words + parameters_.kWords - strided_words_, item);
    } else {
      for (int i = 0; i < kOperands; ++i) record.data[i] = item.data[operands_[i]];
    }
    return cudaSuccess;
  }

  int run() {
    if (parameters_.chunks == 0) return cudaSuccess;
    return launch(&walk<Optimizer, T, kStates>, parameters_.chunks, parameters_, walk_.stream);
  }

 private:
  void start(int64_t first_item) {
    parameters_.prepared = reads_device_scalars(walk_) ? static_cast<const Rule*>(walk_.workspace) + first_item
                                                       : nullptr;
    parameters_.chunks = 0;
    parameters_.records = 0;
    rules_ = 0;
    strided_words_ = 0;
  }

  // The place of the rule for a step: rules_ if it has none yet.
  int rule_of(double step) const {
    if (parameters_.prepared) return 0;
    int rule = 0;
    while (rule < rules_ && steps_[rule] != step) ++rule;
    return rule;
  }

  void write_strided(int64_t* words, const Item& item) const {
    const Layout& layout = *item.layout;
    for (int i = 0; i < kOperands; ++i) *words++ = reinterpret_cast<int64_t>(item.data[operands_[i]]);
    *words++ = layout.dims;
    for (int dim = 0; dim < layout.dims; ++dim) *words++ = layout.size[dim];
    for (int i = 0; i < kOperands; ++i)
      for (int dim = 0; dim < layout.dims; ++dim) *words++ = layout.stride[operands_[i]][dim];
  }

  const Walk& walk_;
  int operands_[kMaxOperands];
  double steps_[kMaxRules];
  int rules_;
  int strided_words_;
  WalkParameters<Rule, kOperands> parameters_;
};

template <class Optimizer, class T, unsigned kStates>
int prepare_rules(const Walk& walk) {
  using Rule = typename Optimizer::template Rule<T, kStates>;
  using Parameters = PrepareParameters<typename Optimizer::Hyperparameters>;
  Parameters parameters;
  parameters.hyperparameters = *static_cast<const typename Optimizer::Hyperparameters*>(walk.hyperparameters);
  parameters.grad_factor = walk.grad_factor;
  parameters.lr = walk.lr;
  parameters.lr_dtype = walk.lr_dtype;
  parameters.counted = walk.steps != nullptr;
  parameters.grad_scale = walk.grad_scale;
  parameters.found_inf = walk.found_inf;
  for (int64_t first = 0; first < walk.item_count; first += Parameters::kMaxItems) {
    const int64_t left = walk.item_count - first;
    parameters.items = left < Parameters::kMaxItems ? left : Parameters::kMaxItems;
    parameters.rules = static_cast<Rule*>(walk.workspace) + first;
    for (int64_t i = 0; i < parameters.items; ++i) {
      if (walk.steps)
        parameters.step[i].counter = walk.steps[first + i];
      else
        parameters.step[i].number = walk.scalars[walk.items[first + i].scalars].step;
    }
    const int64_t blocks = (parameters.items + kThreads - 1) / kThreads;
    if (const int error = launch(&prepare<Optimizer, T, kStates>, blocks, parameters, walk.stream)) return error;
  }
  return cudaSuccess;
}

template <class Optimizer, class T, unsigned kStates>
int run(const Walk& walk) {
  if (reads_device_scalars(walk))
    if (const int error = prepare_rules<Optimizer, T, kStates>(walk)) return error;
  Launch<Optimizer, T, kStates> launch(walk);
  for (int64_t i = 0; i < walk.item_count; ++i)
    if (const int error = launch.add(i)) return error;
  return launch.run();
}

}  // namespace
}  // namespace FUSED_OPS_LEVEL

int64_t workspace_bytes(int optimizer, unsigned states, bool in_double, const Walk& walk) {
  if (!reads_device_scalars(walk)) return 0;
  int64_t rule_bytes = 0;
  visit_rule(optimizer, states, [&]<class Optimizer, unsigned kStates>() {
    rule_bytes = in_double ? sizeof(typename Optimizer::template Rule<double, kStates>)
                           : sizeof(typename Optimizer::template Rule<float, kStates>);
  });
  return rule_bytes * walk.item_count;
}

int run(int optimizer, unsigned states, bool in_double, const Walk& walk) {
  int error = cudaErrorInvalidValue;
  visit_rule(optimizer, states, [&]<class Optimizer, unsigned kStates>() {
    error = in_double ? run<Optimizer, double, kStates>(walk) : run<Optimizer, float, kStates>(walk);
  });
  return error;
}

const char* error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }

}  // namespace fused_ops::cuda
