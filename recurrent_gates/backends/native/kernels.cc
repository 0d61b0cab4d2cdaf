// The loops over time of gated recurrences in float32, as two functions that XLA calls on a CPU.
//
// forward:  pre = z + bias + U h_tm1 by slot, then the next (c, h) from them, in registers: a block
//           of a few examples and of one vector of units holds all its slots while it sums over F.
// backward: the cotangents of the pre-activations of a step from those of its (c, h), unit by unit,
//           then that of h_tm1, a product with the transposed weights. The weights' own gradients
//           are formed outside, of all steps at once.
//
// Weights are packed once a call, in the order in which they are read. Threads share the batch, and
// then never wait for each other, or the units, and then do at every step; see `split`.
// Everything is [T, B, F]: time, batch, features.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>

#include "xla/ffi/api/c_api.h"

namespace {

// ---------------------------------------------------------------------------------------
// Vectors
// ---------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kAccumulators = 12;
#else
constexpr int kLanes = 4, kAccumulators = 12;
#endif
constexpr int kPanel = 4;  // vectors of h_tm1 that one block of the backward product forms

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vector zero() { return Vector{} * 0.0f; }
inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// The first n numbers alone, where a row ends within a vector.
inline Vector load(const float* p, int n) {
  if (n == kLanes) return load(p);
  float part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(float));
  return load(part);
}
inline void store(float* p, Vector v, int n) {
  if (n == kLanes) return store(p, v);
  float part[kLanes];
  store(part, v);
  std::memcpy(p, part, n * sizeof(float));
}

// e^x to 2e-7, by 2^n times a polynomial of the rest; NaN stays.
inline Vector exponential(Vector x) {
  x = x > 88.0f ? zero() + 88.0f : x;
  x = x < -87.0f ? zero() - 87.0f : x;
  const Vector shift = zero() + 12582912.0f;  // 1.5 * 2^23 rounds to whole numbers
  const Vector n = (x * 1.44269504f + shift) - shift;
  const Vector f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vector p = zero() + 1.39316e-3f;
  p = p * f + 8.33330e-3f;
  p = p * f + 4.16667e-2f;
  p = p * f + 0.166666657f;
  p = p * f + 0.5f;
  p = p * f * f + f + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Vector)exponent;
}

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

// tanh to 2e-7 of its value, x P(x^2) / Q(x^2): minimax on [-9, 9]. Beyond it is 1 exactly, so that
// no gradient is left, however large what it is multiplied by; NaN stays.
inline Vector hyperbolic_tangent(Vector x) {
  const Vector one = zero() + 1.0f;
  const Vector unbounded = x;
  x = x > 9.0f ? zero() + 9.0f : x;
  x = x < -9.0f ? zero() - 9.0f : x;
  const Vector z = x * x;
  Vector p = zero() - 1.2246287e-11f;
  p = p * z + 3.0642589e-08f;
  p = p * z + 2.8031338e-05f;
  p = p * z + 3.8695093e-03f;
  p = p * z + 0.13680857f;
  p = p * z + 1.0f;
  Vector q = zero() + 1.2890370e-06f;
  q = q * z + 3.9407157e-04f;
  q = q * z + 2.7250161e-02f;
  q = q * z + 0.47014189f;
  q = q * z + 1.0f;
  Vector y = x * p / q;
  y = y > one ? one : y;
  y = y < -one ? -one : y;
  y = unbounded >= 9.0f ? one : y;
  return unbounded <= -9.0f ? -one : y;
}

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
// Threads
// ---------------------------------------------------------------------------------------

struct Range {
  int64_t begin, end;
};

Range part(int64_t count, int64_t rank, int64_t parts) {
  return {count * rank / parts, count * (rank + 1) / parts};
}

// What runs on XLA's threads. A task that starts late finds the job alive, and nothing left to do.
class Job {
 public:
  virtual ~Job() = default;
  virtual void help() = 0;

