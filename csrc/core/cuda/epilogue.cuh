// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the passes of core/epilogue.h.
//
// A thread has `width` columns, those of 16 bytes or a single one, and every `groups`-th row of its block: biases stay
// in registers, and so do the sums of their gradients. What it computes at once, a unit, is kElements<T> elements: 8
// columns of a 16-bit type, 4 columns of two rows of a 4-byte type, one column of 8 rows. Loads run ahead: while a
// unit is computed, the next vectors of every operand are under way.
#pragma once

#include "core/activations.h"
#include "core/cuda/walk.cuh"
#include "core/epilogue.h"

namespace fused_ops::cuda {

// How a matrix is divided. Its rows by sizes alone, because the order of the sums follows from that.
struct Division {
  int width;          // columns of a thread
  int lanes;          // threads side by side
  int groups;         // rows of a block at once
  int column_blocks;  // blocks side by side, numbered one after another
  int row_blocks;
  int64_t block_rows;
};

constexpr int kMaxFunctionBytes = 40;

template <class Pass>
struct EpilogueParameters {
  Pass pass;
  Division division;
  alignas(8) char function[kMaxFunctionBytes];  // the activation's Function<T>
};

struct SumParameters {
  DType dtype;
  int64_t columns;
  int row_blocks, column_blocks;
  const void* partial[2];  // [row_blocks, columns], of the bias's gradient and of the gate's
  void* sum[2];            // null: not wanted
};

// Columns of a block of sum_rows. They fill a sector of memory; many blocks with few rows a thread are faster.
constexpr int kSumColumns = 8;
constexpr int kSumThreads = 256;

// Vectors of an operand that are under way while a unit is computed.
template <int kOperands>
constexpr int kVectorsAhead = kOperands == 1   ? 4
                              : kOperands == 2 ? 3
                                               : 2;

// Blocks that a multiprocessor holds: as many as leave a thread the registers it needs.
template <class T, bool kGated>
constexpr int kActivateBlocks = sizeof(T) == 4 ? (kGated ? 5 : 7) : (kGated ? 3 : 4);
template <class T>
constexpr int kDifferentiateBlocks = sizeof(T) == 4 ? 4 : 3;

inline namespace FUSED_OPS_LEVEL {

// Decides in the kernel which activation it is; the tests also compile kernels that have one only.
struct AnyActivation {
  template <int kBegin = 0, int kEnd = kActivationCount, class Visitor>
  __device__ __forceinline__ static void visit(int activation, const Visitor& visitor) {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if constexpr (kEnd - kBegin == 1)
      visitor.template operator()<std::tuple_element_t<kBegin, Activations>>();
    else if (activation < kMiddle)
      visit<kBegin, kMiddle>(activation, visitor);
    else
      visit<kMiddle, kEnd>(activation, visitor);
  }
};

// What of the matrix a thread has.
struct Share {
  int lane, group, row_block;
  int64_t column, row;  // its first ones
  int rows;             // `groups` apart; 0: it has none

  __device__ __forceinline__ Share(const Division& division, int64_t matrix_rows, int64_t matrix_columns)
      : lane(int(threadIdx.x) % division.lanes),
        group(int(threadIdx.x) / division.lanes),
        row_block(int(blockIdx.x) / division.column_blocks) {
    const int column_block = int(blockIdx.x) % division.column_blocks;
    column = (int64_t(column_block) * division.lanes + lane) * division.width;
    row = row_block * division.block_rows + group;
    int64_t end = (row_block + 1) * division.block_rows;
    if (end > matrix_rows) end = matrix_rows;
    const bool any = column < matrix_columns && group < division.groups && row < end;
    rows = any ? (int(end - row) + division.groups - 1) / division.groups : 0;
  }
};

// How a thread moves its units: a vector of one row at a time, or, where it has a single column, element by element
// into vectors that hold a word an element. A unit is one vector of 16-bit elements, else two vectors.
template <class T>
struct Mover {
  DType dtype;
  int width;

  __device__ __forceinline__ bool is_packed() const { return sizeof(T) == 4 && width == 8; }
  __device__ __forceinline__ int vector_rows() const { return width == 1 ? kVector<T> : 1; }
  __device__ __forceinline__ int unit_rows() const { return is_packed() ? 1 : 2 * vector_rows(); }

  // The rows lie `gap` bytes apart; `rows` of them are left.
  __device__ __forceinline__ uint4 load_vector(const char* address, int64_t gap, int rows) const {
    if (rows <= 0) return make_uint4(0, 0, 0, 0);
    if (width > 1) return load<uint4>(address, true);
    Word words[4] = {};
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      if (i < rows) words[i] = load_word(address + i * gap, true);
    if constexpr (sizeof(T) == 8)
      return pack(bit_cast<double>(words[0]), bit_cast<double>(words[1]));
    else
      return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ void unpack(T (&value)[kElements<T>], const uint4 (&vectors)[2]) const {
    if (width > 1 || dtype == kCompute<T>) return cuda::unpack(value, vectors, dtype);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) value[i] = converted(word(vectors[i / 4], i % 4));
    }
  }

  __device__ __forceinline__ void store_unit(char* address, int64_t gap, const T (&value)[kElements<T>],
                                             int rows) const {
    if (width == 1) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i)
        if (i < rows) store_one(address + i * gap, value[i]);
    } else if constexpr (sizeof(T) == 8) {
      store(address, pack(value[0], value[1]));
      if (rows > 1) store(address + gap, pack(value[2], value[3]));
    } else if (is_packed()) {
      store(address, dtype == DType::kBFloat16 ? pack<BFloat16>(value) : pack<Float16>(value));
    } else {
      store(address, pack(value[0], value[1], value[2], value[3]));
      if (rows > 1) store(address + gap, pack(value[4], value[5], value[6], value[7]));
    }
  }

  // One element: a load that waits for nothing, its conversion, a store.
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  __device__ __forceinline__ Word load_word(const char* address, bool read_once) const {
    if constexpr (sizeof(T) == 8) return load<unsigned long long>(address, read_once);
    return dtype == DType::kFloat32 ? load<uint32_t>(address, read_once) : load<uint16_t>(address, read_once);
  }
  __device__ __forceinline__ T converted(Word bits) const {
    if constexpr (sizeof(T) == 8)
      return bit_cast<double>(bits);
    else if (dtype == DType::kFloat32)
      return bit_cast<float>(bits);
    else if (dtype == DType::kBFloat16)
      return widen(BFloat16{uint16_t(bits)});
    else
      return widen(Float16{uint16_t(bits)});
  }
  __device__ __forceinline__ void store_one(char* address, T value) const {
    if constexpr (sizeof(T) == 8)
      store(address, value);
    else if (dtype == DType::kFloat32)
      store(address, value);
    else if (dtype == DType::kBFloat16)
      store(address, narrow<BFloat16>(value).bits);
    else
      store(address, narrow<Float16>(value).bits);
  }

  // value[i] belongs to the i % width-th column.
  __device__ __forceinline__ void load_bias(T (&value)[kElements<T>], const void* bias, int64_t column) const {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) {
      const char* const address = static_cast<const char*>(bias) + (column + (i & (width - 1))) * size_of(dtype);
      value[i] = bias ? converted(load_word(address, false)) : T(-0.0);  // -0 changes nothing
    }
  }

  // sum[i], of the i-th column, for i < width, in the order of the rows.
  __device__ __forceinline__ void add_unit(T (&sum)[kElements<T>], const T (&value)[kElements<T>], int rows) const {
    if (width == 1) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i)
        if (i < rows) sum[0] += value[i];
    } else if (is_packed()) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) sum[i] += value[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) sum[i] += value[i];
      if (rows > 1) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sum[i] += value[kVector<T> + i];
      }
    }
  }
};

