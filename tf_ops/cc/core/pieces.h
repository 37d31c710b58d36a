// A long vector that lies in memory in several pieces.
#ifndef TF_BASIS_CORE_PIECES_H_
#define TF_BASIS_CORE_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tf_basis {

class Pieces {
 public:
  // The next piece.
  void Add(const float* data, int64_t count) {
    if (count == 0) return;
    starts_.push_back(elements_);
    data_.push_back(data);
    elements_ += count;
  }

  int64_t elements() const { return elements_; }

  // Elements [begin, begin + count), count > 0: where they lie, or put together
  // in `scratch`, which grows as needed.
  const float* Get(int64_t begin, int64_t count,
                   std::vector<float>* scratch) const {
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) -
               starts_.begin() - 1;
    const auto end_of = [this](size_t j) {
      return j + 1 < starts_.size() ? starts_[j + 1] : elements_;
    };
    if (begin + count <= end_of(i)) return data_[i] + (begin - starts_[i]);
    scratch->resize(count);
    float* out = scratch->data();
    for (const int64_t end = begin + count; begin < end; ++i) {
      const int64_t until = std::min(end, end_of(i));
      out = std::copy_n(data_[i] + (begin - starts_[i]), until - begin, out);
      begin = until;
    }
    return scratch->data();
  }

 private:
  std::vector<const float*> data_;
  std::vector<int64_t> starts_;
  int64_t elements_ = 0;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_PIECES_H_