  static void task(void* data) {
    std::unique_ptr<std::shared_ptr<Job>> job(static_cast<std::shared_ptr<Job>*>(data));
    (*job)->help();
  }
  static void schedule(const XLA_FFI_CallFrame* frame, std::shared_ptr<Job> job) {
    auto* data = new std::shared_ptr<Job>(std::move(job));
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    args.task = &Job::task;
    args.data = data;
    scheduling() = true;
    if (frame->api->XLA_FFI_ThreadPool_Schedule(&args) != nullptr) delete data;
    scheduling() = false;
  }

 protected:
  // Whether this thread is handing over a task: a pool whose queue is full runs it there and then.
  static bool& scheduling() {
    static thread_local bool now = false;
    return now;
  }
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <typename Done>
void wait(Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < 4096) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Parts that do not wait for each other: whoever comes takes the next.
template <typename Run>
class Parts : public Job {
 public:
  Parts(int parts, Run run) : parts_(parts), run_(run) {}
  void help() override {
    for (int n; (n = next_.fetch_add(1)) < parts_;) {
      run_(n, parts_);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  void wait_for_all() {
    wait([this] { return done_.load(std::memory_order_acquire) == parts_; });
  }

 private:
  const int parts_;
  Run run_;  // of part 1 of 2, ...; what it refers to outlives wait_for_all
  std::atomic<int> next_{0}, done_{0};
};

template <typename Run>
void in_parts(const XLA_FFI_CallFrame* frame, int threads, int parts, Run run) {
  auto job = std::make_shared<Parts<Run>>(parts, run);
  for (int n = 1; n < threads; ++n) Job::schedule(frame, job);
  job->help();
  job->wait_for_all();
}

// Threads that share each step, and wait for each other after it. One that comes late is let in at
// the next step; nobody waits for one that XLA has no thread for.
template <typename Run>
class Team : public Job {
 public:
  Team(int64_t steps, Run run) : steps_(steps), run_(run) {}
  void help() override {
    if (scheduling()) return;  // it would wait for its own leader
    const int rank = asked_.fetch_add(1);
    uint64_t state = 0;
    wait([&] {
      state = state_.load(std::memory_order_acquire);
      return size_of(state) > rank || turn_of(state) >= steps_;
    });
    while (turn_of(state) < steps_) {
      run_(turn_of(state), rank, size_of(state));
      arrived_.fetch_add(1, std::memory_order_release);
      const uint64_t before = state;
      wait([&] { return (state = state_.load(std::memory_order_acquire)) != before; });
    }
  }
  void lead() {
    for (int64_t turn = 0, size = 1; turn < steps_;) {
      run_(turn, 0, int(size));
      wait([&] { return arrived_.load(std::memory_order_acquire) == size - 1; });
      arrived_.store(0, std::memory_order_relaxed);
      ++turn;
      size = asked_.load(std::memory_order_relaxed);
      state_.store(uint64_t(turn) << 16 | uint64_t(size), std::memory_order_release);
    }
  }

 private:
  static int size_of(uint64_t state) { return state & 0xffff; }
  static int64_t turn_of(uint64_t state) { return state >> 16; }
  const int64_t steps_;
  Run run_;  // of a step; what it refers to is read by members alone, whom the leader waits for
  std::atomic<int> asked_{1}, arrived_{0};
  std::atomic<uint64_t> state_{1};
};

template <typename Run>
void in_team(const XLA_FFI_CallFrame* frame, int threads, int64_t steps, Run run) {
  auto job = std::make_shared<Team<Run>>(steps, run);
  for (int n = 1; n < threads; ++n) Job::schedule(frame, job);
  job->lead();
}

int pool_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{};
  args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  args.num_threads = &threads;
  return frame->api->XLA_FFI_ThreadPool_NumThreads(&args) == nullptr ? int(threads) : 1;
}

// ---------------------------------------------------------------------------------------
// The loops
// ---------------------------------------------------------------------------------------

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
  // Backward: cotangents take the place of z and own, or stand elsewhere.
  const float *scale, *hs_read, *cs_read, *d_hs, *d_cs, *d_c_T, *d_h_T;
  Slot d_z[kMostSlots], d_own;
  float *d_c, *d_h;
  // Gradients of the weights.
  float *d_kernels[kMostSlots], *d_weights[kMostSlots], *d_bias, *d_own_bias;

