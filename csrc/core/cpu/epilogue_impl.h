// SPDX-License-Identifier: Apache-2.0
// The CPU loops of core/epilogue.h. Included by one translation unit an instruction set, like core/cpu/walk_impl.h.
//
// A tile passes through the first-level cache in simple loops: conversion to T, bias, activation, gate, sums. Only the
// loops of Loops know the activation.
#pragma once

#include "core/activations.h"
#include "core/cpu/epilogue.h"
#include "core/cpu/epilogue_tiles.h"
#include "core/dtype.h"
#include "core/epilogue.h"

namespace fused_ops {
inline namespace FUSED_OPS_LEVEL {
namespace {

// Outputs may be the very same runs as inputs, never shifted ones.
#if defined(__clang__)
#define FUSED_OPS_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSED_OPS_ELEMENTWISE _Pragma("GCC ivdep")
#endif

template <class T>
struct Loops {
  void (*value)(const double* parameters, T* value, const T* x, int64_t n);
  void (*scale)(const double* parameters, T* scaled, const T* grad, const T* saved, int64_t n);  // grad * derivative
  void (*both)(const double* parameters, T* value, T* derivative, const T* saved, int64_t n);
  bool masks;
};

template <class Activation, class T, class Function>
struct LoopsOf {
  __attribute__((noinline)) static void value(const double* parameters, T* value, const T* x, int64_t n) {
    const Function function(parameters);
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) value[i] = function.value(x[i]);
  }

  __attribute__((noinline)) static void scale(const double* parameters, T* scaled, const T* grad, const T* saved,
                                              int64_t n) {
    const Function function(parameters);
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) scaled[i] = chain<Activation>(grad[i], function.derivative(saved[i]));
  }

  __attribute__((noinline)) static void both(const double* parameters, T* value, T* derivative, const T* saved,
                                             int64_t n) {
    const Function function(parameters);
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) {
      const T x = saved[i];
      value[i] = Activation::kSaved == Saved::kOutput ? x : function.value(x);
      derivative[i] = function.derivative(x);
    }
  }
};

template <class T, class Storage>
Loops<T> find_loops(int activation) {
  Loops<T> loops{};
  visit_activation(activation, [&]<class Activation>() {
    using Of = LoopsOf<Activation, T, typename FunctionFor<Activation, T, Storage>::Type>;
    loops = {&Of::value, &Of::scale, &Of::both, kMasks<Activation>};
  });
  return loops;
}

template <class T, class Storage>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

// The run in the compute type: itself, or converted into scratch.
template <class T, class Storage>
const T* widened(T* scratch, const Storage* run, int64_t n) {
  if constexpr (kSame<T, Storage>) {
    return run;
  } else {
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) scratch[i] = T(widen(run[i]));
    return scratch;
  }
}

// Where to compute what will be stored in the run.
template <class T, class Storage>
T* computed(T* scratch, Storage* run) {
  if constexpr (kSame<T, Storage>)
    return run;
  else
    return scratch;
}

template <class T, class Storage>
void stored(Storage* run, const T* values, int64_t n) {
  if constexpr (kSame<T, Storage>) {
    if (run == values) return;
  }
  if constexpr (kSame<BFloat16, Storage>) {
    if (cpu::narrow_by_instruction(&run->bits, values, n)) return;
  }
  FUSED_OPS_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) run[i] = narrow<Storage>(values[i]);
}

// A bias as wide as a tile: repeated for each row of it.
template <class T, class Storage>
struct TiledBias {
  const Storage* bias;
  bool repeated;
  alignas(64) T scratch[cpu::kTile];

  TiledBias(const void* bias_, const cpu::Tiling& tiling)
      : bias(static_cast<const Storage*>(bias_)), repeated(tiling.tile_rows > 1) {
    if (!bias || !repeated) return;
    for (int64_t row = 0; row < tiling.tile_rows; ++row)
      for (int64_t i = 0; i < tiling.tile_columns; ++i) scratch[row * tiling.tile_columns + i] = T(widen(bias[i]));
  }

  const T* at(int64_t column, int64_t n) { return repeated ? scratch : widened(scratch, bias + column, n); }
};

// The pre-activation of a run: with its bias, and written back if asked for.
template <class T, class Storage>
const T* biased(T* scratch, Storage* run, TiledBias<T, Storage>& bias, int64_t column, int64_t n, bool store) {
  const T* x = widened(scratch, run, n);
  if (!bias.bias) return x;
  const T* addend = bias.at(column, n);
  T* sum = store ? computed(scratch, run) : scratch;
  FUSED_OPS_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + addend[i];
  if (store) stored(run, sum, n);
  return sum;
}

template <class Storage>
Storage* at(const void* matrix, int64_t stride, int64_t row, int64_t column) {
  return matrix ? const_cast<Storage*>(static_cast<const Storage*>(matrix)) + row * stride + column : nullptr;
}

