// The loops over time of gated recurrences in float32, as functions that XLA calls on a CPU.
//
// forward:  pre = z + bias + U h_tm1 by slot, then the next (c, h) from them, in registers: a block
//           of a few examples and of one vector of units holds all its slots while it sums over F.
// backward: the cotangents of the pre-activations of a step from those of its (c, h), unit by unit,
//           then that of h_tm1, a product with the transposed weights.
// gradients, inputs: those of the weights and the cotangents of the inputs, of all steps at once.
//
// A step of an example that is not valid keeps its carry, and is not computed where its whole block
// is not valid; one that is reset reads another carry, which the step before it leaves for it.
//
// Weights are packed in the order in which they are read: once a call, or those of a single step a
// few at a time. Those that are read a few times only stay as they are, and threads share their
// rows. Else they share the batch, and then never wait for each other, or the units, and then do at
// every step; see `split`.
// Everything is [T, B, F]: time, batch, features.

#include <algorithm>
#include <array>
#include <cstdint>

#include "arrays.h"
#include "call.h"
#include "inputs.h"
#include "product.h"
#include "scratch.h"
#include "shares.h"
#include "threads.h"
#include "transposed.h"
#include "vectors.h"
#include "weights.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace {

// ---------------------------------------------------------------------------------------
// Cells, unit by unit
// ---------------------------------------------------------------------------------------

// The refine gate: g = f + f (1 - f) (2 r - 1) (UR-gates, eq. 12 and 16), and its derivatives.
struct Refined {
  Vector f, r, g;
  Refined(Vector pre_f, Vector pre_r) : f(sigmoid(pre_f)), r(sigmoid(pre_r)) {
    g = f + f * (1.0f - f) * (2.0f * r - 1.0f);
  }
  // The cotangents of both pre-activations from that of g.
  void backward(Vector d_g, Vector& d_f, Vector& d_r) const {
    const Vector slope = f * (1.0f - f);
    d_f = d_g * (1.0f + (1.0f - 2.0f * f) * (2.0f * r - 1.0f)) * slope;
    d_r = d_g * 2.0f * slope * r * (1.0f - r);
  }
};

// c_t = f c_tm1 + i u; h_t = o tanh(c_t) (h-detach, eq. 1 and 2). Slots f, i, o, u; with a refine
// gate f, r, o, u, where i = 1 - g.
template <bool refine>
struct Lstm {
  static constexpr int slots = 4, apart = 0;
  static constexpr bool has_c = true;

  static void gates(const Vector* pre, Vector& f, Vector& i) {
    if (refine) {
      f = Refined(pre[0], pre[1]).g;
      i = 1.0f - f;
    } else {
      f = sigmoid(pre[0]);
      i = sigmoid(pre[1]);
    }
  }
  static void forward(const Vector* pre, Vector, Vector, Vector& c, Vector& h) {
    Vector f, i;
    gates(pre, f, i);
    c = f * c + i * hyperbolic_tangent(pre[3]);
    h = sigmoid(pre[2]) * hyperbolic_tangent(c);
  }
  // From the cotangents of c_t and h_t to those of pre, of c_tm1 (in d_c) and, through no product,
  // of h_tm1 (in d_h).
  static void backward(const Vector* pre, Vector, Vector, Vector c_tm1, Vector c, Vector& d_c,
                       Vector& d_h, Vector* d_pre, Vector&) {
    Vector f, i;
    gates(pre, f, i);
    const Vector o = sigmoid(pre[2]), u = hyperbolic_tangent(pre[3]);
    const Vector tanh_c = hyperbolic_tangent(c);
    d_c = d_c + d_h * o * (1.0f - tanh_c * tanh_c);
    d_pre[2] = d_h * tanh_c * o * (1.0f - o);
    d_pre[3] = d_c * i * (1.0f - u * u);
    if (refine) {
      Refined(pre[0], pre[1]).backward(d_c * (c_tm1 - u), d_pre[0], d_pre[1]);
    } else {
      d_pre[0] = d_c * c_tm1 * f * (1.0f - f);
      d_pre[1] = d_c * u * i * (1.0f - i);
    }
    d_c = d_c * f;
    d_h = zero();
  }
};

// h_t = f h_tm1 + (1 - f) u (GATO, App. E), u = tanh(z_u + reset (U h_tm1 + b)), or
// u = tanh(z_u + U h_tm1) without a reset gate (JANET). Slots f, [r], [reset], u.
template <bool refine, bool reset>
struct Gru {
  static constexpr int slots = 2 + refine + reset, apart = reset;
  static constexpr bool has_c = false;
  static constexpr int at_reset = 1 + refine, at_u = slots - 1;

  static Vector gate(const Vector* pre) {
    return refine ? Refined(pre[0], pre[1]).g : sigmoid(pre[0]);
  }
  static Vector candidate(const Vector* pre, Vector z_u) {
    if (!reset) return hyperbolic_tangent(pre[at_u]);
    return hyperbolic_tangent(z_u + sigmoid(pre[at_reset]) * pre[at_u]);
  }
  static void forward(const Vector* pre, Vector z_u, Vector h_tm1, Vector&, Vector& h) {
    const Vector f = gate(pre);
    h = f * h_tm1 + (1.0f - f) * candidate(pre, z_u);
  }
  static void backward(const Vector* pre, Vector z_u, Vector h_tm1, Vector, Vector, Vector&,
                       Vector& d_h, Vector* d_pre, Vector& d_z_u) {
    const Vector f = gate(pre), u = candidate(pre, z_u);
    const Vector d_f = d_h * (h_tm1 - u);
    const Vector d_u = d_h * (1.0f - f) * (1.0f - u * u);
    if (refine) {
      Refined(pre[0], pre[1]).backward(d_f, d_pre[0], d_pre[1]);
    } else {
      d_pre[0] = d_f * f * (1.0f - f);
    }
    d_pre[at_u] = d_u;
    if (reset) {
      const Vector r = sigmoid(pre[at_reset]);
      d_z_u = d_u;
      d_pre[at_u] = d_u * r;
      d_pre[at_reset] = d_u * pre[at_u] * r * (1.0f - r);
    }
    d_h = d_h * f;
  }
};

