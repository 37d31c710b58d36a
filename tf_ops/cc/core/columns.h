// Loops over the columns of a row. Their bits do not depend on how wide the
// machine's registers are.
#ifndef TF_BASIS_CORE_COLUMNS_H_
#define TF_BASIS_CORE_COLUMNS_H_

#include <algorithm>
#include <cstdint>
#include <limits>

namespace tf_basis {

// The sum of term(j) over [0, count) in float64. The lanes are added in one
// fixed order, so that the compiler can use wide registers and the bits stay
// the same.
template <typename Term>
double LaneSum(int64_t count, const Term& term) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(j + lane);
  }
  for (; j < count; ++j) lanes[j % kLanes] += term(j);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

inline double SquaredNorm(const float* x, int64_t count) {
  return LaneSum(count,
                 [x](int64_t j) { return static_cast<double>(x[j]) * x[j]; });
}

// Squares and what is made of them stop here, lest large gradients make second
// moments infinite, which no later step would undo. NaN stays NaN.
constexpr float kLargest = std::numeric_limits<float>::max();

template <typename T>
T Saturated(T x) {
  return std::min<T>(x, kLargest);
}

inline void Saturate(float* x, int64_t count) {
  for (int64_t j = 0; j < count; ++j) x[j] = Saturated(x[j]);
}

inline void Scale(float* x, double factor, int64_t count) {
  const float f = static_cast<float>(factor);
  for (int64_t j = 0; j < count; ++j) x[j] *= f;
}

// moment <- keep * moment + take * x
inline void Take(float* moment, double keep, double take, const float* x,
                 int64_t count) {
  const float a = static_cast<float>(keep), b = static_cast<float>(take);
  for (int64_t j = 0; j < count; ++j) moment[j] = a * moment[j] + b * x[j];
}

// moment <- keep * moment + take * x^2
inline void TakeSquare(float* moment, double keep, double take, const float* x,
                       int64_t count) {
  const float a = static_cast<float>(keep), b = static_cast<float>(take);
  for (int64_t j = 0; j < count; ++j) {
    moment[j] = a * moment[j] + b * Saturated(x[j] * x[j]);
  }
}

// base ** exponent by squaring: exact for 1, and far cheaper than std::pow.
inline double IntegerPower(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_COLUMNS_H_