  int64_t row(int64_t t, int64_t b) const { return t * batch + b; }
  int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
};

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Split { kAlone, kRows, kUnits };

constexpr int64_t kOwnCache = 3 << 18;     // bytes of a core's own cache, for weights
constexpr int64_t kRowsForAll = 48;        // of a thread, from which reading all weights is little
constexpr int64_t kLeastOfStep = 60000;    // multiply-adds, from which a barrier is little
constexpr int64_t kLeastOfCall = 1 << 22;  // multiply-adds, from which waking a thread is little
constexpr int kPartsOfThread = 4;          // of the rows: one thread may come late

// How threads share a loop: rows where all weights fit each one's cache, or where each has many
// rows; else units, where a step is long enough for a barrier.
Split split(const Arrays& a, int slots, int threads) {
  const int64_t weights = slots * a.features * (a.features + a.inputs);
  if (threads < 2 || a.steps * a.batch * weights < kLeastOfCall) return Split::kAlone;
  const bool enough = a.batch >= threads;
  if (enough && (4 * weights <= kOwnCache || a.batch >= threads * kRowsForAll)) return Split::kRows;
  if (a.batch * weights >= kLeastOfStep && a.features >= kLanes * threads) return Split::kUnits;
  return enough ? Split::kRows : Split::kAlone;
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

// Calls with a number of rows that is known at compile time, so that their sums are registers.
template <int most, typename Call>
inline void with_rows(int rows, Call call) {
  if constexpr (most > 0) {
    if (rows == most) {
      call(std::integral_constant<int, most>());
    } else {
      with_rows<most - 1>(rows, call);
    }
  }
}

template <typename Cell>
struct Forward {
  static constexpr int G = Cell::slots;
  // Sums of a block: the slots', and that of the inputs which a reset keeps apart.
  static constexpr int kSums = G + Cell::apart;
  static constexpr int kRows = kAccumulators / kSums;
  const Arrays& a;
  const bool keep;  // the pre-activations, for a backward pass

  static constexpr int sum_of_input(int g) { return Cell::apart && g == G - 1 ? G : g; }

  // [blocks of units][D + F][slots][lanes], zeros past the last unit.
  int64_t block_size() const { return (a.inputs + a.features) * G * kLanes; }
  int64_t blocks() const { return up(a.features, kLanes); }
  void pack(Range blocks) const {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const int64_t at = block * kLanes;
      const int n = std::min<int64_t>(kLanes, a.features - at);
      float* out = a.packed + block * block_size();
      for (int64_t k = 0; k < a.inputs; ++k)
        for (int g = 0; g < G; ++g, out += kLanes)
          store(out, load(a.kernels[g] + k * a.features + at, n));
      for (int64_t k = 0; k < a.features; ++k)
        for (int g = 0; g < G; ++g, out += kLanes)
          store(out, load(a.weights[g] + k * a.features + at, n));
    }
  }

  // sums += x weights, over `count` numbers of each of `rows` rows of x.
  template <int rows, bool input>
  static void multiply(const float* x, int64_t count, const float* weights,
                       Vector (&sums)[rows][kSums]) {
    for (int64_t k = 0; k < count; ++k, weights += G * kLanes) {
      Vector w[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) w[g] = load(weights + g * kLanes);
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) {
        const float x_k = x[m * count + k];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[m][input ? sum_of_input(g) : g] += x_k * w[g];
      }
    }
  }

