#include "generate/generator.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <list>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/clock.h"
#include "generate/decode.h"
#include "generate/device_stream.h"
#include "generate/host_pass.h"
#include "generate/matrix_product.h"
#include "generate/prompt_lookup.h"
#include "generate/stream.h"
#include "kernels/cache.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::generate {
namespace {

using kernels::DType;

constexpr size_t kMeasuredUnits = 24;
constexpr uint64_t kTableShare = 64;  // a table of at most this part of the budget is kept

absl::StatusOr<std::unique_ptr<aio::Engine>> MakeEngine(const aio::Arena* arena,
                                                        const std::function<void(const std::string&)>& log) {
  aio::EngineOptions options;
  options.arenas = {arena};
  options.log = [log](std::string_view line) {
    if (log) log(std::string(line));
  };
  return aio::Engine::Create(std::move(options));
}

absl::StatusOr<std::unique_ptr<aio::Arena>> MakeArena(uint64_t bytes) {
  aio::ArenaOptions options;
  options.bytes = bytes;
  return aio::Arena::Create(options);
}

// Host memory that a device copies from and to.
class PinnedForDevice {
 public:
  PinnedForDevice(zero::Device* device, std::span<std::byte> memory)
      : device_(*device),
        memory_(memory.data()),
        status_(device->RegisterHost(memory.data(), static_cast<int64_t>(memory.size()))) {}
  ~PinnedForDevice() {
    if (status_.ok()) device_.UnregisterHost(memory_);
  }
  PinnedForDevice(const PinnedForDevice&) = delete;
  PinnedForDevice& operator=(const PinnedForDevice&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  zero::Device& device_;
  std::byte* const memory_;
  const absl::Status status_;
};

// What the mixtures of a model add to its sizes. All experts are alike.
void AddExpertSizes(const MatrixOrder& order, const models::ModelLayout& layout, const WeightSource& source,
                    DType type, GenerationSizes* sizes) {
  if (order.experts.empty()) return;
  ExpertSizes& experts = sizes->experts;
  experts.each = sizes->decoder.mixture.experts;
  experts.chosen = sizes->decoder.mixture.chosen;
  experts.place_bytes = source.largest_expert_bytes();
  for (size_t i = 0; i < order.experts.size(); i += static_cast<size_t>(experts.each)) {
    if (order.experts[i].there()) ++experts.layers;
  }
  for (const WeightUnit& unit : source.experts()) {
    int64_t elements = 0;
    for (const WeightPart& part : unit.parts) {
      const StoredMatrix stored = StoredAs(source, layout, part.tensor);
      elements += part.elements;
      sizes->largest_part = std::max(sizes->largest_part, part.elements);
      sizes->largest_part_rows = std::max(sizes->largest_part_rows, stored.rows);
      if (MultipliesAllPacked(type, stored))
        sizes->largest_packed_rows = std::max(sizes->largest_packed_rows, stored.rows);
      if (stored.code.has_value() || stored.scaled != nullptr) {
        sizes->decoded_elements =
            std::max(sizes->decoded_elements, DecodedRows(stored.columns) * stored.columns);
      }
    }
    experts.elements = std::max(experts.elements, elements);
  }
}

GenerationSizes SizesOf(const models::Decoder& decoder, const models::ModelLayout& layout,
                        const MatrixOrder& order, const WeightSource& source, uint64_t budget) {
  GenerationSizes sizes;
  sizes.decoder = decoder.shape;
  const DType type = ComputeType(source, order);
  sizes.element_bytes = type == DType::kFp32 ? 4 : 2;
  sizes.cache = {
      .layers = sizes.decoder.layers,
      .record_bytes = static_cast<uint64_t>(sizes.decoder.record_elements() * sizes.element_bytes)};
  const std::vector<int64_t>& windows = decoder.function.windows;
  if (std::any_of(windows.begin(), windows.end(), [](int64_t window) { return window > 0; }))
    sizes.cache.windows = windows;
  for (const int adapter : order.adapters) {
    const models::PublishedTensor& matrix = layout.tensors[static_cast<size_t>(adapter)];
    const StoredMatrix kept = {.rows = matrix.rows, .columns = matrix.columns, .type = type};
    sizes.adapter_elements = std::max(sizes.adapter_elements, kept.rows + kept.columns);
    sizes.largest_part_rows = std::max(sizes.largest_part_rows, kept.rows);
    if (MultipliesAllPacked(type, kept))
      sizes.largest_packed_rows = std::max(sizes.largest_packed_rows, kept.rows);
  }
  int64_t eight = 0, four = 0, scaled = 0;  // elements in each code
  int64_t strip = 0;                        // that are decoded at once, of those with scales
  for (const WeightUnit& unit : source.units()) {
    sizes.units.push_back(unit.bytes);
    for (const WeightPart& part : unit.parts) {
      const StoredMatrix stored = StoredAs(source, layout, part.tensor);
      sizes.largest_part = std::max(sizes.largest_part, part.elements);
      const int64_t rows = stored.turned ? stored.rows : part.elements / stored.columns + 1;
      sizes.largest_part_rows = std::max(sizes.largest_part_rows, rows);
      if (MultipliesAllPacked(type, stored))
        sizes.largest_packed_rows = std::max(sizes.largest_packed_rows, rows);
      if (stored.turned) sizes.turned_elements += part.elements;
      sizes.converts = sizes.converts || stored.type != type;
      sizes.matrix_elements += part.elements;
      if (stored.scaled != nullptr) {
        scaled += part.elements;
        sizes.scaled = stored.scaled->code();
        strip = std::max(strip, DecodedRows(stored.columns) * stored.columns);
      }
      if (!stored.code.has_value()) continue;
      sizes.coded_elements += part.elements;
      (stored.code->bits == 8 ? eight : four) += part.elements;
      if (stored.code->bits == (eight > four ? 8 : 4)) sizes.code = *stored.code;
      sizes.decoded_elements = std::max(sizes.decoded_elements, DecodedRows(stored.columns) * stored.columns);
    }
  }
  AddExpertSizes(order, layout, source, type, &sizes);
  if (scaled * 2 < sizes.matrix_elements) sizes.scaled = std::nullopt;
  const KeptTensors::Sizes with = KeptTensors::SizesOf(decoder, source, type, budget / kTableShare);
  sizes.kept_bytes = KeptTensors::SizesOf(decoder, source, type, 0).kept_bytes;
  sizes.table_bytes = with.kept_bytes - sizes.kept_bytes;
  sizes.loading_bytes = with.loading_bytes;
  if (strip > 0) {
    sizes.kept_bytes += static_cast<uint64_t>(strip * sizes.element_bytes);
    sizes.decoded_elements = std::max(sizes.decoded_elements, strip);
    sizes.coded_elements += scaled;
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    if (const auto& of = source.scaled(static_cast<int>(i)); of != nullptr)
      sizes.kept_bytes += of->scale_bytes();
  }
  sizes.scratch_bytes = source.scratch_bytes();
  return sizes;
}

// How long the products of one row and of a further one take in a whole pass, by those of a piece of a matrix
// as most of them are stored.
absl::Status MeasureProducts(const GenerationSizes& sizes, const GeneratorOptions& options,
                             GenerationWish* wish) {
  constexpr int64_t kMeasuredElements = 4 << 20, kFurther = 16;
  StoredMatrix piece = {.rows = 1,
                        .columns = sizes.decoder.width,
                        .type = sizes.element_bytes == 2 ? DType::kBf16 : DType::kFp32};
  if (sizes.coded_elements > 0 && !sizes.scaled.has_value()) piece.code = sizes.code;
  piece.turned = sizes.turned_elements * 2 > sizes.matrix_elements;
  piece.rows = std::max<int64_t>(1, std::min(kMeasuredElements, sizes.largest_part) / piece.columns);
  if (sizes.scaled.has_value()) {
    piece.scaled = std::make_shared<const models::ScaledMatrix>(
        models::ScaledMatrix::Plain(*sizes.scaled, piece.rows, piece.columns));
  }
  const double pieces =
      static_cast<double>(sizes.matrix_elements) / static_cast<double>(piece.rows * piece.columns);
  if (zero::Device* const device = options.device.get(); NeedsDeviceCompute(*device)) {
    ASSIGN_OR_RETURN(const double block, options.compute->MeasureProduct(piece, kDeviceRows, device));
    ASSIGN_OR_RETURN(const double two, options.compute->MeasureProduct(piece, 2 * kDeviceRows, device));
    wish->product_seconds = block * pieces;
    wish->row_seconds = std::max(0.0, two - block) / kDeviceRows * pieces;
    return absl::OkStatus();
  }
  ProductScratch scratch(options.threads);
  ASSIGN_OR_RETURN(const double one, MeasureProduct(piece, 1, &scratch));
  ASSIGN_OR_RETURN(const double more, MeasureProduct(piece, 1 + kFurther, &scratch));
  // Each row has experts of its own, at most.
  const double of_experts = one * static_cast<double>(sizes.experts.row_elements()) /
                            static_cast<double>(piece.rows * piece.columns);
  wish->product_seconds = one * pieces + of_experts;
  wish->row_seconds = std::max(0.0, more - one) / kFurther * pieces + of_experts;
  return absl::OkStatus();
}

// How fast so much memory is copied to the device's; takes its arena.
absl::Status MeasureCopies(zero::Device* device, std::span<std::byte> memory, GenerationWish* wish) {
  constexpr int kTurns = 3;
  const auto bytes = static_cast<int64_t>(memory.size());
  ASSIGN_OR_RETURN(std::byte* const there, device->AllocateArena(bytes));
  const PinnedForDevice pinned(device, memory);
  RETURN_IF_ERROR(pinned.status());
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const double begin = Now();
    std::promise<absl::Status> copied;
    device->CopyIn(there, memory.data(), bytes, /*after_compute=*/false,
                   [&](absl::Status status) { copied.set_value(std::move(status)); });
    RETURN_IF_ERROR(copied.get_future().get());
    best = std::min(best, Now() - begin);
  }
  wish->device->copy_bytes_per_second = static_cast<double>(bytes) / std::max(best, 1e-9);
  return absl::OkStatus();
}

// How fast the units come, and how long products take.
absl::Status Measure(WeightSource* source, const GenerationSizes& sizes, std::span<std::byte> memory,
                     size_t device_bytes, GeneratorOptions* options) {
  GenerationWish* const wish = &options->wish;
  const size_t units = std::min(kMeasuredUnits, sizes.units.size());
  const uint64_t slot = source->largest_unit_bytes();
  const size_t slots = std::max<size_t>(1, memory.size() / slot);
  std::vector<UnitRead> reads(slots);
  absl::Status status;
  uint64_t bytes = 0;
  const double begin = Now();
  for (size_t i = 0; i < units + slots; ++i) {
    UnitRead& read = reads[i % slots];
    if (read.pending) status.Update(source->Finish(&read));
    if (i >= units || !status.ok()) continue;
    // Spread over the model, so that no cache of the drive has them.
    const size_t unit = i * sizes.units.size() / units;
    status.Update(source->Start(unit, memory.data() + i % slots * slot, &read));
    bytes += sizes.units[unit];
  }
  RETURN_IF_ERROR(status);
  wish->drive_bytes_per_second = static_cast<double>(bytes) / std::max(Now() - begin, 1e-6);

  if (wish->device.has_value())
    RETURN_IF_ERROR(
        MeasureCopies(options->device.get(), memory.first(std::min(memory.size(), device_bytes)), wish));
  return MeasureProducts(sizes, *options, wish);
}

struct Sequence {
  GenerationRequest request;
  std::vector<int64_t> tokens;  // prompt, then text
  int64_t past = 0;             // positions in the cache
  int64_t read = 0;             // tokens that are read as a prompt is, before it decodes
  bool far = false;             // it is longer than DecoderFunction::NearPositions
  int slot = 0;
  models::TextSampler sampler;

