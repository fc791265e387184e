// SPDX-License-Identifier: Apache-2.0
// How a [rows, columns] matrix is cut: chunks of rows and of columns are the threads' units of work; within one, tiles
// of at most kTile elements pass through the first-level cache. Narrow rows that lie back to back share a tile.
#pragma once

#include <cstdint>

namespace fused_ops::cpu {

constexpr int64_t kTile = 1024;            // elements
constexpr int64_t kChunkElements = 16384;  // at least this many a unit of work, where there are as many
constexpr int64_t kMaxRowChunks = 32;      // bounds the partial sums of a bias gradient

struct Tiling {
  int64_t chunk_rows, row_chunks;
  int64_t chunk_columns, column_chunks;
  int64_t tile_rows, tile_columns;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Depends on the sizes alone, so that sums do.
inline Tiling tile(int64_t rows, int64_t columns, int64_t stride) {
  Tiling t{};
  t.tile_columns = columns < kTile ? columns : kTile;
  t.tile_rows = stride == columns && columns <= kTile / 2 ? kTile / columns : 1;
  int64_t chunk_rows = divide_up(kChunkElements, columns);
  if (chunk_rows < divide_up(rows, kMaxRowChunks)) chunk_rows = divide_up(rows, kMaxRowChunks);
  t.chunk_rows = divide_up(chunk_rows, t.tile_rows) * t.tile_rows;
  t.row_chunks = divide_up(rows, t.chunk_rows);
  // Few rows leave a thread without work unless columns are shared out too.
  const int64_t tiles_across = divide_up(columns, t.tile_columns);
  t.column_chunks = t.row_chunks >= 8 ? 1 : tiles_across < 8 ? tiles_across : 8;
  t.chunk_columns = divide_up(tiles_across, t.column_chunks) * t.tile_columns;
  t.column_chunks = divide_up(columns, t.chunk_columns);
  return t;
}

}  // namespace fused_ops::cpu
