// Products with transposed weights, as the way back takes them: d W^T, of all slots.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "arrays.h"
#include "product.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Vectors a and b, whose numbers of every second group of `size` change places.
template <int size>
constexpr int of_first(int n) { return n & size ? kLanes + n - size : n; }
template <int size>
constexpr int of_second(int n) { return n & size ? kLanes + n : n + size; }
template <int size, int... n>
inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, n...>) {
#if defined(__clang__)
  const Vector first = __builtin_shufflevector(a, b, of_first<size>(n)...);
  b = __builtin_shufflevector(a, b, of_second<size>(n)...);
#else
  const Vector first = __builtin_shuffle(a, b, Ints{of_first<size>(n)...});
  b = __builtin_shuffle(a, b, Ints{of_second<size>(n)...});
#endif
  a = first;
}
template <int size>
inline void transpose(Vector (&square)[kLanes]) {
  if constexpr (size < kLanes) {
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n)
      if (!(n & size))
        exchange<size>(square[n], square[n + size], std::make_integer_sequence<int, kLanes>());
    transpose<2 * size>(square);
  }
}

// The transposed weights of all slots, [width, F] each. Their rows are packed in panels of about
// one width, `most` or less, as many for each thread where they suffice:
// [panels][slots][F][width * lanes], zeros past the last.
template <int G>
struct Transposed {
  static constexpr int kRows = kAccumulators / kPanel;  // of d in a block
  const float* const* weights;
  int64_t width, features;
  int threads;  // that share the panels
  float* packed;
  int most = kPanel;

  int64_t vectors() const { return up(width, kLanes); }
  int64_t panels() const {
    const int64_t even = up(up(vectors(), most), threads) * threads;
    return std::min(even, vectors());
  }
  Range of_panel(int64_t panel) const { return part(vectors(), panel, panels()); }
  int64_t size() const { return vectors() * kLanes * G * features; }
  int64_t size_of_panel() const { return most * kLanes * G * features; }  // at most
  float* packed_panel(int64_t panel) const {
    return packed + of_panel(panel).begin * kLanes * G * features;
  }

  void pack(Range panels) const {
    for (int64_t panel = panels.begin; panel < panels.end; ++panel)
      pack(panel, packed_panel(panel));
  }
  void pack(int64_t panel, float* out) const {
    const Range own = of_panel(panel);
    const int64_t wide = (own.end - own.begin) * kLanes;
    for (int g = 0; g < G; ++g, out += features * wide)
      for (int64_t v = own.begin; v < own.end; ++v)
        pack(weights[g] + v * kLanes * features, std::min<int64_t>(kLanes, width - v * kLanes),
             out + (v - own.begin) * kLanes, wide);
  }
  // One vector's rows, a square of numbers at a time.
  void pack(const float* from, int rows, float* out, int64_t wide) const {
    for (int64_t k = 0; k < features; k += kLanes) {
      const int n = std::min<int64_t>(kLanes, features - k);
      Vector square[kLanes];
#pragma GCC unroll 16
      for (int m = 0; m < kLanes; ++m)
        square[m] = m < rows ? load(from + m * features + k, n) : zero();
      transpose<1>(square);
#pragma GCC unroll 16
      for (int m = 0; m < kLanes; ++m)
        if (m < n) store(out + (k + m) * wide, square[m]);
    }
  }

  // Calls with the numbers of rows and of a panel's vectors, known at compile time.
  template <typename Call>
  void with_counts(int rows, int64_t panel, Call call) const {
    const Range own = of_panel(panel);
    with_count<kPanelOfFew>(own.end - own.begin, [&](auto wide) {
      with_count<kRows>(rows, [&](auto known) {
        if constexpr (known <= kFewOfBlock || wide <= kPanel) call(known, wide);
      });
    });
  }

  // sums += d W^T of some slots, for a block of d's rows and one packed panel of `wide` vectors.
  template <int rows, int wide>
  void multiply(const Slot* d, int64_t row, Range slots, const float* from,
                Vector (&sums)[rows][wide], Ahead ahead = {}) const {
    for (int64_t g = slots.begin; g < slots.end; ++g, ahead.skip(features))
      ::multiply(d[g].at(row), d[g].stride, features, from + g * features * wide * kLanes, sums,
                 ahead);
  }

  // d W^T with weights that are read where they are, of `wide` of their rows; handed out as
  // to(row of d, row of W, number).
  template <int rows, int wide, typename To>
  void multiply_in_place(const Slot* d, int64_t row, int64_t at, To to) const {
    Vector sums[rows][wide];
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) sums[m][j] = zero();
    for (int g = 0; g < G; ++g) {
      const float *x = d[g].at(row), *from = weights[g] + at * features;
      for (int64_t k = 0; k < features; k += kLanes) {
        const int n = std::min<int64_t>(kLanes, features - k);
        Vector w[wide];
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) w[j] = load(from + j * features + k, n);
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
          const Vector x_k = load(x + m * d[g].stride + k, n);
#pragma GCC unroll 4
          for (int j = 0; j < wide; ++j) sums[m][j] += x_k * w[j];
        }
      }
    }
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) to(m, at + j, total(sums[m][j]));
  }
  // Of a range of vectors.
  template <int rows, typename To>
  void multiply_in_place(const Slot* d, int64_t row, Range vectors, To to) const {
    const int64_t end = std::min(vectors.end * kLanes, width);
    int64_t at = vectors.begin * kLanes;
    for (; at + kPanel <= end; at += kPanel) multiply_in_place<rows, kPanel>(d, row, at, to);
    for (; at < end; ++at) multiply_in_place<rows, 1>(d, row, at, to);
  }
};

}  // namespace
