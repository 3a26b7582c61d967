#include "generate/pass.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/decode.h"
#include "kernels/attention.h"
#include "models/causal_attention.h"
#include "zero/compute/libtorch/tensors.h"

namespace penstock::generate {
namespace {

using kernels::DType;
using torch::Tensor;

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

bool IsMatrix(const models::ParameterDescription& parameter) { return parameter.columns > 0; }

absl::Status Move(zero::Device* device, Tensor* tensor) {
  try {
    *tensor = zero::ToDevice(*device, *tensor);
    return absl::OkStatus();
  } catch (const c10::Error& error) {
    return OutOfMemory(error);
  }
}

}  // namespace

absl::Status OutOfMemory(const c10::Error& error) {
  return absl::ResourceExhaustedError(absl::StrCat("generate: ", error.what_without_backtrace()));
}

MatrixOrder OrderOf(const models::Decoder& decoder, const models::ModelLayout& layout) {
  const models::DecoderShape shape = decoder.shape();
  MatrixOrder order;
  int number = 0, head = -1;
  size_t block_number = 0;
  for (const models::BlockDescription& block : decoder.Blocks()) {
    const bool layer = block_number >= 1 && block_number <= static_cast<size_t>(shape.layers);
    const size_t first = order.all.size();
    for (const models::ParameterDescription& parameter : block.parameters) {
      if (layer && IsMatrix(parameter)) order.all.push_back(number);
      if (block_number == static_cast<size_t>(shape.head_block) && parameter.name == shape.head)
        head = number;
      ++number;
    }
    if (layer) order.before_attention.push_back(first + static_cast<size_t>(shape.matrices_before_attention));
    ++block_number;
  }
  PENSTOCK_CHECK(head >= 0 && static_cast<size_t>(number) == layout.tensors.size(),
                 "a decoder's description is its layout's");
  order.all.push_back(head);
  return order;
}

StoredMatrix StoredAs(const WeightSource& source, const models::ModelLayout& layout, int tensor) {
  const models::PublishedTensor& matrix = layout.tensors[static_cast<size_t>(tensor)];
  return {.rows = matrix.rows,
          .columns = matrix.columns,
          .type = source.type(tensor),
          .code = source.code(tensor),
          .turned = source.turned(tensor)};
}

DType ComputeType(const WeightSource& source, std::span<const int> uses) {
  const bool narrow =
      std::all_of(uses.begin(), uses.end(), [&](int tensor) { return source.type(tensor) == DType::kBf16; });
  return narrow ? DType::kBf16 : DType::kFp32;
}

// ---- What is kept.

namespace {

// Vectors, and tables of block 0 that are small; not the matrices that are only multiplied with.
bool IsKept(const models::DecoderShape& shape, size_t block, const models::ParameterDescription& parameter,
            uint64_t width, uint64_t table_bytes) {
  if (!IsMatrix(parameter)) return true;
  const bool table =
      block == 0 && (parameter.name == shape.token_table || parameter.name == shape.position_table);
  return table && static_cast<uint64_t>(parameter.elements()) * width <= table_bytes;
}

template <typename Visit>
void ForKept(const models::Decoder& decoder, DType type, uint64_t table_bytes, Visit visit) {
  const models::DecoderShape shape = decoder.shape();
  const uint64_t width = type == DType::kFp32 ? 4 : 2;
  int number = 0;
  size_t block_number = 0;
  for (const models::BlockDescription& block : decoder.Blocks()) {
    for (const models::ParameterDescription& parameter : block.parameters) {
      visit(static_cast<int>(block_number), parameter, number++,
            IsKept(shape, block_number, parameter, width, table_bytes), width);
    }
    ++block_number;
  }
}

}  // namespace

KeptTensors::Sizes KeptTensors::SizesOf(const models::Decoder& decoder, const WeightSource& source,
                                        DType type, uint64_t table_bytes) {
  Sizes sizes;
  ForKept(decoder, type, table_bytes,
          [&](int, const models::ParameterDescription& parameter, int number, bool kept, uint64_t width) {
            if (!kept) return;
            // An allocation is rounded to whole cache lines.
            const auto elements = static_cast<uint64_t>(parameter.elements());
            sizes.kept_bytes += (elements * width + 127) / 64 * 64;
            uint64_t raw =
                source.type(number) == type ? 0 : elements * kernels::BytesPerElement(source.type(number));
            if (const auto& code = source.code(number); code.has_value())
              raw = static_cast<uint64_t>(parameter.rows) *
                    code->row_bytes(static_cast<size_t>(parameter.columns));
            sizes.loading_bytes = std::max(sizes.loading_bytes, raw);
          });
  return sizes;
}

absl::StatusOr<std::unique_ptr<KeptTensors>> KeptTensors::Load(
    const models::Decoder& decoder, const models::ModelLayout& layout, WeightSource* source, DType type,
    uint64_t table_bytes, std::span<std::byte> scratch, zero::Device* device) {
  auto result = std::make_unique<KeptTensors>();
  result->layout_ = &layout;
  result->source_ = source;
  result->type_ = type;
  result->scratch_ = scratch;
  absl::Status status;
  ForKept(decoder, type, table_bytes,
          [&](int block, const models::ParameterDescription& parameter, int number, bool kept, uint64_t) {
            result->numbers_.emplace(std::pair(block, parameter.name), number);
            if (!kept || !status.ok()) return;
            std::vector<int64_t> rows(IsMatrix(parameter) ? static_cast<size_t>(parameter.rows) : 1);
            std::iota(rows.begin(), rows.end(), int64_t{0});
            std::vector<int64_t> sizes = {parameter.rows};
            if (IsMatrix(parameter)) sizes.push_back(parameter.columns);
            absl::StatusOr<Tensor> read = result->Read(number, rows, std::move(sizes));
            status = read.status();
            if (status.ok() && !IsMatrix(parameter)) status = Move(device, &*read);
            if (status.ok()) result->kept_.emplace(number, *std::move(read));
          });
  RETURN_IF_ERROR(status);
  return result;
}

int KeptTensors::tensor(int block, std::string_view name) const {
  const auto found = numbers_.find(std::pair(block, std::string(name)));
  return found == numbers_.end() ? -1 : found->second;
}

absl::StatusOr<Tensor> KeptTensors::Read(int tensor, std::span<const int64_t> rows,
                                         std::vector<int64_t> sizes) {
  const DType stored = source_->type(tensor);
  const std::optional<kernels::WeightCode>& code = source_->code(tensor);
  try {
    if (code.has_value()) {
      const int64_t columns = sizes.back(), count = static_cast<int64_t>(rows.size());
      const Tensor raw = torch::empty(
          {count * static_cast<int64_t>(code->row_bytes(static_cast<size_t>(columns)))}, torch::kUInt8);
      RETURN_IF_ERROR(source_->ReadRows(tensor, rows, scratch_, static_cast<std::byte*>(raw.data_ptr())));
      Tensor decoded = torch::empty(sizes, zero::TorchDtype(type_));
      DecodeRows(*code, static_cast<const std::byte*>(raw.data_ptr()), count, columns, type_,
                 decoded.data_ptr());
      return decoded;
    }
    Tensor raw = torch::empty(sizes, zero::TorchDtype(stored));
    RETURN_IF_ERROR(source_->ReadRows(tensor, rows, scratch_, static_cast<std::byte*>(raw.data_ptr())));
    return raw.to(zero::TorchDtype(type_));
  } catch (const c10::Error& error) {
    return OutOfMemory(error);
  }
}

absl::StatusOr<Tensor> KeptTensors::Rows(int table, std::span<const int64_t> rows) {
  if (const auto kept = kept_.find(table); kept != kept_.end()) {
    const Tensor index = torch::from_blob(const_cast<int64_t*>(rows.data()),
                                          {static_cast<int64_t>(rows.size())}, torch::kInt64);
    return kept->second.index_select(0, index);
  }
  // Each row once, in order.
  std::vector<int64_t> unique(rows.begin(), rows.end());
  std::sort(unique.begin(), unique.end());
  unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
  const int64_t columns = layout_->tensors[static_cast<size_t>(table)].columns;
  ASSIGN_OR_RETURN(const Tensor read, Read(table, unique, {static_cast<int64_t>(unique.size()), columns}));
  std::vector<int64_t> at;
  for (const int64_t row : rows)
    at.push_back(std::lower_bound(unique.begin(), unique.end(), row) - unique.begin());
  return read.index_select(0, torch::tensor(at, torch::kInt64));
}

// ---- A pass.

// Where the rows of a pass are, and which are multiplied together.
struct PassRunner::Rows {
  std::vector<int64_t> first;  // by share
  ProductRows products;
  int64_t all = 0;

