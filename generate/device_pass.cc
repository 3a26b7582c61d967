#include "generate/device_pass.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/memory_plan.h"
#include "generate/tensor_product.h"
#include "models/families/causal_attention.h"
#include "models/families/stages.h"
#include "models/families/tensor_decoder.h"
#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::generate {
namespace {

using torch::Tensor;

// What LibTorch has thrown: its memory is at its limit.
absl::Status OutOfMemory(const c10::Error& error) {
  return absl::ResourceExhaustedError(absl::StrCat("generate: ", error.what_without_backtrace()));
}

// A status on its way out through LibTorch's interfaces.
struct StatusError : std::exception {
  explicit StatusError(absl::Status what) : status(std::move(what)) {}
  absl::Status status;
};
void OrThrow(absl::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}
template <typename T>
T OrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) throw StatusError(value.status());
  return *std::move(value);
}

// Where the rows of a pass are, and which are multiplied together.
struct DeviceRows {
  std::vector<int64_t> first;  // by share
  ProductRows products;
  int64_t all = 0;

  // Those that decode, and all of them, are a multiple of kDeviceRows; a prompt's begin at one of kShareRows.
  explicit DeviceRows(const std::vector<Share>& shares) {
    for (const Share& share : shares) {
      if (!share.decodes) all = RoundUp(all, products.chunks.empty() ? kDeviceRows : kShareRows);
      first.push_back(all);
      const auto count = static_cast<int64_t>(share.tokens.size());
      all += count;
      if (share.decodes) {
        PENSTOCK_CHECK(products.chunks.empty(), "the shares that decode come first");
        products.single = RoundUp(all, kDeviceRows);
        continue;
      }
      // At multiples of kChunkRows of the sequence, wherever this piece of the prompt begins.
      for (int64_t at = 0; at < count;) {
        const int64_t rows = std::min(count - at, kChunkRows - (share.past + at) % kChunkRows);
        products.chunks.emplace_back(first.back() + at, rows);
        at += rows;
      }
    }
    all = RoundUp(all, kDeviceRows);
  }
};

// Of a host matrix as it lies there.
Tensor TensorOf(const HostRows& rows) {
  return torch::from_blob(rows.data(), {rows.rows(), rows.columns()}, zero::TorchDtype(rows.type()));
}

class DevicePass : public PassRunner {
 public:
  // Throws as LibTorch.
  explicit DevicePass(const PassParts& parts)
      : PassRunner(parts),
        shape_(parts.decoder->shape),
        device_(*parts.device),
        decoder_(models::MakeTensorDecoder(*parts.model)) {
    for (const auto& [tensor, rows] : parts.kept->kept()) {
      if (parts.layout->tensors[static_cast<size_t>(tensor)].columns == 0)
        vectors_.emplace(tensor, zero::ToDevice(device_, TensorOf(rows).view({rows.columns()})));
    }
  }

  int64_t RowsOf(int64_t tokens) const override { return RoundUp(tokens, kShareRows); }

  absl::StatusOr<std::span<const float>> Run(const std::vector<Share>& shares) override {
    try {
      logits_ = Tensor();  // before there are others
      ASSIGN_OR_RETURN(logits_, Compute(shares));
      return std::span<const float>(logits_.data_ptr<float>(), static_cast<size_t>(logits_.numel()));
    } catch (const StatusError& error) {
      return error.status;
    } catch (const c10::Error& error) {
      return OutOfMemory(error);
    }
  }

 private:
  class Block;
  absl::StatusOr<Tensor> Embed(const std::vector<Share>& shares, const DeviceRows& rows);
  absl::StatusOr<Tensor> Compute(const std::vector<Share>& shares);

  const models::DecoderShape& shape_;
  zero::Device& device_;
  const std::unique_ptr<const models::TensorDecoder> decoder_;
  std::map<int, Tensor> vectors_;
  Tensor logits_;
};

// The weights of one block, as they come from the stream, and its layer's part of the cache.
class DevicePass::Block : public models::BlockAccess {
 public:
  Block(DevicePass* runner, const std::vector<Share>* shares, const DeviceRows* rows)
      : runner_(*runner), shares_(*shares), rows_(*rows) {}

  // `layer` -1: none. `products`: of the rows from here on; outlive it.
  void Enter(int block, int64_t layer, const ProductRows* products) {
    block_ = block;
    layer_ = layer;
    products_ = products;
  }

  Tensor Get(std::string_view name) const override {
    const int tensor = runner_.parts_.kept->tensor(block_, name);
    TORCH_CHECK(tensor >= 0, "the block has no parameter ", std::string(name));
    return runner_.vectors_.at(tensor);
  }

