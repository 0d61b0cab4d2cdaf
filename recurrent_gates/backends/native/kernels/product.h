// The product of a block of rows and packed weights, in registers.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace {

// sums += x W: x has `rows` rows of `count` numbers, `stride` apart; W is packed
// [wide / group][count][group * lanes]. What is summed is in an array that nothing else can point
// to, so that it is registers. Of few rows each weight is used little, so that its way from the
// shared cache is most of the time: it is asked for some numbers ahead.
template <int rows, int wide, int group = wide>
inline void multiply(const float* x, int64_t stride, int64_t count, const float* weights,
                     Vector (&sums)[rows][wide]) {
  static_assert(rows * wide + wide + 1 <= kRegisters && wide % group == 0);
  constexpr bool few = rows <= 4;
  constexpr int kAhead = 16;
  const int64_t apart = count * group * kLanes;
  Vector own[rows][wide];
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < wide; ++j) own[m][j] = sums[m][j];
#pragma GCC unroll 2
  for (int64_t k = 0; k < count; ++k, weights += group * kLanes) {
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