  Sequence(GenerationRequest from, int of_slot, const models::SamplingOptions& sampling)
      : request(std::move(from)),
        tokens(request.prompt),
        read(prompt()),
        slot(of_slot),
        sampler(request.sampling.value_or(sampling), request.seed) {}
  int64_t prompt() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t made() const { return static_cast<int64_t>(tokens.size()) - prompt(); }
  bool decodes() const { return past >= read; }
};

}  // namespace

const char* FinishName(Finish finish) {
  return finish == Finish::kEnd ? "end" : finish == Finish::kStop ? "stop" : "length";
}

class Generator::Impl {
 public:
  Impl(std::shared_ptr<const models::LanguageModel> model, GeneratorOptions options)
      : model_(std::move(model)),
        options_(std::move(options)),
        decoder_(*model_->decoder()),
        layout_(model_->Layout()),
        order_(OrderOf(decoder_, layout_)),
        near_(decoder_.function.NearPositions()) {}

  absl::Status Open(const OpenWeights& open) {
    const zero::TensorScope scope(memory_.pool());
    ASSIGN_OR_RETURN(const GenerationSizes surveyed, Generator::Survey(*model_, open, &options_));
    ASSIGN_OR_RETURN(plan_, PlanGeneration(surveyed, options_.wish));
    const uint64_t arena = plan_.ring_bytes + plan_.scratch_bytes + plan_.cache_bytes + plan_.resident_bytes +
                           plan_.experts.memory_bytes;
    ASSIGN_OR_RETURN(arena_, MakeArena(arena));
    ASSIGN_OR_RETURN(engine_, MakeEngine(arena_.get(), options_.log));
    ASSIGN_OR_RETURN(source_, open(engine_.get(), order_.uses()));
    RETURN_IF_ERROR(OpenDevice());
    const DType type = ComputeType(*source_, order_);
    ASSIGN_OR_RETURN(ring_, arena_->Allocate(plan_.ring_bytes));
    ASSIGN_OR_RETURN(scratch_, arena_->Allocate(plan_.scratch_bytes));
    std::vector<std::byte*> homes(plan_.resident.size(), nullptr);
    if (plan_.resident_bytes > 0) {
      ASSIGN_OR_RETURN(resident_, arena_->Allocate(plan_.resident_bytes));
      std::byte* next = resident_.data();
      for (size_t i = 0; i < homes.size(); ++i) {
        if (!plan_.resident[i]) continue;
        homes[i] = next;
        next += source_->units()[i].bytes;
      }
    }
    const GenerationSizes sizes = SizesOf(decoder_, layout_, order_, *source_, options_.wish.budget_bytes);
    if (plan_.cache == CachePlace::kDevice) {
      cache_ =
          KvCache::OnDevice(sizes.cache, TakeOfDevice(plan_.device->cache_bytes), options_.wish.positions);
    } else if (plan_.cache == CachePlace::kHost) {
      cache_ = KvCache::InHostMemory(sizes.cache, arena_.get(), plan_.cache_bytes);
    } else {
      ASSIGN_OR_RETURN(cache_,
                       KvCache::OnDrive(sizes.cache, engine_.get(), arena_.get(), options_.cache_directory,
                                        static_cast<int>(plan_.batch), options_.wish.positions));
    }
    ASSIGN_OR_RETURN(kept_,
                     KeptTensors::Load(decoder_, layout_, source_.get(), type,
                                       plan_.keeps_tables ? options_.wish.budget_bytes / kTableShare : 0,
                                       {scratch_.data(), scratch_.bytes()}));
    stream_ = std::make_unique<Stream>(source_.get(), cache_.get(), engine_.get(),
                                       std::span(ring_.data(), ring_.bytes()), std::move(homes));
    ItemStream* items = stream_.get();
    if (plan_.device.has_value()) {
      const std::span<std::byte> ring = TakeOfDevice(plan_.device->ring_bytes);
      device_stream_ = std::make_unique<DeviceStream>(source_.get(), stream_.get(), options_.device.get(),
                                                      ring, DeviceHomes());
      items = device_stream_.get();
    }
    if (plan_.experts.memory_bytes > 0) {
      ASSIGN_OR_RETURN(expert_memory_, arena_->Allocate(plan_.experts.memory_bytes));
      experts_ = std::make_unique<ExpertCache>(source_.get(), engine_.get(),
                                               std::span(expert_memory_.data(), plan_.experts.memory_bytes),
                                               decoder_.shape.layers, decoder_.shape.mixture.experts);
    }
    const PassParts parts = {.model = model_.get(),
                             .decoder = &decoder_,
                             .layout = &layout_,
                             .order = &order_,
                             .source = source_.get(),
                             .kept = kept_.get(),
                             .stream = items,
                             .cache = cache_.get(),
                             .experts = experts_.get(),
                             .device = options_.device.get()};
    if (!NeedsDeviceCompute(*options_.device)) {
      runner_ = MakeHostPass(parts, options_.threads);
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(runner_, options_.compute->MakePass(parts));
    return absl::OkStatus();
  }

  absl::Status Run(const GenerationCallbacks& callbacks) {
    const zero::TensorScope scope(memory_.pool());
    const double begin = Now() - stats_.seconds;
    while (true) {
      if (callbacks.cancelled && callbacks.cancelled()) return absl::CancelledError("generate: interrupted");
      RETURN_IF_ERROR(Admit(callbacks));
      if (active_.empty()) return absl::OkStatus();
      const double pass_begin = Now();
      const uint64_t read_before = ReadBytes();
      const int64_t tokens_before = stats_.tokens;
      const bool decodes = std::all_of(active_.begin(), active_.end(),
                                       [](const Sequence& sequence) { return sequence.decodes(); });
      RETURN_IF_ERROR(Pass(callbacks));
      stats_.seconds = Now() - begin;
      if (decodes && stats_.passes > 1) {
        stats_.decode_seconds += Now() - pass_begin;
        stats_.decode_tokens += stats_.tokens - tokens_before;
        stats_.decode_read_bytes += ReadBytes() - read_before;
        ++stats_.decode_passes;
      }
      if (callbacks.progress) callbacks.progress(stats());
    }
  }

  GenerationStats stats() const {
    GenerationStats stats = stats_;
    stats.active = static_cast<int64_t>(active_.size());
    stats.weight_read_bytes = WeightBytes();
    stats.cache_read_bytes = cache_->read_bytes();
    stats.cache_written_bytes = cache_->written_bytes();
    stats.wait_seconds = stream_->stats().wait_seconds;
    if (experts_ != nullptr) {
      stats.experts = experts_->stats();
      stats.wait_seconds += stats.experts.wait_seconds + stats.experts.guess_wait_seconds;
    }
    stats.peak_tensor_bytes = memory_.Stats().peak_bytes;
    if (device_stream_ != nullptr) {
      const zero::Device::Traffic traffic = options_.device->traffic();
      stats.h2d_bytes = traffic.h2d_bytes - traffic_before_.h2d_bytes;
      stats.d2h_bytes = traffic.d2h_bytes - traffic_before_.d2h_bytes;
      stats.copy_wait_seconds = device_stream_->copy_wait_seconds();
      stats.peak_device_bytes =
          static_cast<int64_t>(plan_.device->arena_bytes()) + options_.device->tensors().peak_bytes;
    }
    return stats;
  }
  const GenerationPlan& plan() const { return plan_; }
  const GenerationWish& wish() const { return options_.wish; }
  std::string backend_name() const { return engine_->backend_name(); }

 private:
  // Its memory, and the bounds of tensors.
  absl::Status OpenDevice() {
    auto tensors = static_cast<int64_t>(plan_.tensor_bytes);
    if (plan_.device.has_value()) {
      zero::Device& device = *options_.device;
      const uint64_t arena = plan_.device->arena_bytes();
      ASSIGN_OR_RETURN(std::byte* const memory, device.AllocateArena(static_cast<int64_t>(arena)));
      device_left_ = {memory, arena};
      pinned_.emplace(&device, std::span(arena_->data(), arena_->bytes()));
      RETURN_IF_ERROR(pinned_->status());
      const auto there = static_cast<int64_t>(plan_.device->tensor_bytes);
      if (device.tensors_are_host()) {
        tensors += there;
      } else {
        device.TrimTensors();
        RETURN_IF_ERROR(device.LimitTensors(there));
        device.ResetPeak();
      }
      traffic_before_ = device.traffic();
    }
    zero::TensorMemory::SetLimit(tensors);
    zero::TensorMemory::ResetPeak();
    return absl::OkStatus();
  }

  std::span<std::byte> TakeOfDevice(uint64_t bytes) {
    const std::span<std::byte> taken = device_left_.first(bytes);
    device_left_ = device_left_.subspan(bytes);
    return taken;
  }

  // Of the units that live there, by unit.
  std::vector<std::byte*> DeviceHomes() {
    std::vector<std::byte*> homes(plan_.device->resident.size(), nullptr);
    for (size_t i = 0; i < homes.size(); ++i) {
      if (plan_.device->resident[i]) homes[i] = TakeOfDevice(source_->units()[i].bytes).data();
    }
    return homes;
  }

  uint64_t WeightBytes() const {
    const uint64_t experts = experts_ != nullptr ? experts_->stats().read_bytes : 0;
    return stream_->stats().weight_bytes + source_->rows_bytes() + experts;
  }
  uint64_t ReadBytes() const { return WeightBytes() + cache_->read_bytes(); }

  // Fills the places that are free with sequences that wait.
  absl::Status Admit(const GenerationCallbacks& callbacks) {
    while (static_cast<int64_t>(active_.size()) < plan_.batch) {
      if (!waiting_.has_value()) {
        ASSIGN_OR_RETURN(waiting_, callbacks.next());
        if (waiting_.has_value()) RETURN_IF_ERROR(Check(*waiting_));
      }
      if (!waiting_.has_value()) return absl::OkStatus();
      const int64_t positions = static_cast<int64_t>(waiting_->prompt.size()) + waiting_->tokens;
      const std::optional<int> slot = cache_->Take(positions);
      if (!slot.has_value()) {
        PENSTOCK_CHECK(!active_.empty(), "the cache is planned for the longest sequence");
        return absl::OkStatus();
      }
      active_.emplace_back(*std::move(waiting_), *slot, options_.sampling);
      waiting_.reset();
    }
    return absl::OkStatus();
  }

  absl::Status Check(const GenerationRequest& request) const {
    const auto prompt = static_cast<int64_t>(request.prompt.size());
    const bool fits = prompt >= 1 && prompt <= options_.wish.prompt && request.tokens >= 1 &&
                      prompt + request.tokens <= options_.wish.positions;
    for (const int64_t token : request.prompt) {
      if (token >= 0 && token < model_->vocabulary()) continue;
      return absl::InvalidArgumentError(absl::StrCat("sequence ", request.id, ": token ", token,
                                                     " is not one of the model's ", model_->vocabulary()));
    }
    if (fits) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("sequence ", request.id, ": ", prompt, " tokens and ",
                                                   request.tokens, " more do not fit into the ",
                                                   options_.wish.positions, " positions planned for"));
  }

