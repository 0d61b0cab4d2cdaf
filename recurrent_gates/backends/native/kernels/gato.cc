// The loops over time of a one-layer GATO in float32, as functions that XLA calls on a CPU.
//
// Units do not meet: a recurrent weight is one number a unit. So a block of rows (t, b) first gets
// its inputs' products, in registers, then takes its steps one after the other; time is no obstacle
// to the products, and threads that share the units never wait for each other.
//
// forward:  pre = W x + b + a r_tm1 by slot, then the next (r, s) from them, and cos(s) beside r.
// backward: the cotangents of the pre-activations, and of a.
// gradients, inputs: those of W and b and the cotangents of the inputs, of all steps at once.
//
// Everything is [T, B, J]: time, batch, pairs of r and s.

#include <algorithm>
#include <cstdint>

#include "arrays.h"
#include "call.h"
#include "inputs.h"
#include "product.h"
#include "scratch.h"
#include "threads.h"
#include "vectors.h"
#include "weights.h"

namespace {

// ---------------------------------------------------------------------------------------
// The cell, unit by unit
// ---------------------------------------------------------------------------------------

// r_t = rate sigmoid(gate) r_tm1 + tanh(candidate); s_t = s_tm1 + softplus(s), less whole periods
// (GATO, eq. 4 and 5). cos(s) is emitted.
struct Gato {
  static constexpr int slots = 3, apart = 0;
  enum { kGate, kCandidate, kSum };
  float rate, period, rest;  // of the period: what float32 leaves

  // log(1 + e^x) by 2 artanh(e / (2 + e)), e = e^-|x|, to float32's relative precision.
  template <typename V>
  static V softplus(V x) {
    const V above = at_least(x, 0.0f), e = exponential(x - 2.0f * above);
    const V ratio = e / (2.0f + e), z = ratio * ratio;
    const float artanh[] = {1.0f,     1.0f / 3,  1.0f / 5,  1.0f / 7,
                            1.0f / 9, 1.0f / 11, 1.0f / 13, 1.0f / 15};
    return above + 2.0f * ratio * polynomial(artanh, z);
  }

  template <typename V>
  V wrap(V s) const {
    const V turns = (s * (1.0f / period) - 0.5f + kShift) - kShift;
    return s - period * turns - rest * turns;
  }

  // s = n pi + x for the nearest whole n: cos(s) = (-1)^n cos(x), sin(s) = (-1)^n sin(x).
  template <typename V>
  struct HalfTurns {
    V shifted, x;
    explicit HalfTurns(V s) : shifted(s * 0.318309886f + kShift) {
      const V turns = shifted - kShift;
      x = s - turns * 3.14159274f + turns * 8.74227766e-8f;
      x = at_least(at_most(x, 1.57079637f), -1.57079637f);  // a huge s has no digits left
    }
    V cosine() const {
      const float taylor[] = {1.0f,           -0.5f,           4.16666667e-2f, -1.38888889e-3f,
                              2.48015873e-5f, -2.75573192e-7f, 2.08767570e-9f};
      return negative_where_odd(polynomial(taylor, x * x), shifted);
    }
    V sine() const {
      const float taylor[] = {1.0f,           -1.66666667e-1f, 8.33333333e-3f, -1.98412698e-4f,
                              2.75573192e-6f, -2.50521084e-8f, 1.60590438e-10f};
      return negative_where_odd(x * polynomial(taylor, x * x), shifted);
    }
  };
  template <typename V>
  static V cosine(V s) {
    return HalfTurns<V>(s).cosine();
  }
  template <typename V>
  static V sine(V s) {
    return HalfTurns<V>(s).sine();
  }

