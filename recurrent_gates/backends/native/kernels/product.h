// The product of a block of rows and packed weights, in registers.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace {

// Memory that is asked for while a product is formed, so many numbers at each of its steps: a share
// of the weights that the next block of units reads, where no cache holds all weights. Else the
// first block of rows would wait for them, and the others would leave the memory idle.
struct Ahead {
  const float* from = nullptr;
  int64_t step = 0;
  void skip(int64_t count) { from += count * step; }
};
constexpr int kLeastOfBlock = 3;  // rows; smaller blocks do not ask, and are rarely one of several

// sums += x W: x has `rows` rows of `count` numbers, `stride` apart; W is packed
// [wide / group][count][group * lanes]. What is summed is in an array that nothing else can point
// to, so that it is registers. Of few rows each weight is used little, so that its way from the
// shared cache is most of the time: it is asked for some numbers ahead.
template <int rows, int wide, int group = wide, bool asks = false>
inline void multiply(const float* x, int64_t stride, int64_t count, const float* weights,
                     Vector (&sums)[rows][wide], Ahead ahead = {}) {
  if constexpr (!asks && rows >= kLeastOfBlock) {
    if (ahead.from != nullptr)
      return multiply<rows, wide, group, true>(x, stride, count, weights, sums, ahead);
  }
  static_assert(rows * wide + wide + 1 <= kRegisters && wide % group == 0);
  constexpr bool few = rows <= 4 && rows * wide < kAccumulators;
  constexpr int kAhead = 16;
  // A line is 16 numbers. Half the lines of a step's weights: a block has half of all rows or less.
  constexpr int kLine = 16, kLines = (wide * kLanes + kLine) / (2 * kLine);
  const int64_t apart = count * group * kLanes;
  Vector own[rows][wide];
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < wide; ++j) own[m][j] = sums[m][j];
#pragma GCC unroll 2
  for (int64_t k = 0; k < count; ++k, weights += group * kLanes) {
    if (asks) {
#pragma GCC unroll 2
      for (int n = 0; n < kLines; ++n) __builtin_prefetch(ahead.from + n * kLine, 0, 2);
      ahead.skip(1);
    }
    Vector w[wide];
#pragma GCC unroll 4
    for (int j = 0; j < wide; ++j) {
      const float* from = weights + j / group * apart + j % group * kLanes;
      if (few) __builtin_prefetch(from + kAhead * group * kLanes);
      w[j] = load(from);
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m) {
      const float x_k = x[m * stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) own[m][j] += x_k * w[j];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < wide; ++j) sums[m][j] = own[m][j];
}

}  // namespace