// Calls visit(row, column, n) for each tile of a unit of work.
template <class Visitor>
void for_each_tile(const cpu::Tiling& tiling, int64_t rows, int64_t columns, int64_t unit, Visitor&& visit) {
  const int64_t row_chunk = unit / tiling.column_chunks, column_chunk = unit % tiling.column_chunks;
  const int64_t first_row = row_chunk * tiling.chunk_rows, first_column = column_chunk * tiling.chunk_columns;
  const int64_t last_row = first_row + tiling.chunk_rows < rows ? first_row + tiling.chunk_rows : rows;
  const int64_t last_column = first_column + tiling.chunk_columns < columns ? first_column + tiling.chunk_columns
                                                                            : columns;
  for (int64_t row = first_row; row < last_row; row += tiling.tile_rows) {
    const int64_t tile_rows = tiling.tile_rows < last_row - row ? tiling.tile_rows : last_row - row;
    for (int64_t column = first_column; column < last_column; column += tiling.tile_columns) {
      const int64_t width = tiling.tile_columns < last_column - column ? tiling.tile_columns : last_column - column;
      visit(row, column, tile_rows * width);
    }
  }
}

template <class T, class Storage>
void activate_unit(const Activate& pass, const cpu::Tiling& tiling, const Loops<T>& loops, int64_t unit) {
  alignas(64) T scratch[cpu::kTile], up_scratch[cpu::kTile], out_scratch[cpu::kTile];
  TiledBias<T, Storage> bias(pass.bias, tiling), up_bias(pass.up_bias, tiling);
  for_each_tile(tiling, pass.rows, pass.columns, unit, [&](int64_t row, int64_t column, int64_t n) {
    Storage* const out = at<Storage>(pass.out, pass.columns, row, column);
    const T* x = biased(scratch, at<Storage>(pass.pre, pass.stride, row, column), bias, column, n, pass.store_pre);
    if (!pass.up) {
      T* const y = computed(out_scratch, out);
      loops.value(pass.parameters, y, x, n);
      return stored(out, y, n);
    }
    loops.value(pass.parameters, out_scratch, x, n);
    const T* u = biased(up_scratch, at<Storage>(pass.up, pass.stride, row, column), up_bias, column, n, pass.store_pre);
    T* const y = computed(out_scratch, out);
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) y[i] = out_scratch[i] * u[i];
    stored(out, y, n);
  });
}

// The sums over a row chunk of one gradient's columns: a row of the workspace.
template <class T>
struct ColumnSums {
  T* sums;  // null: not wanted
  bool repeated;
  alignas(64) T tile[cpu::kTile];

  ColumnSums(T* workspace, const Differentiate& pass, const cpu::Tiling& tiling, int64_t unit)
      : sums(workspace), repeated(tiling.tile_rows > 1) {
    if (!sums) return;
    sums += unit / tiling.column_chunks * pass.columns;
    const int64_t first = unit % tiling.column_chunks * tiling.chunk_columns;
    for (int64_t i = first; i < first + tiling.chunk_columns && i < pass.columns; ++i) sums[i] = T(0);
    if (repeated)
      for (int64_t i = 0; i < cpu::kTile; ++i) tile[i] = T(0);
  }

  void add(const T* values, int64_t column, int64_t n) {
    if (!sums) return;
    T* const to = repeated ? tile : sums + column;
    FUSED_OPS_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) to[i] += values[i];
  }

  void fold(const cpu::Tiling& tiling) {
    if (!sums || !repeated) return;
    for (int64_t row = 0; row < tiling.tile_rows; ++row)
      for (int64_t i = 0; i < tiling.tile_columns; ++i) sums[i] += tile[row * tiling.tile_columns + i];
  }
};