  Tensor Linear(std::string_view name, const Tensor& x) override {
    const int tensor = runner_.parts_.kept->matrix(block_, name);
    const StoredMatrix matrix = StoredAs(*runner_.parts_.source, *runner_.parts_.layout, tensor);
    TensorProduct product(x, *products_, matrix, &runner_.device_);
    OrThrow(runner_.ForParts(tensor, matrix, [&](const std::byte* memory, int64_t first, int64_t elements) {
      product.Add(memory, first, elements);
      return absl::OkStatus();
    }));
    const Tensor y = product.Result();
    const int bias = runner_.parts_.kept->tensor(block_, absl::StrCat(std::string(name), ".bias"));
    if (bias >= 0) y.add_(runner_.vectors_.at(bias));
    return y;
  }

  Tensor Attend(const Tensor& of_q, const Tensor& k, const Tensor& v, const models::AttentionForm& form,
                bool wide) override {
    const Tensor q = of_q.contiguous();
    Tensor mixed = torch::zeros({q.size(0), q.size(1) * q.size(2)}, q.options());
    for (size_t i = 0; i < shares_.size(); ++i) {
      const Share& share = shares_[i];
      const int64_t row = rows_.first[i], count = static_cast<int64_t>(share.tokens.size());
      const Records records = OrThrow(runner_.TakeRecords(share, layer_));
      // Positions are counted from the first that is there.
      const int64_t past = share.past - records.first;
      const RecordsThere there(&runner_, records.memory, past, count, k);
      const Tensor fresh = there.fresh();
      fresh.select(1, 0).copy_(k.narrow(0, row, count));
      fresh.select(1, 1).copy_(v.narrow(0, row, count));
      AttendShare(share, q.narrow(0, row, count), there.all(), records.first, form, wide,
                  mixed.narrow(0, row, count));
      there.KeepFresh();
      OrThrow(runner_.KeepRecords(records));
    }
    return mixed;
  }

 private:
  // A layer's records of a share where they are attended to: where they lie, or in the device's memory for as
  // long.
  class RecordsThere {
   public:
    // `k` [rows, key heads, depth]: of the type of the records, and where they are wanted.
    RecordsThere(const DevicePass* runner, std::byte* records, int64_t past, int64_t count, const Tensor& k)
        : device_(runner->device_), past_(past), count_(count) {
      const std::vector<int64_t> sizes = {past + count, 2, k.size(1), k.size(2)};
      if (!device_.has_own_memory() || runner->parts_.cache->on_device()) {
        all_ = torch::from_blob(records, sizes, k.options());
        return;
      }
      host_ = torch::from_blob(records, sizes, k.options().device(torch::kCPU));
      all_ = torch::empty(sizes, k.options());
      const Tensor there = all_.narrow(0, 0, past);
      there.copy_(host_.narrow(0, 0, past));
      device_.CountCopied({static_cast<int64_t>(there.nbytes()), 0});
    }
    const Tensor& all() const { return all_; }
    Tensor fresh() const { return all_.narrow(0, past_, count_); }
    // Puts what is fresh behind the others in host memory; waits.
    void KeepFresh() const {
      if (!host_.defined()) return;
      host_.narrow(0, past_, count_).copy_(fresh());
      device_.CountCopied({0, static_cast<int64_t>(fresh().nbytes())});
    }

   private:
    zero::Device& device_;
    const int64_t past_, count_;
    Tensor all_, host_;
  };

  // Pieces of at most kAttentionRows, cut at multiples of it; where it decodes each position by itself, so
  // that attention has the same bits whether a token was drafted or not.
  static void AttendShare(const Share& share, const Tensor& q, const Tensor& records, int64_t first,
                          const models::AttentionForm& form, bool wide, const Tensor& to) {
    const auto type = wide ? torch::kFloat32 : q.scalar_type();
    const auto count = static_cast<int64_t>(share.tokens.size());
    for (int64_t at = 0; at < count;) {
      const int64_t rows =
          share.decodes ? 1 : std::min(count - at, kAttentionRows - (share.past + at) % kAttentionRows);
      const int64_t end = share.past + at + rows;
      const int64_t from = form.window > 0 ? std::max<int64_t>(0, end - rows + 1 - form.window) : 0;
      const Tensor seen = records.narrow(0, from - first, end - from);
      const Tensor keys = seen.select(1, 0).transpose(0, 1).to(type);
      const Tensor values = seen.select(1, 1).transpose(0, 1).to(type);
      const Tensor queries = q.narrow(0, at, rows).transpose(0, 1).to(type);
      const Tensor out = models::AttentionOfLast(queries, keys, values, form);
      to.narrow(0, at, rows).copy_(out.transpose(0, 1).reshape({rows, to.size(1)}));
      at += rows;
    }
  }

