// What threads share: rows in blocks, and weights that stay in place.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "arrays.h"
#include "threads.h"

namespace {

constexpr int kPartsOfThread = 4;  // of what is shared: one thread may come late
constexpr int64_t kFewRows = 12;   // of all steps, for which weights are not packed
constexpr int kOwnParts = 6;       // of a thread, of such weights on the way back

// What threads share of products whose weights stay in place. Memory is what they wait for, so that
// the number of weights decides whether they are shared, however few the rows. Each pass over the
// weights at `first` goes the other way than the one before: of more than a cache holds, it still
// holds what was read last.
template <typename Run>
void share_in_place(const XLA_FFI_CallFrame* frame, int threads, int64_t weights, int parts,
                    const float* first, Run run) {
  if (weights < kLeastOfWeights || threads == 1) {
    for (int n = 0; n < parts; ++n) run(n, parts);
    return;
  }
  static std::array<std::atomic<unsigned>, 64> passes{};  // of weights, by their first page
  auto& pass = passes[reinterpret_cast<uintptr_t>(first) / 4096 % passes.size()];
  in_own_parts(frame, threads, parts, pass.fetch_add(1, std::memory_order_relaxed) % 2, run);
}
int own_parts(int threads) {
  threads = std::min(threads, kMostOwnParts);
  return threads * std::min(kOwnParts, kMostOwnParts / threads);
}

// Rows in blocks of at most `most`, a multiple of the threads where that leaves two rows a block.
struct Blocks {
  int64_t rows, count;
  Blocks(int64_t rows, int most, int threads) : rows(rows), count(up(rows, most)) {
    const int64_t even = up(count, threads) * threads;
    if (rows >= 2 * even) count = even;
  }
  // Into how many parts threads share them out.
  int parts(int threads) const { return int(std::min<int64_t>(count, kPartsOfThread * threads)); }
  Range range(Range blocks) const {
    return {part(rows, blocks.begin, count).begin, part(rows, blocks.end, count).begin};
  }
  template <typename Block>
  void each(Range blocks, Block block) const {
    for (int64_t n = blocks.begin; n < blocks.end; ++n) {
      const Range r = part(rows, n, count);
      block(r.begin, int(r.end - r.begin));
    }
  }
};

}  // namespace
