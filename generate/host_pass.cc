#include "generate/host_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "generate/expert_cache.h"
#include "generate/host_latent.h"
#include "generate/host_mixture.h"
#include "generate/matrix_product.h"
#include "kernels/attention.h"
#include "kernels/layer.h"

namespace penstock::generate {
namespace {

using kernels::DType;

// Columns [from, from + n) of the rows of a matrix.
struct Columns {
  const HostRows* of;
  size_t from_bytes;
  const std::byte* row(int64_t i) const { return of->row(i) + from_bytes; }
};

// Where the shares of a pass lie among its rows.
struct PassRows {
  explicit PassRows(const std::vector<Share>& shares) {
    for (const Share& share : shares) {
      first.push_back(all);
      all += static_cast<int64_t>(share.tokens.size());
      if (!share.decodes) continue;
      PENSTOCK_CHECK(single == first.back(), "the shares that decode come first");
      single = all;
    }
  }
  std::vector<int64_t> first;  // by share
  int64_t single = 0;          // that decode, or are drafted
  int64_t all = 0;
};

class HostPass : public PassRunner {
 public:
  HostPass(const PassParts& parts, int threads)
      : PassRunner(parts), f_(parts.decoder->function), shape_(parts.decoder->shape), scratch_(threads) {
    if (parts.experts != nullptr) mixture_.emplace(parts, &scratch_);
    if (shape_.latent.rank > 0) latent_.emplace(*parts.decoder, &scratch_);
  }

  int64_t RowsOf(int64_t tokens) const override { return tokens; }

  absl::StatusOr<std::span<const float>> Run(const std::vector<Share>& shares) override {
    logits_ = {};  // before there are others
    const PassRows rows(shares);
    ASSIGN_OR_RETURN(HostRows x, Embed(shares));
    const std::vector<int64_t> wanted = WantedRows(shares, rows.first);
    for (int64_t layer = 0; layer < shape_.layers; ++layer)
      RETURN_IF_ERROR(ComputeLayer(layer, shares, rows, &x));
    const auto count = static_cast<int64_t>(wanted.size());
    ASSIGN_OR_RETURN(HostRows last, HostRows::Of(x.type(), count, x.columns()));
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(last.row(i), x.row(wanted[static_cast<size_t>(i)]), x.row_bytes());
    x = {};
    block_ = shape_.head_block;
    RETURN_IF_ERROR(Normalize(f_.last_norm, last, &last));
    ASSIGN_OR_RETURN(logits_, Linear(shape_.head, last, count));
    if (f_.logits_divisor != 1) {
      const auto divisor = static_cast<float>(f_.logits_divisor);
      ForElements(logits_,
                  [&](void* some, size_t n) { kernels::DivideElements(logits_.type(), some, divisor, n); });
    }
    if (f_.logit_cap > 0) {
      const auto cap = static_cast<float>(f_.logit_cap);
      ForElements(logits_, [&](void* some, size_t n) { kernels::SoftCap(logits_.type(), some, cap, n); });
    }
    if (logits_.type() != DType::kFp32) {
      ASSIGN_OR_RETURN(HostRows wide, HostRows::Of(DType::kFp32, count, logits_.columns()));
      kernels::Convert(logits_.type(), logits_.data(), DType::kFp32, wide.data(), wide.elements());
      logits_ = std::move(wide);
    }
    return std::span<const float>(logits_.floats(), logits_.elements());
  }

 private:
  // Some elements of whole rows at a time, by several threads.
  template <typename Work>
  void ForElements(HostRows& x, const Work& work) {
    scratch_.ForRows(x.rows(), x.columns(), [&](size_t begin, size_t end) {
      work(x.row(static_cast<int64_t>(begin)), (end - begin) * static_cast<size_t>(x.columns()));
    });
  }

  void Scale(HostRows* x, double factor) {
    if (factor == 1) return;
    ForElements(*x, [&](void* some, size_t n) {
      kernels::ScaleElements(x->type(), some, static_cast<float>(factor), n);
    });
  }