// An input matrix, of which a thread's next kAhead vectors are under way.
template <class T, int kAhead>
struct Source {
  const char* ahead;  // what is loaded next
  int64_t gap;        // between a thread's rows, in bytes
  uint4 next[kAhead];

  __device__ __forceinline__ Source(const Mover<T>& mover, const void* matrix, int64_t offset, int64_t gap_, int rows)
      : ahead(static_cast<const char*>(matrix) + offset), gap(gap_) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_next(mover, i, rows - i * mover.vector_rows());
  }

  // `rows` are left, with those of the unit.
  __device__ __forceinline__ void take(const Mover<T>& mover, uint4 (&unit)[2], int rows) {
    const int left = rows - kAhead * mover.vector_rows();
    unit[0] = next[0];
    unit[1] = next[1];
    if (mover.is_packed()) {
#pragma unroll
      for (int i = 1; i < kAhead; ++i) next[i - 1] = next[i];
    } else {
#pragma unroll
      for (int i = 2; i < kAhead; ++i) next[i - 2] = next[i];
      load_next(mover, kAhead - 2, left);
    }
    load_next(mover, kAhead - 1, mover.is_packed() ? left : left - mover.vector_rows());
  }

 private:
  __device__ __forceinline__ void load_next(const Mover<T>& mover, int index, int rows) {
    next[index] = mover.load_vector(ahead, gap, rows);
    ahead += mover.vector_rows() * gap;
  }
};

