// What a two-layer GATO adds to s, before the softplus, in float32 (GATO, eq. 6):
//
//   F = sum_i out_i relu(p_i),  p_i = x first_i + on_r_i r,
//
// of N rows (steps and examples, which do not meet once r is known), D inputs of which one is 1, for
// the bias, J units and k hidden ones for each. x is [N, D], r and F [N, J], first [k, D, J], on_r
// and out [k, J].
//
// Neither pass writes the k J numbers of a row to memory. The backward pass forms the p of a few
// rows again, and of them it keeps where they are above zero. Then all is sums of what is there:
//
//   dF/dr = sum_i [p_i > 0] out_i on_r_i,  dF/dx = sum_i [p_i > 0] out_i first_i   over i,
//   d first_i = out_i sum_n [p_i > 0] d x,  d on_r_i = out_i sum_n [p_i > 0] d r   over the rows.

#include <algorithm>
#include <cstdint>

#include "arrays.h"
#include "call.h"
#include "product.h"
#include "scratch.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Where a vector is above zero, or not a number.
#if defined(__AVX512F__)
typedef uint16_t Mask;
inline Mask is_on(Vector p) {
  return _mm512_cmp_ps_mask((__m512)p, _mm512_setzero_ps(), _CMP_NLE_UQ);
}
inline Vector add_where(Mask on, Vector sum, Vector v) {
  return (Vector)_mm512_mask_add_ps((__m512)sum, on, (__m512)sum, (__m512)v);
}
#else
typedef Ints Mask;
inline Mask is_on(Vector p) { return ~(Mask)(p <= zero()); }
inline Vector add_where(Mask on, Vector sum, Vector v) { return sum + (Vector)(on & (Mask)v); }
#endif

// The arrays of a call; those that it has not are null.
struct Pass {
  int64_t rows, inputs, units, hidden;
  const float *x, *r, *first, *on_r, *out, *d;
  float *total, *d_x, *d_r, *d_first, *d_on_r, *d_out;

  int64_t blocks() const { return up(units, kLanes); }
  int lanes(int64_t block) const { return std::min<int64_t>(kLanes, units - block * kLanes); }
  int64_t pairs() const { return up(hidden, 2); }
  int threads(int of_pool) const {
    return rows * units * hidden * (inputs + 2) < kLeastOfCall ? 1 : of_pool;
  }
};

// The weights of a block of units, hidden units in pairs, zeros past the last of either.
struct Weights {
  const Pass& a;
  float* data;

  int64_t of_first() const { return a.pairs() * a.inputs * 2 * kLanes; }
  int64_t of_vector() const { return a.pairs() * 2 * kLanes; }
  int64_t size() const { return of_first() + 2 * of_vector(); }  // of a block
  const float* first(int64_t block, int64_t pair) const {
    return data + block * size() + pair * a.inputs * 2 * kLanes;
  }
  const float* on_r(int64_t block) const { return data + block * size() + of_first(); }
  const float* out(int64_t block) const { return on_r(block) + of_vector(); }

  void pack(int64_t block) const {
    const int64_t D = a.inputs, J = a.units, at = block * kLanes;
    const int n = a.lanes(block);
    float* to = data + block * size();
    for (int64_t i = 0; i < 2 * a.pairs(); ++i) {
      const bool is_one = i < a.hidden;
      for (int64_t c = 0; c < D; ++c)
        store(to + ((i / 2 * D + c) * 2 + i % 2) * kLanes,
              is_one ? load(a.first + (i * D + c) * J + at, n) : zero());
      store(to + of_first() + i * kLanes, is_one ? load(a.on_r + i * J + at, n) : zero());
      store(to + of_first() + of_vector() + i * kLanes,
            is_one ? load(a.out + i * J + at, n) : zero());
    }
  }
};

