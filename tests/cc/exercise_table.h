// A few steps on a small table of any rule, mapping and formats.
#ifndef TF_BASIS_TESTS_CC_EXERCISE_TABLE_H_
#define TF_BASIS_TESTS_CC_EXERCISE_TABLE_H_

#include <set>
#include <vector>

#include "core/table_update.h"
#include "exercise_mapping.h"
#include "source.h"

namespace tf_basis {
namespace exercise {

inline int64_t Width(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kLog8 ? 1 : 2;
}

// A variable of floats in some format; memory of its exact length.
struct Slot {
  Format format = Format::kFloat32;
  std::vector<uint8_t> bytes;

  void Make(Source* source, Format chosen, int64_t count, bool wild,
            bool positive) {
    format = chosen;
    bytes.resize(count * Width(format));
    const RoundingKey key(7, 0, 0, 0);
    const Numbers numbers(bytes.data(), format);
    for (int64_t i = 0; i < count; ++i) {
      float x = source->Number(false);
      numbers.Write(i, positive ? std::fabs(x) : x, key);
    }
    if (wild && source->Flip()) bytes = source->Bytes(count * Width(format));
  }
};

inline Format AnyFormat(Source* source, bool log8 = false) {
  return static_cast<Format>(source->Below(log8 ? 4 : 3));
}

struct Table {
  int64_t dim = 0;
  Mapping mapping;
  BucketRule rule;
  TableState state;
  Slot theta, first, second, scalar;
  std::vector<int32_t> bucket_steps, last_step, row_steps, votes, leader_steps;
  std::vector<int64_t> leader;

