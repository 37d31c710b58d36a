// One step on a table of more than 2^32 elements, of which only the touched
// pages take memory. Prints what the last rows hold after it, and whether
// anything was written where an index of 32 bits would have pointed.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "core/table_update.h"

namespace {

constexpr int64_t kDim = 17;
constexpr int64_t kRows = (int64_t{1} << 28) + 1000003;

// Zeros that take no memory until they are written.
template <typename T>
T* Zeros(int64_t count) {
  void* memory = mmap(nullptr, static_cast<size_t>(count) * sizeof(T),
                      PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(77);
  }
  return static_cast<T*>(memory);
}

void PrintRow(const char* name, const tf_basis::Rows& rows, int64_t row) {
  std::vector<float> scratch(kDim);
  const float* values = rows.Open(row, scratch.data());
  std::printf(" \"%s\": [", name);
  for (int64_t j = 0; j < kDim; ++j) {
    std::printf("%s%.9g", j > 0 ? ", " : "", static_cast<double>(values[j]));
  }
  std::printf("],");
}

// Elements that `table[int32(row * dim)]` and its like would have written.
int CountStrays(const char* data, int64_t width,
                const std::vector<int64_t>& rows) {
  std::set<int64_t> written;
  for (const int64_t row : rows) {
    for (int64_t j = 0; j < kDim; ++j) written.insert(row * kDim + j);
  }
  int strays = 0;
  const std::vector<char> zero(width);
  for (const int64_t element : written) {
    for (const int bits : {31, 32}) {
      const int64_t wrapped = element & ((int64_t{1} << bits) - 1);
      if (written.count(wrapped) > 0) continue;
      strays +=
          std::memcmp(data + wrapped * width, zero.data(), zero.size()) != 0;
    }
  }
  return strays;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int64_t num_buckets = std::atoll(argv[1]);
  const bool half = std::string(argv[2]) == "bfloat16";
  const tf_basis::Format format =
      half ? tf_basis::Format::kBfloat16 : tf_basis::Format::kFloat32;
  const int64_t width = half ? 2 : 4;

  char* table = Zeros<char>(kRows * kDim * width);
  char* second = Zeros<char>(num_buckets * kDim * width);
  char* first = Zeros<char>(num_buckets * kDim * width);

  tf_basis::TableState state;
  state.dim = kDim;
  state.owners = num_buckets == kRows ? kRows : 0;
  state.first_moment_rows = num_buckets;
  state.table = tf_basis::Rows(table, format, kDim);
  state.second_moment = tf_basis::Rows(second, format, kDim);
  state.first_moment = tf_basis::Rows(first, format, kDim);
  state.bucket_steps = Zeros<int32_t>(num_buckets);
  state.row_scalar =
      tf_basis::Numbers(Zeros<float>(kRows), tf_basis::Format::kFloat32);

  tf_basis::BucketRule rule;
  rule.scalar = tf_basis::RowScalar::kEnergy;
  rule.bias_correction = true;
  rule.learning_rate = 0.125;
  rule.first_keep = 0.75;
  rule.first_take = 0.25;
  rule.second_keep = 0.875;
  rule.second_take = 0.125;
  rule.energy_keep = 0.5;
  rule.energy_take = 0.5;
  rule.epsilon = 1e-3;
  rule.scalar_min = 0.1;
  rule.scalar_max = 10.0;
  rule.step = 1;

  tf_basis::RowMapping mapping{
      kRows, num_buckets, 0,       tf_basis::Hashing::kBalanced,
      5,     nullptr,     nullptr, {}};
  const tf_basis::BucketMap buckets_of(mapping);
  const int64_t past_31 = (int64_t{1} << 31) / kDim + 1;
  const std::vector<int64_t> rows = {3,         past_31,   past_31 * 2 - 1,
                                     kRows - 2, kRows - 1, kRows / 2};
  std::vector<float> gradients;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t j = 0; j < kDim; ++j) {
      gradients.push_back(static_cast<float>(i + 1) * (j - 8) / 16.0f);
    }
  }
  const tf_basis::ParallelFor serial =
      [](int64_t total, int64_t,
         const std::function<void(int64_t, int64_t)>& work) { work(0, total); };
  const tf_basis::RowGroups groups =
      tf_basis::GroupRows(rows.data(), static_cast<int64_t>(rows.size()), kRows,
                          num_buckets, buckets_of, serial);
  tf_basis::UpdateTable(rule, state, groups, gradients.data(),
                        /*two_buckets=*/false, serial);

  std::vector<int64_t> touched;
  std::printf("{\"n_rows\": %lld, \"rows\": [", static_cast<long long>(kRows));
  for (size_t i = 0; i < rows.size(); ++i) {
    int64_t bucket[2];
    buckets_of(rows[i], bucket);
    touched.push_back(bucket[0]);
    std::printf("%s\n{\"row\": %lld, \"bucket\": %lld,", i > 0 ? "," : "",
                static_cast<long long>(rows[i]),
                static_cast<long long>(bucket[0]));
    PrintRow("theta", state.table, rows[i]);
    PrintRow("first_moment", state.first_moment, bucket[0]);
    PrintRow("second_moment", state.second_moment, bucket[0]);
    std::printf(" \"row_energy\": %.9g, \"bucket_steps\": %d}",
                static_cast<double>(state.row_scalar.Read(rows[i])),
                state.bucket_steps[bucket[0]]);
  }
  std::printf("],\n\"strays\": %d}\n", CountStrays(table, width, rows) +
                                           CountStrays(second, width, touched) +
                                           CountStrays(first, width, touched));
  return 0;
}