  absl::StatusOr<HostRows> Embed(const std::vector<Share>& shares) {
    std::vector<int64_t> tokens, positions;
    std::vector<bool> far;
    for (const Share& share : shares) {
      tokens.insert(tokens.end(), share.tokens.begin(), share.tokens.end());
      for (size_t t = 0; t < share.tokens.size(); ++t)
        positions.push_back(share.past + static_cast<int64_t>(t));
      far.resize(positions.size(), share.far);
    }
    KeptTensors& kept = *parts_.kept;
    ASSIGN_OR_RETURN(HostRows x, kept.Rows(kept.tensor(0, shape_.token_table), tokens));
    if (!shape_.position_table.empty()) {
      ASSIGN_OR_RETURN(const HostRows at, kept.Rows(kept.tensor(0, shape_.position_table), positions));
      kernels::AddElements(x.type(), x.data(), at.data(), x.elements(), x.data());
    }
    const auto scale = static_cast<float>(f_.embedding_scale);
    Scale(&x, f_.rounds_embedding_scale ? Rounded(x.type(), scale) : scale);
    angles_.clear();
    for (const models::Rotation& rotation : f_.rotations) {
      ASSIGN_OR_RETURN(Angles angles, AnglesOf(rotation, positions, far, x.type()));
      angles_.push_back(std::move(angles));
    }
    return x;
  }

  static float Rounded(DType type, float value) {
    return type == DType::kBf16 ? kernels::Bf16ToFloat(kernels::FloatToBf16(value)) : value;
  }

  // Of all rows [rows, pairs that turn]: angles in fp32, cosine and sine rounded to the compute type.
  struct Angles {
    HostRows cosine, sine;
  };
  static absl::StatusOr<Angles> AnglesOf(const models::Rotation& rotation,
                                         const std::vector<int64_t>& positions, const std::vector<bool>& far,
                                         DType type) {
    const auto rows = static_cast<int64_t>(positions.size());
    const auto half = static_cast<int64_t>(rotation.frequencies.size());
    const auto scale = static_cast<float>(rotation.scale);
    Angles made;
    ASSIGN_OR_RETURN(made.cosine, HostRows::Of(DType::kFp32, rows, half));
    ASSIGN_OR_RETURN(made.sine, HostRows::Of(DType::kFp32, rows, half));
    for (int64_t row = 0; row < rows; ++row) {
      const auto position = static_cast<float>(positions[static_cast<size_t>(row)]);
      const bool is_far = far[static_cast<size_t>(row)] && !rotation.far_frequencies.empty();
      const std::vector<float>& frequencies = is_far ? rotation.far_frequencies : rotation.frequencies;
      float* const cosine = made.cosine.floats() + row * half;
      float* const sine = made.sine.floats() + row * half;
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * frequencies[static_cast<size_t>(i)];
        cosine[i] = Rounded(type, std::cos(angle) * scale);
        sine[i] = Rounded(type, std::sin(angle) * scale);
      }
    }
    return made;
  }

  // NAME.weight and NAME.bias of the block; `out` may be `x`. Rows of x are taken in pieces of so many
  // elements.
  absl::Status Normalize(const std::string& name, const HostRows& x, HostRows* out) {
    return Normalize(name, x, f_.epsilon, out);
  }
  absl::Status Normalize(const std::string& name, const HostRows& x, double epsilon, HostRows* out) {
    KeptTensors& kept = *parts_.kept;
    const int weight = kept.tensor(block_, name + ".weight"), bias = kept.tensor(block_, name + ".bias");
    PENSTOCK_CHECK(weight >= 0, "a norm has a weight");
    const int64_t width = kept.vector(weight).columns(), pieces = x.columns() / width;
    scratch_.ForRows(x.rows(), x.columns(), [&](size_t begin, size_t end) {
      const auto first = static_cast<int64_t>(begin);
      const kernels::NormRows in = {.type = x.type(),
                                    .x = x.row(first),
                                    .rows = (end - begin) * static_cast<size_t>(pieces),
                                    .columns = static_cast<size_t>(width),
                                    .weight = kept.vector(weight).data(),
                                    .bias = bias >= 0 ? kept.vector(bias).data() : nullptr,
                                    .epsilon = static_cast<float>(epsilon),
                                    .from_one = f_.norms_from_one,
                                    .rounds_normal = f_.rounds_normal};
      if (f_.norm == models::DecoderFunction::Norm::kLayer) {
        kernels::LayerNorm(in, out->row(first));
      } else {
        kernels::RootMeanSquareNorm(in, out->row(first));
      }
    });
    return absl::OkStatus();
  }

