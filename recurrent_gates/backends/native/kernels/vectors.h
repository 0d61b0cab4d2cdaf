// Vectors of as many floats as the processor has lanes, and the functions of them that cells take.
//
// Headers' names are a library's own: several libraries are loaded beside each other.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
// Sums of a block that stay in registers beside the weights and a number of x: with as many as 3 by
// 4 of 16, some are written to memory at every step, which then takes twice as long as 6 by 2 does.
constexpr int kAccumulators = kRegisters / 4 * 3;
// Vectors of a row in a block of the backward products: kPanel, or with kFewOfBlock rows or fewer
// kPanelOfFew, since each of fewer sums would wait for its own last addition.
constexpr int kPanel = kRegisters / 8, kFewOfBlock = 2, kPanelOfFew = 4;

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vector zero() { return Vector{} * 0.0f; }
inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// The first n numbers alone, where a row ends within a vector.
// A whole vector takes no mask: a masked store costs several times a plain one, even of all of it.
#if defined(__AVX512F__)
inline Vector load(const float* p, int n) {
  if (n == kLanes) return load(p);
  return (Vector)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
inline void store(float* p, Vector v, int n) {
  if (n == kLanes) return store(p, v);
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
}
#else
inline Vector load(const float* p, int n) {
  if (n == kLanes) return load(p);
#if defined(__AVX__)
  constexpr int32_t kMask[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1};
  const auto* mask = reinterpret_cast<const __m256i*>(kMask + kLanes - n);
  return (Vector)_mm256_maskload_ps(p, _mm256_loadu_si256(mask));
#else
  float part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(float));
  return load(part);
#endif
}
inline void store(float* p, Vector v, int n) {
  if (n == kLanes) return store(p, v);
  float part[kLanes];
  store(part, v);
  std::memcpy(p, part, n * sizeof(float));
}
#endif

// The sum of its numbers.
inline float total(Vector v) {
  float sum = 0.0f;
#pragma GCC unroll 16
  for (int n = 0; n < kLanes; ++n) sum += v[n];
  return sum;
}

// Two vectors, of which the second is computed while the first waits for its results: a function
// of one alone is a chain of operations, each of which takes several cycles.
struct Pair {
  Vector a, b;
};
inline Pair operator-(Pair x) { return {-x.a, -x.b}; }
#define RG_OPERATOR(op)                                                          \
  inline Pair operator op(Pair x, Pair y) { return {x.a op y.a, x.b op y.b}; }   \
  inline Pair operator op(Pair x, float y) { return {x.a op y, x.b op y}; }      \
  inline Pair operator op(float x, Pair y) { return {x op y.a, x op y.b}; }      \
  inline Pair operator op(Pair x, Vector y) { return {x.a op y, x.b op y}; }     \
  inline Pair operator op(Vector x, Pair y) { return {x op y.a, x op y.b}; }
RG_OPERATOR(+)
RG_OPERATOR(-)
RG_OPERATOR(*)
RG_OPERATOR(/)
#undef RG_OPERATOR

// A vector of one row, or a pair of two that lie some way apart.
template <typename V>
inline V load_rows(const float* p, int64_t apart, int n) {
  if constexpr (sizeof(V) == sizeof(Pair)) {
    return {load(p, n), load(p + apart, n)};
  } else {
    return load(p, n);
  }
}
inline void store_rows(float* p, int64_t, Vector v, int n) {
  store(p, v, n);
}
inline void store_rows(float* p, int64_t apart, Pair v, int n) {
  store(p, v.a, n);
  store(p + apart, v.b, n);
}