template <class Choice, class T, bool kGated>
__global__ void __launch_bounds__(kThreads, kActivateBlocks<T, kGated>)
    activate_rows(const EpilogueParameters<Activate> __grid_constant__ parameters) {
  const Activate& pass = parameters.pass;
  const Mover<T> mover{pass.dtype, parameters.division.width};
  const Share share(parameters.division, pass.rows, pass.columns);
  const int size = size_of(mover.dtype);
  const int64_t gap = parameters.division.groups * pass.stride * size;
  const int64_t out_gap = parameters.division.groups * pass.columns * size;
  int64_t offset = (share.row * pass.stride + share.column) * size;
  char* out = static_cast<char*>(pass.out) + (share.row * pass.columns + share.column) * size;
  if (share.rows == 0) return;

  constexpr int kAhead = kVectorsAhead < kGated ? 2 : 1 > ;
  Source<T, kAhead> pre(mover, pass.pre, offset, gap, share.rows);
  Source<T, kAhead> up(mover, kGated ? pass.up : pass.pre, offset, gap, kGated ? share.rows : 0);
  T bias[kElements<T>], up_bias[kElements<T>];
  mover.load_bias(bias, pass.bias, share.column);
  if (kGated) mover.load_bias(up_bias, pass.up_bias, share.column);

#pragma unroll 1
  for (int rows = share.rows; rows > 0; rows -= mover.unit_rows()) {
    uint4 vectors[2], up_vectors[2];
    T value[kElements<T>], up_value[kElements<T>];
    pre.take(mover, vectors, rows);
    if (kGated) up.take(mover, up_vectors, rows);
    mover.unpack(value, vectors);
    if (kGated) mover.unpack(up_value, up_vectors);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) {
      value[i] += bias[i];
      if (kGated) up_value[i] += up_bias[i];
    }
    if (pass.store_pre) {
      mover.store_unit(static_cast<char*>(pass.pre) + offset, gap, value, rows);
      if (kGated) mover.store_unit(static_cast<char*>(pass.up) + offset, gap, up_value, rows);
    }
    Choice::visit(pass.activation, [&]<class Activation>() {
      using Function = typename Activation::template Function<T>;
      const Function& function = reinterpret_cast<const Function&>(parameters.function);
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) value[i] = function.value(value[i]);
    });
    if (kGated) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) value[i] *= up_value[i];
    }
    mover.store_unit(out, out_gap, value, rows);
    offset += mover.unit_rows() * gap;
    out += mover.unit_rows() * out_gap;
  }
}

// Adds up, in the order of the groups of a block, what they have for the same columns; group 0 gets the sums. All
// threads take part.
template <int kBlockThreads, class T, int kCount>
__device__ __forceinline__ void reduce_groups(T (&sum)[kCount], int width, int lanes, int groups) {
  __shared__ T shared[kCount][kBlockThreads];
  if (groups == 1) return;
  const int thread = int(threadIdx.x);
  __syncthreads();  // the last sums have been read
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < width) shared[i][thread] = sum[i];
  __syncthreads();
  if (thread >= lanes) return;
#pragma unroll 4
  for (int group = 1; group < groups; ++group) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < width) sum[i] += shared[i][group * lanes + thread];
  }
}

// Writes a block's sums: the gradient itself if there is no other block of these columns, else a row of the workspace.
template <class T>
__device__ __forceinline__ void finish_sum(T (&sum)[kElements<T>], const Mover<T>& mover, const Division& division,
                                           const Share& share, int64_t columns, void* gradient, void* partial) {
  if (!gradient) return;
  reduce_groups<kThreads>(sum, mover.width, division.lanes, division.groups);
  if (share.group != 0 || share.column >= columns) return;
  char* const row = static_cast<char*>(partial) + (share.row_block * columns + share.column) * int64_t(sizeof(T));
  if (division.row_blocks == 1) {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i)
      if (i < mover.width)
        mover.store_one(static_cast<char*>(gradient) + (share.column + i) * size_of(mover.dtype), sum[i]);
  } else if (mover.width == 1) {
    store(row, sum[0]);
  } else if constexpr (sizeof(T) == 8) {
    store(row, pack(sum[0], sum[1]));
  } else {
    store(row, pack(sum[0], sum[1], sum[2], sum[3]));
    if (mover.width == 8) store(row + kVectorBytes, pack(sum[4], sum[5], sum[6], sum[7]));
  }
}

// The part of the workspace for one of the bias gradients.
FUSED_OPS_HD void* partial_sums(const Differentiate& pass, int row_blocks, int compute_size, bool of_up) {
  const bool second = of_up && pass.grad_bias;
  return static_cast<char*>(pass.workspace) + (second ? row_blocks * pass.columns * compute_size : 0);
}