  // From the pre-activations; r and s one step on.
  template <typename V>
  void forward(const V* pre, V& r, V& s) const {
    r = rate * sigmoid(pre[kGate]) * r + hyperbolic_tangent(pre[kCandidate]);
    s = wrap(s + softplus(pre[kSum]));
  }
  // From the cotangents of r_t and s_t to those of pre and, through no weight, of r_tm1 (in d_r).
  // That of s_tm1 is that of s_t: ds_t / ds_tm1 is 1 (GATO, eq. 3).
  template <typename V>
  void backward(const V* pre, V r_tm1, V& d_r, V d_s, V* d_pre) const {
    const V f = sigmoid(pre[kGate]), u = hyperbolic_tangent(pre[kCandidate]);
    d_pre[kGate] = d_r * rate * r_tm1 * f * (1.0f - f);
    d_pre[kCandidate] = d_r * (1.0f - u * u);
    d_pre[kSum] = d_s * sigmoid(pre[kSum]);
    d_r = d_r * rate * f;
  }
};

// ---------------------------------------------------------------------------------------
// The loops
// ---------------------------------------------------------------------------------------

constexpr int G = Gato::slots;

// The arrays of a call; those that it has not are null. Rows are (t, b) in the order of memory.
struct Pass {
  Gato cell;
  int64_t steps, batch, features, inputs;
  bool reverse;
  const float *xs, *kernels[G], *bias[G], *weights[G], *r_0, *s_0;
  float *ys, *ss, *pre, *packed;  // ys: cos(s) and r side by side
  int64_t ss_steps;               // of ss: all, or 1, which then holds the last
  const float *pre_read, *scale, *ys_read, *ss_read, *d_ys, *d_ss, *d_r_T, *d_s_T;
  float *d_pre, *d_weights[G], *d_r, *d_s, *sums;

  void read_numbers(const float* numbers) { cell = {numbers[0], numbers[1], numbers[2]}; }
  float scale_at(int64_t t) const { return scale == nullptr ? 1.0f : scale[t]; }
  int64_t blocks() const { return up(features, kLanes); }
  int lanes(int64_t block) const { return std::min<int64_t>(kLanes, features - block * kLanes); }
  int64_t rows() const { return steps * batch; }
  bool is_first(int64_t row) const { return reverse ? row >= rows() - batch : row < batch; }
  int64_t before(int64_t row) const { return reverse ? row + batch : row - batch; }
  int64_t r_at(int64_t row) const { return (2 * row + 1) * features; }  // of ys
  int threads(int of_pool) const {
    const int64_t of_unit = G * (inputs + 32);  // multiply-adds; functions are some 100
    return rows() * features * of_unit < kLeastOfCall ? 1 : of_pool;
  }
};

struct GatoForward {
  static constexpr int kRows = kAccumulators / G;
  const Pass& a;

  // [blocks][D][slots][lanes], zeros past the last unit.
  const float* packed(int64_t block) const { return a.packed + block * a.inputs * G * kLanes; }
  void pack(Range blocks) const {
    float* out = a.packed + blocks.begin * a.inputs * G * kLanes;
    for (int64_t block = blocks.begin; block < blocks.end; ++block)
      for (int64_t k = 0; k < a.inputs; ++k)
        for (int g = 0; g < G; ++g, out += kLanes)
          store(out, load(a.kernels[g] + k * a.features + block * kLanes, a.lanes(block)));
  }

  // Rows next to each other, in one step or in several, of one block of units.
  template <int rows>
  void tile(int64_t first, int64_t block) const {
    const int64_t D = a.inputs, at = block * kLanes;
    const int n = a.lanes(block);
    // A template of vectors forgets that they may lie anywhere: see step.
    alignas(4 * kLanes) Vector sums[rows][G], own[G];
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g) {
      own[g] = load(a.weights[g] + at, n);
      const Vector bias = load(a.bias[g] + at, n);
#pragma GCC unroll 8
      for (int m = 0; m < rows; ++m) sums[m][g] = bias;
    }
    multiply(a.xs + first * D, D, D, packed(block), sums);
    steps<rows>(first, at, n, own, sums);
  }