// p of a pair of hidden units, of some rows. What r adds comes last: inputs that are far from zero
// and a bias that takes them back leave no digits of what was there before.
template <int rows>
inline void pre_activations(const Pass& a, int64_t row, const float* first, const float* on_r,
                            const Vector (&r)[rows], Vector (&p)[rows][2]) {
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m) p[m][0] = p[m][1] = zero();
  multiply(a.x + row * a.inputs, a.inputs, a.inputs, first, p);
  const Vector w[2] = {load(on_r), load(on_r + kLanes)};
#pragma GCC unroll 12
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) p[m][i] += w[i] * r[m];
}

constexpr int kRows = kAccumulators / 3;  // whose p are in registers, two of each

struct Forward {
  const Pass& a;
  const Weights weights;

  template <int rows>
  void tile(int64_t row, int64_t block) const {
    const int64_t J = a.units, at = block * kLanes;
    const int n = a.lanes(block);
    const float *on_r = weights.on_r(block), *out = weights.out(block);
    alignas(4 * kLanes) Vector r[rows], sum[rows], p[rows][2];
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m) r[m] = load(a.r + (row + m) * J + at, n), sum[m] = zero();
    for (int64_t pair = 0; pair < a.pairs(); ++pair) {
      const int64_t i = pair * 2 * kLanes;
      pre_activations<rows>(a, row, weights.first(block, pair), on_r + i, r, p);
      const Vector w[2] = {load(out + i), load(out + i + kLanes)};
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) sum[m] += w[0] * at_least(p[m][0], 0.0f);
      if (2 * pair + 1 == a.hidden) break;  // of zero weights an infinite x makes NaN
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) sum[m] += w[1] * at_least(p[m][1], 0.0f);
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m) store(a.total + (row + m) * J + at, sum[m], n);
  }

  void run(Range rows) const {
    const int64_t tiles = up(rows.end - rows.begin, kRows);
    for (int64_t block = 0; block < a.blocks(); ++block)
      for (int64_t i = 0; i < tiles; ++i) {
        const Range own = part(rows.end - rows.begin, i, tiles);
        with_count<kRows>(int(own.end - own.begin), [&](auto known) {
          tile<decltype(known)::value>(rows.begin + own.begin, block);
        });
      }
  }

  void run(const XLA_FFI_CallFrame* frame, int of_pool) const {
    const int threads = a.threads(of_pool);
    for (int64_t block = 0; block < a.blocks(); ++block) weights.pack(block);
    const int parts = int(std::min<int64_t>(4 * threads, up(a.rows, kRows)));
    in_parts(frame, std::min(threads, parts), parts,
             [this](int n, int parts) { run(part(a.rows, n, parts)); });
  }
};