// ---------------------------------------------------------------------------------------
// The loops
// ---------------------------------------------------------------------------------------

enum class Split { kAlone, kRows, kUnits, kInPlace };

constexpr int64_t kOwnCache = 3 << 18;     // bytes of a core's own cache, for weights
constexpr int64_t kLeastOfStep = 60000;    // multiply-adds, from which a barrier is little
constexpr int kSumsInPlace = 4;            // on the way forward: parts with sums of their own
constexpr int64_t kFewInputs = 128;        // that the loop projects itself, whatever the rows;
constexpr int64_t kFewOfStep = 11;         // more of so few rows are projected before it,
constexpr int64_t kMostOfInputs = 1 << 24; // where no backward pass keeps them, up to so many

int64_t weights_of(const Arrays& a, int slots) {
  return slots * a.features * (a.features + a.inputs);
}
int64_t work_of_step(const Arrays& a, int slots) { return a.batch * weights_of(a, slots); }

// Whether the cache that cores share is slow: where each has 2 MB of its own, as in Intel's
// servers.
bool shared_is_slow() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const bool slow = sysconf(_SC_LEVEL2_CACHE_SIZE) >= 1 << 21;
  return slow;
#else
  return false;
#endif
}
// Rows of a thread, from which reading all weights from the shared cache is little.
int64_t rows_for_all() { return shared_is_slow() ? 256 : 48; }
// Bytes of weights, from which the next ones are asked for.
int64_t least_to_ask_for() { return shared_is_slow() ? 1 << 22 : 1 << 24; }

// Whether the inputs are projected before the loop, those of all steps at once: each step would
// read their weights for its few rows.
bool ahead_of_loop(const Arrays& a, int slots, bool keep) {
  const int64_t rows = a.steps * a.batch;
  if (!keep && rows * slots * a.features > kMostOfInputs) return false;
  return a.inputs > kFewInputs && a.batch <= kFewOfStep && rows > kFewRows;
}

// How threads share a loop: what weights that stay in place are multiplied with, where all steps
// have few rows; rows where all weights fit each one's cache, or where each has many rows; else
// units, where a step is long enough for a barrier. Units of a single step, which has at most one,
// if they come out even: each thread then reads what it has packed itself.
Split split(const Arrays& a, int slots, int threads) {
  const int64_t weights = weights_of(a, slots), vectors = up(a.features, kLanes);
  if (a.steps * a.batch <= kFewRows) return Split::kInPlace;
  if (threads < 2 || a.steps * a.batch * weights < kLeastOfCall) return Split::kAlone;
  if (a.steps == 1 && 10 * up(vectors, threads) * threads <= 11 * vectors) return Split::kUnits;
  const bool enough = a.batch >= threads;
  if (enough && (4 * weights <= kOwnCache || a.batch >= threads * rows_for_all()))
    return Split::kRows;
  const bool long_enough = work_of_step(a, slots) >= kLeastOfStep;
  if (long_enough && a.features >= kLanes * threads) return Split::kUnits;
  return enough ? Split::kRows : Split::kAlone;
}

// Whether weights are packed a few at a time, each few just before they are multiplied, while a
// core's own cache has them: those of a single step are not read again.
bool at_once(const Arrays& a, Split how) {
  return a.steps == 1 && (how == Split::kAlone || how == Split::kUnits);
}
// How many threads need a place for them.
int team(Split how, int threads) { return how == Split::kAlone ? 1 : threads; }

// What of a range has its turn at a step, and where the next one lies: 1 or -1, or 0 after the last.
// Every other step goes from the end to the beginning. Of more weights than a cache holds, it then
// still holds those that were read last.
template <typename Turn>
void to_and_fro(Range range, int64_t step, Turn turn) {
  const bool back = step % 2 != 0;
  const int64_t count = range.end - range.begin;
  for (int64_t i = 0; i < count; ++i)
    turn(back ? range.end - 1 - i : range.begin + i, i + 1 == count ? 0 : back ? -1 : 1);
}

// The share of `size` numbers at `next` that is asked for while a block of all rows is formed in so
// many turns; none where there is one block, or where all numbers, `whole`, may stay in a cache.
Ahead share(const float* next, int64_t size, int64_t whole, int64_t b, int rows, Range all,
            int64_t turns) {
  const int64_t count = all.end - all.begin;
  if (rows == count || 4 * whole <= least_to_ask_for()) return {};
  return {next + size * (b - all.begin) / count, up(size * rows, count * turns)};
}

template <typename Cell>
struct Forward {
  static constexpr int G = Cell::slots;
  // Sums of a block: the slots', and that of the inputs which a reset keeps apart.
  static constexpr int kSums = G + Cell::apart;
  // Slots whose weights lie side by side: two of four where registers cannot hold all four of many
  // rows.
  static constexpr int kGroup = kRegisters == 16 && G == 4 ? 2 : G;
  static constexpr int kRows = kAccumulators / (kRegisters == 16 ? kGroup : kSums);
  const Arrays& a;
  const bool keep;  // the pre-activations, for a backward pass
  const int threads;
  const Split how;

  Forward(const Arrays& a, bool keep, int threads)
      : a(a), keep(keep), threads(threads), how(split(a, G, threads)) {}

  static constexpr int sum_of_input(int g) { return Cell::apart && g == G - 1 ? G : g; }