  // x times NAME.weight (or NAME, where the block calls it that), plus NAME.bias where there is one.
  // `single`: the rows that decode.
  absl::StatusOr<HostRows> Linear(const std::string& name, const HostRows& x, int64_t single) {
    KeptTensors& kept = *parts_.kept;
    const int tensor = kept.matrix(block_, name);
    const StoredMatrix matrix = StoredAs(*parts_.source, *parts_.layout, tensor);
    ASSIGN_OR_RETURN(MatrixProduct product, MatrixProduct::Begin(x, single, matrix, &scratch_));
    RETURN_IF_ERROR(ForParts(tensor, matrix, [&](const std::byte* memory, int64_t first, int64_t elements) {
      return product.Add(memory, first, elements);
    }));
    HostRows y = product.Result();
    if (const int bias = kept.tensor(block_, name + ".bias"); bias >= 0)
      scratch_.AddToRows(kept.vector(bias), &y);
    if (const int down = kept.tensor(block_, models::AdapterDown(name)); down >= 0) {
      const int up = kept.tensor(block_, models::AdapterUp(name));
      ASSIGN_OR_RETURN(const HostRows narrow, ProductWith(kept.vector(down), x, single, &scratch_));
      ASSIGN_OR_RETURN(HostRows change, ProductWith(kept.vector(up), narrow, single, &scratch_));
      Scale(&change, parts_.decoder->blocks[static_cast<size_t>(block_)].adapters.scaling);
      AddTo(&y, change);
    }
    return y;
  }

  // Turns the first `heads` heads of all rows, in a layer where positions do.
  void Rotate(int64_t layer, int64_t heads, HostRows* x) {
    const int which = f_.RotationOf(layer);
    if (which < 0) return;
    const Angles& angles = angles_[static_cast<size_t>(which)];
    const int64_t half = angles.cosine.columns();
    const kernels::RotatedHeads turned = {x->type(), static_cast<size_t>(heads),
                                          static_cast<size_t>(shape_.depth), static_cast<size_t>(half)};
    scratch_.ForRows(x->rows(), x->columns(), [&](size_t begin, size_t end) {
      for (auto row = static_cast<int64_t>(begin); row < static_cast<int64_t>(end); ++row) {
        kernels::RotateHeads(turned, x->row(row), angles.cosine.floats() + row * half,
                             angles.sine.floats() + row * half);
      }
    });
  }

  absl::Status NormalizeOrCopy(const std::string& name, const HostRows& x, HostRows* out) {
    if (!name.empty()) return Normalize(name, x, out);
    std::memcpy(out->row(0), x.row(0), static_cast<size_t>(x.rows()) * x.row_bytes());
    return absl::OkStatus();
  }

  // x = x + residual_scale * norm(y), in the norm's absence of y itself.
  absl::Status AddResult(const std::string& norm, HostRows* y, HostRows* x) {
    if (!norm.empty()) RETURN_IF_ERROR(Normalize(norm, *y, y));
    Scale(y, f_.residual_scale);
    AddTo(x, *y);
    return absl::OkStatus();
  }

  void AddTo(HostRows* x, const HostRows& y) {
    scratch_.ForRows(x->rows(), x->columns(), [&](size_t begin, size_t end) {
      const auto first = static_cast<int64_t>(begin);
      const size_t elements = (end - begin) * static_cast<size_t>(x->columns());
      kernels::AddElements(x->type(), x->row(first), y.row(first), elements, x->row(first));
    });
  }