// sums[m][c] += those of `count` vectors values[n][c] for which a bit of masks[n][m] is set.
template <int rows, int wide>
inline void add_masked(const Mask* masks, int64_t of_row, int64_t of_value, const float* values,
                       int64_t stride, int64_t count, Vector (&sums)[rows][wide]) {
  Vector own[rows][wide];
#pragma GCC unroll 4
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < wide; ++c) own[m][c] = sums[m][c];
  for (int64_t n = 0; n < count; ++n, values += stride, masks += of_value) {
    Vector v[wide];
#pragma GCC unroll 8
    for (int c = 0; c < wide; ++c) v[c] = load(values + c * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) {
      const Mask on = masks[m * of_row];
#pragma GCC unroll 8
      for (int c = 0; c < wide; ++c) own[m][c] = add_where(on, own[m][c], v[c]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < wide; ++c) sums[m][c] = own[m][c];
}

struct Backward {
  static constexpr int kTile = 2 * kRows;           // rows whose masks are kept
  static constexpr int kWide = kRegisters / 4;      // sums of a row, or of a hidden unit, at once
  static constexpr int kAtOnce = 2;                 // rows, or hidden units
  static constexpr int64_t kParts = 16;             // of the units, whatever the threads
  static constexpr int64_t kChunk = 1 << 15;        // numbers of d_x that a part has at a time

  const Pass& a;
  const Weights weights;
  float *slopes, *sums, *d_xs, *values;
  Mask* masks;

  // Sizes in floats. Columns are the inputs and, last, r.
  static int64_t columns(const Pass& a) { return a.inputs + 1; }
  static int64_t hidden(const Pass& a) { return 2 * a.pairs(); }
  static int64_t of_block(const Pass& a) { return hidden(a) * columns(a) * kLanes; }
  static int64_t parts(const Pass& a) { return std::min(a.blocks(), kParts); }
  static int64_t chunk(const Pass& a) {
    const int64_t most = std::max<int64_t>(4, kChunk / (a.inputs * kLanes * kTile)) * kTile;
    return std::min(a.rows, most);
  }
  static int64_t of_d_x(const Pass& a) { return chunk(a) * a.inputs * kLanes; }  // of a part
  static int64_t of_values(const Pass& a) { return kTile * columns(a) * kLanes; }
  static int64_t of_masks(const Pass& a) {
    return up(hidden(a) * kTile * sizeof(Mask), sizeof(float) * kLanes) * kLanes;
  }
  static int64_t size(const Pass& a) {
    const int64_t of_weights = Weights{a, nullptr}.size() + 2 * of_block(a) + hidden(a) * kLanes;
    return a.blocks() * of_weights + parts(a) * (of_d_x(a) + of_values(a) + of_masks(a));
  }
  Backward(const Pass& a, float* data) : a(a), weights{a, data} {
    slopes = data + a.blocks() * weights.size();
    sums = slopes + a.blocks() * of_block(a);
    d_xs = sums + a.blocks() * (of_block(a) + hidden(a) * kLanes);
    values = d_xs + parts(a) * of_d_x(a);
    masks = reinterpret_cast<Mask*>(values + parts(a) * of_values(a));
  }
  float* slopes_of(int64_t block) const { return slopes + block * of_block(a); }
  float* sums_of(int64_t block) const {
    return sums + block * (of_block(a) + hidden(a) * kLanes);
  }
  float* out_sums_of(int64_t block) const { return sums_of(block) + of_block(a); }

  // out_i first_i and out_i on_r_i, [hidden][columns][lanes].
  void pack(int64_t block) const {
    weights.pack(block);
    const int64_t D = a.inputs;
    float* to = slopes_of(block);
    for (int64_t i = 0; i < hidden(a); ++i) {
      const Vector out = load(weights.out(block) + i * kLanes);
      const float* first = weights.first(block, i / 2) + i % 2 * kLanes;
      for (int64_t c = 0; c < D; ++c, to += kLanes) store(to, out * load(first + c * 2 * kLanes));
      store(to, out * load(weights.on_r(block) + i * kLanes)), to += kLanes;
    }
    std::fill_n(sums_of(block), of_block(a) + hidden(a) * kLanes, 0.0f);
  }

  // Where p is above zero, and the sums of d relu(p).
  template <int rows>
  void mask(int64_t row, int64_t block, Mask* on) const {
    const int64_t J = a.units, at = block * kLanes;
    const int n = a.lanes(block);
    alignas(4 * kLanes) Vector r[rows], d[rows], p[rows][2];
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m) {
      r[m] = load(a.r + (row + m) * J + at, n);
      d[m] = load(a.d + (row + m) * J + at, n);
    }
    for (int64_t pair = 0; pair < a.pairs(); ++pair) {
      const float* on_r = weights.on_r(block) + pair * 2 * kLanes;
      pre_activations<rows>(a, row, weights.first(block, pair), on_r, r, p);
      float* sum = out_sums_of(block) + pair * 2 * kLanes;
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i, sum += kLanes) {
        Vector own = zero();
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
          on[(2 * pair + i) * kTile + m] = is_on(p[m][i]);
          own += d[m] * at_least(p[m][i], 0.0f);
        }
        store(sum, load(sum) + own);
      }
    }
  }

  // Calls with the columns that are summed at once: where they begin, and how many.
  template <typename Call>
  void each_columns(int64_t begin, Call call) const {
    const int64_t all = columns(a) - begin, count = up(all, kWide);
    for (int64_t n = 0; n < count; ++n) {
      const Range own = part(all, n, count);
      with_count<kWide>(int(own.end - own.begin), [&](auto wide) { call(begin + own.begin, wide); });
    }
  }

  // d_r and d_x of some rows, of some columns: of d_x what these units add, lane by lane.
  template <int rows, int wide>
  void by_row(int64_t row, int64_t begin, int64_t block, const Mask* on, float* d_x) const {
    const int64_t J = a.units, at = block * kLanes, D = a.inputs;
    const int n = a.lanes(block);
    alignas(4 * kLanes) Vector sum[rows][wide] = {};
    add_masked<rows, wide>(on, 1, kTile, slopes_of(block) + begin * kLanes, columns(a) * kLanes,
                           hidden(a), sum);
    for (int m = 0; m < rows; ++m) {
      const Vector d = load(a.d + (row + m) * J + at, n);
      for (int c = 0; c < wide; ++c) {
        const Vector slope = sum[m][c], passed = slope == 0.0f ? slope : d * slope;  // d may be inf
        if (begin + c == D) {
          store(a.d_r + (row + m) * J + at, passed, n);
        } else {
          float* to = d_x + (m * D + begin + c) * kLanes;
          store(to, load(to) + passed);
        }
      }
    }
  }

  // Of some hidden units and columns the sums over the rows of a tile, whose values are d x and d r.
  template <int wide>
  void by_weight(int64_t i, int64_t begin, int64_t block, const Mask* on, const float* of_rows,
                 int rows) const {
    float* to = sums_of(block) + (i * columns(a) + begin) * kLanes;
    alignas(4 * kLanes) Vector sum[kAtOnce][wide] = {};
    add_masked<kAtOnce, wide>(on + i * kTile, kTile, 1, of_rows + begin * kLanes,
                              columns(a) * kLanes, rows, sum);
    for (int m = 0; m < kAtOnce; ++m)
      for (int c = 0; c < wide; ++c) {
        float* total = to + (m * columns(a) + c) * kLanes;
        store(total, load(total) + sum[m][c]);
      }
  }

  void tile(int64_t row, int rows, int64_t block, Mask* on, float* of_rows, float* d_x) const {
    const int64_t J = a.units, at = block * kLanes, D = a.inputs;
    const int n = a.lanes(block);
    for (int m = 0; m < rows; m += kRows)
      with_count<kRows>(std::min(kRows, rows - m), [&](auto known) {
        mask<decltype(known)::value>(row + m, block, on + m);
      });
    float* to = of_rows;
    for (int m = 0; m < rows; ++m) {
      const Vector d = load(a.d + (row + m) * J + at, n);
      const float* x = a.x + (row + m) * D;
      for (int64_t c = 0; c < D; ++c, to += kLanes) store(to, d * x[c]);
      store(to, d * load(a.r + (row + m) * J + at, n)), to += kLanes;
    }
    each_columns(a.d_x == nullptr ? D : 0, [&](int64_t begin, auto wide) {
      for (int m = 0; m < rows; m += kAtOnce)
        with_count<kAtOnce>(std::min(kAtOnce, rows - m), [&](auto count) {
          by_row<decltype(count)::value, decltype(wide)::value>(row + m, begin, block, on + m,
                                                                d_x + m * D * kLanes);
        });
    });
    each_columns(0, [&](int64_t begin, auto wide) {
      for (int64_t i = 0; i < hidden(a); i += kAtOnce)
        by_weight<decltype(wide)::value>(i, begin, block, on, of_rows, rows);
    });
  }

  void run(Range rows, int64_t n) const {
    float *of_rows = values + n * of_values(a), *d_x = d_xs + n * of_d_x(a);
    Mask* on = reinterpret_cast<Mask*>(reinterpret_cast<float*>(masks) + n * of_masks(a));
    const Range blocks = part(a.blocks(), n, parts(a));
    if (a.d_x != nullptr) std::fill_n(d_x, (rows.end - rows.begin) * a.inputs * kLanes, 0.0f);
    for (int64_t block = blocks.begin; block < blocks.end; ++block)
      for (int64_t row = rows.begin; row < rows.end; row += kTile)
        tile(row, int(std::min<int64_t>(kTile, rows.end - row)), block, on, of_rows,
             d_x + (row - rows.begin) * a.inputs * kLanes);
  }

  // Numbers of d_x, of all units; the first row of d_xs is `first`.
  void add_up(int64_t first, Range numbers) const {
    for (int64_t i = numbers.begin; i < numbers.end; ++i) {
      Vector sum = load(d_xs + i * kLanes);
      for (int64_t n = 1; n < parts(a); ++n) sum += load(d_xs + n * of_d_x(a) + i * kLanes);
      a.d_x[first * a.inputs + i] = ::total(sum);
    }
  }

  void unpack(int64_t block) const {
    const int64_t D = a.inputs, J = a.units, at = block * kLanes;
    const int n = a.lanes(block);
    const float* from = sums_of(block);
    for (int64_t i = 0; i < a.hidden; ++i) {
      const Vector out = load(weights.out(block) + i * kLanes);
      for (int64_t c = 0; c < D; ++c, from += kLanes)
        store(a.d_first + (i * D + c) * J + at, out * load(from), n);
      store(a.d_on_r + i * J + at, out * load(from), n), from += kLanes;
      store(a.d_out + i * J + at, load(out_sums_of(block) + i * kLanes), n);
    }
  }

  void run(const XLA_FFI_CallFrame* frame, int of_pool) const {
    const int threads = a.threads(of_pool), count = int(parts(a));
    for (int64_t block = 0; block < a.blocks(); ++block) pack(block);
    for (int64_t row = 0; row < a.rows; row += chunk(a)) {
      const Range rows{row, std::min(a.rows, row + chunk(a))};
      in_parts(frame, std::min(threads, count), count, [&](int n, int) { run(rows, n); });
      if (a.d_x == nullptr) continue;
      in_parts(frame, threads, threads, [&](int n, int parts) {
        add_up(row, part((rows.end - rows.begin) * a.inputs, n, parts));
      });
    }
    for (int64_t block = 0; block < a.blocks(); ++block) unpack(block);
  }
};