  template <int rows>
  void block(int64_t t, const float* h_tm1, const float* c_tm1, float* c_t, int64_t b,
             int64_t block) const {
    const int64_t F = a.features, D = a.inputs, at = block * kLanes;
    const int n = std::min<int64_t>(kLanes, F - at);
    Vector sums[rows][kSums];
#pragma GCC unroll 5
    for (int g = 0; g < kSums; ++g) {
      const bool own = Cell::apart && g == G - 1;
      const int slot = g == G ? G - 1 : g;
      const Vector bias = load((own ? a.own_bias : a.bias + slot * F) + at, n);
#pragma GCC unroll 12
      for (int m = 0; m < rows; ++m) {
        sums[m][g] = bias;
        if (D == 0 && !own) sums[m][g] += load(a.z[slot].at(a.row(t, b + m)) + at, n);
      }
    }
    const float* weights = a.packed + block * block_size();
    multiply<rows, true>(a.xs + a.row(t, b) * D, D, weights, sums);
    multiply<rows, false>(h_tm1 + b * F, F, weights + D * G * kLanes, sums);
    for (int m = 0; m < rows; ++m) {
      const int64_t row = a.row(t, b + m), state = (b + m) * F + at;
      Vector c = Cell::has_c ? load(c_tm1 + state, n) : zero(), h_t;
      Cell::forward(sums[m], sums[m][kSums - 1], load(h_tm1 + state, n), c, h_t);
      if (Cell::has_c) store(c_t + state, c, n);
      store(a.hs + row * F + at, h_t, n);
      if (!keep) continue;
      for (int g = 0; g < G; ++g) {
        const int sum = Cell::apart && g == G - 1 ? G : g;
        store(a.z[g].at(row) + at, sums[m][sum], n);
      }
      if (Cell::apart) store(a.own.at(row) + at, sums[m][G - 1], n);
    }
  }

  void step(int64_t step, const Blocks& rows, Range of_rows, Range blocks) const {
    const int64_t t = a.time(step), before = a.time(step - 1);
    const float* h_tm1 = step == 0 ? a.h_0 : a.hs + a.row(before, 0) * a.features;
    const float* c_tm1 = a.c_0;
    float* c_t = a.cs;
    if (Cell::has_c && a.cs_steps == a.steps) c_t = a.cs + a.row(t, 0) * a.features;
    if (Cell::has_c && step != 0) {
      c_tm1 = a.cs_steps == a.steps ? a.cs + a.row(before, 0) * a.features : a.cs;
    }
    for (int64_t n = blocks.begin; n < blocks.end; ++n)
      rows.each(of_rows, [&](int64_t b, int count) {
        with_rows<kRows>(count, [&](auto known) {
          block<decltype(known)::value>(t, h_tm1, c_tm1, c_t, b, n);
        });
      });
  }

  void run(const XLA_FFI_CallFrame* frame, int threads) const {
    const Split how = split(a, G, threads);
    const Blocks rows(a.batch, kRows, how == Split::kRows ? threads : 1);
    const Range all_rows{0, rows.count}, all_blocks{0, blocks()};
    const auto pack_part = [this](int n, int parts) { pack(part(blocks(), n, parts)); };
    switch (how) {
      case Split::kAlone:
        pack(all_blocks);
        for (int64_t s = 0; s < a.steps; ++s) step(s, rows, all_rows, all_blocks);
        break;
      case Split::kRows:
        in_parts(frame, threads, threads, pack_part);
        in_parts(frame, threads, rows.parts(threads), [&](int n, int parts) {
          const Range mine = part(rows.count, n, parts);
          for (int64_t s = 0; s < a.steps; ++s) step(s, rows, mine, all_blocks);
        });
        break;
      case Split::kUnits:
        in_parts(frame, threads, threads, pack_part);
        in_team(frame, threads, a.steps, [&](int64_t s, int rank, int size) {
          step(s, rows, all_rows, part(blocks(), rank, size));
        });
        break;
    }
  }
};

template <typename Cell>
struct Backward {
  static constexpr int G = Cell::slots;
  static constexpr int kRows = kAccumulators / kPanel;
  const Arrays& a;
  const int threads;  // that share the panels