  std::vector<int32_t> Counters(Source* source, int64_t count, bool wild,
                                int64_t most) {
    std::vector<int32_t> counters(count);
    for (int32_t& each : counters) {
      each = wild && source->Byte() % 8 == 0
                 ? source->Raw<int32_t>()
                 : static_cast<int32_t>(source->Below(most));
    }
    return counters;
  }
};

inline void MakeRule(Source* source, bool wild, BucketRule* rule) {
  rule->scalar = static_cast<RowScalar>(source->Below(3));
  rule->scalar_rule = static_cast<ScalarRule>(source->Below(3));
  rule->reduce = static_cast<CollisionReduce>(source->Below(3));
  rule->bias_correction = source->Flip();
  rule->nesterov = source->Flip();
  rule->learning_rate = source->Share();
  rule->first_keep = source->Share();
  rule->first_take = 1 - rule->first_keep;
  rule->second_keep = source->Share();
  rule->second_take = source->Flip() ? 1.0 : 1 - rule->second_keep;
  rule->energy_keep = source->Share();
  rule->energy_take = 1 - rule->energy_keep;
  rule->epsilon = 1e-6 + source->Share();
  rule->weight_decay = source->Flip() ? 0 : source->Share();
  rule->row_clipnorm = source->Flip() ? 0 : source->Share();
  rule->scalar_min = 0.1;
  rule->scalar_max = 10;
  rule->scalar_learning_rate = source->Share();
  rule->frequency_power = source->Share();
  rule->step = 40;
  rule->seed = source->Raw<uint32_t>();
  if (!wild) return;
  double* const numbers[] = {
      &rule->learning_rate,        &rule->first_keep,     &rule->first_take,
      &rule->second_keep,          &rule->second_take,    &rule->energy_keep,
      &rule->energy_take,          &rule->epsilon,        &rule->weight_decay,
      &rule->row_clipnorm,         &rule->scalar_min,     &rule->scalar_max,
      &rule->scalar_learning_rate, &rule->frequency_power};
  for (double* number : numbers) {
    if (source->Byte() % 16 == 0) *number = source->Raw<double>();
  }
  if (source->Flip()) rule->step = source->Raw<int64_t>();
}

// What the kernel lets pass, and nothing else.
inline void MakeTable(Source* source, bool wild, Table* table) {
  const int64_t n_rows = 1 + source->Below(source->Flip() ? 8 : 300);
  const int64_t dim = table->dim = 1 + source->Below(source->Flip() ? 4 : 40);
  SmallMapping(source, n_rows, &table->mapping);
  const RowMapping& mapping = table->mapping.rows;
  CHECK(SizesError(mapping).empty());
  CHECK(mapping.owner_rows == nullptr || OwnersError(mapping).empty());
  const int64_t buckets = mapping.num_buckets, owners = mapping.owners();
  BucketRule& rule = table->rule;
  MakeRule(source, wild, &rule);
  const int64_t momentum = source->Below(3);  // exclusive, shared, none
  const bool led = source->Flip() && owners == 0 && momentum != 1 &&
                   mapping.hashing != Hashing::kDouble &&
                   rule.scalar != RowScalar::kLearned;
  TableState& state = table->state;
  state.dim = dim;
  state.owners = owners;
  state.first_moment_rows = momentum == 0   ? (led ? buckets : owners)
                            : momentum == 1 ? buckets
                                            : 0;
  const auto rows = [&](Slot* slot, int64_t count, bool positive) {
    slot->Make(source, AnyFormat(source), count * dim, wild, positive);
    return Rows(slot->bytes.data(), slot->format, dim);
  };
  state.table = rows(&table->theta, n_rows, false);
  if (state.first_moment_rows > 0) {
    state.first_moment = rows(&table->first, state.first_moment_rows, false);
  }
  const bool energy = rule.scalar == RowScalar::kEnergy;
  if (energy || source->Flip()) {
    state.second_moment = rows(&table->second, buckets, true);
  }
  if (rule.scalar != RowScalar::kNone) {
    table->scalar.Make(source, AnyFormat(source, energy), n_rows, wild, true);
    state.row_scalar =
        Numbers(table->scalar.bytes.data(), table->scalar.format);
  }
  table->bucket_steps = table->Counters(source, buckets, wild, 20);
  state.bucket_steps = table->bucket_steps.data();
  if (source->Flip()) {
    table->last_step = table->Counters(source, buckets, wild, 40);
    state.last_step = table->last_step.data();
  }
  if (rule.scalar == RowScalar::kLearned && source->Flip()) {
    table->row_steps = table->Counters(source, n_rows, wild, 20);
    state.row_steps = table->row_steps.data();
  }
  if (!led) return;
  table->votes = table->Counters(source, buckets, wild, 20);
  table->leader_steps = table->Counters(source, buckets, wild, 20);
  for (int64_t b = 0; b < buckets; ++b) {
    table->leader.push_back(wild ? source->Raw<int64_t>()
                                 : source->Below(n_rows));
    // Votes come with steps.
    if (!wild) table->bucket_steps[b] += table->votes[b];
  }
  state.leader = table->leader.data();
  state.leader_votes = table->votes.data();
  state.leader_steps = table->leader_steps.data();
}

template <typename Index>
void Step(Source* source, bool wild, Table* table,
          const ParallelFor& parallel_for) {
  const RowMapping& mapping = table->mapping.rows;
  const BucketMap buckets_of(mapping);
  std::vector<Index> indices(source->Below(source->Flip() ? 6 : 400));
  const int64_t range = 1 + source->Below(mapping.n_rows);
  for (Index& index : indices) {
    index = static_cast<Index>(source->Below(range));
  }
  const int64_t count = static_cast<int64_t>(indices.size());
  const auto values = source->Numbers(count * table->dim, wild);
  const RowGroups groups =
      GroupRows(indices.data(), count, mapping.n_rows, mapping.num_buckets,
                buckets_of, parallel_for);
  const std::set<int64_t> touched(indices.begin(), indices.end());
  CHECK(groups.rows.size() == touched.size());
  const auto before = table->theta.bytes;
  UpdateTable(table->rule, table->state, groups, values.data(),
              mapping.hashing == Hashing::kDouble, parallel_for);
  const int64_t width = table->dim * Width(table->theta.format);
  for (int64_t row = 0; row < mapping.n_rows; ++row) {
    if (touched.count(row) > 0) continue;
    CHECK(std::memcmp(before.data() + row * width,
                      table->theta.bytes.data() + row * width, width) == 0);
  }
}

inline uint64_t ExerciseTable(Source* source, const ParallelFor& parallel_for) {
  const bool wild = source->Flip();
  Table table;
  MakeTable(source, wild, &table);
  for (int64_t steps = 1 + source->Below(3); steps > 0; --steps) {
    if (source->Flip()) {
      Step<int32_t>(source, wild, &table, parallel_for);
    } else {
      Step<int64_t>(source, wild, &table, parallel_for);
    }
    if (table.rule.step < INT64_MAX) ++table.rule.step;
  }
  std::vector<float> scratch(table.dim);
  for (int64_t row = 0; !wild && row < table.mapping.rows.n_rows; ++row) {
    const float* theta = table.state.table.Open(row, scratch.data());
    for (int64_t j = 0; j < table.dim; ++j) CHECK(!std::isnan(theta[j]));
    if (table.state.row_scalar) {
      CHECK(!std::isnan(table.state.row_scalar.Read(row)));
    }
  }
  Digest digest;
  for (const Slot* slot :
       {&table.theta, &table.first, &table.second, &table.scalar}) {
    digest.Add(slot->bytes);
  }
  for (const auto* counters :
       {&table.bucket_steps, &table.last_step, &table.row_steps, &table.votes,
        &table.leader_steps}) {
    digest.Add(*counters);
  }
  digest.Add(table.leader);
  return digest.value();
}

}  // namespace exercise
}  // namespace tf_basis

#endif  // TF_BASIS_TESTS_CC_EXERCISE_TABLE_H_