// ---------------------------------------------------------------------------------------
// What XLA calls
// ---------------------------------------------------------------------------------------

Pass arguments(Reader& read) {
  Pass a{};
  a.rows = read.dims()[0], a.inputs = read.dims()[1];
  a.x = read.in();
  a.r = read.in();
  a.hidden = read.dims()[0], a.units = read.dims()[2];
  a.first = read.in();
  a.on_r = read.in();
  a.out = read.in();
  return a;
}

void forward(const XLA_FFI_CallFrame* frame) {
  Reader read(frame);
  Pass a = arguments(read);
  a.total = read.out();
  const Scratch scratch(a.blocks() * Weights{a, nullptr}.size());
  Forward{a, {a, scratch.data()}}.run(frame, threads_of(frame, read));
}

void backward(const XLA_FFI_CallFrame* frame) {
  Reader read(frame);
  Pass a = arguments(read);
  a.d = read.in();
  if (read.attribute("of_x")) a.d_x = read.out();
  a.d_r = read.out();
  a.d_first = read.out();
  a.d_on_r = read.out();
  a.d_out = read.out();
  const Scratch scratch(Backward::size(a));
  Backward(a, scratch.data()).run(frame, threads_of(frame, read));
}

}  // namespace

extern "C" XLA_FFI_Error* rg_forward(XLA_FFI_CallFrame* frame) {
  return answer(frame, forward);
}

extern "C" XLA_FFI_Error* rg_backward(XLA_FFI_CallFrame* frame) {
  return answer(frame, backward);
}