  // Panels of h_tm1's units: [panels][slots][F][width * lanes], zeros past the last unit. They are
  // of about one width, and as many for each thread.
  int64_t vectors() const { return up(a.features, kLanes); }
  int64_t panels() const {
    const int64_t even = up(up(vectors(), kPanel), threads) * threads;
    return std::min(even, vectors());
  }
  Range panel_vectors(int64_t panel) const {
    return part(vectors(), panel, panels());
  }
  float* packed(int64_t panel) const {
    return a.packed + panel_vectors(panel).begin * kLanes * G * a.features;
  }
  void pack(Range panels) const {
    const int64_t F = a.features;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const Range own = panel_vectors(panel);
      const int64_t wide = (own.end - own.begin) * kLanes, at = own.begin * kLanes;
      const int64_t units = std::min<int64_t>(wide, F - at);
      float* out = packed(panel);
      for (int g = 0; g < G; ++g, out += F * wide)
        for (int64_t k0 = 0; k0 < F; k0 += 16) {
          const int64_t k1 = std::min<int64_t>(F, k0 + 16);
          for (int64_t j = 0; j < wide; ++j) {
            const float* row = a.weights[g] + (at + j) * F;
            for (int64_t k = k0; k < k1; ++k) out[k * wide + j] = j < units ? row[k] : 0.0f;
          }
        }
    }
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
          c_tm1 = load(step == 0 ? a.c_0 + state : a.cs_read + a.row(before, b) * F + at, n);
          d_c = load(a.d_c + state, n);
          if (a.d_cs != nullptr) d_c += load(a.d_cs + here, n);
        } else {
          h_tm1 = load(step == 0 ? a.h_0 + state : a.hs_read + a.row(before, b) * F + at, n);
        }
        Cell::backward(pre, z_u, h_tm1, c_tm1, c, d_c, d_h, d_pre, d_z_u);
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
  void block(int64_t t, float scale, int64_t b, int64_t panel) const {
    const int64_t F = a.features, at = panel_vectors(panel).begin * kLanes;
    Vector sum[rows][wide];
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) sum[m][j] = zero();
    const float* weights = packed(panel);
    for (int g = 0; g < G; ++g) {
      const Slot& slot = Cell::apart && g == G - 1 ? a.d_own : a.d_z[g];
      const float* d = slot.at(a.row(t, b));
      for (int64_t k = 0; k < F; ++k, weights += wide * kLanes) {
        Vector u[wide];
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) u[j] = load(weights + j * kLanes);
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
          const float x = d[m * slot.stride + k];
#pragma GCC unroll 4
          for (int j = 0; j < wide; ++j) sum[m][j] += x * u[j];
        }
      }
    }
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) {
        const int n = std::min<int64_t>(kLanes, F - at - j * kLanes);
        float* out = a.d_h + (b + m) * F + at + j * kLanes;
        store(out, scale * (load(out, n) + sum[m][j]), n);
      }
  }

  template <int wide>
  void rows_of(int64_t t, float scale, const Blocks& rows, Range of_rows, int64_t panel) const {
    rows.each(of_rows, [&](int64_t b, int count) {
      with_rows<kRows>(count, [&](auto known) {
        block<decltype(known)::value, wide>(t, scale, b, panel);
      });
    });
  }

  void product(int64_t step, const Blocks& rows, Range of_rows, Range panels) const {
    const Range all = rows.range(of_rows);
    const int64_t t = a.time(step);
    const float scale = a.scale[t];
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const Range own = panel_vectors(panel);
      if (scale == 0.0f) {  // h-detach: nothing reaches h_tm1
        const int64_t at = own.begin * kLanes;
        const int64_t n = std::min(own.end * kLanes, a.features) - at;
        for (int64_t b = all.begin; b < all.end; ++b)
          std::fill_n(a.d_h + b * a.features + at, n, 0.0f);
        continue;
      }
      switch (own.end - own.begin) {
        case 1: rows_of<1>(t, scale, rows, of_rows, panel); break;
        case 2: rows_of<2>(t, scale, rows, of_rows, panel); break;
        case 3: rows_of<3>(t, scale, rows, of_rows, panel); break;
        case 4: rows_of<4>(t, scale, rows, of_rows, panel); break;
      }
    }
  }

  static void run(const XLA_FFI_CallFrame* frame, const Arrays& a, int threads) {
    const Split how = split(a, G, threads);
    Backward{a, how == Split::kUnits ? threads : 1}.run(frame, how, threads);
  }
  void run(const XLA_FFI_CallFrame* frame, Split how, int threads) const {
    const int64_t state = a.batch * a.features;
    std::copy_n(a.d_h_T, state, a.d_h);
    if (Cell::has_c) std::copy_n(a.d_c_T, state, a.d_c);
    const Blocks rows(a.batch, kRows, how == Split::kRows ? threads : 1);
    const Range all_rows{0, rows.count}, all_panels{0, panels()}, all_units{0, vectors()};
    const auto pack_part = [this](int n, int parts) { pack(part(panels(), n, parts)); };
    const auto rows_alone = [&](Range mine) {
      for (int64_t s = a.steps - 1; s >= 0; --s) {
        units(s, rows, mine, all_units);
        product(s, rows, mine, all_panels);
      }
    };
    switch (how) {
      case Split::kAlone:
        pack(all_panels);
        rows_alone(all_rows);
        break;
      case Split::kRows:
        in_parts(frame, threads, threads, pack_part);
        in_parts(frame, threads, rows.parts(threads),
                 [&](int n, int parts) { rows_alone(part(rows.count, n, parts)); });
        break;
      case Split::kUnits:
        in_parts(frame, threads, threads, pack_part);
        // A turn is the product of the step before and the units of the next: those who meet after
        // it have all cotangents of a step.
        in_team(frame, threads, a.steps + 1, [&](int64_t turn, int rank, int size) {
          const Range mine = part(panels(), rank, size);
          const int64_t s = a.steps - 1 - turn;
          if (turn > 0) product(s + 1, rows, all_rows, mine);
          if (s < 0) return;
          const int64_t end = panel_vectors(mine.end).begin;
          units(s, rows, all_rows, {panel_vectors(mine.begin).begin, end});
        });
        break;
    }
  }
};