  // Those that decode, and all of them, are a multiple of `block`; a prompt's begin at one of `start`.
  Rows(const std::vector<Share>& shares, int64_t block, int64_t start) {
    for (const Share& share : shares) {
      if (!share.decodes) all = RoundUp(all, products.chunks.empty() ? block : start);
      first.push_back(all);
      const auto count = static_cast<int64_t>(share.tokens.size());
      all += count;
      if (share.decodes) {
        PENSTOCK_CHECK(products.chunks.empty(), "the shares that decode come first");
        products.single = RoundUp(all, block);
        continue;
      }
      // At multiples of kChunkRows of the sequence, wherever this piece of the prompt begins.
      for (int64_t at = 0; at < count;) {
        const int64_t rows = std::min(count - at, kChunkRows - (share.past + at) % kChunkRows);
        products.chunks.emplace_back(first.back() + at, rows);
        at += rows;
      }
    }
    all = RoundUp(all, block);
  }
};

// The weights of one block, as they come from the stream, and its layer's part of the cache.
class PassRunner::Block : public models::BlockAccess {
 public:
  Block(PassRunner* runner, const std::vector<Share>* shares, const Rows* rows)
      : runner_(*runner), shares_(*shares), rows_(*rows) {}

  // `layer` -1: none. `products`: of the rows from here on; outlive it.
  void Enter(int block, int64_t layer, const ProductRows* products) {
    block_ = block;
    layer_ = layer;
    products_ = products;
  }