template <class Choice, class T, bool kGated>
__global__ void __launch_bounds__(kThreads, kDifferentiateBlocks<T>)
    differentiate_rows(const EpilogueParameters<Differentiate> __grid_constant__ parameters) {
  const Differentiate& pass = parameters.pass;
  const Mover<T> mover{pass.dtype, parameters.division.width};
  const Share share(parameters.division, pass.rows, pass.columns);
  const int size = size_of(mover.dtype);
  const int64_t gap = parameters.division.groups * pass.stride * size;
  const int64_t out_gap = parameters.division.groups * pass.columns * size;
  int64_t offset = (share.row * pass.stride + share.column) * size;
  int64_t out_offset = (share.row * pass.columns + share.column) * size;

  constexpr int kAhead = kVectorsAhead < kGated ? 3 : 2 > ;
  Source<T, kAhead> saved(mover, pass.saved, offset, gap, share.rows);
  Source<T, kAhead> grad_out(mover, pass.grad_out, out_offset, out_gap, share.rows);
  Source<T, kAhead> up(mover, kGated ? pass.up : pass.saved, offset, gap, kGated ? share.rows : 0);
  T sum[kElements<T>] = {}, up_sum[kElements<T>] = {};

#pragma unroll 1
  for (int rows = share.rows; rows > 0; rows -= mover.unit_rows()) {
    uint4 saved_vectors[2], grad_vectors[2], up_vectors[2];
    T value[kElements<T>], grad[kElements<T>], up_value[kElements<T>];  // replaced by hidden, grad_pre, grad_up
    saved.take(mover, saved_vectors, rows);
    grad_out.take(mover, grad_vectors, rows);
    if (kGated) up.take(mover, up_vectors, rows);
    mover.unpack(value, saved_vectors);
    mover.unpack(grad, grad_vectors);
    if (kGated) mover.unpack(up_value, up_vectors);
    Choice::visit(pass.activation, [&]<class Activation>() {
      using Function = typename Activation::template Function<T>;
      const Function& function = reinterpret_cast<const Function&>(parameters.function);
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) {
        const T x = value[i], factor = kGated ? grad[i] * up_value[i] : grad[i];
        const T activated = Activation::kSaved == Saved::kOutput ? x : function.value(x);
        value[i] = kGated ? activated * up_value[i] : activated;
        if (kGated) up_value[i] = grad[i] * activated;
        grad[i] = chain<Activation>(factor, function.derivative(x));
      }
    });
    mover.store_unit(static_cast<char*>(pass.grad_pre) + offset, gap, grad, rows);
    if (kGated) mover.store_unit(static_cast<char*>(pass.grad_up) + offset, gap, up_value, rows);
    if (pass.hidden) mover.store_unit(static_cast<char*>(pass.hidden) + out_offset, out_gap, value, rows);
    mover.add_unit(sum, grad, rows);
    if (kGated) mover.add_unit(up_sum, up_value, rows);
    offset += mover.unit_rows() * gap;
    out_offset += mover.unit_rows() * out_gap;
  }

  const Division& division = parameters.division;
  finish_sum(sum, mover, division, share, pass.columns, pass.grad_bias,
             partial_sums(pass, division.row_blocks, sizeof(T), false));
  if (kGated)
    finish_sum(up_sum, mover, division, share, pass.columns, pass.grad_up_bias,
               partial_sums(pass, division.row_blocks, sizeof(T), true));
}

// Adds up the partial sums. The second half of the blocks has the gate's.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_rows(const SumParameters __grid_constant__ parameters) {
  constexpr int kGroups = kSumThreads / kSumColumns;
  const int of_up = int(blockIdx.x) >= parameters.column_blocks;
  if (!parameters.sum[of_up]) return;
  const int group = int(threadIdx.x) / kSumColumns;
  const int64_t column = (int64_t(blockIdx.x) - of_up * parameters.column_blocks) * kSumColumns +
                         int(threadIdx.x) % kSumColumns;
  const T* const partial = static_cast<const T*>(parameters.partial[of_up]);
  T sum[1] = {0};
  if (column < parameters.columns) {
#pragma unroll 8
    for (int row = group; row < parameters.row_blocks; row += kGroups)
      sum[0] += __ldcs(partial + row * parameters.columns + column);
  }
  reduce_groups<kSumThreads>(sum, 1, kSumColumns, kGroups);
  if (group == 0 && column < parameters.columns) {
    const Mover<T> mover{parameters.dtype, 1};
    mover.store_one(static_cast<char*>(parameters.sum[of_up]) + column * size_of(mover.dtype), sum[0]);
  }
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops::cuda