  // The rows of a tile, a step after the other; of a step two at once.
  template <int rows>
  void steps(int64_t first, int64_t at, int n, const Vector* own, Vector (*sums)[G]) const {
    const int64_t from = first / a.batch, to = (first + rows - 1) / a.batch;
    for (int64_t i = from; i <= to; ++i) {
      const int64_t t = a.reverse ? to - (i - from) : i, b = t * a.batch;
      const int64_t end = std::min<int64_t>(first + rows, b + a.batch);
      for (int64_t row = std::max(first, b); row < end; row += 2) {
        Vector* pre = sums[row - first];
        if (row + 1 < end) {
          Pair both[G];
          for (int g = 0; g < G; ++g) both[g] = {pre[g], pre[(rows > 1) * G + g]};
          step(row, row - b, at, n, own, both);
        } else {
          step(row, row - b, at, n, own, pre);
        }
      }
    }
  }

  template <typename V>
  void step(int64_t row, int64_t b, int64_t at, int n, const Vector* own, V* pre) const {
    const int64_t J = a.features, before = a.before(row);
    const bool all = a.ss_steps == a.steps, first = a.is_first(row);
    V r = load_rows<V>((first ? a.r_0 + b * J : a.ys + a.r_at(before)) + at, first ? J : 2 * J, n);
    V s = load_rows<V>((first ? a.s_0 + b * J : a.ss + (all ? before : b) * J) + at, J, n);
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g) {
      pre[g] = pre[g] + own[g] * r;
      if (a.pre != nullptr) store_rows(a.pre + (row * G + g) * J + at, G * J, pre[g], n);
    }
    a.cell.forward(pre, r, s);
    store_rows(a.ss + (all ? row : b) * J + at, J, s, n);
    store_rows(a.ys + 2 * row * J + at, 2 * J, Gato::cosine(s), n);
    store_rows(a.ys + a.r_at(row) + at, 2 * J, r, n);
  }

  // Rows next to each other, in the order of time.
  void stretch(Range rows, int64_t block) const {
    const int64_t tiles = up(rows.end - rows.begin, kRows);
    for (int64_t i = 0; i < tiles; ++i) {
      const Range own = part(rows.end - rows.begin, a.reverse ? tiles - 1 - i : i, tiles);
      with_count<kRows>(int(own.end - own.begin), [&](auto known) {
        tile<decltype(known)::value>(rows.begin + own.begin, block);
      });
    }
  }

  // Steps in chunks, whose inputs and outputs stay in cache while all units are formed.
  void run(Range examples, Range blocks) const {
    const bool whole = examples.end - examples.begin == a.batch;
    const int64_t of_row = std::max(a.inputs, 3 * a.features);  // numbers read, half those written
    const int64_t most = std::max<int64_t>(1, kChunk / (of_row * a.batch));
    for (int64_t begin = 0; begin < a.steps; begin += most) {
      const int64_t end = std::min(a.steps, begin + most);
      const Range times = a.reverse ? Range{a.steps - end, a.steps - begin} : Range{begin, end};
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        if (whole) {
          stretch({times.begin * a.batch, times.end * a.batch}, block);
          continue;
        }
        for (int64_t i = times.begin; i < times.end; ++i) {
          const int64_t t = a.reverse ? times.end - 1 - (i - times.begin) : i;
          stretch({t * a.batch + examples.begin, t * a.batch + examples.end}, block);
        }
      }
    }
  }
  static constexpr int64_t kChunk = 1 << 16;

  // Threads share the units, or the examples where these come out more even: of few units one
  // thread has a vector more, and few examples make for small tiles.
  bool by_units(int64_t threads) const {
    const int64_t most = up(a.blocks(), threads);
    const int64_t enough = threads * kRows / 2;
    return a.blocks() * enough >= most * threads * std::min(enough, a.batch);
  }
  void run(const XLA_FFI_CallFrame* frame, int of_pool) const {
    const int threads = a.threads(of_pool);
    const int shared = std::min<int64_t>(threads, a.blocks());
    in_parts(frame, shared, shared,
             [this](int n, int parts) { pack(part(a.blocks(), n, parts)); });
    if (by_units(threads)) {
      in_parts(frame, shared, shared, [this](int n, int parts) {
        run({0, a.batch}, part(a.blocks(), n, parts));
      });
    } else {
      in_parts(frame, threads, threads, [this](int n, int parts) {
        run(part(a.batch, n, parts), {0, a.blocks()});
      });
    }
  }
};