// What the functions below are made of, of a vector or a pair. NaN stays: of two operands one of
// which is NaN the processor's own minimum and maximum are the second.
#if defined(__AVX512F__)
inline Vector at_most(Vector x, float most) {
  return (Vector)_mm512_min_ps(_mm512_set1_ps(most), (__m512)x);
}
inline Vector at_least(Vector x, float least) {
  return (Vector)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
}
#elif defined(__AVX__)
inline Vector at_most(Vector x, float most) {
  return (Vector)_mm256_min_ps(_mm256_set1_ps(most), (__m256)x);
}
inline Vector at_least(Vector x, float least) {
  return (Vector)_mm256_max_ps(_mm256_set1_ps(least), (__m256)x);
}
#else
inline Vector at_most(Vector x, float most) { return x > most ? zero() + most : x; }
inline Vector at_least(Vector x, float least) { return x < least ? zero() + least : x; }
#endif
// x times 2^n, for whole numbers n from -126 to 127.
#if defined(__AVX512F__)
inline Vector times_power_of_two(Vector x, Vector n) {
  return (Vector)_mm512_scalef_ps((__m512)x, (__m512)n);
}
#else
inline Vector times_power_of_two(Vector x, Vector n) {
  return x * (Vector)((__builtin_convertvector(n, Ints) + 127) << 23);
}
#endif
// -x where the last bit of `bits` is set.
inline Vector negative_where_odd(Vector x, Vector bits) {
  return (Vector)((Ints)x ^ ((Ints)bits << 31));
}
inline Pair at_most(Pair x, float most) { return {at_most(x.a, most), at_most(x.b, most)}; }
inline Pair at_least(Pair x, float least) { return {at_least(x.a, least), at_least(x.b, least)}; }
inline Pair times_power_of_two(Pair x, Pair n) {
  return {times_power_of_two(x.a, n.a), times_power_of_two(x.b, n.b)};
}
inline Pair negative_where_odd(Pair x, Pair bits) {
  return {negative_where_odd(x.a, bits.a), negative_where_odd(x.b, bits.b)};
}

// The sum of c[n] x^n.
template <typename V, int count>
inline V polynomial(const float (&c)[count], V x) {
  V sum = x * c[count - 1] + c[count - 2];
#pragma GCC unroll 8
  for (int n = count - 3; n >= 0; --n) sum = sum * x + c[n];
  return sum;
}

// kShift + x is kShift + the nearest whole number, and its last bit whether that is odd; for
// |x| < 2^22.
constexpr float kShift = 12582912.0f;  // 1.5 * 2^23

// e^x to 2e-7, by 2^n times a polynomial of the rest.
template <typename V>
inline V exponential(V x) {
  x = at_least(at_most(x, 88.0f), -87.0f);
  const V n = (x * 1.44269504f + kShift) - kShift;
  const V f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  const float rest[] = {0.5f, 0.166666657f, 4.16667e-2f, 8.33330e-3f, 1.39316e-3f};
  const V p = polynomial(rest, f) * f * f + f + 1.0f;
  return times_power_of_two(p, n);
}

template <typename V>
inline V sigmoid(V x) {
  return 1.0f / (1.0f + exponential(-x));
}

// tanh to 4e-7 of its value, x P(x^2) / Q(x^2): minimax on [-9, 9], but for Q's last coefficient,
// which is lowered until the quotient is 1 + 2.7e-7 at 9. So it is 1 exactly from there on, however
// it is rounded, and leaves no gradient, however large what that is multiplied by.
template <typename V>
inline V hyperbolic_tangent(V unbounded) {
  const V x = at_least(at_most(unbounded, 9.0f), -9.0f), z = x * x;
  const float above[] = {1.0f,           0.13680857f,     3.8695093e-03f,
                         2.8031338e-05f, 3.0642589e-08f, -1.2246287e-11f};
  const float below[] = {1.0f, 0.47014189f, 2.7250161e-02f, 3.9407157e-04f, 1.2890336e-06f};
  return at_least(at_most(x * polynomial(above, z) / polynomial(below, z), 1.0f), -1.0f);
}

}  // namespace

// Whether the compiler adds up in the order that is written, on which exponential rests.
extern "C" int rg_adds_in_order() {
  volatile float x = 0.7f;
  return (x + kShift) - kShift == 1.0f;
}