  // [blocks of units][D, F][groups][D or F][slots of a group][lanes], zeros past the last unit.
  int64_t block_size() const { return (a.inputs + a.features) * G * kLanes; }
  int64_t blocks() const { return up(a.features, kLanes); }
  int64_t packed_size() const { return blocks() * block_size(); }
  float* packed(int64_t block) const { return a.packed + block * block_size(); }
  void pack(Range blocks, float* to) const {
    pack(blocks, a.kernels, a.inputs, to);
    pack(blocks, a.weights, a.features, to + a.inputs * G * kLanes);
  }
  // A few rows at a time, each read from its one end to the other.
  void pack(Range blocks, const float* const* from, int64_t count, float* to) const {
    constexpr int64_t kFew = 8;
    for (int64_t k0 = 0; k0 < count; k0 += kFew)
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const int64_t at = block * kLanes, end = std::min(count, k0 + kFew);
        const int n = std::min<int64_t>(kLanes, a.features - at);
        float* out = to + (block - blocks.begin) * block_size();
        for (int64_t k = k0; k < end; ++k)
          for (int g = 0; g < G; ++g) {
            const float* row = from[g] + k * a.features + at;
            __builtin_prefetch(row + kFew * a.features);
            store(out + ((g / kGroup * count + k) * kGroup + g % kGroup) * kLanes, load(row, n));
          }
      }
  }

  // Slots that a product of so many rows sums at once.
  template <int rows>
  static constexpr int kWide = (rows + 1) * G + 1 <= kRegisters ? G : kGroup;

  // sums += x weights, over `count` numbers of each of `rows` rows of x.
  template <int rows, bool input>
  static void multiply(const float* x, int64_t count, const float* weights,
                       Vector (&sums)[rows][kSums], Ahead& ahead) {
    constexpr int wide = kWide<rows>;
#pragma GCC unroll 2
    for (int g0 = 0; g0 < G; g0 += wide) {
      Vector own[rows][wide];
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < wide; ++g) own[m][g] = sums[m][input ? sum_of_input(g0 + g) : g0 + g];
      ::multiply<rows, wide, kGroup>(x, count, count, weights + g0 * count * kLanes, own, ahead);
      ahead.skip(count);
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < wide; ++g) sums[m][input ? sum_of_input(g0 + g) : g0 + g] = own[m][g];
    }
  }

  template <int rows>
  using Sums = Vector[rows][kSums];

  // z = W x of all rows, before the loop. A part packs a block of units' weights and multiplies
  // a stretch of rows by them, whose xs stay in a core's own cache for the next block.
  int64_t size_of_kernels() const { return a.inputs * G * kLanes; }  // of a block
  int parts_of_inputs() const { return threads * kPartsOfThread; }
  int64_t scratch_of_inputs() const { return parts_of_inputs() * size_of_kernels(); }
  void project(const XLA_FFI_CallFrame* frame, float* scratch) const {
    const int64_t all = a.steps * a.batch, weights = G * a.features * a.inputs;
    const int64_t most = std::max<int64_t>(48, kOwnCache / (8 * a.inputs));  // rows of a stretch
    const int64_t stretches = up(all, most);
    const int team = all * weights < kLeastOfCall ? 1 : threads;
    in_parts(frame, team, parts_of_inputs(), [&](int n, int parts) {
      const Range mine = part(stretches * blocks(), n, parts);
      float* packed = scratch + n * size_of_kernels();
      for (int64_t i = mine.begin; i < mine.end; ++i)
        project_block(i % blocks(), part(all, i / blocks(), stretches), packed);
    });
  }
  void project_block(int64_t block, Range stretch, float* packed) const {
    pack({block, block + 1}, a.kernels, a.inputs, packed);
    const Blocks rows(stretch.end - stretch.begin, kRows, 1);
    rows.each({0, rows.count}, [&](int64_t b, int count) {
      with_count<kRows>(count, [&](auto known) {
        project_rows<decltype(known)::value>(block, stretch.begin + b, packed);
      });
    });
  }
  template <int rows>
  void project_rows(int64_t block, int64_t row, const float* packed) const {
    const int64_t at = block * kLanes;
    const int n = std::min<int64_t>(kLanes, a.features - at);
    Sums<rows> sums;
    for (int m = 0; m < rows; ++m)
      for (int g = 0; g < kSums; ++g) sums[m][g] = zero();
    Ahead nothing;
    multiply<rows, true>(a.xs + row * a.inputs, a.inputs, packed, sums, nothing);
    for (int m = 0; m < rows; ++m)
      for (int g = 0; g < G; ++g) store(a.z[g].at(row + m) + at, sums[m][sum_of_input(g)], n);
  }

  // What a step reads of the one before, and where c_t goes.
  struct Carries {
    const float *h_tm1, *c_tm1;
    float* c_t;
  };
  Carries carries_of(int64_t step) const {
    const int64_t state = a.batch * a.features, before = a.time(step - 1) * state;
    const bool all = Cell::has_c && a.cs_steps == a.steps;
    Carries s{a.h_0, a.c_0, all ? a.cs + a.time(step) * state : a.cs};
    if (step != 0) {
      s.h_tm1 = a.hs + before;
      if (Cell::has_c) s.c_tm1 = all ? a.cs + before : a.cs;
    }
    if (a.h_reset != nullptr) {
      s.h_tm1 = a.h_in + step % 2 * state;
      s.c_tm1 = a.c_in + step % 2 * state;
    }
    return s;
  }

  // What a block's sums are before the products.
  template <int rows>
  void start(int64_t t, int64_t b, int64_t block, Sums<rows>& sums) const {
    const int64_t F = a.features, at = block * kLanes;
    const int n = std::min<int64_t>(kLanes, F - at);
#pragma GCC unroll 5
    for (int g = 0; g < kSums; ++g) {
      const bool own = Cell::apart && g == G - 1;
      const int slot = g == G ? G - 1 : g;
      const Vector bias = load((own ? a.own_bias : a.bias + slot * F) + at, n);
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) {
        sums[m][g] = bias;
        if (a.inputs == 0 && !own) sums[m][g] += load(a.z[slot].at(a.row(t, b + m)) + at, n);
      }
    }
  }

  // (c_t, h_t) of a block from its sums.
  template <int rows>
  void finish(int64_t step, const Carries& carries, int64_t b, int64_t block,
              const Sums<rows>& sums) const {
    const int64_t t = a.time(step), F = a.features, at = block * kLanes;
    const int n = std::min<int64_t>(kLanes, F - at);
    for (int m = 0; m < rows; ++m) {
      const int64_t row = a.row(t, b + m), state = (b + m) * F + at;
      Vector c = Cell::has_c ? load(carries.c_tm1 + state, n) : zero();
      Vector h_t = load(carries.h_tm1 + state, n);
      if (!a.invalid(row)) Cell::forward(sums[m], sums[m][kSums - 1], h_t, c, h_t);
      if (Cell::has_c) store(carries.c_t + state, c, n);
      store(a.hs + row * F + at, h_t, n);
      if (a.h_reset != nullptr && step + 1 < a.steps) leave(step + 1, b + m, at, n, c, h_t);
      if (!keep) continue;
      for (int g = 0; g < G; ++g) {
        const int sum = Cell::apart && g == G - 1 ? G : g;
        store(a.z[g].at(row) + at, sums[m][sum], n);
      }
      if (Cell::apart) store(a.own.at(row) + at, sums[m][G - 1], n);
    }
  }

  template <int rows>
  void block(int64_t step, const Carries& carries, int64_t b, int64_t block, const float* weights,
             const float* next, Range all) const {
    const int64_t row = a.row(a.time(step), b);
    Sums<rows> sums;
    start<rows>(a.time(step), b, block, sums);
    if (any_valid(row, rows)) {
      const int64_t turns = (a.inputs + a.features) * (G / kWide<rows>);
      const int64_t whole = at_once(a, how) ? 0 : packed_size();
      Ahead ahead = share(next, block_size(), whole, b, rows, all, turns);
      multiply<rows, true>(a.xs + row * a.inputs, a.inputs, weights, sums, ahead);
      multiply<rows, false>(carries.h_tm1 + b * a.features, a.features,
                            weights + a.inputs * G * kLanes, sums, ahead);
    }
    finish<rows>(step, carries, b, block, sums);
  }

  bool any_valid(int64_t row, int rows) const {
    for (int m = 0; m < rows; ++m)
      if (!a.invalid(row + m)) return true;
    return false;
  }

  // Blocks whose weights are packed at once.
  int64_t few_blocks() const {
    return std::clamp<int64_t>(kOwnCache / (4 * block_size()), 1, up(blocks(), team(how, threads)));
  }
  void only_step(const Blocks& rows, Range of_rows, Range blocks, float* few) const {
    for (int64_t begin = blocks.begin; begin < blocks.end; begin += few_blocks()) {
      const Range some{begin, std::min(begin + few_blocks(), blocks.end)};
      pack(some, few);
      step(0, rows, of_rows, some, few);
    }
  }
  int64_t scratch_size() const {
    if (how == Split::kInPlace) return parts_of_numbers() * (of_x().size() + of_h().size());
    if (!at_once(a, how)) return packed_size();
    return team(how, threads) * few_blocks() * block_size();
  }

  // Weights that are read where they are: threads share out the numbers of x and h_tm1, and so
  // whole rows of weights, which lie side by side in memory; many threads share the units as well.
  // Each part of the numbers has its own sums, [parts][blocks][slots][rows][lanes]: how many there
  // are does not depend on the threads, so that no bit does. Those of x are formed at the first
  // step, of all steps.
  struct PartialSums {
    float* data;
    int64_t rows, blocks;
    int64_t size() const { return blocks * G * rows * kLanes; }
    float* at(int64_t part, int64_t block, int64_t g, int64_t row) const {
      return data + part * size() + ((block * G + g) * rows + row) * kLanes;
    }
  };
  int parts_of_numbers() const { return weights_of(a, G) < kLeastOfWeights ? 1 : kSumsInPlace; }
  int groups_of_units() const { return std::min<int>(up(threads, 2), kMostOwnParts / kSumsInPlace); }
  PartialSums of_x() const {
    return {a.packed, a.inputs == 0 ? 0 : a.steps * a.batch, blocks()};
  }
  PartialSums of_h() const {
    return {a.packed + parts_of_numbers() * of_x().size(), a.batch, blocks()};
  }

  // A part of the sums of some blocks: over some of the `count` numbers of each row of x, where
  // steps are valid. A few rows of weights at a time meet all rows of x.
  void sum_in_place(const float* x, int64_t first, Range numbers, int64_t count,
                    const float* const* weights, const PartialSums& sums, int part,
                    Range blocks) const {
    constexpr int64_t kFew = 16;
    std::fill(sums.at(part, blocks.begin, 0, 0), sums.at(part, blocks.end, 0, 0), 0.0f);
    const Blocks rows(sums.rows, kRows, 1);
    for (int64_t k = numbers.begin; k < numbers.end; k += kFew) {
      const Range some{k, std::min(numbers.end, k + kFew)};
      rows.each({0, rows.count}, [&](int64_t row, int n) {
        if (!any_valid(first + row, n)) return;
        with_count<kRows>(n, [&](auto known) {
          constexpr int m = decltype(known)::value;
          for (int g = 0; g < G; ++g)
            add_in_place<m>(x + row * count, some, count, weights[g], blocks,
                            sums.at(part, 0, g, row), G * sums.rows * kLanes);
        });
      });
    }
  }
  // The sums of blocks are `next` apart, those of the first of all at `sums`.
  template <int rows>
  void add_in_place(const float* x, Range numbers, int64_t count, const float* weights,
                    Range blocks, float* sums, int64_t next) const {
    constexpr int kBlocks = kRegisters == 16 ? 2 : 1;  // at once: of 8 lanes, a line of memory
    int64_t block = blocks.begin;
    for (; block + kBlocks <= blocks.end; block += kBlocks)
      add_blocks<rows, kBlocks>(x, numbers, count, weights, block, sums + block * next, next);
    for (; block < blocks.end; ++block)
      add_blocks<rows, 1>(x, numbers, count, weights, block, sums + block * next, next);
  }
  template <int rows, int wide>
  void add_blocks(const float* x, Range numbers, int64_t count, const float* weights,
                  int64_t block, float* sums, int64_t next) const {
    const int64_t F = a.features, at = block * kLanes;
    const int n = std::min<int64_t>(kLanes, F - at - (wide - 1) * kLanes);  // of the last
    Vector sum[rows][wide];
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) sum[m][j] = load(sums + j * next + m * kLanes);
    for (int64_t k = numbers.begin; k < numbers.end; ++k) {
      Vector w[wide];
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j)
        w[j] = load(weights + k * F + at + j * kLanes, j + 1 < wide ? kLanes : n);
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) {
        const float x_k = x[m * count + k];
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) sum[m][j] += x_k * w[j];
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < wide; ++j) store(sums + j * next + m * kLanes, sum[m][j]);
  }

  void step_in_place(const XLA_FFI_CallFrame* frame, int64_t step) const {
    const Carries carries = carries_of(step);
    const int64_t D = step == 0 ? a.inputs : 0, F = a.features, row = a.row(a.time(step), 0);
    const int parts = parts_of_numbers(), groups = groups_of_units();
    const int64_t weights = G * F * (D + F);  // of this step
    share_in_place(frame, threads, weights, parts * groups, a.weights[0], [&](int n, int) {
      const Range mine = part(D + F, n % parts, parts), units = part(blocks(), n / parts, groups);
      const Range xs{std::min(mine.begin, D), std::min(mine.end, D)};
      const Range hs{std::max(mine.begin, D) - D, std::max(mine.end, D) - D};
      if (D > 0) sum_in_place(a.xs, 0, xs, D, a.kernels, of_x(), n % parts, units);
      sum_in_place(carries.h_tm1, row, hs, F, a.weights, of_h(), n % parts, units);
    });
    const Blocks rows(a.batch, kRows, 1);
    rows.each({0, rows.count}, [&](int64_t b, int count) {
      with_count<kRows>(count, [&](auto known) {
        for (int64_t block = 0; block < blocks(); ++block)
          finish_in_place<decltype(known)::value>(step, carries, b, block);
      });
    });
  }
  template <int rows>
  void finish_in_place(int64_t step, const Carries& carries, int64_t b, int64_t block) const {
    const int64_t t = a.time(step), row = a.row(t, b);
    Sums<rows> sums;
    start<rows>(t, b, block, sums);
    for (int n = 0; n < parts_of_numbers(); ++n)
      for (int g = 0; g < G; ++g)
        for (int m = 0; m < rows; ++m) {
          if (a.inputs > 0) sums[m][sum_of_input(g)] += load(of_x().at(n, block, g, row + m));
          sums[m][g] += load(of_h().at(n, block, g, b + m));
        }
    finish<rows>(step, carries, b, block, sums);
  }

  // For a later step, the carry that it reads.
  void leave(int64_t step, int64_t b, int64_t at, int n, Vector c, Vector h) const {
    const int64_t state = b * a.features + at, here = step % 2 * a.batch * a.features + state;
    if (a.resets(a.row(a.time(step), b))) {
      h = load(a.h_reset + state, n);
      if (Cell::has_c) c = load(a.c_reset + state, n);
    }
    store(a.h_in + here, h, n);
    if (Cell::has_c) store(a.c_in + here, c, n);
  }
  void leave_first() const {
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t block = 0; block < blocks(); ++block) {
        const int64_t at = block * kLanes, state = b * a.features + at;
        const int n = std::min<int64_t>(kLanes, a.features - at);
        leave(0, b, at, n, Cell::has_c ? load(a.c_0 + state, n) : zero(), load(a.h_0 + state, n));
      }
  }

  // A step of some blocks of units, whose packed weights are at `weights`.
  void step(int64_t step, const Blocks& rows, Range of_rows, Range blocks,
            const float* weights) const {
    const Carries carries = carries_of(step);
    const Range all = rows.range(of_rows);
    to_and_fro(blocks, step, [&](int64_t n, int direction) {
      const float* own = weights + (n - blocks.begin) * block_size();
      const float* next = own + direction * block_size();
      rows.each(of_rows, [&](int64_t b, int count) {
        with_count<kRows>(count, [&](auto known) {
          block<decltype(known)::value>(step, carries, b, n, own, next, all);
        });
      });
    });
  }

  void run(const XLA_FFI_CallFrame* frame) const {
    if (a.h_reset != nullptr) leave_first();
    const Blocks rows(a.batch, kRows, how == Split::kRows ? threads : 1);
    const Range all_rows{0, rows.count}, all_blocks{0, blocks()};
    const auto pack_part = [this](int n, int parts) {
      const Range mine = part(blocks(), n, parts);
      pack(mine, packed(mine.begin));
    };
    if (at_once(a, how)) {
      in_team(frame, team(how, threads), 1, work_of_step(a, G), [&](int64_t, int rank, int size) {
        float* few = a.packed + rank * few_blocks() * block_size();
        only_step(rows, all_rows, part(blocks(), rank, size), few);
      });
      return;
    }
    switch (how) {
      case Split::kAlone:
        pack(all_blocks, a.packed);
        for (int64_t s = 0; s < a.steps; ++s) step(s, rows, all_rows, all_blocks, a.packed);
        break;
      case Split::kRows:
        in_parts(frame, threads, threads, pack_part);
        in_parts(frame, threads, rows.parts(threads), [&](int n, int parts) {
          const Range mine = part(rows.count, n, parts);
          for (int64_t s = 0; s < a.steps; ++s) step(s, rows, mine, all_blocks, a.packed);
        });
        break;
      case Split::kUnits:
        in_parts(frame, threads, threads, pack_part);
        in_team(frame, threads, a.steps, work_of_step(a, G), [&](int64_t s, int rank, int size) {
          const Range mine = part(blocks(), rank, size);
          step(s, rows, all_rows, mine, packed(mine.begin));
        });
        break;
      case Split::kInPlace:
        for (int64_t s = 0; s < a.steps; ++s) step_in_place(frame, s);
        break;
    }
  }
};

