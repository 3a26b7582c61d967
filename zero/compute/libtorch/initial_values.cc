#include "zero/compute/libtorch/initial_values.h"

#include <torch/utils.h>

#include <algorithm>
#include <cstring>

namespace penstock::zero {
namespace {

constexpr int64_t kPiece = 64 << 10;  // elements; a multiple of 16

}  // namespace

InitialStream::InitialStream(const BlockSpec& spec, const FlatLayout& layout)
    : spec_(spec), layout_(layout), order_(layout.InOrder()) {
  TORCH_CHECK(spec.initial.size() == layout.parameters.size(), "it says what ", spec.initial.size(),
              " parameters begin with, and has ", layout.parameters.size());
}

// A piece of a parameter; the last one has what is left, up to twice as much, so that it never has too
// little.
void InitialStream::DrawNext() {
  while (next_ < order_.size() && done_ == layout_.parameters[order_[next_]].elements) {
    ++next_;
    done_ = 0;
  }
  drawn_first_ = drawn_end_ = layout_.elements;
  if (next_ == order_.size()) return;
  const Parameter& parameter = layout_.parameters[order_[next_]];
  const InitialValues& values = spec_.initial[order_[next_]];
  const int64_t left = parameter.elements - done_;
  const int64_t count = left < 2 * kPiece ? left : kPiece;
  if (!buffer_.defined() || buffer_.numel() < count) buffer_ = torch::empty({count}, torch::kFloat32);
  torch::NoGradGuard no_grad;
  const torch::Tensor piece = buffer_.narrow(0, 0, count);
  if (values.bound > 0) {
    piece.uniform_(-values.bound, values.bound);
  } else if (values.deviation > 0) {
    piece.normal_(values.mean, values.deviation);
  } else {
    piece.fill_(values.mean);
  }
  drawn_ = piece.data_ptr<float>();
  drawn_first_ = parameter.offset + done_;
  drawn_end_ = drawn_first_ + count;
  done_ += count;
}

void InitialStream::Read(int64_t first, int64_t elements, float* to) {
  const int64_t end = first + elements;
  std::memset(to, 0, static_cast<size_t>(elements) * sizeof(float));
  for (;;) {
    const int64_t from = std::max(drawn_first_, first), until = std::min(drawn_end_, end);
    if (from < until)
      std::memcpy(to + (from - first), drawn_ + (from - drawn_first_),
                  static_cast<size_t>(until - from) * sizeof(float));
    const bool over = drawn_first_ == layout_.elements;
    if (drawn_end_ >= end || over) return;
    DrawNext();
  }
}

torch::Tensor WithoutMemory(torch::IntArrayRef sizes) {
  static float zero = 0;  // nobody writes to it, and no allocator is asked
  return torch::from_blob(&zero, {}, torch::kFloat32).expand(sizes);
}

std::shared_ptr<torch::nn::Module> BuildWhole(const BlockSpec& spec) {
  std::shared_ptr<torch::nn::Module> module = spec.build();
  TORCH_CHECK(module != nullptr, "its factory returned nothing");
  if (spec.initial.empty()) return module;
  const FlatLayout layout = LayoutOf(*module);
  InitialStream stream(spec, layout);
  const std::vector<torch::Tensor> parameters = UniqueParameters(*module);
  for (const size_t i : layout.InOrder()) {
    torch::Tensor whole = torch::empty(layout.parameters[i].sizes, torch::kFloat32);
    stream.Read(layout.parameters[i].offset, layout.parameters[i].elements, whole.data_ptr<float>());
    parameters[i].set_data(whole);
  }
  return module;
}

}  // namespace penstock::zero