  // The first of the sequences before this one that has its prompt; null: there is none, or keys and values
  // cannot be copied.
  const Sequence* WithItsPrompt(const Sequence& sequence) const {
    if (cache_->on_drive() || cache_->on_device() || sequence.prompt() < 2) return nullptr;
    for (const Sequence& each : active_) {
      if (&each == &sequence) return nullptr;
      if (each.request.prompt == sequence.request.prompt && each.far == sequence.far) return &each;
    }
    return nullptr;
  }

  // The shares of the next pass: those that decode first, then prompts in the order of their coming, as much
  // as a pass takes. `of`: the sequence of each share.
  std::vector<Share> NextShares(std::vector<Sequence*>* of) {
    std::vector<Share> shares;
    for (Sequence& sequence : active_) ReadAgainWhereFar(&sequence);
    for (Sequence& sequence : active_) {
      if (!sequence.decodes()) continue;
      Share share{sequence.slot, sequence.past, {sequence.tokens.back()}, true, true, sequence.far};
      // One more is made behind the last that is right, and none is drafted that would be far.
      int64_t left = sequence.request.tokens - sequence.made() - 1;
      if (near_ > 0 && !sequence.far) left = std::min(left, near_ - sequence.past - 1);
      const std::vector<int64_t> drafted = LookUp(sequence.tokens, std::min(options_.wish.drafted, left));
      share.tokens.insert(share.tokens.end(), drafted.begin(), drafted.end());
      shares.push_back(std::move(share));
      of->push_back(&sequence);
    }
    int64_t room = plan_.prompt_rows;
    for (Sequence& sequence : active_) {
      if (sequence.decodes() || room <= 0) continue;
      if (const Sequence* const first = sequence.past == 0 ? WithItsPrompt(sequence) : nullptr) {
        if (!first->decodes()) continue;  // Pass gives it what the first one has
        if (cache_->Copy(first->slot, sequence.slot, sequence.prompt() - 1))
          sequence.past = sequence.prompt() - 1;
      }
      const int64_t left = sequence.read - sequence.past;
      const int64_t count = left <= room ? left : room / kChunkRows * kChunkRows;
      if (count == 0) break;
      const auto from = sequence.tokens.begin() + sequence.past;
      shares.push_back(
          {sequence.slot, sequence.past, {from, from + count}, false, count == left, sequence.far});
      of->push_back(&sequence);
      room -= runner_->RowsOf(count);
    }
    return shares;
  }

