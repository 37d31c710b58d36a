// Deflates and inflates bytes in memory with the zlib that TensorFlow brings.
#ifndef TF_BASIS_KERNELS_ZLIB_BYTES_H_
#define TF_BASIS_KERNELS_ZLIB_BYTES_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/lib/io/zlib_compression_options.h"
#include "tensorflow/core/lib/io/zlib_inputstream.h"
#include "tensorflow/core/lib/io/zlib_outputbuffer.h"
#include "tensorflow/core/platform/env.h"

namespace tf_basis {

constexpr int64_t kZlibBuffer = int64_t{1} << 16;

// What is written to it.
class StringSink : public tensorflow::WritableFile {
 public:
  absl::Status Append(absl::string_view data) override {
    written_.append(data.data(), data.size());
    return absl::OkStatus();
  }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::Status Flush() override { return absl::OkStatus(); }
  absl::Status Sync() override { return absl::OkStatus(); }

  std::string written_;
};

class StringSource : public tensorflow::io::InputStreamInterface {
 public:
  explicit StringSource(absl::string_view data) : data_(data) {}

  absl::Status ReadNBytes(int64_t bytes, tensorflow::tstring* out) override {
    const int64_t left = static_cast<int64_t>(data_.size()) - position_;
    const int64_t count = std::min(bytes, left);
    out->assign(data_.data() + position_, count);
    position_ += count;
    if (count == bytes) return absl::OkStatus();
    return absl::OutOfRangeError("end of the bytes");
  }
  int64_t Tell() const override { return position_; }
  absl::Status Reset() override {
    position_ = 0;
    return absl::OkStatus();
  }

 private:
  absl::string_view data_;
  int64_t position_ = 0;
};

inline absl::Status Deflate(absl::string_view data, std::string* out) {
  StringSink sink;
  tensorflow::io::ZlibOutputBuffer buffer(
      &sink, kZlibBuffer, kZlibBuffer,
      tensorflow::io::ZlibCompressionOptions::DEFAULT());
  TF_RETURN_IF_ERROR(buffer.Init());
  TF_RETURN_IF_ERROR(buffer.Append(data));
  TF_RETURN_IF_ERROR(buffer.Close());
  *out = std::move(sink.written_);
  return absl::OkStatus();
}

// Exactly `bytes` of them; any other number is an error.
inline absl::Status Inflate(absl::string_view data, int64_t bytes,
                            tensorflow::tstring* out) {
  StringSource source(data);
  tensorflow::io::ZlibInputStream stream(
      &source, kZlibBuffer, kZlibBuffer,
      tensorflow::io::ZlibCompressionOptions::DEFAULT());
  const absl::Status read = stream.ReadNBytes(bytes, out);
  if (read.ok() && static_cast<int64_t>(out->size()) == bytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "the bytes are no zlib stream of the length");
}

}  // namespace tf_basis

#endif  // TF_BASIS_KERNELS_ZLIB_BYTES_H_