template <class T, class Storage>
void differentiate_unit(const Differentiate& pass, const cpu::Tiling& tiling, const Loops<T>& loops, T* workspace,
                        T* up_workspace, int64_t unit) {
  alignas(64) T saved_scratch[cpu::kTile], grad_scratch[cpu::kTile], up_scratch[cpu::kTile];
  alignas(64) T value_scratch[cpu::kTile], derivative_scratch[cpu::kTile];
  ColumnSums<T> sums(workspace, pass, tiling, unit), up_sums(up_workspace, pass, tiling, unit);
  for_each_tile(tiling, pass.rows, pass.columns, unit, [&](int64_t row, int64_t column, int64_t n) {
    const T* saved = widened(saved_scratch, at<Storage>(pass.saved, pass.stride, row, column), n);
    const T* grad = widened(grad_scratch, at<Storage>(pass.grad_out, pass.columns, row, column), n);
    Storage* const grad_pre = at<Storage>(pass.grad_pre, pass.stride, row, column);
    Storage* const hidden = at<Storage>(pass.hidden, pass.columns, row, column);
    T* value = value_scratch;
    if (!pass.up && !hidden) {
      T* const scaled = computed(derivative_scratch, grad_pre);
      loops.scale(pass.parameters, scaled, grad, saved, n);
      sums.add(scaled, column, n);
      return stored(grad_pre, scaled, n);
    }
    loops.both(pass.parameters, value, derivative_scratch, saved, n);
    const auto chained = [masks = loops.masks](T g, T derivative) {
      return masks && derivative == T(0) ? T(0) : g * derivative;
    };
    if (pass.up) {
      const T* up = widened(up_scratch, at<Storage>(pass.up, pass.stride, row, column), n);
      Storage* const grad_up = at<Storage>(pass.grad_up, pass.stride, row, column);
      FUSED_OPS_ELEMENTWISE
      for (int64_t i = 0; i < n; ++i) {
        const T v = value[i], u = up[i], g = grad[i];
        value[i] = v * u;
        up_scratch[i] = g * v;
        derivative_scratch[i] = chained(g * u, derivative_scratch[i]);
      }
      up_sums.add(up_scratch, column, n);
      stored(grad_up, up_scratch, n);
    } else {
      FUSED_OPS_ELEMENTWISE
      for (int64_t i = 0; i < n; ++i) derivative_scratch[i] = chained(grad[i], derivative_scratch[i]);
    }
    sums.add(derivative_scratch, column, n);
    stored(grad_pre, derivative_scratch, n);
    if (hidden) stored(hidden, value, n);
  });
  sums.fold(tiling);
  up_sums.fold(tiling);
}

int threads_for(int64_t elements, int threads) { return elements >= cpu::kChunkElements ? threads : 1; }

// Calls work(unit) for every unit. A parallel region, even of one thread, takes as long as a small layer.
template <class Work>
void run_units(int64_t units, int threads, Work&& work) {
  if (threads == 1 || units == 1) {
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t unit = 0; unit < units; ++unit) work(unit);
}

template <class T, class Storage>
void reduce(const T* workspace, void* grad_bias, const cpu::Tiling& tiling, int64_t columns, int threads) {
  if (!grad_bias) return;
  Storage* const out = static_cast<Storage*>(grad_bias);
  const int64_t blocks = cpu::divide_up(columns, cpu::kTile);
  run_units(blocks, threads_for(tiling.row_chunks * columns, threads), [&](int64_t block) {
    alignas(64) T sum[cpu::kTile];
    const int64_t first = block * cpu::kTile;
    const int64_t n = columns - first < cpu::kTile ? columns - first : cpu::kTile;
    for (int64_t i = 0; i < n; ++i) sum[i] = workspace[first + i];
    for (int64_t chunk = 1; chunk < tiling.row_chunks; ++chunk)
      for (int64_t i = 0; i < n; ++i) sum[i] += workspace[chunk * columns + first + i];
    stored(out + first, sum, n);
  });
}

// Calls work.operator()<T, Storage>().
template <class Work>
void visit_storage(DType dtype, Work&& work) {
  visit_dtype(dtype, [&]<class Storage>() {
    if constexpr (kSame<double, Storage>)
      work.template operator()<double, double>();
    else
      work.template operator()<float, Storage>();
  });
}

}  // namespace

void activate(const Activate& pass, int threads) {
  const cpu::Tiling tiling = cpu::tile(pass.rows, pass.columns, pass.stride);
  visit_storage(pass.dtype, [&]<class T, class Storage>() {
    const Loops<T> loops = find_loops<T, Storage>(pass.activation);
    run_units(tiling.row_chunks * tiling.column_chunks, threads_for(pass.rows * pass.columns, threads),
              [&](int64_t unit) { activate_unit<T, Storage>(pass, tiling, loops, unit); });
  });
}

void differentiate(const Differentiate& pass, int threads) {
  const cpu::Tiling tiling = cpu::tile(pass.rows, pass.columns, pass.stride);
  visit_storage(pass.dtype, [&]<class T, class Storage>() {
    const Loops<T> loops = find_loops<T, Storage>(pass.activation);
    T* const sums = static_cast<T*>(pass.workspace);
    T* const up_sums = pass.grad_bias ? sums + tiling.row_chunks * pass.columns : sums;
    T* const workspace = pass.grad_bias ? sums : nullptr;
    T* const up_workspace = pass.grad_up_bias ? up_sums : nullptr;
    run_units(
        tiling.row_chunks * tiling.column_chunks, threads_for(pass.rows * pass.columns, threads),
        [&](int64_t unit) { differentiate_unit<T, Storage>(pass, tiling, loops, workspace, up_workspace, unit); });
    reduce<T, Storage>(workspace, pass.grad_bias, tiling, pass.columns, threads);
    reduce<T, Storage>(up_workspace, pass.grad_up_bias, tiling, pass.columns, threads);
  });
}

}  // namespace FUSED_OPS_LEVEL
}  // namespace fused_ops
