// The hyperparameters of one step and the variables it works on. BasisAdam,
// BasisSGD and BasisAdagrad are choices of these numbers (tf_basis/rules/).
#ifndef TF_BASIS_CORE_BUCKET_RULE_H_
#define TF_BASIS_CORE_BUCKET_RULE_H_

#include <cstdint>

#include "core/formats.h"
#include "core/hash.h"

namespace tf_basis {

enum class RowScalar { kEnergy, kLearned, kNone };
enum class ScalarRule { kGradient, kSign, kLog };
enum class CollisionReduce { kMean, kSum, kSequential };

struct BucketRule {
  RowScalar scalar = RowScalar::kNone;
  ScalarRule scalar_rule = ScalarRule::kGradient;
  CollisionReduce reduce = CollisionReduce::kMean;
  bool bias_correction = false;  // divide moments by 1 - keep^steps
  bool nesterov = false;         // direction g + keep * M
  bool stale_decay = false;  // moments decay in steps that missed the bucket
  double learning_rate = 0;
  double first_keep = 0, first_take = 0;    // M <- keep * M + take * g
  double second_keep = 0, second_take = 0;  // V <- keep * V + take * g^2
  double energy_keep = 0, energy_take = 0;  // q <- keep * q + take * mean g^2
  double epsilon = 0;
  double weight_decay = 0;  // 0: off
  double row_clipnorm = 0;  // 0: off
  double scalar_min = 0, scalar_max = 0;
  double scalar_learning_rate = 0;
  double frequency_power = 0;  // 0: off
  int64_t step = 0;            // of the optimizer, from 1; for stale_decay
  uint32_t seed = 0;           // of stochastic rounding
};

// A bucket's leader is the row that came in most of the bucket's recent steps:
// it gains a vote in a step it is in and loses one in another; without votes
// the first row of the step takes over. With enough votes it owns the bucket.
struct Leaders {
  static constexpr int32_t kVotesToOwn = 8;
  static constexpr int32_t kMostVotes = 64;
};

struct TableState {
  int64_t dim = 0;
  int64_t owners = 0;               // buckets below this belong to one row each
  int64_t first_moment_rows = 0;    // buckets below this have a first moment
  Rows table;                       // [n_rows, dim]
  Rows first_moment;                // [first_moment_rows, dim], or none
  Rows second_moment;               // [num_buckets, dim], or none
  int32_t* bucket_steps = nullptr;  // [num_buckets]
  int32_t* last_step = nullptr;     // [num_buckets], for stale_decay
  Numbers row_scalar;  // [n_rows] energies or learned scalars, or none
  int32_t* row_steps = nullptr;  // [n_rows], for frequency_power
  // [num_buckets] each, where owners are found during training (see Leaders).
  int64_t* leader = nullptr;
  int32_t* leader_votes = nullptr;
  int32_t* leader_steps = nullptr;  // of the leader's first moment
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BUCKET_RULE_H_