  absl::Status ComputeLayer(int64_t layer, const std::vector<Share>& shares, const PassRows& rows,
                            HostRows* x) {
    block_ = static_cast<int>(layer) + 1;
    ASSIGN_OR_RETURN(HostRows normal, HostRows::Of(x->type(), x->rows(), x->columns()));
    RETURN_IF_ERROR(NormalizeOrCopy(f_.attention_norm, *x, &normal));
    HostRows mixed;
    if (latent_.has_value()) {
      ASSIGN_OR_RETURN(mixed, AttendToLatents(layer, shares, rows, normal));
    } else {
      HostRows q, k, v;
      const size_t width = kernels::BytesPerElement(x->type());
      Columns queries{}, keys{}, values{};
      if (!f_.joined.empty()) {
        ASSIGN_OR_RETURN(q, Linear(f_.joined, normal, rows.single));
        Rotate(layer, shape_.heads + shape_.key_heads, &q);
        const size_t each = static_cast<size_t>(shape_.depth) * width;
        queries = {&q, 0};
        keys = {&q, static_cast<size_t>(shape_.heads) * each};
        values = {&q, static_cast<size_t>(shape_.heads + shape_.key_heads) * each};
      } else {
        ASSIGN_OR_RETURN(q, Linear(f_.query, normal, rows.single));
        if (!f_.query_norm.empty()) RETURN_IF_ERROR(Normalize(f_.query_norm, q, &q));
        Rotate(layer, shape_.heads, &q);
        ASSIGN_OR_RETURN(k, Linear(f_.key, normal, rows.single));
        if (!f_.key_norm.empty()) RETURN_IF_ERROR(Normalize(f_.key_norm, k, &k));
        Rotate(layer, shape_.key_heads, &k);
        ASSIGN_OR_RETURN(v, Linear(f_.value, normal, rows.single));
        queries = {&q, 0};
        keys = {&k, 0};
        values = {&v, 0};
      }
      ASSIGN_OR_RETURN(mixed, Attend(layer, shares, rows, queries, keys, values));
      if (x->type() != mixed.type()) {
        ASSIGN_OR_RETURN(mixed, scratch_.Converted(mixed, x->type()));
      }
    }
    {
      ASSIGN_OR_RETURN(HostRows y, Linear(f_.output, mixed, rows.single));
      mixed = {};
      RETURN_IF_ERROR(AddResult(f_.attention_result_norm, &y, x));
    }
    RETURN_IF_ERROR(NormalizeOrCopy(f_.inner_norm, *x, &normal));
    HostRows y;
    if (mixture_.has_value() && mixture_->Has(layer)) {
      ASSIGN_OR_RETURN(y, ComputeMixture(layer, rows, normal, *x));
    } else {
      ASSIGN_OR_RETURN(y, ComputeInner({f_.gate, f_.up, f_.down}, rows, &normal));
    }
    return AddResult(f_.inner_result_norm, &y, x);
  }

  // [rows, heads * value].
  absl::StatusOr<HostRows> AttendToLatents(int64_t layer, const std::vector<Share>& shares,
                                           const PassRows& rows, const HostRows& normal) {
    const models::LatentFunction& of = f_.latent;
    HostRows queries, records;
    {
      HostRows q;
      if (!of.query_down.empty()) {
        ASSIGN_OR_RETURN(q, Linear(of.query_down, normal, rows.single));
        RETURN_IF_ERROR(Normalize(of.query_norm, q, of.epsilon, &q));
      }
      ASSIGN_OR_RETURN(q, Linear(of.query, of.query_down.empty() ? normal : q, rows.single));
      {
        ASSIGN_OR_RETURN(const HostRows down, Linear(of.down, normal, rows.single));
        ASSIGN_OR_RETURN(HostRows latents, latent_->LatentsOf(down));
        RETURN_IF_ERROR(Normalize(of.norm, latents, of.epsilon, &latents));
        ASSIGN_OR_RETURN(records, latent_->Records(down, latents));
      }
      const int up = parts_.kept->matrix(block_, of.up);
      const StoredMatrix matrix = StoredAs(*parts_.source, *parts_.layout, up);
      RETURN_IF_ERROR(latent_->Begin(normal.type()));
      RETURN_IF_ERROR(ForParts(up, matrix, [&](const std::byte* memory, int64_t first, int64_t elements) {
        latent_->Add(matrix, memory, first, elements);
        return absl::OkStatus();
      }));
      ASSIGN_OR_RETURN(queries, latent_->Queries(q));
    }
    Rotate(layer, 1, &records);
    Rotate(layer, shape_.heads, &queries);
    ASSIGN_OR_RETURN(const HostRows mixed,
                     Attend(layer, shares, rows, {&queries, 0}, {&records, 0}, {&records, 0}));
    queries = {};
    ASSIGN_OR_RETURN(HostRows values, latent_->Values(mixed));
    latent_->End();
    return values;
  }