// The gradients of the weights: sums over all rows (t, b) of an input's or h_tm1's numbers times
// cotangents. A tile of kRows by kPanel vectors is summed in registers over kChunk rows.
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
              g == G ? a.d_own_bias : a.d_bias + g * a.features, own.begin * kLanes,
              int(own.end - own.begin)};
    return c;
  }
  int64_t blocks(int64_t width) const { return up(width, kRows); }
  int64_t packed_size() const {  // of a thread
    return kChunk * ((blocks(a.inputs) + blocks(a.features)) * kRows + kPanel * kLanes);
  }

  const float* h_tm1(int64_t row) const {
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
      for (int64_t m = k; m < std::min(width, k + kRows); ++m)
        for (int j = 0; j < wide; ++j) __builtin_prefetch(out + m * F + at + j * kLanes, 1);
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
    float* d = hs + kChunk * blocks(a.features) * kRows;
    for (int64_t begin = 0; begin < all; begin += kChunk) {
      const Range rows{begin, std::min(all, begin + kChunk)};
      pack(packed, a.inputs, rows, [this](int64_t n) { return a.xs + n * a.inputs; });
      pack(hs, a.features, rows, [this](int64_t n) { return h_tm1(n); });
      for (int64_t n = mine.begin; n < mine.end; ++n) {
        const Columns c = column(n);
        switch (c.wide) {
          case 1: chunk<1>(c, rows, packed, hs, d); break;
          case 2: chunk<2>(c, rows, packed, hs, d); break;
          case 3: chunk<3>(c, rows, packed, hs, d); break;
          case 4: chunk<4>(c, rows, packed, hs, d); break;
        }
      }
    }
  }

  void run(const XLA_FFI_CallFrame* frame, int threads) const {
    const int64_t work = a.steps * a.batch * G * a.features * (a.features + a.inputs);
    const int most = work < kLeastOfCall ? 1 : int(std::min<int64_t>(threads, columns()));
    in_parts(frame, most, most, [this](int n, int parts) {
      run_columns(part(columns(), n, parts), a.packed + n * packed_size());
    });
  }
};

// ---------------------------------------------------------------------------------------
// What XLA calls
// ---------------------------------------------------------------------------------------

// Reads a call's arrays one after the other, as backend.py lists them.
class Reader {
 public:
  explicit Reader(const XLA_FFI_CallFrame* frame) : frame_(frame) {}
  const int64_t* dims() const { return argument(argument_).dims; }  // of what is read next
  float* in() { return static_cast<float*>(argument(argument_++).data); }
  const int64_t* result_dims() const { return result(result_).dims; }
  float* out() { return static_cast<float*>(result(result_++).data); }
  int64_t attribute(const char* name) const {
    for (int64_t n = 0; n < frame_->attrs.size; ++n) {
      const XLA_FFI_ByteSpan& span = *frame_->attrs.names[n];
      if (span.len == std::strlen(name) && std::memcmp(span.ptr, name, span.len) == 0)
        return *static_cast<int64_t*>(static_cast<XLA_FFI_Scalar*>(frame_->attrs.attrs[n])->value);
    }
    std::abort();  // backend.py gives them all
  }