  // A sequence that grows beyond what other frequencies turn: its keys of before are of no use.
  void ReadAgainWhereFar(Sequence* sequence) const {
    const auto length = static_cast<int64_t>(sequence->tokens.size());
    if (near_ == 0 || sequence->far || length <= near_) return;
    sequence->far = true;
    sequence->past = 0;
    sequence->read = length;
  }

  // Whether a pass comes after this one, as far as can be known before its tokens are.
  bool GoesOn(const std::vector<Sequence*>& of, const std::vector<Share>& shares) const {
    if (waiting_.has_value() || of.size() < active_.size()) return true;
    for (size_t i = 0; i < of.size(); ++i) {
      if (!shares[i].wants_logits || of[i]->made() + 1 < of[i]->request.tokens) return true;
    }
    return false;
  }

  absl::Status Pass(const GenerationCallbacks& callbacks) {
    std::vector<Sequence*> of;
    const std::vector<Share> shares = NextShares(&of);
    if (!start_appended_) runner_->AppendStart();
    runner_->AppendRest(shares);
    // The drive goes on over the end of this pass: the weights that the next one begins with do not depend on
    // the tokens that this one makes.
    start_appended_ = GoesOn(of, shares);
    if (start_appended_) runner_->AppendStart();
    ASSIGN_OR_RETURN(const std::span<const float> logits, runner_->Run(shares));
    const auto vocabulary = static_cast<size_t>(decoder_.shape.vocab);
    const float* row = logits.data();
    ++stats_.passes;
    for (size_t i = 0; i < shares.size(); ++i) {
      const Share& share = shares[i];
      if (share.decodes) {
        RETURN_IF_ERROR(Verify(callbacks, share, of[i], row, vocabulary));
        row += share.tokens.size() * vocabulary;
        continue;
      }
      of[i]->past += static_cast<int64_t>(share.tokens.size());
      stats_.prompt_tokens += static_cast<int64_t>(share.tokens.size());
      if (!share.wants_logits) continue;
      std::vector<Sequence*> alike = {of[i]};  // that have these logits
      for (Sequence& each : active_) {
        // Neither is one that is read again with what it has made.
        if (of[i]->made() > 0 || each.made() > 0 || each.past != 0 || WithItsPrompt(each) != of[i]) continue;
        if (!cache_->Copy(of[i]->slot, each.slot, of[i]->prompt())) continue;
        each.past = of[i]->prompt();
        alike.push_back(&each);
      }
      for (Sequence* const each : alike) RETURN_IF_ERROR(Take(callbacks, each, {row, vocabulary}).status());
      row += vocabulary;
    }
    return absl::OkStatus();
  }