  DevicePass& runner_;
  const std::vector<Share>& shares_;
  const DeviceRows& rows_;
  const ProductRows* products_ = nullptr;
  int block_ = 0;
  int64_t layer_ = -1;
};

absl::StatusOr<Tensor> DevicePass::Embed(const std::vector<Share>& shares, const DeviceRows& rows) {
  // Rows that are nobody's are as the first: nothing is read for them.
  std::vector<int64_t> tokens(static_cast<size_t>(rows.all), shares.front().tokens.front());
  std::vector<int64_t> positions(tokens.size(), shares.front().past);
  for (size_t i = 0; i < shares.size(); ++i) {
    for (size_t t = 0; t < shares[i].tokens.size(); ++t) {
      const size_t row = static_cast<size_t>(rows.first[i]) + t;
      tokens[row] = shares[i].tokens[t];
      positions[row] = shares[i].past + static_cast<int64_t>(t);
    }
  }
  KeptTensors& kept = *parts_.kept;
  // Copies, where there is nothing else between the host's and the device's.
  const auto there = [&](const HostRows& rows_of) {
    return zero::ToDevice(device_, device_.has_own_memory() ? TensorOf(rows_of) : TensorOf(rows_of).clone());
  };
  ASSIGN_OR_RETURN(const HostRows of_tokens, kept.Rows(kept.tensor(0, shape_.token_table), tokens));
  if (shape_.position_table.empty()) return decoder_->Embed(there(of_tokens), Tensor());
  ASSIGN_OR_RETURN(const HostRows of_positions, kept.Rows(kept.tensor(0, shape_.position_table), positions));
  return decoder_->Embed(there(of_tokens), there(of_positions));
}

absl::StatusOr<Tensor> DevicePass::Compute(const std::vector<Share>& shares) {
  const torch::NoGradGuard no_grad;
  const DeviceRows rows(shares);
  ASSIGN_OR_RETURN(Tensor x, Embed(shares, rows));
  std::vector<int64_t> at(static_cast<size_t>(rows.all), 0), far(at.size(), 0);
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto count = static_cast<int64_t>(shares[i].tokens.size());
    for (int64_t t = 0; t < count; ++t) {
      at[static_cast<size_t>(rows.first[i] + t)] = shares[i].past + t;
      far[static_cast<size_t>(rows.first[i] + t)] = shares[i].far ? 1 : 0;
    }
  }
  std::vector<int64_t> wanted = WantedRows(shares, rows.first);
  const auto count = static_cast<int64_t>(wanted.size());
  if (count > 0) wanted.resize(static_cast<size_t>(RoundUp(count, kDeviceRows)), wanted.front());
  // All that is copied there is, before anything is enqueued that a copy would wait for.
  models::RowPlaces places{zero::ToDevice(device_, torch::tensor(at, torch::kInt64)), {}};
  if (parts_.decoder->function.NearPositions() > 0)
    places.far = zero::ToDevice(device_, torch::tensor(far, torch::kInt64)).ne(0).unsqueeze(1);
  const Tensor index = zero::ToDevice(device_, torch::tensor(wanted, torch::kInt64));
  Block block(this, &shares, &rows);
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    block.Enter(static_cast<int>(layer) + 1, layer, &rows.products);
    x = decoder_->Layer(layer, block, x, places);
  }
  const ProductRows wanted_rows = {.single = static_cast<int64_t>(wanted.size()), .chunks = {}};
  block.Enter(shape_.head_block, -1, &wanted_rows);
  const Tensor logits = decoder_->Logits(block, x.index_select(0, index));
  return zero::ToHost(device_, logits.narrow(0, 0, count).contiguous());
}

class LibTorchDeviceCompute : public DeviceCompute {
 public:
  absl::StatusOr<std::unique_ptr<PassRunner>> MakePass(const PassParts& parts) override {
    try {
      return std::make_unique<DevicePass>(parts);
    } catch (const c10::Error& error) {
      return OutOfMemory(error);
    }
  }
  absl::StatusOr<double> MeasureProduct(const StoredMatrix& matrix, int64_t rows,
                                        zero::Device* device) override {
    try {
      return MeasureTensorProduct(matrix, rows, device);
    } catch (const c10::Error& error) {
      return OutOfMemory(error);
    }
  }
};

}  // namespace

std::shared_ptr<DeviceCompute> LibTorchCompute() {
  zero::InstallTensorAllocator();
  return std::make_shared<LibTorchDeviceCompute>();
}

}  // namespace penstock::generate