struct GatoBackward {
  static constexpr int64_t kGroup = 8;
  const Pass& a;

  // Examples whose part of a's gradient is summed by itself, so that threads can share them and
  // change no bit of the sum; only where there are few units to share.
  int64_t groups() const { return a.blocks() > 4 ? 1 : up(a.batch, kGroup); }

  void run(int64_t group, Range examples, Range blocks) const {
    const int64_t J = a.features;
    float* sums = a.sums + group * G * J;
    for (int g = 0; g < G; ++g)
      std::fill_n(sums + g * J + blocks.begin * kLanes,
                  std::min(blocks.end * kLanes, J) - blocks.begin * kLanes, 0.0f);
    for (int64_t step = a.steps - 1; step >= 0; --step) {
      const int64_t t = a.reverse ? a.steps - 1 - step : step;
      for (int64_t b = examples.begin; b < examples.end; b += 2)
        for (int64_t block = blocks.begin; block < blocks.end; ++block) {
          if (b + 1 < examples.end) {
            units<Pair>(t, b, block, a.lanes(block), sums);
          } else {
            units<Vector>(t, b, block, a.lanes(block), sums);
          }
        }
    }
  }

  static Vector sum(Vector v) { return v; }
  static Vector sum(Pair v) { return v.a + v.b; }

  template <typename V>
  void units(int64_t t, int64_t b, int64_t block, int n, float* sums) const {
    const int64_t J = a.features, at = block * kLanes, row = t * a.batch + b, state = b * J + at;
    const bool first = a.is_first(row), last = t == (a.reverse ? 0 : a.steps - 1);
    const V r_tm1 = load_rows<V>(
        first ? a.r_0 + state : a.ys_read + a.r_at(a.before(row)) + at, first ? J : 2 * J, n);
    V pre[G], d_pre[G];
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g)
      pre[g] = load_rows<V>(a.pre_read + (row * G + g) * J + at, G * J, n);
    const V s = load_rows<V>(a.ss_read + row * J + at, J, n);
    V d_r = load_rows<V>((last ? a.d_r_T : a.d_r) + state, J, n);
    V d_s = load_rows<V>((last ? a.d_s_T : a.d_s) + state, J, n);
    d_r = d_r + load_rows<V>(a.d_ys + a.r_at(row) + at, 2 * J, n);
    d_s = d_s - load_rows<V>(a.d_ys + 2 * row * J + at, 2 * J, n) * Gato::sine(s);
    if (a.d_ss != nullptr) d_s = d_s + load_rows<V>(a.d_ss + row * J + at, J, n);
    a.cell.backward(pre, r_tm1, d_r, d_s, d_pre);
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g) {
      store_rows(a.d_pre + (row * G + g) * J + at, G * J, d_pre[g], n);
      d_r = d_r + load(a.weights[g] + at, n) * d_pre[g];
      float* total = sums + g * J + at;
      store(total, load(total, n) + sum(d_pre[g] * r_tm1), n);
    }
    const float scale = a.scale_at(t);
    d_r = scale == 0.0f ? V{} : scale * d_r;  // h-detach: nothing, not even NaN
    store_rows(a.d_r + state, J, d_r, n);
    store_rows(a.d_s + state, J, d_s, n);
  }

  void run(const XLA_FFI_CallFrame* frame, int of_pool) const {
    const int threads = a.threads(of_pool);
    const int64_t shares = std::min<int64_t>(groups() == 1 ? threads : 1, a.blocks());
    const int most = std::min<int64_t>(threads, groups() * shares);
    in_parts(frame, most, int(groups() * shares), [&](int n, int) {
      const int64_t group = n / shares;
      run(group, part(a.batch, group, groups()), part(a.blocks(), n % shares, shares));
    });
    const int64_t J = a.features;
    for (int g = 0; g < G; ++g)
      for (int64_t j = 0; j < J; ++j) {
        const float* of_group = a.sums + g * J + j;
        a.d_weights[g][j] = *of_group;
        for (int64_t group = 1; group < groups(); ++group)
          a.d_weights[g][j] += of_group[group * G * J];
      }
  }
};