template <typename Cell>
struct Backward {
  static constexpr int G = Cell::slots;
  static constexpr int kRows = Transposed<G>::kRows;
  const Arrays& a;
  const int threads;
  const Split how;
  Transposed<G> weights;
  Slot d_products[G];  // the cotangents of what the weights make of h_tm1

  Backward(const Arrays& a, int threads)
      : a(a),
        threads(threads),
        how(split(a, G, threads)),
        weights{a.weights,
                a.features,
                a.features,
                how == Split::kUnits || how == Split::kInPlace ? threads : 1,
                nullptr,
                a.batch <= kFewOfBlock ? kPanelOfFew : kPanel} {
    std::copy_n(a.d_z, G, d_products);
    if (Cell::apart) d_products[G - 1] = a.d_own;
  }
  int64_t scratch_size() const {
    if (how == Split::kInPlace) return 0;
    return at_once(a, how) ? team(how, threads) * weights.size_of_panel() : weights.size();
  }

  // The cotangents of the pre-activations; d_h becomes what reaches h_tm1 through no product.
  void units(int64_t step, const Blocks& rows, Range of_rows, Range vectors) const {
    const int64_t F = a.features, t = a.time(step), before = a.time(step - 1);
    const Range all = rows.range(of_rows);
    for (int64_t b = all.begin; b < all.end; ++b)
      for (int64_t v = vectors.begin; v < vectors.end; ++v) {
        const int64_t at = v * kLanes, row = a.row(t, b), here = row * F + at, state = b * F + at;
        const int n = std::min<int64_t>(kLanes, F - at);
        Vector pre[G], d_pre[G], z_u = zero(), d_z_u = zero(), c = zero(), c_tm1 = zero();
        Vector h_tm1 = zero(), d_h = load(a.d_h + state, n) + load(a.d_hs + here, n), d_c = zero();
        for (int g = 0; g < G; ++g) pre[g] = load(a.z[g].at(row) + at, n);
        if (Cell::apart) {
          z_u = pre[G - 1];
          pre[G - 1] = load(a.own.at(row) + at, n);
        }
        if (Cell::has_c) {
          c = load(a.cs_read + here, n);
          const float* from = step == 0 ? a.c_0 + state : a.cs_read + a.row(before, b) * F + at;
          c_tm1 = load(a.resets(row) ? a.c_reset + state : from, n);
          d_c = load(a.d_c + state, n);
          if (a.d_cs != nullptr) d_c += load(a.d_cs + here, n);
        } else {
          const float* from = step == 0 ? a.h_0 + state : a.hs_read + a.row(before, b) * F + at;
          h_tm1 = load(a.resets(row) ? a.h_reset + state : from, n);
        }
        if (a.invalid(row)) {  // the carry is that of before: what reaches it passes by
          for (int g = 0; g < G; ++g) d_pre[g] = zero();
        } else {
          Cell::backward(pre, z_u, h_tm1, c_tm1, c, d_c, d_h, d_pre, d_z_u);
        }
        if (Cell::has_c && a.resets(row)) {
          store(a.d_c_reset + state, load(a.d_c_reset + state, n) + d_c, n);
          d_c = zero();
        }
        if (Cell::apart) {
          store(a.d_own.at(row) + at, d_pre[G - 1], n);
          d_pre[G - 1] = d_z_u;
        }
        for (int g = 0; g < G; ++g) store(a.d_z[g].at(row) + at, d_pre[g], n);
        if (Cell::has_c) store(a.d_c + state, d_c, n);
        store(a.d_h + state, d_h, n);
      }
  }