  // The token behind each of a share's, up to the first that is not the one drafted there. What is cached
  // behind it is written over by the next pass.
  absl::Status Verify(const GenerationCallbacks& callbacks, const Share& share, Sequence* sequence,
                      const float* rows, size_t vocabulary) {
    stats_.drafted_tokens += static_cast<int64_t>(share.tokens.size()) - 1;
    for (size_t at = 0; at < share.tokens.size(); ++at, rows += vocabulary) {
      if (at > 0) ++stats_.accepted_tokens;
      ++sequence->past;
      ASSIGN_OR_RETURN(const std::optional<int64_t> made, Take(callbacks, sequence, {rows, vocabulary}));
      if (!made.has_value() || at + 1 == share.tokens.size() || *made != share.tokens[at + 1]) break;
    }
    return absl::OkStatus();
  }

  // One more token of a sequence; nullopt: its last, and the sequence is gone.
  absl::StatusOr<std::optional<int64_t>> Take(const GenerationCallbacks& callbacks, Sequence* sequence,
                                              std::span<const float> logits) {
    const int64_t token = sequence->sampler.Next(
        logits, {sequence->tokens, static_cast<size_t>(sequence->prompt()), options_.ends});
    sequence->tokens.push_back(token);
    ++stats_.tokens;
    std::optional<Finish> finish;
    const bool ends = std::find(options_.ends.begin(), options_.ends.end(), token) != options_.ends.end();
    if (const std::optional<int64_t> top = sequence->request.logprobs; top.has_value() && !ends)
      callbacks.logprobs(sequence->request.id, models::LogprobsOf(logits, token, *top));
    if (ends) {
      finish = Finish::kEnd;
    } else if (callbacks.token(sequence->request.id, token)) {
      finish = Finish::kStop;
    } else if (sequence->made() >= sequence->request.tokens) {
      finish = Finish::kLength;
    }
    if (!finish.has_value()) return token;
    const int64_t id = sequence->request.id;
    cache_->Give(sequence->slot);
    active_.remove_if([sequence](const Sequence& each) { return &each == sequence; });
    ++stats_.finished;
    RETURN_IF_ERROR(callbacks.finished(id, *finish));
    return std::nullopt;
  }

