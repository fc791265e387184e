// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of an optimizer step: `walk` applies the rule, `prepare` builds it where only the device knows all
// that it is made of.
//
// A block takes one chunk of one item. A thread moves 16 bytes at a time whatever the storage types are, loads all
// operands before it uses the first, and computes in T.
#pragma once

#include "core/cuda/parameters.h"
#include "core/dtype.h"
#include "core/optim/list.h"

namespace fused_ops::cuda {
inline namespace FUSED_OPS_LEVEL {

template <class T>
constexpr DType kCompute = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;

// Gradients are read once; what the step writes may still be in cache when the next forward pass reads it.
template <class Word>
__device__ __forceinline__ Word load(const char* address, bool read_once) {
  const Word* const words = reinterpret_cast<const Word*>(address);
  return read_once ? __ldcs(words) : __ldca(words);
}

template <class Word>
__device__ __forceinline__ void store(char* address, Word word) {
  __stwb(reinterpret_cast<Word*>(address), word);
}

__device__ __forceinline__ uint32_t word(const uint4& vector, int index) {
  return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
}

// value <- the elements of the vectors, which hold 4-byte elements, or 16-bit ones in the first vector alone.
__device__ __forceinline__ void unpack(float (&value)[8], const uint4 (&vectors)[2], DType dtype) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = bit_cast<float>(word(vectors[i / 4], i % 4));
  } else if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = widen(BFloat16{uint16_t(word(vectors[0], i / 2) >> i % 2 * 16)});
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = widen(Float16{uint16_t(word(vectors[0], i / 2) >> i % 2 * 16)});
  }
}

__device__ __forceinline__ void unpack(double (&value)[4], const uint4 (&vectors)[2], DType) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4& vector = vectors[i / 2];
    const uint32_t low = i % 2 ? vector.z : vector.x, high = i % 2 ? vector.w : vector.y;
    value[i] = bit_cast<double>(uint64_t(high) << 32 | low);
  }
}

template <class Half>
__device__ __forceinline__ uint4 pack(const float (&value)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = narrow<Half>(value[2 * i]).bits | uint32_t(narrow<Half>(value[2 * i + 1]).bits) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 pack(float a, float b, float c, float d) {
  return make_uint4(bit_cast<uint32_t>(a), bit_cast<uint32_t>(b), bit_cast<uint32_t>(c), bit_cast<uint32_t>(d));
}

__device__ __forceinline__ uint4 pack(double a, double b) {
  const uint64_t first = bit_cast<uint64_t>(a), second = bit_cast<uint64_t>(b);
  return make_uint4(uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32));
}

// Stores one vector of 16-bit elements, or two of 4-byte elements that lie `gap` bytes apart.
__device__ __forceinline__ void store_vectors(char* address, int gap, const float (&value)[8], DType dtype) {
  if (dtype == DType::kFloat32) {
    store(address, pack(value[0], value[1], value[2], value[3]));
    store(address + gap, pack(value[4], value[5], value[6], value[7]));
  } else {
    store(address, dtype == DType::kBFloat16 ? pack<BFloat16>(value) : pack<Float16>(value));
  }
}

__device__ __forceinline__ void store_vectors(char* address, int gap, const double (&value)[4], DType) {
  store(address, pack(value[0], value[1]));
  store(address + gap, pack(value[2], value[3]));
}

// One element, in two steps: a load that waits for nothing, then its conversion.
__device__ __forceinline__ uint64_t load_bits(const char* address, DType dtype, bool read_once) {
  if (dtype == DType::kFloat32) return load<uint32_t>(address, read_once);
  if (dtype == DType::kFloat64) return load<unsigned long long>(address, read_once);
  return load<uint16_t>(address, read_once);
}

template <class T>
__device__ __forceinline__ T from_bits(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return T(bit_cast<float>(uint32_t(bits)));
    case DType::kFloat64: return T(bit_cast<double>(bits));
    case DType::kFloat16: return T(widen(Float16{uint16_t(bits)}));
    default: return T(widen(BFloat16{uint16_t(bits)}));
  }
}

template <class T>
__device__ __forceinline__ void store_element(char* address, T value, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: store(address, narrow<float>(value)); break;
    case DType::kFloat64: store(address, narrow<double>(value)); break;
    case DType::kFloat16: store(address, narrow<Float16>(value).bits); break;
    case DType::kBFloat16: store(address, narrow<BFloat16>(value).bits); break;
  }
}

template <unsigned kStates, class T, int kOperands, int kCount, class Rule>
__device__ __forceinline__ void apply(const Rule& rule, T (&value)[kOperands][kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    T state[kMaxStates];
#pragma unroll
    for (int index = 0, operand = kFirstState; index < kMaxStates; ++index)
      if (has_state(kStates, index)) state[index] = value[operand++][i];
    rule(value[kParam][i], value[kGrad][i], state);
#pragma unroll
    for (int index = 0, operand = kFirstState; index < kMaxStates; ++index)
      if (has_state(kStates, index)) value[operand++][i] = state[index];
  }
}