  template <int rows, int wide>
  void block(int64_t t, float scale, int64_t b, int64_t panel, const float* from, int direction,
             Range all) const {
    const int64_t F = a.features, at = weights.of_panel(panel).begin * kLanes;
    const int64_t size = G * F * wide * kLanes;
    Vector sum[rows][wide];
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) sum[m][j] = zero();
    weights.template multiply<rows, wide>(
        d_products, a.row(t, b), {0, G}, from, sum,
        share(from + direction * size, size, at_once(a, how) ? 0 : weights.size(), b, rows, all,
              G * F));
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) {
        const int n = std::min<int64_t>(kLanes, F - at - j * kLanes);
        float* out = a.d_h + (b + m) * F + at + j * kLanes;
        const float passes = a.invalid(a.row(t, b + m)) ? 1.0f : scale;
        store(out, passes * (load(out, n) + sum[m][j]), n);
      }
    for (int m = 0; m < rows; ++m) reset(t, b + m, at, wide * kLanes);
  }

  template <int rows>
  void block_in_place(int64_t t, float scale, int64_t b, int64_t panel) const {
    const Range own = weights.of_panel(panel);
    const int64_t row = a.row(t, b);
    weights.template multiply_in_place<rows>(d_products, row, own, [&](int m, int64_t k, float x) {
      float& out = a.d_h[(b + m) * a.features + k];
      out = (a.invalid(row + m) ? 1.0f : scale) * (out + x);
    });
    for (int m = 0; m < rows; ++m)
      reset(t, b + m, own.begin * kLanes, (own.end - own.begin) * kLanes);
  }

  // Where a step was reset, what would reach the carry before it reaches the other one.
  void reset(int64_t t, int64_t b, int64_t at, int64_t wide) const {
    if (!a.resets(a.row(t, b))) return;
    const int64_t end = std::min(at + wide, a.features);
    for (int64_t k = b * a.features + at; k < b * a.features + end; ++k) {
      a.d_h_reset[k] += a.d_h[k];
      a.d_h[k] = 0.0f;
    }
  }

  // `few`: room for one panel, where each is packed just before it is multiplied; null where all of
  // them have been packed.
  void product(int64_t step, const Blocks& rows, Range of_rows, Range panels,
               float* few = nullptr) const {
    const Range all = rows.range(of_rows);
    const int64_t t = a.time(step);
    const float scale = a.scale_at(t);
    // Panels in place have their turns as `share_in_place` gives them.
    to_and_fro(panels, how == Split::kInPlace ? 0 : step, [&](int64_t panel, int direction) {
      const Range own = weights.of_panel(panel);
      if (scale == 0.0f) {  // h-detach: nothing reaches h_tm1
        const int64_t at = own.begin * kLanes;
        const int64_t n = std::min(own.end * kLanes, a.features) - at;
        for (int64_t b = all.begin; b < all.end; ++b) {
          if (!a.invalid(a.row(t, b))) std::fill_n(a.d_h + b * a.features + at, n, 0.0f);
          reset(t, b, at, n);
        }
        return;
      }
      if (how == Split::kInPlace) {
        rows.each(of_rows, [&](int64_t b, int count) {
          with_count<kRows>(count, [&](auto known) {
            block_in_place<decltype(known)::value>(t, scale, b, panel);
          });
        });
        return;
      }
      if (few != nullptr) weights.pack(panel, few);
      const float* packed = few != nullptr ? few : weights.packed_panel(panel);
      rows.each(of_rows, [&](int64_t b, int count) {
        weights.with_counts(count, panel, [&](auto known, auto wide) {
          block<decltype(known)::value, decltype(wide)::value>(t, scale, b, panel, packed,
                                                               direction, all);
        });
      });
    });
  }

  void run(const XLA_FFI_CallFrame* frame) const {
    const int64_t state = a.batch * a.features;
    std::copy_n(a.d_h_T, state, a.d_h);
    if (Cell::has_c) std::copy_n(a.d_c_T, state, a.d_c);
    if (a.h_reset != nullptr) {
      std::fill_n(a.d_h_reset, state, 0.0f);
      if (Cell::has_c) std::fill_n(a.d_c_reset, state, 0.0f);
    }
    const Blocks rows(a.batch, kRows, how == Split::kRows ? threads : 1);
    const Range all_rows{0, rows.count}, all_panels{0, weights.panels()};
    const Range all_units{0, weights.vectors()};
    const auto pack_part = [this](int n, int parts) {
      weights.pack(part(weights.panels(), n, parts));
    };
    const auto rows_alone = [&](Range mine) {
      for (int64_t s = a.steps - 1; s >= 0; --s) {
        units(s, rows, mine, all_units);
        product(s, rows, mine, all_panels);
      }
    };
    // A turn is the product of the step before and the units of the next: those who meet after it
    // have all cotangents of a step.
    const auto units_alone = [&](int64_t turn, int rank, int size) {
      const Range mine = part(weights.panels(), rank, size);
      const int64_t s = a.steps - 1 - turn;
      float* few = at_once(a, how) ? weights.packed + rank * weights.size_of_panel() : nullptr;
      if (turn > 0) product(s + 1, rows, all_rows, mine, few);
      if (s < 0) return;
      const int64_t end = weights.of_panel(mine.end).begin;
      units(s, rows, all_rows, {weights.of_panel(mine.begin).begin, end});
    };
    switch (how) {
      case Split::kAlone:
        if (at_once(a, how)) {
          for (int64_t turn = 0; turn < 2; ++turn) units_alone(turn, 0, 1);
          break;
        }
        weights.pack(all_panels);
        rows_alone(all_rows);
        break;
      case Split::kRows:
        in_parts(frame, threads, threads, pack_part);
        in_parts(frame, threads, rows.parts(threads),
                 [&](int n, int parts) { rows_alone(part(rows.count, n, parts)); });
        break;
      case Split::kUnits:
        if (!at_once(a, how)) in_parts(frame, threads, threads, pack_part);
        in_team(frame, threads, a.steps + 1, work_of_step(a, G), units_alone);
        break;
      case Split::kInPlace:
        for (int64_t s = a.steps - 1; s >= 0; --s) {
          units(s, rows, all_rows, all_units);
          share_in_place(frame, threads, weights_of(a, G), own_parts(threads), a.weights[0],
                         [&](int n, int parts) {
            product(s, rows, all_rows, part(weights.panels(), n, parts));
          });
        }
        break;
    }
  }
};