  // Destroyed from the last to the first.
  const std::shared_ptr<const models::LanguageModel> model_;
  GeneratorOptions options_;
  const models::Decoder decoder_;
  const models::ModelLayout layout_;
  const MatrixOrder order_;
  const int64_t near_;  // 0: however long a sequence is
  GenerationPlan plan_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> engine_;
  std::unique_ptr<WeightSource> source_;
  zero::TensorAccount memory_;             // what passes compute in
  std::optional<PinnedForDevice> pinned_;  // the arena
  std::span<std::byte> device_left_;       // of the device's, not given to anybody yet
  zero::Device::Traffic traffic_before_;
  aio::Region ring_, scratch_, resident_, expert_memory_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<KeptTensors> kept_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ExpertCache> experts_;         // null: the model has no mixtures
  std::unique_ptr<DeviceStream> device_stream_;  // null: the device computes in host memory
  std::unique_ptr<PassRunner> runner_;

  std::list<Sequence> active_;
  std::optional<GenerationRequest> waiting_;
  bool start_appended_ = false;
  GenerationStats stats_;
};

Generator::Generator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Generator::~Generator() = default;

absl::Status PlanAsPacked(const kernels::WeightCode& code, const GeneratorOptions& options,
                          GenerationSizes* sizes, GenerationWish* wish) {
  const auto row = static_cast<size_t>(sizes->decoder.width);
  const auto stored =
      static_cast<double>(std::accumulate(sizes->units.begin(), sizes->units.end(), uint64_t{0}));
  const double coded = static_cast<double>(sizes->matrix_elements) *
                       static_cast<double>(code.row_bytes(row)) / static_cast<double>(row);
  const double share = stored > 0 ? coded / stored : 1;
  for (uint64_t& unit : sizes->units) unit = static_cast<uint64_t>(static_cast<double>(unit) * share);
  sizes->experts.place_bytes = static_cast<uint64_t>(static_cast<double>(sizes->experts.place_bytes) * share);
  sizes->code = code;
  sizes->scaled = std::nullopt;
  sizes->coded_elements = sizes->matrix_elements;
  sizes->decoded_elements = DecodedRows(sizes->decoder.width) * sizes->decoder.width;
  return MeasureProducts(*sizes, options, wish);
}

