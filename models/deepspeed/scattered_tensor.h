// A tensor of a foreign checkpoint whose elements lie in several files of torch.save, one run after the
// other: what ZeRO leaves of a parameter that its ranks share.
//
//   ScatteredTensor weight;
//   weight.Add(file_of_rank_0, partition, /*first=*/96, /*elements=*/32);  // in the order of its elements
//   weight.Add(file_of_rank_1, partition_1, 0, 96);
//   status = weight.Read(/*from=*/0, /*n=*/128, values);
//
// Files and their tensors outlive it, and it outlives the buffer's next read. Values may be fp32, bf16 or
// fp16; they are read as fp32, exactly. Memory: a few hundred bytes a piece; reads go through a buffer that
// the caller keeps, with a strip of 16 MiB for what is published transposed. Any thread, one buffer for each.
#ifndef PENSTOCK_MODELS_DEEPSPEED_SCATTERED_TENSOR_H_
#define PENSTOCK_MODELS_DEEPSPEED_SCATTERED_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "models/weights/layout.h"
#include "models/weights/torch_file.h"

namespace penstock::models {

class ScatteredTensor;

// Reused from read to read.
struct ReadBuffer {
  // Whole rows of a tensor that is published transposed, turned.
  struct Strip {
    const ScatteredTensor* tensor = nullptr;
    int64_t row = 0, rows = 0;
    std::vector<float> values;
  };
  std::vector<std::byte> raw;
  std::vector<float> values;
  Strip strip;
};

class ScatteredTensor {
 public:
  // Elements [first, first + elements) of `tensor` come next. kInvalidArgument: it has fewer, or is no tensor
  // of fp32, bf16 or fp16.
  absl::Status Add(const TorchFile& file, const TorchTensor& tensor, int64_t first, int64_t elements);

  int64_t elements() const { return elements_; }
  // What a piece takes of memory, in a vector that grows.
  static constexpr int64_t kPieceBytes = 80;

  // Elements [from, from + n), in the order of the file.
  absl::Status Read(int64_t from, int64_t n, float* to, ReadBuffer* buffer) const;

  // Elements [from, to) of a parameter of a model as it is kept: turned on the way if it is published
  // transposed.
  absl::Status ReadParameter(const PublishedTensor& parameter, int64_t from, int64_t to, float* out,
                             ReadBuffer* buffer) const;

 private:
  struct Piece {
    const TorchFile* file = nullptr;
    const TorchTensor* tensor = nullptr;
    int64_t first = 0;  // in `tensor`
    int64_t start = 0;  // in the whole
    int64_t elements = 0;
  };
  absl::Status LoadStrip(const PublishedTensor& parameter, int64_t row, ReadBuffer* buffer,
                         ReadBuffer::Strip* strip) const;

  std::vector<Piece> pieces_;
  int64_t elements_ = 0;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DEEPSPEED_SCATTERED_TENSOR_H_