 private:
  const XLA_FFI_Buffer& argument(int64_t n) const {
    return *static_cast<XLA_FFI_Buffer*>(frame_->args.args[n]);
  }
  const XLA_FFI_Buffer& result(int64_t n) const {
    return *static_cast<XLA_FFI_Buffer*>(frame_->rets.rets[n]);
  }
  const XLA_FFI_CallFrame* frame_;
  int64_t argument_ = 0, result_ = 0;
};

int threads_of(const XLA_FFI_CallFrame* frame, const Reader& read) {
  return std::min<int64_t>(read.attribute("threads"), pool_threads(frame));
}

// All slots side by side, [T, B, slots * F].
template <typename Cell>
void set_slots(Slot* slots, float* data, int64_t features) {
  for (int g = 0; g < Cell::slots; ++g) slots[g] = {data + g * features, Cell::slots * features};
}

template <typename Cell>
void forward(const XLA_FFI_CallFrame* frame) {
  constexpr int G = Cell::slots;
  Arrays a{};
  Reader read(frame);
  const bool keep = read.attribute("keep");
  a.steps = read.dims()[0], a.batch = read.dims()[1];
  a.reverse = read.attribute("reverse");
  float* z = nullptr;
  if (read.attribute("project")) {
    a.inputs = read.dims()[2];
    a.xs = read.in();
    for (int g = 0; g < G; ++g) a.kernels[g] = read.in();
  } else {
    z = read.in();
  }
  a.bias = read.in();
  if (Cell::apart) a.own_bias = read.in();
  for (int g = 0; g < G; ++g) a.weights[g] = read.in();
  if (Cell::has_c) a.c_0 = read.in();
  a.features = read.dims()[1];
  a.h_0 = read.in();
  if (keep) {
    float* kept = read.out();
    if (z != nullptr && z != kept)  // XLA has made a copy, though not here
      std::copy_n(z, a.steps * a.batch * G * a.features, kept);
    z = kept;
    if (Cell::apart) a.own = {read.out(), a.features};
  }
  set_slots<Cell>(a.z, z, a.features);
  a.hs = read.out();
  if (Cell::has_c) {
    a.cs_steps = read.result_dims()[0];
    a.cs = read.out();
  }
  a.packed = read.out();
  Forward<Cell>{a, keep}.run(frame, threads_of(frame, read));
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
  a.scale = read.in();
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
  set_slots<Cell>(a.d_z, read.out(), a.features);
  if (Cell::apart) a.d_own = {read.out(), a.features};
  if (Cell::has_c) a.d_c = read.out();
  a.d_h = read.out();
  a.packed = read.out();
  Backward<Cell>::run(frame, a, threads_of(frame, read));
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
  for (int g = 0; g < G; ++g) a.d_kernels[g] = read.out();
  for (int g = 0; g < G; ++g) a.d_weights[g] = read.out();
  a.d_bias = read.out();
  if (Cell::apart) a.d_own_bias = read.out();
  a.packed = read.out();
  Gradients<Cell>{a}.run(frame, threads_of(frame, read));
}

// XLA asks once for the version of the interface.
bool answers_metadata(XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;  // whose type has had two names
  if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata =
      reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

}  // namespace

// A library holds one cell, RG_CELL: all of them would take six times as long to compile.
extern "C" XLA_FFI_Error* rg_forward(XLA_FFI_CallFrame* frame) {
  if (!answers_metadata(frame)) forward<RG_CELL>(frame);
  return nullptr;
}

extern "C" XLA_FFI_Error* rg_backward(XLA_FFI_CallFrame* frame) {
  if (!answers_metadata(frame)) backward<RG_CELL>(frame);
  return nullptr;
}

extern "C" XLA_FFI_Error* rg_gradients(XLA_FFI_CallFrame* frame) {
  if (!answers_metadata(frame)) gradients<RG_CELL>(frame);
  return nullptr;
}