  Tensor Get(std::string_view name) const override {
    const int tensor = runner_.kept_.tensor(block_, name);
    TORCH_CHECK(tensor >= 0, "the block has no parameter ", std::string(name));
    return runner_.kept_.vector(tensor);
  }

  Tensor Linear(std::string_view name, const Tensor& x) override {
    int tensor = runner_.kept_.tensor(block_, absl::StrCat(std::string(name), ".weight"));
    if (tensor < 0) tensor = runner_.kept_.tensor(block_, name);
    TORCH_CHECK(tensor >= 0, "the block has no matrix ", std::string(name));
    const StoredMatrix matrix = StoredAs(runner_.source_, runner_.layout_, tensor);
    const std::unique_ptr<Product> product = runner_.MakeProduct(x, *products_, matrix);
    for (int64_t done = 0; done < matrix.rows * matrix.columns;) {
      const WeightPart part = NextPart();
      PENSTOCK_CHECK(part.tensor == tensor && part.first == done, "matrices come in the order of their use");
      product->Add(unit_.memory + part.at, part.first, part.elements);
      done += part.elements;
      OrThrow(DonePart());
    }
    const Tensor y = product->Result();
    const int bias = runner_.kept_.tensor(block_, absl::StrCat(std::string(name), ".bias"));
    if (bias >= 0) y.add_(runner_.kept_.vector(bias));
    return y;
  }

