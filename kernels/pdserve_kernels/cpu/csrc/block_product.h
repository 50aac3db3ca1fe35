// Has what products with weights in blocks are made of, for those who multiply rows in an order of their own.
#pragma once
#include <algorithm>

#include "block_lanes.h"
#include "kept.h"
#include "lanes.h"

namespace pdserve {

inline constexpr long kBlockColumns = 16;  // the outputs of a panel
inline constexpr long kSpan = 32;          // inputs with one scale of the activations
// So many rows' sums stay in the registers.
inline constexpr long kMostRows = kWide == 16 ? 8 : 4;

// Rows are multiplied in groups of so many: groups of kMostRows, then one of each smaller power of two that fits.
struct Group {
  long first, size;
};

inline Group group_of(long row, long rows) {
  long first = rows - rows % kMostRows, size = kMostRows;
  if (row < first) return {row / kMostRows * kMostRows, kMostRows};
  while (true) {
    size /= 2;
    if (!(rows & size)) continue;
    if (row < first + size) return {first, size};
    first += size;
  }
}

// Rows as bytes. A group's rows lie side by side, span by span: bytes [spans][rows][32], and for each span and row its
// scale, the sum of its values, and where the sums of bytes begin so that the weights' offset is taken away.
struct InputRows {
  int8_t* bytes;
  float *scales, *totals;
  int32_t* starts;

  InputRows from(long place, long halves) const {
    return {bytes + place * kSpan, scales + place, totals + place, starts + place * halves};
  }
};

// Returns memory of this thread for so many rows. Each span has two starts, whether its format has one or two halves.
inline InputRows room_for(Keep use, long rows, long inner) {
  const long spans = rows * inner / kSpan;
  auto* room = (uint8_t*)kept(use, size_t(spans) * (kSpan + 2 * sizeof(float) + 2 * sizeof(int32_t)));
  auto* scales = (float*)(room + spans * kSpan);
  return {(int8_t*)room, scales, scales + spans, (int32_t*)(scales + 2 * spans)};
}

// What the products with one format are made of.
struct BlockProduct {
  // Makes one row of `inner` values bytes: number `row` of `rows` in x.
  void (*quantise)(const Bf16* from, const InputRows& x, long row, long rows, long inner);
  // Writes the sums of a panel's outputs, [some][kBlockColumns] with `stride` between rows, for the rows of x from number
  // `first` on. It is a multiple of kMostRows, and so is `some`, but for the last rows.
  void (*sums)(const InputRows& x, long first, long some, long inner, const uint8_t* panel, float* out, long stride);
  long (*panel_bytes)(long inner);
};

// Returns the products with the format that has this number in GGUF files. There has to be one.
const BlockProduct& block_product(long format);

}  // namespace pdserve