  // The matrices between the widths of a layer; gate may be empty.
  struct InnerNames {
    const std::string &gate, &up, &down;
  };
  // `normal` is given up as soon as it has been used, where it is not kept.
  absl::StatusOr<HostRows> ComputeInner(const InnerNames& names, const PassRows& rows, HostRows* normal,
                                        bool keeps = false) {
    HostRows gate;
    if (!names.gate.empty()) {
      ASSIGN_OR_RETURN(gate, Linear(names.gate, *normal, rows.single));
    }
    ASSIGN_OR_RETURN(HostRows inner, Linear(names.up, *normal, rows.single));
    if (!keeps) *normal = {};
    if (f_.gate_in_up) {
      ASSIGN_OR_RETURN(inner, ActivateHalves(inner));
    } else {
      scratch_.ForRows(inner.rows(), inner.columns(), [&](size_t begin, size_t end) {
        const auto first = static_cast<int64_t>(begin);
        const size_t elements = (end - begin) * static_cast<size_t>(inner.columns());
        const bool gated = gate.rows() > 0;
        kernels::Activate(inner.type(), f_.activation, gated ? gate.row(first) : inner.row(first),
                          gated ? inner.row(first) : nullptr, elements, inner.row(first));
      });
    }
    gate = {};
    return Linear(names.down, inner, rows.single);
  }

  // `normal`: what the mixture takes of x.
  absl::StatusOr<HostRows> ComputeMixture(int64_t layer, const PassRows& rows, HostRows& normal,
                                          const HostRows& x) {
    RETURN_IF_ERROR(mixture_->Choose(layer, normal, rows.single));
    RETURN_IF_ERROR(GuessNext(layer + 1, rows, x));
    const models::MixtureFunction& mixture = f_.mixture;
    HostRows shared;
    if (!mixture.shared_up.empty()) {  // while experts are read
      ASSIGN_OR_RETURN(shared, ComputeInner({mixture.shared_gate, mixture.shared_up, mixture.shared_down},
                                            rows, &normal, /*keeps=*/true));
      if (!mixture.shared_router.empty())
        RETURN_IF_ERROR(mixture_->ScaleShared(layer, normal, rows.single, &shared));
    }
    ASSIGN_OR_RETURN(HostRows y, mixture_->Compute(normal, rows.single));
    if (shared.rows() > 0) AddTo(&y, shared);
    return y;
  }

  // The next layer's router, with what there is of its input: its attention is not in it yet.
  absl::Status GuessNext(int64_t layer, const PassRows& rows, const HostRows& x) {
    if (layer >= shape_.layers || !mixture_->Has(layer) || parts_.experts->has_all()) return absl::OkStatus();
    ASSIGN_OR_RETURN(HostRows normal, HostRows::Of(x.type(), x.rows(), x.columns()));
    ++block_;
    const absl::Status status = NormalizeOrCopy(f_.inner_norm, x, &normal);
    --block_;
    RETURN_IF_ERROR(status);
    return mixture_->Guess(layer, normal, rows.single);
  }

  // Of rows whose first half is the gate of the second: [rows, half of the columns].
  absl::StatusOr<HostRows> ActivateHalves(const HostRows& both) {
    const int64_t half = both.columns() / 2;
    ASSIGN_OR_RETURN(HostRows inner, HostRows::Of(both.type(), both.rows(), half));
    scratch_.ForRows(inner.rows(), half, [&](size_t begin, size_t end) {
      for (auto row = static_cast<int64_t>(begin); row < static_cast<int64_t>(end); ++row) {
        kernels::Activate(both.type(), f_.activation, both.row(row), both.row(row) + inner.row_bytes(),
                          static_cast<size_t>(half), inner.row(row));
      }
    });
    return inner;
  }

  // A row, and the records of all positions that it sees.
  struct Query {
    int64_t row;
    const std::byte* records;
    int64_t positions;
  };