template <class Rule, int kOperands>
__device__ __forceinline__ int find_record(const WalkParameters<Rule, kOperands>& parameters, int chunk) {
  int low = 0, high = int(parameters.records);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (parameters.record[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <class Optimizer, class T, unsigned kStates>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T, operand_count(kStates)>)
    walk(const WalkParameters<typename Optimizer::template Rule<T, kStates>, operand_count(kStates)> __grid_constant__
             parameters) {
  using Rule = typename Optimizer::template Rule<T, kStates>;
  constexpr int kOperands = operand_count(kStates);
  if (parameters.found_inf && *parameters.found_inf != 0) return;

  const int chunk_index = int(blockIdx.x);
  const int index = find_record(parameters, chunk_index);
  const Record<kOperands>& record = parameters.record[index];
  const Traits traits = record.traits;
  const Rule rule = parameters.prepared ? parameters.prepared[index] : parameters.rules[traits.rule];
  const bool is_strided = Path(traits.path) == Path::kStrided;
  const int strided = is_strided ? int(parameters.kWords - record.strided) : 0;  // where in the words
  const int chunk = parameters.chunk;
  const int last_chunk = index + 1 < parameters.records ? parameters.record[index + 1].first_chunk : parameters.chunks;

  // Where the chunk lies in its item, and what of it the item has.
  const int64_t origin = int64_t(chunk_index - record.first_chunk) * chunk - traits.phase;
  const int begin = origin < 0 ? int(traits.phase) : 0;
  const int end = chunk_index + 1 == last_chunk ? chunk - int(traits.missing) : chunk;
  int vectors_begin = origin < 0 ? kElements<T> : 0;
  int vectors_end = end / kElements<T> * kElements<T>;
  if (Path(traits.path) != Path::kVectors || vectors_end < vectors_begin) vectors_begin = vectors_end = begin;

  char* data[kOperands];
  DType dtype[kOperands];
  bool spread = true;
#pragma unroll
  for (int operand = 0; operand < kOperands; ++operand) {
    dtype[operand] = DType(traits.dtypes >> 2 * operand & 3u);
    spread = spread && dtype[operand] == kCompute<T>;
    data[operand] = is_strided ? reinterpret_cast<char*>(parameters.words[strided + operand])
                               : static_cast<char*>(record.data[operand]) + origin * size_of(dtype[operand]);
  }

  constexpr int kAtOnce = kThreads * kElements<T>;
#pragma unroll 1
  for (int first = vectors_begin; first < vectors_end; first += kAtOnce) {
    // Neighbouring threads take neighbouring vectors where all operands have as many elements a vector.
    const bool interleaved = spread && vectors_end - first >= kAtOnce;
    const int mine = first + int(threadIdx.x) * (interleaved ? kVector<T> : kElements<T>);
    const int gap = interleaved ? kThreads * kVectorBytes : kVectorBytes;
    if (mine >= vectors_end) break;
    uint4 vectors[kOperands][2];
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand) {
      const char* address = data[operand] + mine * size_of(dtype[operand]);
      vectors[operand][0] = load<uint4>(address, operand == kGrad);
      if (dtype[operand] == kCompute<T>) vectors[operand][1] = load<uint4>(address + gap, operand == kGrad);
    }
    T value[kOperands][kElements<T>];
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand) unpack(value[operand], vectors[operand], dtype[operand]);
    apply<kStates>(rule, value);
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand)
      if (operand != kGrad)
        store_vectors(data[operand] + mine * size_of(dtype[operand]), gap, value[operand], dtype[operand]);
  }

  // What the vectors leave over before and after them, or all.
  const int head = vectors_begin - begin;
  const int singles = head + end - vectors_end;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < singles; i += kThreads) {
    const int element = i < head ? begin + i : vectors_end + i - head;
    char* address[kOperands];
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand)
      address[operand] = data[operand] + (is_strided ? 0 : element * size_of(dtype[operand]));
    if (is_strided) {
      const int dims = int(parameters.words[strided + kOperands]);
      const int sizes = strided + kOperands + 1;
      int64_t rest = origin + element;
#pragma unroll 1
      for (int dim = dims - 1; dim >= 0; --dim) {
        const int64_t quotient = rest / parameters.words[sizes + dim];
        const int64_t position = rest - quotient * parameters.words[sizes + dim];
#pragma unroll
        for (int operand = 0; operand < kOperands; ++operand)
          address[operand] += position * parameters.words[sizes + (1 + operand) * dims + dim] * size_of(dtype[operand]);
        rest = quotient;
      }
    }
    uint64_t bits[kOperands];
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand)
      bits[operand] = load_bits(address[operand], dtype[operand], operand == kGrad);
    T value[kOperands][1];
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand)
      value[operand][0] = from_bits<T>(bits[operand], dtype[operand]);
    apply<kStates>(rule, value);
#pragma unroll
    for (int operand = 0; operand < kOperands; ++operand)
      if (operand != kGrad) store_element(address[operand], value[operand][0], dtype[operand]);
  }
}

// One thread an item: counts the step and builds the rule in double, as the host would.
template <class Optimizer, class T, unsigned kStates>
__global__ void __launch_bounds__(kThreads)
    prepare(const PrepareParameters<typename Optimizer::Hyperparameters> __grid_constant__ parameters) {
  using Rule = typename Optimizer::template Rule<T, kStates>;
  const int index = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (index >= parameters.items || (parameters.found_inf && *parameters.found_inf != 0)) return;
  typename Optimizer::Hyperparameters hyperparameters = parameters.hyperparameters;
  if (parameters.lr)
    hyperparameters.lr = parameters.lr_dtype == DType::kFloat64 ? *static_cast<const double*>(parameters.lr)
                                                                : double(*static_cast<const float*>(parameters.lr));
  double grad_factor = parameters.grad_factor;
  if (parameters.grad_scale) grad_factor /= double(*parameters.grad_scale);
  // Atomic because items may share a counter.
  const double step = parameters.counted ? double(atomicAdd(parameters.step[index].counter, 1.0f) + 1.0f)
                                         : parameters.step[index].number;
  static_cast<Rule*>(parameters.rules)[index] = Rule(hyperparameters, step, grad_factor);
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops::cuda