// ---------------------------------------------------------------------------------------
// What XLA calls
// ---------------------------------------------------------------------------------------

void forward(const XLA_FFI_CallFrame* frame) {
  Pass a{};
  Reader read(frame);
  a.read_numbers(read.in());
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.inputs = read.dims()[2];
  a.reverse = read.attribute("reverse");
  a.xs = read.in();
  for (int g = 0; g < G; ++g) a.kernels[g] = read.in();
  for (int g = 0; g < G; ++g) a.bias[g] = read.in();
  for (int g = 0; g < G; ++g) a.weights[g] = read.in();
  a.features = read.dims()[1];
  a.r_0 = read.in();
  a.s_0 = read.in();
  a.ys = read.out();
  a.ss_steps = read.result_dims()[0];
  a.ss = read.out();
  if (read.attribute("keep")) a.pre = read.out();
  const Scratch scratch(a.blocks() * a.inputs * G * kLanes);
  a.packed = scratch.data();
  GatoForward{a}.run(frame, threads_of(frame, read));
}

void backward(const XLA_FFI_CallFrame* frame) {
  Pass a{};
  Reader read(frame);
  a.read_numbers(read.in());
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.features = read.dims()[2] / G;
  a.reverse = read.attribute("reverse");
  a.pre_read = read.in();
  for (int g = 0; g < G; ++g) a.weights[g] = read.in();
  if (read.attribute("scaled")) a.scale = read.in();
  a.r_0 = read.in();
  a.ys_read = read.in();
  a.ss_read = read.in();
  a.d_r_T = read.in();
  a.d_s_T = read.in();
  a.d_ys = read.in();
  if (read.attribute("keep")) a.d_ss = read.in();
  a.d_pre = read.out();
  for (int g = 0; g < G; ++g) a.d_weights[g] = read.out();
  a.d_r = read.out();
  a.d_s = read.out();
  const Scratch scratch(GatoBackward{a}.groups() * G * a.features);
  a.sums = scratch.data();
  GatoBackward{a}.run(frame, threads_of(frame, read));
}

void gradients(const XLA_FFI_CallFrame* frame) {
  Arrays a{};
  Reader read(frame);
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.inputs = read.dims()[2];
  a.xs = read.in();
  a.features = read.dims()[2] / G;
  set_slots<Gato>(a.d_z, read.in(), a.features);
  for (int g = 0; g < G; ++g) a.d_kernels[g] = read.out();
  for (int g = 0; g < G; ++g) a.d_bias[g] = read.out();
  Gradients<Gato>{a}.run(frame, threads_of(frame, read));
}

}  // namespace

extern "C" XLA_FFI_Error* rg_forward(XLA_FFI_CallFrame* frame) {
  return answer(frame, forward);
}

extern "C" XLA_FFI_Error* rg_backward(XLA_FFI_CallFrame* frame) {
  return answer(frame, backward);
}

extern "C" XLA_FFI_Error* rg_gradients(XLA_FFI_CallFrame* frame) {
  return answer(frame, gradients);
}

extern "C" XLA_FFI_Error* rg_inputs(XLA_FFI_CallFrame* frame) {
  return answer(frame, inputs<Gato>);
}