  // By each row that decodes and each piece of a prompt: their places among the others are not their own. A
  // device computes each element alike.
  Tensor Map(const Tensor& x, const std::function<Tensor(const Tensor&)>& f) const override {
    if (runner_.products_ == Products::kLibTorch) return f(x);
    Tensor y;
    const auto add = [&](int64_t first, int64_t rows) {
      const Tensor part = f(x.narrow(0, first, rows));
      if (!y.defined()) y = torch::empty(x.sizes(), part.options());
      y.narrow(0, first, rows).copy_(part);
    };
    for (int64_t row = 0; row < products_->single; ++row) add(row, 1);
    for (const auto& [first, rows] : products_->chunks) add(first, rows);
    return y;
  }

  Tensor Attend(const Tensor& of_q, const Tensor& k, const Tensor& v, double scale, bool wide) override {
    const Tensor q = of_q.contiguous();
    Tensor mixed = torch::zeros({q.size(0), q.size(1) * q.size(2)}, q.options());
    // Of the rows that decode, where they are attended to one by one.
    Tensor singles;
    if (runner_.products_ == Products::kOwn)
      singles = torch::empty({products_->single, mixed.size(1)}, torch::kFloat32);
    for (size_t i = 0; i < shares_.size(); ++i) {
      const Share& share = shares_[i];
      const int64_t row = rows_.first[i], count = static_cast<int64_t>(share.tokens.size());
      Stream::Item item;
      std::byte* records = nullptr;
      if (runner_.cache_.on_drive()) {
        item = OrThrow(runner_.stream_.Next());
        PENSTOCK_CHECK(item.is_cache && item.cache.slot == share.slot && item.cache.layer == layer_,
                       "records come in the order of their use");
        records = item.memory;
      } else {
        records = runner_.cache_.Records(share.slot, layer_);
      }
      const RecordsThere there(&runner_, records, share.past, count, k);
      const Tensor fresh = there.fresh();
      fresh.select(1, 0).copy_(k.narrow(0, row, count));
      fresh.select(1, 1).copy_(v.narrow(0, row, count));
      if (singles.defined() && share.decodes) {
        for (int64_t at = 0; at < count; ++at)
          AttendRow(q[row + at], there.all().narrow(0, 0, share.past + at + 1), scale, singles[row + at]);
      } else {
        AttendShare(share, q.narrow(0, row, count), there.all(), scale, wide, mixed.narrow(0, row, count));
      }
      there.KeepFresh();
      if (runner_.cache_.on_drive()) {
        OrThrow(runner_.cache_.Keep(item.cache, records));
        OrThrow(runner_.stream_.Release(item));
      }
    }
    if (singles.defined()) mixed.narrow(0, 0, singles.size(0)).copy_(singles);
    return mixed;
  }

