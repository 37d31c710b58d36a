// Random choices, threads and digests for what exercises the core.
#ifndef TF_BASIS_TESTS_CC_SOURCE_H_
#define TF_BASIS_TESTS_CC_SOURCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/parallel.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace tf_basis {
namespace exercise {

// Choices made by the bytes given (a fuzzer's) and, after their end, by what
// a generator makes of them: a few bytes can stand for a large problem.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : next_(data), end_(data + size) {
    for (size_t i = 0; i < size; ++i)
      state_ = (state_ ^ data[i]) * 0x100000001b3;
  }

  uint8_t Byte() {
    if (next_ != end_) return *next_++;
    state_ += 0x9e3779b97f4a7c15;  // SplitMix64
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<uint8_t>(z >> 56);
  }

  template <typename T>
  T Raw() {
    uint8_t bytes[sizeof(T)];
    for (uint8_t& byte : bytes) byte = Byte();
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
  }

  bool Flip() { return Byte() & 1; }

  // In [0, count), count > 0.
  int64_t Below(int64_t count) {
    return static_cast<int64_t>((count <= 256 ? Byte() : Raw<uint64_t>()) %
                                static_cast<uint64_t>(count));
  }

  // Any number, with `wild` any bits; else of many sizes, and 0 at times.
  float Number(bool wild) {
    if (wild && Byte() % 8 == 0) return Raw<float>();
    const int8_t mantissa = static_cast<int8_t>(Byte());
    return std::ldexp(static_cast<float>(mantissa), Byte() % 16 - 12);
  }

  // In [0, 1).
  double Share() { return Byte() / 256.0; }

  std::vector<float> Numbers(int64_t count, bool wild) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = Number(wild);
    return numbers;
  }

  std::vector<uint8_t> Bytes(int64_t count) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = Byte();
    return bytes;
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
  uint64_t state_ = 0xcbf29ce484222325;
};

// What work gave, to compare that of different numbers of threads.
class Digest {
 public:
  template <typename T>
  void Add(const std::vector<T>& values) {
    const char* bytes = reinterpret_cast<const char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) {
      hash_ = (hash_ ^ static_cast<uint8_t>(bytes[i])) * 0x100000001b3;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

inline ParallelFor Serial() {
  return [](int64_t total, int64_t,
            const std::function<void(int64_t, int64_t)>& work) {
    if (total > 0) work(0, total);
  };
}

// As many real threads, however little there is to do.
inline ParallelFor Threads(int64_t count) {
  return [count](int64_t total, int64_t,
                 const std::function<void(int64_t, int64_t)>& work) {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = total * i / count, end = total * (i + 1) / count;
      if (begin < end) threads.emplace_back(work, begin, end);
    }
    for (std::thread& thread : threads) thread.join();
  };
}

}  // namespace exercise
}  // namespace tf_basis

#endif  // TF_BASIS_TESTS_CC_SOURCE_H_