// ---------------------------------------------------------------------------------------
// What XLA calls
// ---------------------------------------------------------------------------------------

// What of a call is masked: nothing, some steps of some examples, or some are reset as well.
enum { kNoMasks, kFlags, kResets };

template <typename Cell>
void read_masks(Arrays& a, Reader& read) {
  if (read.attribute("masks") == kNoMasks) return;
  a.flags = read.whole_numbers();
  if (read.attribute("masks") != kResets) return;
  if (Cell::has_c) a.c_reset = read.in();
  a.h_reset = read.in();
}

// A slot's bias is the sum of one to three arrays; an attribute has how many, two bits a slot.
constexpr int kMostParts = 3;
int bias_parts(const Reader& read, int slot) {
  return read.attribute("bias_parts") >> 2 * slot & 3;
}
void add_up(const float* const* parts, float* sum, int64_t features) {
  std::copy_n(parts[0], features, sum);
  for (int n = 1; n < kMostParts && parts[n] != nullptr; ++n)
    for (int64_t k = 0; k < features; ++k) sum[k] += parts[n][k];
}

template <typename Cell>
void forward(const XLA_FFI_CallFrame* frame) {
  constexpr int G = Cell::slots;
  Arrays a{};
  Reader read(frame);
  const bool keep = read.attribute("keep");
  a.steps = read.dims()[0], a.batch = read.dims()[1];
  a.reverse = read.attribute("reverse");
  a.inputs = read.dims()[2];
  a.xs = read.in();
  for (int g = 0; g < G; ++g) a.kernels[g] = read.in();
  std::array<const float*, G * kMostParts> parts{};
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < bias_parts(read, g); ++n) parts[g * kMostParts + n] = read.in();
  if (Cell::apart) a.own_bias = read.in();
  for (int g = 0; g < G; ++g) a.weights[g] = read.in();
  if (Cell::has_c) a.c_0 = read.in();
  a.features = read.dims()[1];
  a.h_0 = read.in();
  read_masks<Cell>(a, read);
  float* z = nullptr;
  if (keep) {
    z = read.out();
    if (Cell::apart) a.own = {read.out(), a.features};
  }
  a.hs = read.out();
  if (Cell::has_c) {
    a.cs_steps = read.result_dims()[0];
    a.cs = read.out();
  }
  const int threads = threads_of(frame, read);
  const bool ahead = ahead_of_loop(a, G, keep);
  Arrays in_loop = a;
  if (ahead) in_loop.inputs = 0;
  const Forward<Cell> inputs(a, keep, threads), loop(in_loop, keep, threads);
  const int64_t turns = a.h_reset == nullptr ? 0 : 2 * a.batch * a.features;
  const int64_t of_loop = loop.scratch_size(), of_turns = (1 + Cell::has_c) * turns;
  const int64_t of_inputs = ahead ? inputs.scratch_of_inputs() : 0;
  const int64_t of_z = ahead && !keep ? a.steps * a.batch * G * a.features : 0;
  const Scratch scratch(of_loop + of_turns + G * a.features + of_inputs + of_z);
  in_loop.packed = scratch.data();
  in_loop.h_in = in_loop.packed + of_loop;
  in_loop.c_in = in_loop.h_in + turns;
  float* bias = in_loop.h_in + of_turns;
  for (int g = 0; g < G; ++g) add_up(&parts[g * kMostParts], bias + g * a.features, a.features);
  a.bias = in_loop.bias = bias;
  float* rest = bias + G * a.features;
  set_slots<Cell>(a.z, keep ? z : rest + of_inputs, a.features);
  std::copy_n(a.z, G, in_loop.z);
  if (ahead) inputs.project(frame, rest);
  loop.run(frame);
}