absl::StatusOr<GenerationSizes> Generator::Survey(const models::LanguageModel& model, const OpenWeights& open,
                                                  GeneratorOptions* options) {
  const std::optional<models::Decoder> decoder = model.decoder();
  const models::ModelLayout layout = model.Layout();
  if (options->device->has_own_memory() && decoder->shape.mixture.experts > 0) {
    return absl::UnimplementedError(
        "generate: a mixture of experts is computed on the processor: leave out `device` and "
        "`device_memory`");
  }
  if (options->device->has_own_memory() && model.lora() != nullptr) {
    return absl::UnimplementedError(
        "generate: adapters are computed on the processor: leave out `device` and `device_memory`, or export "
        "them merged");
  }
  const MatrixOrder order = OrderOf(*decoder, layout);
  // A text that grows beyond is read once more, as a prompt.
  if (const int64_t near = decoder->function.NearPositions(); near > 0 && options->wish.positions > near)
    options->wish.prompt = std::max(options->wish.prompt, near + 1);
  // As much as the least ring has, or as much of the budget as measuring may take.
  constexpr uint64_t kMeasuringBytes = uint64_t{32} << 20;
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> arena,
                   MakeArena(std::clamp<uint64_t>(options->wish.budget_bytes / 2, 4096, kMeasuringBytes)));
  ASSIGN_OR_RETURN(const std::unique_ptr<aio::Engine> engine, MakeEngine(arena.get(), options->log));
  ASSIGN_OR_RETURN(const std::unique_ptr<WeightSource> source, open(engine.get(), order.uses()));
  GenerationSizes sizes = SizesOf(*decoder, layout, order, *source, options->wish.budget_bytes);
  // Whether the budget holds it at all, before anything is read.
  ASSIGN_OR_RETURN(const GenerationPlan plan, PlanGeneration(sizes, options->wish));
  if (source->largest_unit_bytes() <= arena->bytes()) {
    RETURN_IF_ERROR(Measure(source.get(), sizes, {arena->data(), arena->bytes()},
                            plan.device.has_value() ? plan.device->arena_bytes() : 0, options));
  }
  return sizes;
}

absl::StatusOr<std::unique_ptr<Generator>> Generator::Create(
    std::shared_ptr<const models::LanguageModel> model, const OpenWeights& open, GeneratorOptions options) {
  if (NeedsDeviceCompute(*options.device) && options.compute == nullptr)
    return absl::FailedPreconditionError("generate: this build computes on the processor alone");
  auto impl = std::make_unique<Impl>(std::move(model), std::move(options));
  RETURN_IF_ERROR(impl->Open(open));
  return std::unique_ptr<Generator>(new Generator(std::move(impl)));
}

const GenerationPlan& Generator::plan() const { return impl_->plan(); }
const GenerationWish& Generator::wish() const { return impl_->wish(); }
std::string Generator::backend_name() const { return impl_->backend_name(); }
absl::Status Generator::Run(const GenerationCallbacks& callbacks) { return impl_->Run(callbacks); }
GenerationStats Generator::stats() const { return impl_->stats(); }

}  // namespace penstock::generate
