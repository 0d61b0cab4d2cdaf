// The arrays of a call, [T, B, F]: time, batch, features.

#pragma once

#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int kMostSlots = 4;

// One slot's numbers at all steps: rows of F, some way apart.
struct Slot {
  float* data;
  int64_t stride;
  float* at(int64_t row) const { return data + row * stride; }
};

// The arrays of a call; those that it has not are null. Rows are (t, b) in the order of memory.
struct Arrays {
  int64_t steps, batch, features, inputs;
  bool reverse;
  const float *xs, *kernels[kMostSlots], *weights[kMostSlots], *bias, *own_bias, *c_0, *h_0;
  // What the inputs make of a slot. Where a reset keeps it apart, U h_tm1 + b of the last slot has
  // an array of its own, and z holds W x + b alone; else both stand for the sum.
  Slot z[kMostSlots], own;
  float *hs, *cs;
  int64_t cs_steps;  // of cs: all, or 1, which then holds the last
  float* packed;
  // By row: kInvalid where a step keeps the carry, kReset where it first takes c_reset and h_reset.
  // Null: none. With resets the carry that a step reads is in c_in and h_in, [2, B, F], by turns.
  const int32_t* flags;
  const float *c_reset, *h_reset;  // null: no resets
  float *c_in, *h_in, *d_c_reset, *d_h_reset;
  // Backward: cotangents take the place of z and own, or stand elsewhere. Where each step's scale is
  // 1, it is null.
  const float *scale, *hs_read, *cs_read, *d_hs, *d_cs, *d_c_T, *d_h_T;
  Slot d_z[kMostSlots], d_own;
  float *d_c, *d_h;
  float* d_xs;  // cotangents of the inputs
  // Gradients of the weights.
  float *d_kernels[kMostSlots], *d_weights[kMostSlots], *d_bias[kMostSlots], *d_own_bias;

  enum { kInvalid = 1, kReset = 2 };
  bool invalid(int64_t row) const { return flags != nullptr && (flags[row] & kInvalid); }
  bool resets(int64_t row) const { return h_reset != nullptr && (flags[row] & kReset); }

  float scale_at(int64_t t) const { return scale == nullptr ? 1.0f : scale[t]; }

  int64_t row(int64_t t, int64_t b) const { return t * batch + b; }
  int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
};

// All slots side by side, [T, B, slots * F].
template <typename Cell>
void set_slots(Slot* slots, float* data, int64_t features) {
  for (int g = 0; g < Cell::slots; ++g) slots[g] = {data + g * features, Cell::slots * features};
}

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// From which waking a thread is little: multiply-adds, and weights that are read or written.
constexpr int64_t kLeastOfCall = 1 << 22, kLeastOfWeights = 1 << 18;

// Calls with a number, of rows or vectors, that is known at compile time: sums are then registers.
template <int most, typename Call>
inline void with_count(int count, Call call) {
  if constexpr (most > 0) {
    if (count == most) {
      call(std::integral_constant<int, most>());
    } else {
      with_count<most - 1>(count, call);
    }
  }
}

}  // namespace