template <typename Cell>
void backward(const XLA_FFI_CallFrame* frame) {
  constexpr int G = Cell::slots;
  Arrays a{};
  Reader read(frame);
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.features = read.dims()[2] / G;
  a.reverse = read.attribute("reverse");
  set_slots<Cell>(a.z, read.in(), a.features);
  if (Cell::apart) a.own = {read.in(), a.features};
  for (int g = 0; g < G; ++g) a.weights[g] = read.in();
  if (read.attribute("scaled")) a.scale = read.in();
  if (Cell::has_c) {
    a.c_0 = read.in();
    a.cs_read = read.in();
    a.d_c_T = read.in();
  } else {
    a.h_0 = read.in();
    a.hs_read = read.in();
  }
  a.d_h_T = read.in();
  a.d_hs = read.in();
  if (read.attribute("keep")) a.d_cs = read.in();
  read_masks<Cell>(a, read);
  set_slots<Cell>(a.d_z, read.out(), a.features);
  if (Cell::apart) a.d_own = {read.out(), a.features};
  if (Cell::has_c) a.d_c = read.out();
  a.d_h = read.out();
  if (a.h_reset != nullptr) {
    if (Cell::has_c) a.d_c_reset = read.out();
    a.d_h_reset = read.out();
  }
  Backward<Cell> loop(a, threads_of(frame, read));
  const Scratch scratch(loop.scratch_size());
  loop.weights.packed = scratch.data();
  loop.run(frame);
}