  // Keeps keys and values with what is there of their sequences, and attends: fp32 [rows, heads * depth], of
  // latents [rows, heads * rank].
  absl::StatusOr<HostRows> Attend(int64_t layer, const std::vector<Share>& shares, const PassRows& rows,
                                  const Columns& q, const Columns& k, const Columns& v) {
    const DType type = q.of->type();
    ASSIGN_OR_RETURN(HostRows mixed, HostRows::Of(DType::kFp32, rows.all, shape_.heads * ValueDepth()));
    const size_t kept_bytes =
        static_cast<size_t>(shape_.key_heads * shape_.depth) * kernels::BytesPerElement(type);
    // A record of latents is its key.
    const size_t record_bytes = latent_.has_value() ? kept_bytes : 2 * kept_bytes;
    const bool on_drive = parts_.cache->on_drive();
    std::vector<Query> queries;
    for (size_t i = 0; i < shares.size(); ++i) {
      const Share& share = shares[i];
      ASSIGN_OR_RETURN(const Records records, TakeRecords(share, layer));
      for (size_t t = 0; t < share.tokens.size(); ++t) {
        const int64_t row = rows.first[i] + static_cast<int64_t>(t);
        const int64_t position = share.past + static_cast<int64_t>(t);
        const auto record_of = [&](int64_t of) {
          return records.memory + static_cast<size_t>(of - records.first) * record_bytes;
        };
        std::byte* const record = record_of(position);
        std::memcpy(record, k.row(row), kept_bytes);
        if (!latent_.has_value()) std::memcpy(record + kept_bytes, v.row(row), kept_bytes);
        const int64_t window = f_.Window(layer);
        const int64_t from = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
        queries.push_back({row, record_of(from), position + 1 - from});
      }
      if (!on_drive) continue;
      AttendAll(layer, queries, q, &mixed);
      queries.clear();
      RETURN_IF_ERROR(KeepRecords(records));
    }
    AttendAll(layer, queries, q, &mixed);
    return mixed;
  }

  // Elements of a head of what attention gives.
  int64_t ValueDepth() const { return latent_.has_value() ? shape_.latent.rank : shape_.depth; }

  void AttendAll(int64_t layer, const std::vector<Query>& queries, const Columns& q, HostRows* mixed) {
    if (queries.empty()) return;
    const auto heads = static_cast<size_t>(shape_.heads), key_heads = static_cast<size_t>(shape_.key_heads);
    const auto depth = static_cast<size_t>(shape_.depth), value_depth = static_cast<size_t>(ValueDepth());
    const auto scale = static_cast<float>(f_.scales[static_cast<size_t>(layer)]);
    constexpr size_t kLeastTerms = 64 << 10;  // for which another thread is worth waking
    // What threads share: key heads with all that look at them, or, where all look at one, heads.
    const size_t pieces = latent_.has_value() ? heads : key_heads, in_piece = heads / pieces;
    const size_t terms = 2 * static_cast<size_t>(queries.back().positions) * depth * in_piece;
    const float* const sinks = SinksOf();
    // A head's keys and values are used by one query after the other.
    scratch_.pool.ParallelFor(
        pieces * queries.size(), std::max<size_t>(1, kLeastTerms / terms), [&](size_t begin, size_t end) {
          for (size_t i = begin; i < end; ++i) {
            const size_t head = i / queries.size();
            const Query& query = queries[i % queries.size()];
            float* const out = mixed->floats() + query.row * mixed->columns();
            if (latent_.has_value()) {
              const size_t at = head * depth * kernels::BytesPerElement(q.of->type());
              const kernels::AttentionRecords seen = {.type = q.of->type(),
                                                      .data = query.records,
                                                      .positions = static_cast<size_t>(query.positions),
                                                      .key_heads = 1,
                                                      .depth = depth,
                                                      .value_depth = value_depth};
              kernels::Attend(seen, q.row(query.row) + at, 1, scale, 0, 1, out + head * value_depth);
              continue;
            }
            const kernels::AttentionRecords seen = {
                q.of->type(), query.records, static_cast<size_t>(query.positions),
                key_heads,    depth,         static_cast<float>(f_.score_cap),
                sinks};
            kernels::Attend(seen, q.row(query.row), heads, scale, head, head + 1, out);
          }
        });
  }

  // Of the layer that is computed, in fp32; null: it has none.
  const float* SinksOf() {
    if (f_.sinks.empty()) return nullptr;
    const HostRows& kept = parts_.kept->vector(parts_.kept->tensor(block_, f_.sinks));
    sinks_.resize(static_cast<size_t>(kept.columns()));
    kernels::Convert(kept.type(), kept.data(), DType::kFp32, sinks_.data(), sinks_.size());
    return sinks_.data();
  }

  const models::DecoderFunction& f_;
  const models::DecoderShape& shape_;
  ProductScratch scratch_;
  std::optional<HostMixture> mixture_;
  std::optional<HostLatent> latent_;
  std::vector<Angles> angles_;  // by rotation
  HostRows logits_;
  std::vector<float> sinks_;
  int block_ = 0;
};

}  // namespace

std::unique_ptr<PassRunner> MakeHostPass(const PassParts& parts, int threads) {
  return std::make_unique<HostPass>(parts, threads);
}

}  // namespace penstock::generate
