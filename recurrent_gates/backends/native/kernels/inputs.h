// The kernel `inputs`.

#pragma once

#include <algorithm>
#include <cstdint>

#include "arrays.h"
#include "call.h"
#include "scratch.h"
#include "shares.h"
#include "threads.h"
#include "transposed.h"
#include "vectors.h"

namespace {

// The cotangents of the inputs, of all steps at once.
template <typename Cell>
struct InputCotangents {
  static constexpr int G = Cell::slots;
  static constexpr int kRows = Transposed<G>::kRows;
  static constexpr int64_t kChunk = 16 * kRows;   // rows of d_z that a panel of weights meets
  static constexpr int64_t kWeights = 1024;       // of one input: so many stay in a core's cache
  const Arrays& a;
  const Transposed<G> weights;

  int64_t rows() const { return a.steps * a.batch; }
  bool in_place() const { return rows() <= kFewRows; }
  int64_t scratch_size() const { return in_place() ? 0 : weights.size(); }

  template <int rows, int wide>
  void block(int64_t row, Range slots, int64_t panel) const {
    const float* from = weights.packed_panel(panel);
    const int64_t D = a.inputs, at = weights.of_panel(panel).begin * kLanes;
    float* out = a.d_xs + row * D + at;
    Vector sum[rows][wide];
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) {
        const int n = std::min<int64_t>(kLanes, D - at - j * kLanes);
        sum[m][j] = slots.begin == 0 ? zero() : load(out + m * D + j * kLanes, n);
      }
    weights.template multiply<rows, wide>(a.d_z, row, slots, from, sum);
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j)
        store(out + m * D + j * kLanes, sum[m][j], std::min<int64_t>(kLanes, D - at - j * kLanes));
  }

  void product(Range mine, int64_t panel) const {
    const Blocks blocks(mine.end - mine.begin, kRows, 1);
    const int64_t slots = std::max<int64_t>(1, kWeights / a.features);
    for (int64_t g = 0; g < G; g += slots)
      blocks.each({0, blocks.count}, [&](int64_t b, int count) {
        weights.with_counts(count, panel, [&](auto known, auto wide) {
          const Range some{g, std::min<int64_t>(G, g + slots)};
          block<decltype(known)::value, decltype(wide)::value>(mine.begin + b, some, panel);
        });
      });
  }

  void run(const XLA_FFI_CallFrame* frame, int threads) const {
    const int64_t panels = weights.panels();
    if (in_place()) {
      const int64_t count = G * a.features * a.inputs;
      const float* first = weights.weights[0];
      share_in_place(frame, threads, count, own_parts(threads), first, [&](int n, int parts) {
        const Range own = part(panels, n, parts);
        const Blocks blocks(rows(), kRows, 1);
        blocks.each({0, blocks.count}, [&](int64_t row, int count) {
          with_count<kRows>(count, [&](auto known) {
            const Range vectors{weights.of_panel(own.begin).begin, weights.of_panel(own.end).begin};
            weights.template multiply_in_place<decltype(known)::value>(
                a.d_z, row, vectors,
                [&](int m, int64_t k, float x) { a.d_xs[(row + m) * a.inputs + k] = x; });
          });
        });
      });
      return;
    }
    const int most = rows() * G * a.features * a.inputs < kLeastOfCall ? 1 : threads;
    const int64_t share = up(up(rows(), most * kPartsOfThread), kRows) * kRows;
    const int64_t chunks = up(rows(), std::min(share, kChunk));
    in_parts(frame, most, most, [this](int n, int parts) {
      weights.pack(part(weights.panels(), n, parts));
    });
    in_parts(frame, most, int(chunks * panels), [&](int n, int) {
      product(part(rows(), n / panels, chunks), n % panels);
    });
  }
};

// What XLA calls.
template <typename Cell>
void inputs(const XLA_FFI_CallFrame* frame) {
  constexpr int G = Cell::slots;
  Arrays a{};
  Reader read(frame);
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.features = read.dims()[2] / G;
  set_slots<Cell>(a.d_z, read.in(), a.features);
  a.inputs = read.dims()[0];
  for (int g = 0; g < G; ++g) a.kernels[g] = read.in();
  a.d_xs = read.out();
  const int threads = threads_of(frame, read);
  Transposed<G> weights{a.kernels, a.inputs, a.features, threads, nullptr};
  const Scratch scratch(InputCotangents<Cell>{a, weights}.scratch_size());
  weights.packed = scratch.data();
  InputCotangents<Cell>{a, weights}.run(frame, threads);
}

}  // namespace