 private:
  // A layer's records of a share where they are attended to: where they lie, or in the device's memory for as
  // long.
  class RecordsThere {
   public:
    // `k` [rows, key heads, depth]: of the type of the records, and where they are wanted.
    RecordsThere(const PassRunner* runner, std::byte* records, int64_t past, int64_t count, const Tensor& k)
        : device_(runner->device_), past_(past), count_(count) {
      const std::vector<int64_t> sizes = {past + count, 2, k.size(1), k.size(2)};
      if (!device_.has_own_memory() || runner->cache_.on_device()) {
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

  // `q`: [heads, depth]; `records`: all that it sees; `to`: [heads * depth] in fp32.
  void AttendRow(const Tensor& q, const Tensor& records, double scale, const Tensor& to) const {
    const kernels::AttentionRecords there = {
        TypeOf(q), records.data_ptr(), static_cast<size_t>(records.size(0)),
        static_cast<size_t>(records.size(2)), static_cast<size_t>(records.size(3))};
    constexpr size_t kLeastTerms = 64 << 10;  // for which another thread is worth waking
    const auto heads = static_cast<size_t>(q.size(0));
    const size_t terms = 2 * there.positions * there.depth * (heads / there.key_heads);
    runner_.scratch_.pool.ParallelFor(there.key_heads, std::max<size_t>(1, kLeastTerms / terms),
                                      [&](size_t first, size_t end) {
                                        kernels::Attend(there, q.data_ptr(), heads, static_cast<float>(scale),
                                                        first, end, to.data_ptr<float>());
                                      });
  }

  // Pieces of at most kAttentionRows, cut at multiples of it; where it decodes each position by itself, so
  // that attention has the same bits whether a token was drafted or not.
  static void AttendShare(const Share& share, const Tensor& q, const Tensor& records, double scale, bool wide,
                          const Tensor& to) {
    const auto type = wide ? torch::kFloat32 : q.scalar_type();
    const auto count = static_cast<int64_t>(share.tokens.size());
    for (int64_t at = 0; at < count;) {
      const int64_t rows =
          share.decodes ? 1 : std::min(count - at, kAttentionRows - (share.past + at) % kAttentionRows);
      const Tensor seen = records.narrow(0, 0, share.past + at + rows);
      const Tensor keys = seen.select(1, 0).transpose(0, 1).to(type);
      const Tensor values = seen.select(1, 1).transpose(0, 1).to(type);
      const Tensor queries = q.narrow(0, at, rows).transpose(0, 1).to(type);
      const Tensor out = models::AttentionOfLast(queries, keys, values, scale);
      to.narrow(0, at, rows).copy_(out.transpose(0, 1).reshape({rows, to.size(1)}));
      at += rows;
    }
  }

  WeightPart NextPart() {
    if (!held_) {
      unit_ = OrThrow(runner_.stream_.Next());
      PENSTOCK_CHECK(!unit_.is_cache, "weights come in the order of their use");
      held_ = true;
      part_ = 0;
    }
    return runner_.source_.units()[unit_.unit].parts[part_];
  }
  absl::Status DonePart() {
    if (++part_ < runner_.source_.units()[unit_.unit].parts.size()) return absl::OkStatus();
    held_ = false;
    return runner_.stream_.Release(unit_);
  }

  PassRunner& runner_;
  const std::vector<Share>& shares_;
  const PassRunner::Rows& rows_;
  const ProductRows* products_ = nullptr;
  int block_ = 0;
  int64_t layer_ = -1;
  Stream::Item unit_;
  bool held_ = false;
  size_t part_ = 0;
};

PassRunner::PassRunner(const models::Decoder* decoder, const models::ModelLayout* layout,
                       const MatrixOrder* order, WeightSource* source, KeptTensors* kept, ItemStream* stream,
                       KvCache* cache, zero::Device* device, Products products, int threads)
    : decoder_(*decoder),
      shape_(decoder->shape()),
      layout_(*layout),
      order_(*order),
      source_(*source),
      kept_(*kept),
      stream_(*stream),
      cache_(*cache),
      device_(*device),
      products_(products),
      scratch_(threads) {}

PassRunner::~PassRunner() = default;

Products ProductsOf(const zero::Device& device) {
  return device.has_own_memory() && !device.tensors_are_host() ? Products::kLibTorch : Products::kOwn;
}

int64_t PassRunner::RowsOf(int64_t tokens) const {
  return products_ == Products::kLibTorch ? RoundUp(tokens, kShareRows) : tokens;
}

std::unique_ptr<Product> PassRunner::MakeProduct(const Tensor& x, const ProductRows& rows,
                                                 const StoredMatrix& matrix) {
  if (products_ == Products::kLibTorch) return std::make_unique<TensorProduct>(x, rows, matrix, &device_);
  return std::make_unique<MatrixProduct>(x, rows, matrix, &scratch_);
}

// Units that hold a part of one of the first `matrix` matrices.
size_t PassRunner::UnitsBefore(size_t matrix) const {
  const int last = order_.all[matrix - 1];
  size_t units = source_.units().size();
  const auto holds = [&](const WeightUnit& unit) {
    return std::any_of(unit.parts.begin(), unit.parts.end(),
                       [last](const WeightPart& part) { return part.tensor == last; });
  };
  while (units > 0 && !holds(source_.units()[units - 1])) --units;
  return units;
}

void PassRunner::AppendStart() {
  stream_.AppendUnits(
      0, cache_.on_drive() ? UnitsBefore(order_.before_attention.front()) : source_.units().size());
}

void PassRunner::AppendRest(const std::vector<Share>& shares) {
  if (!cache_.on_drive()) return;
  size_t from = UnitsBefore(order_.before_attention.front());
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    for (const Share& share : shares) {
      stream_.AppendCache(
          cache_.ReadOf(share.slot, layer, share.past, static_cast<int64_t>(share.tokens.size())));
    }
    const auto next = static_cast<size_t>(layer) + 1;
    const size_t end = next < order_.before_attention.size() ? UnitsBefore(order_.before_attention[next])
                                                             : source_.units().size();
    stream_.AppendUnits(from, end);
    from = end;
  }
}

absl::StatusOr<Tensor> PassRunner::Embed(const std::vector<Share>& shares, const Rows& rows) {
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
  ASSIGN_OR_RETURN(const Tensor of_tokens, kept_.Rows(kept_.tensor(0, shape_.token_table), tokens));
  Tensor of_positions;
  if (!shape_.position_table.empty()) {
    ASSIGN_OR_RETURN(of_positions, kept_.Rows(kept_.tensor(0, shape_.position_table), positions));
  }
  return decoder_.Embed(zero::ToDevice(device_, of_tokens), zero::ToDevice(device_, of_positions));
}

absl::StatusOr<Tensor> PassRunner::Compute(const std::vector<Share>& shares) {
  const torch::NoGradGuard no_grad;
  const bool in_blocks = products_ == Products::kLibTorch;
  const int64_t block_rows = in_blocks ? kDeviceRows : 1;
  const Rows rows(shares, block_rows, in_blocks ? kShareRows : 1);
  ASSIGN_OR_RETURN(Tensor x, Embed(shares, rows));
  std::vector<int64_t> at(static_cast<size_t>(rows.all), 0), wanted;
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto count = static_cast<int64_t>(shares[i].tokens.size());
    for (int64_t t = 0; t < count; ++t) at[static_cast<size_t>(rows.first[i] + t)] = shares[i].past + t;
    if (!shares[i].wants_logits) continue;
    for (int64_t t = shares[i].decodes ? 0 : count - 1; t < count; ++t) wanted.push_back(rows.first[i] + t);
  }
  const auto count = static_cast<int64_t>(wanted.size());
  if (count > 0) wanted.resize(static_cast<size_t>(RoundUp(count, block_rows)), wanted.front());
  // All that is copied there is, before anything is enqueued that a copy would wait for.
  const Tensor positions = zero::ToDevice(device_, torch::tensor(at, torch::kInt64));
  const Tensor index = zero::ToDevice(device_, torch::tensor(wanted, torch::kInt64));
  Block block(this, &shares, &rows);
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    block.Enter(static_cast<int>(layer) + 1, layer, &rows.products);
    x = decoder_.Layer(layer, block, x, positions);
  }
  const ProductRows wanted_rows = {.single = static_cast<int64_t>(wanted.size()), .chunks = {}};
  block.Enter(shape_.head_block, -1, &wanted_rows);
  const Tensor logits = decoder_.Logits(block, x.index_select(0, index));
  return zero::ToHost(device_, logits.narrow(0, 0, count).contiguous());
}

absl::StatusOr<Tensor> PassRunner::Run(const std::vector<Share>& shares) {
  try {
    return Compute(shares);
  } catch (const StatusError& error) {
    return error.status;
  } catch (const c10::Error& error) {
    return OutOfMemory(error);
  }
}

}  // namespace penstock::generate