template <typename Cell>
void gradients(const XLA_FFI_CallFrame* frame) {
  constexpr int G = Cell::slots;
  Arrays a{};
  Reader read(frame);
  a.steps = read.dims()[0], a.batch = read.dims()[1], a.inputs = read.dims()[2];
  a.reverse = read.attribute("reverse");
  a.xs = read.in();
  a.features = read.dims()[1];
  a.h_0 = read.in();
  a.hs_read = read.in();
  set_slots<Cell>(a.d_z, read.in(), a.features);
  if (Cell::apart) a.d_own = {read.in(), a.features};
  if (read.attribute("masks") == kResets) {
    a.flags = read.whole_numbers();
    a.h_reset = read.in();
  }
  for (int g = 0; g < G; ++g) a.d_kernels[g] = read.out();
  for (int g = 0; g < G; ++g) a.d_weights[g] = read.out();
  for (int g = 0; g < G; ++g) a.d_bias[g] = read.out();
  if (Cell::apart) a.d_own_bias = read.out();
  Gradients<Cell>{a}.run(frame, threads_of(frame, read));
}

}  // namespace

// A library holds one cell, RG_CELL: all of them would take six times as long to compile.
extern "C" XLA_FFI_Error* rg_forward(XLA_FFI_CallFrame* frame) {
  return answer(frame, forward<RG_CELL>);
}

extern "C" XLA_FFI_Error* rg_backward(XLA_FFI_CallFrame* frame) {
  return answer(frame, backward<RG_CELL>);
}

extern "C" XLA_FFI_Error* rg_gradients(XLA_FFI_CallFrame* frame) {
  return answer(frame, gradients<RG_CELL>);
}

extern "C" XLA_FFI_Error* rg_inputs(XLA_FFI_CallFrame* frame) {
  return answer(frame, inputs<RG_CELL>);
}
