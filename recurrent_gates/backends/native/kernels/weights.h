// The gradients of the weights, formed of all steps at once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "arrays.h"
#include "scratch.h"
#include "threads.h"

namespace {

// The gradients of the weights: sums over all rows (t, b) of an input's or h_tm1's numbers times
// cotangents; where hs_read and d_weights are null there are no products with h_tm1. A tile of
// kRows by kPanel vectors is summed in registers over kChunk rows.
template <typename Cell>
struct Gradients {
  static constexpr int G = Cell::slots;
  static constexpr int kRows = kAccumulators / kPanel, kChunk = 192;
  const Arrays& a;

  struct Columns {  // of one slot's cotangents
    Slot d;
    float *input, *own;  // the gradients of W and of U, or null
    float *bias;
    int64_t at;
    int wide;
  };
  int64_t vectors() const { return up(a.features, kLanes); }
  int64_t panels() const { return up(vectors(), kPanel); }
  int64_t columns() const { return (G + Cell::apart) * panels(); }
  Columns column(int64_t n) const {
    const int g = n / panels();
    const Range own = part(vectors(), n % panels(), panels());
    const bool apart = Cell::apart && g >= G - 1;
    Columns c{g == G ? a.d_own : a.d_z[g], g == G ? nullptr : a.d_kernels[g],
              apart && g < G ? nullptr : a.d_weights[g == G ? G - 1 : g],
              g == G ? a.d_own_bias : a.d_bias[g], own.begin * kLanes,
              int(own.end - own.begin)};
    return c;
  }
  int64_t own_width() const { return a.hs_read == nullptr ? 0 : a.features; }  // of h_tm1
  int64_t blocks(int64_t width) const { return up(width, kRows); }
  int64_t packed_size() const {  // of a thread
    return kChunk * ((blocks(a.inputs) + blocks(own_width())) * kRows + kPanel * kLanes);
  }

  const float* h_tm1(int64_t row) const {
    if (a.resets(row)) return a.h_reset + row % a.batch * a.features;
    const int64_t before = a.reverse ? row + a.batch : row - a.batch;
    if (before < 0) return a.h_0 + row * a.features;
    if (before >= a.steps * a.batch) return a.h_0 + (before - a.steps * a.batch) * a.features;
    return a.hs_read + before * a.features;
  }

  // [blocks][chunk][kRows]
  template <typename Row>
  static void pack(float* out, int64_t width, Range rows, Row row) {
    for (int64_t n = rows.begin; n < rows.end; ++n) {
      const float* x = row(n);
      float* to = out + (n - rows.begin) * kRows;
      for (int64_t k = 0; k < width; k += kRows, to += kChunk * kRows) {
        const int64_t count = std::min<int64_t>(kRows, width - k);
        if (count == kRows) {
          std::memcpy(to, x + k, kRows * sizeof(float));
        } else {
          std::fill_n(to, kRows, 0.0f);
          std::copy_n(x + k, count, to);
        }
      }
    }
  }

  // sums [kRows][wide] of x [rows][kRows] times d [rows][wide]. Not inlined, so that the compiler
  // has all registers for the sums.
  template <int wide>
  __attribute__((noinline)) static void tile(const float* x, const float* d, int64_t rows,
                                             float* sums) {
    Vector sum[kRows][wide];
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) sum[m][j] = zero();
    for (int64_t n = 0; n < rows; ++n, x += kRows, d += wide * kLanes) {
      Vector v[wide];
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) v[j] = load(d + j * kLanes);
#pragma GCC unroll 12
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) sum[m][j] += x[m] * v[j];
    }
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) store(sums + (m * wide + j) * kLanes, sum[m][j]);
  }

  template <int wide>
  void tiles(const float* x, const float* d, int64_t rows, int64_t width, float* out, int64_t at,
             bool first) const {
    const int64_t F = a.features;
    float sums[kRows * wide * kLanes];
    for (int64_t k = 0; k < width; k += kRows, x += kChunk * kRows) {
      for (int64_t m = k; m < std::min(width, k + kRows); ++m)  // rows begin within a line
        for (int64_t n = 0; n <= wide * kLanes; n += kLanes)
          __builtin_prefetch(out + m * F + std::min(at + n, F - 1), 1);
      tile<wide>(x, d, rows, sums);
      for (int64_t m = k; m < std::min(width, k + kRows); ++m)
        for (int j = 0; j < wide; ++j) {
          const int count = std::min<int64_t>(kLanes, F - at - j * kLanes);
          float* to = out + m * F + at + j * kLanes;
          const Vector sum = load(sums + ((m - k) * wide + j) * kLanes);
          store(to, first ? sum : sum + load(to, count), count);
        }
    }
  }

  template <int wide>
  void chunk(const Columns& c, Range rows, const float* xs, const float* hs, float* d) const {
    const int64_t F = a.features, count = rows.end - rows.begin;
    const bool first = rows.begin == 0;
    Vector sum[wide];
    for (int j = 0; j < wide; ++j) sum[j] = zero();
    for (int64_t n = 0; n < count; ++n) {
      const float* from = c.d.at(rows.begin + n) + c.at;
      for (int j = 0; j < wide; ++j) {
        const Vector v = load(from + j * kLanes, std::min<int64_t>(kLanes, F - c.at - j * kLanes));
        store(d + (n * wide + j) * kLanes, v);
        sum[j] += v;
      }
    }
    for (int j = 0; j < wide; ++j) {
      const int in_row = std::min<int64_t>(kLanes, F - c.at - j * kLanes);
      float* to = c.bias + c.at + j * kLanes;
      store(to, first ? sum[j] : sum[j] + load(to, in_row), in_row);
    }
    if (c.input != nullptr) tiles<wide>(xs, d, count, a.inputs, c.input, c.at, first);
    if (c.own != nullptr) tiles<wide>(hs, d, count, F, c.own, c.at, first);
  }

  void run_columns(Range mine, float* packed) const {
    const int64_t all = a.steps * a.batch;
    float* hs = packed + kChunk * blocks(a.inputs) * kRows;
    float* d = hs + kChunk * blocks(own_width()) * kRows;
    for (int64_t begin = 0; begin < all; begin += kChunk) {
      const Range rows{begin, std::min(all, begin + kChunk)};
      pack(packed, a.inputs, rows, [this](int64_t n) { return a.xs + n * a.inputs; });
      if (a.hs_read != nullptr)
        pack(hs, a.features, rows, [this](int64_t n) { return h_tm1(n); });
      for (int64_t n = mine.begin; n < mine.end; ++n) {
        const Columns c = column(n);
        with_count<kPanel>(c.wide, [&](auto known) {
          chunk<decltype(known)::value>(c, rows, packed, hs, d);
        });
      }
    }
  }

  void run(const XLA_FFI_CallFrame* frame, int threads) const {
    const int64_t weights = G * a.features * (a.inputs + own_width());
    const bool alone = a.steps * a.batch * weights < kLeastOfCall && weights < kLeastOfWeights;
    const int most = alone ? 1 : int(std::min<int64_t>(threads, columns()));
    const Scratch scratch(most * packed_size());
    in_parts(frame, most, most, [&](int n, int parts) {
      run_columns(part(columns(), n, parts), scratch.data() + n * packed_size());
    });
  }
};

}  // namespace
