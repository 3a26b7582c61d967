#include "generate/memory_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "generate/decode.h"
#include "generate/expert_cache.h"
#include "kernels/many_rows.h"
#include "tiering/plan/byte_size.h"

namespace penstock::generate {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kPages = 2 * kMiB;  // that an arena is rounded to
constexpr uint64_t kComfortableRing = 64 * kMiB;
constexpr int64_t kMostPromptRows = kMostPassPositions;  // beyond which processors, not drives, bound a pass
constexpr int64_t kMostBatch = 256;
constexpr uint64_t kTensorSlack = 4 * kMiB;

uint64_t U(int64_t n) { return static_cast<uint64_t>(n); }

uint64_t LargestUnit(const GenerationSizes& s) {
  return s.units.empty() ? 0 : *std::max_element(s.units.begin(), s.units.end());
}

// Of a pass of so many rows: a layer's input and output, and the most of what lives at once in a norm (in
// fp32), in attention (queries, keys and values, and as many again while positions turn them) and in the
// inner network.
uint64_t RowBytes(const GenerationSizes& s) {
  const models::DecoderShape& d = s.decoder;
  const uint64_t e = U(s.element_bytes);
  const uint64_t mixed = U(d.heads * d.depth), kept = U(d.key_heads * d.depth);
  const uint64_t norm = 3 * e * U(d.width) + 12 * U(d.width);
  // To latents: queries as they come and of records, in both types, or what is mixed and values.
  const models::LatentShape& l = d.latent;
  const uint64_t attend =
      l.rank > 0 ? (e + 4) * U(d.heads) * U(std::max(l.query_depth(), l.value) + d.depth) +
                       e * (4 * U(d.width) + 2 * U(l.query_rank) + 3 * U(d.depth)) + 4 * U(d.width)
                 : e * (4 * U(d.width) + 5 * mixed + 6 * kept) + 4 * (mixed + U(d.width));
  const uint64_t inner = e * 5 * (U(d.width) + U(d.inner));  // in one matrix or in two
  // What a row's experts give, and of one of them what is in between; the scores, and what is chosen.
  const models::MixtureShape& m = d.mixture;
  const uint64_t mixture = m.experts == 0
                               ? 0
                               : e * (U(m.chosen + 7) * U(d.width) + (m.paired ? 7 : 5) * U(m.inner)) +
                                     (e + 8) * U(m.experts) + 48 * U(m.chosen) +
                                     (l.rank > 0 ? 4 * U(d.width + m.experts) : 0);  // its router is in fp32
  return 2 * e * U(d.width) + std::max({norm, attend, inner + mixture}) + e * U(s.adapter_elements);
}
// The matrix that makes keys and values of latents, which a layer keeps while it attends.
uint64_t LatentMatrixBytes(const GenerationSizes& s) {
  const models::LatentShape& l = s.decoder.latent;
  return U(s.element_bytes) * U(s.decoder.heads * (l.plain + l.value)) * U(l.rank);
}
uint64_t WidestRow(const GenerationSizes& s) {
  const models::DecoderShape& d = s.decoder;
  const models::LatentShape& l = d.latent;
  const int64_t attention =
      l.rank > 0 ? std::max({d.heads * l.query_depth(), d.heads * l.value, l.query_rank, d.depth})
                 : d.heads * d.depth + 2 * d.key_heads * d.depth;
  return U(std::max({d.width, d.inner, d.inner_rows, (d.mixture.paired ? 2 : 1) * d.mixture.inner,
                     d.mixture.experts, attention}));
}
uint64_t LogitsBytes(const GenerationSizes& s, int64_t decoded) {
  const models::DecoderShape& d = s.decoder;
  const uint64_t e = U(s.element_bytes);
  return U(decoded) * (U(d.vocab) * (e + 8) + 2 * e * U(d.width) + 12 * U(d.width));
}

// What a pass of so many rows takes in host memory, from above.
uint64_t TensorBytes(const GenerationSizes& s, int64_t decoded, int64_t prompted) {
  const uint64_t widest = WidestRow(s), rows = U(RoundUp(decoded + prompted, 16));
  // In and out of a product, in fp32 where rows decode; where all rows are packed, these and a part's sums;
  // else a prompt's rows turned, and their sums.
  const uint64_t packed =
      s.largest_packed_rows > 0
          ? rows * 4 * (U(RoundUp(static_cast<int64_t>(widest), 32)) + U(s.largest_packed_rows))
          : 0;
  const auto many = static_cast<size_t>(prompted);
  const uint64_t turned =
      prompted > 0
          ? kernels::ManyRowsScratch(
                many, static_cast<size_t>(std::max({s.largest_part_rows, s.decoder.inner,
                                                    s.decoder.inner_rows, s.decoder.mixture.experts})))
          : 0;
  const uint64_t product = 8 * U(decoded) * widest + packed + turned;
  const uint64_t angles = 4 * U(decoded + prompted) * U(s.decoder.depth) * U(s.decoder.rotations);
  return (U(decoded + prompted) * RowBytes(s) + product + angles + LogitsBytes(s, decoded)) * 9 / 8 +
         LatentMatrixBytes(s) + s.kept_bytes + kTensorSlack;
}

// The same of LibTorch's tensors, where it computes.
uint64_t LibTorchBytes(const GenerationSizes& s, const GenerationWish& wish, int64_t decoded,
                       int64_t prompted) {
  const models::DecoderShape& d = s.decoder;
  const uint64_t e = U(s.element_bytes);
  const uint64_t mixed = U(d.heads * d.depth), kept = U(d.key_heads * d.depth);
  const uint64_t product =
      8 * U(decoded) * WidestRow(s) +
      2 * e * U(std::min(kChunkRows, prompted)) * U(std::max({s.largest_part_rows, d.inner, d.inner_rows}));
  const uint64_t attending = U(std::min(kAttentionRows, std::max<int64_t>(prompted, 1)));
  const uint64_t wide = 4;  // scores may be in fp32
  const uint64_t attention = U(wish.positions) * (attending * U(d.heads) * 3 * wide + 2 * kept * (e + wide)) +
                             4 * attending * mixed * 4;
  const uint64_t converted = (s.converts ? 4 * U(s.largest_part) : 0) + e * U(s.decoded_elements);
  return (U(decoded + prompted) * RowBytes(s) + product + std::max(LogitsBytes(s, decoded), attention) +
          converted) *
             9 / 8 +
         s.kept_bytes + kTensorSlack;
}

// Of a pass that decodes: of each text one, and its drafted tokens.
int64_t RowsThatDecode(const GenerationPlan& plan, const GenerationWish& wish) {
  return plan.batch * (1 + wish.drafted);
}

// What of a pass that a device computes is in the host's tensors: rows of tables, logits.
uint64_t HostTensorBytes(const GenerationSizes& s, int64_t decoded, int64_t prompted) {
  const int64_t rows = RoundUp(decoded, kDeviceRows) + RoundUp(prompted, kDeviceRows);
  const uint64_t table_rows = U(rows) * U(s.decoder.width) * (8 + 2 * U(s.element_bytes));
  const uint64_t logits = U(decoded) * U(s.decoder.vocab) * 4;
  return (table_rows + logits) * 9 / 8 + s.kept_bytes + kTensorSlack;
}

// What it computes itself.
uint64_t DeviceTensorBytes(const GenerationSizes& s, const GenerationWish& wish, int64_t decoded,
                           int64_t prompted) {
  // What is decoded, and what is still multiplied with.
  const uint64_t coded =
      s.coded_elements > 0 ? 2 * U(s.element_bytes) * U(std::max(kDeviceDecodedElements, s.decoded_elements))
                           : 0;
  // Parts that are moved to where they are aligned.
  const uint64_t moved = 2 * LargestUnit(s);
  const uint64_t records = U(wish.positions) * 2 * U(s.decoder.key_heads * s.decoder.depth * s.element_bytes);
  const uint64_t tensors =
      LibTorchBytes(s, wish, RoundUp(decoded, kDeviceRows), RoundUp(prompted, kDeviceRows)) + coded + moved +
      records;
  return tensors + U(wish.device->slack.Beside(static_cast<int64_t>(tensors)));
}

struct Candidate {
  int64_t batch = 1;
  CachePlace place = CachePlace::kHost;
  bool tables = false;
};

// Experts in places, out of all.
void SetPlaces(const GenerationSizes& s, int64_t places, GenerationPlan* plan) {
  plan->experts.places = places;
  plan->experts.all = s.experts.all();
  plan->experts.memory_bytes = U(places) * s.experts.place_bytes;
}

GenerationPlan Fixed(const GenerationSizes& s, const GenerationWish& wish, const Candidate& candidate,
                     uint64_t ring, int64_t prompt_rows) {
  GenerationPlan plan;
  plan.batch = candidate.batch;
  plan.cache = candidate.place;
  plan.keeps_tables = candidate.tables;
  plan.prompt_rows = prompt_rows;
  plan.ring_bytes = ring;
  plan.scratch_bytes = s.scratch_bytes;
  if (s.experts.all() > 0) SetPlaces(s, static_cast<int64_t>(ExpertCache::kLeastPlaces), &plan);
  const uint64_t cache =
      U(plan.batch) * (candidate.place == CachePlace::kDevice ? s.cache.device_bytes(wish.positions)
                                                              : s.cache.host_bytes(wish.positions));
  if (plan.cache == CachePlace::kHost) plan.cache_bytes = cache;
  if (plan.cache == CachePlace::kDrive)
    plan.cache_bytes = U(plan.batch) * s.cache.tail_bytes() + KvCache::StagingBytes(s.cache);
  const int64_t decoded = RowsThatDecode(plan, wish);
  plan.tensor_bytes = wish.device.has_value() ? HostTensorBytes(s, decoded, prompt_rows)
                                              : TensorBytes(s, decoded, prompt_rows);
  // Tables are loaded before there is a pass.
  if (plan.keeps_tables)
    plan.tensor_bytes = std::max(plan.tensor_bytes, s.loading_bytes + kTensorSlack) + s.table_bytes;
  if (wish.device.has_value()) {
    DevicePart& device = plan.device.emplace();
    device.ring_bytes = kDevicePlaces * LargestUnit(s);
    device.cache_bytes = plan.cache == CachePlace::kDevice ? cache : 0;
    device.tensor_bytes = DeviceTensorBytes(s, wish, decoded, prompt_rows);
    device.total_bytes = device.arena_bytes() + device.tensor_bytes;
  }
  const uint64_t arena = plan.ring_bytes + plan.scratch_bytes + plan.cache_bytes + plan.experts.memory_bytes;
  plan.total_bytes = (arena + kPages - 1) / kPages * kPages + plan.tensor_bytes;
  return plan;
}

// Of the units that `taken` does not have, as many as `room` holds; returns their bytes. Spread evenly, so
// that the drive is as busy in every part of a pass.
uint64_t ChooseResident(const GenerationSizes& s, uint64_t room, const std::vector<bool>& taken,
                        std::vector<bool>* resident) {
  resident->assign(s.units.size(), false);
  const auto is_taken = [&](size_t i) { return !taken.empty() && taken[i]; };
  uint64_t all = 0, bytes = 0;
  for (size_t i = 0; i < s.units.size(); ++i) all += is_taken(i) ? 0 : s.units[i];
  const double share = all == 0 ? 1.0 : std::min(1.0, static_cast<double>(room) / static_cast<double>(all));
  double due = 0;
  for (size_t i = 0; i < s.units.size(); ++i) {
    if (is_taken(i)) continue;
    due += share * static_cast<double>(s.units[i]);
    const bool fits = bytes + s.units[i] <= room;
    if (!fits || (share < 1 && due < static_cast<double>(s.units[i]))) continue;
    due -= static_cast<double>(s.units[i]);
    (*resident)[i] = true;
    bytes += s.units[i];
  }
  // A unit or two that the last share was too small for.
  for (size_t i = 0; i < s.units.size(); ++i) {
    if (is_taken(i) || (*resident)[i] || bytes + s.units[i] > room) continue;
    (*resident)[i] = true;
    bytes += s.units[i];
  }
  return bytes;
}

// What budgets have left keeps weights: the device's, which no pass copies, then the host's.
void ChooseAllResident(const GenerationSizes& s, const GenerationWish& wish, GenerationPlan* plan) {
  const uint64_t all = std::accumulate(s.units.begin(), s.units.end(), uint64_t{0});
  std::vector<bool> on_device;
  uint64_t device_bytes = 0;
  if (plan->device.has_value()) {
    DevicePart& device = *plan->device;
    device.resident_bytes =
        ChooseResident(s, wish.device->budget_bytes - device.total_bytes, {}, &device.resident);
    device.total_bytes += device.resident_bytes;
    on_device = device.resident;
    device_bytes = device.resident_bytes;
    device.pass_bytes = all - device_bytes;
    if (plan->cache != CachePlace::kDevice)
      device.pass_bytes += U(plan->batch) * s.cache.host_bytes(wish.positions);
  }
  const uint64_t room = wish.budget_bytes - plan->total_bytes;
  plan->resident_bytes = ChooseResident(s, room > kPages ? room - kPages : 0, on_device, &plan->resident);
  plan->total_bytes += plan->resident_bytes == 0 ? 0 : (plan->resident_bytes + kPages - 1) / kPages * kPages;
  plan->pass_bytes = all - device_bytes - plan->resident_bytes;
}

// `more` experts beyond those that have places, as far as there are so many and `room` holds them.
void AddPlaces(const GenerationSizes& s, int64_t more, uint64_t room, GenerationPlan* plan) {
  if (s.experts.all() == 0) return;
  const auto held = static_cast<int64_t>(std::min(room / s.experts.place_bytes, U(s.experts.all())));
  const int64_t added = std::clamp<int64_t>(std::min(more, held), 0,
                                            std::max<int64_t>(0, s.experts.all() - plan->experts.places));
  SetPlaces(s, plan->experts.places + added, plan);
  plan->total_bytes += U(added) * s.experts.place_bytes;
}

// How many a pass uses, and how many of those are not in memory.
void PredictExperts(const GenerationSizes& s, int64_t rows, GenerationPlan* plan) {
  ExpertPart& experts = plan->experts;
  if (experts.all == 0) return;
  experts.pass_used = s.experts.used(rows);
  const double held = static_cast<double>(experts.places) / static_cast<double>(experts.all);
  experts.pass_read = experts.pass_used * std::max(0.0, 1 - held);
  experts.pass_bytes = static_cast<uint64_t>(experts.pass_read * static_cast<double>(s.experts.place_bytes));
  plan->pass_bytes += experts.pass_bytes;
}

void Predict(const GenerationSizes& s, const GenerationWish& wish, GenerationPlan* plan) {
  plan->cache_pass_bytes =
      plan->cache == CachePlace::kDrive ? U(plan->batch) * s.cache.pass_bytes(wish.positions) : 0;
  const int64_t rows = RowsThatDecode(*plan, wish);
  PredictExperts(s, rows, plan);
  const double drive =
      static_cast<double>(plan->pass_bytes + plan->cache_pass_bytes) / wish.drive_bytes_per_second;
  // On a device those of a block cost as much as one.
  const int64_t first = wish.device.has_value() ? kDeviceRows : 1;
  const auto further = static_cast<double>(RoundUp(rows, first) - first);
  const double compute = wish.product_seconds + further * wish.row_seconds;
  const double copies = plan->device.has_value() ? static_cast<double>(plan->device->pass_bytes) /
                                                       wish.device->copy_bytes_per_second
                                                 : 0;
  plan->pass_seconds = std::max({drive, copies, compute, 1e-6});
  plan->bound = drive >= std::max(copies, compute) ? PassBound::kRead
                : copies >= compute                ? PassBound::kCopy
                                                   : PassBound::kCompute;
}

bool Fits(const GenerationPlan& plan, const GenerationWish& wish) {
  return plan.total_bytes <= wish.budget_bytes &&
         (!plan.device.has_value() || plan.device->total_bytes <= wish.device->budget_bytes);
}

// Positions that a cache on a drive brings of a layer at once, at most.
int64_t LongestRead(const GenerationSizes& s, const GenerationWish& wish) {
  int64_t longest = 0;
  for (int64_t layer = 0; layer < std::max<int64_t>(s.cache.layers, 1); ++layer)
    longest = std::max(longest, s.cache.read_positions(layer, wish.positions));
  return longest;
}

// Whether more rows of prompts take at most a quarter of what computes them has.
bool IsModest(const GenerationPlan& more, const GenerationPlan& least, const GenerationWish& wish) {
  if (more.device.has_value() &&
      more.device->tensor_bytes - least.device->tensor_bytes > wish.device->budget_bytes / 4)
    return false;
  return more.tensor_bytes - least.tensor_bytes <= wish.budget_bytes / 4;
}

// The plan of one candidate; nullopt where the budgets do not hold it.
std::optional<GenerationPlan> PlanExactly(const GenerationSizes& s, const GenerationWish& wish,
                                          const Candidate& candidate) {
  const uint64_t cache_item = candidate.place == CachePlace::kDrive
                                  ? (U(LongestRead(s, wish)) * s.cache.record_bytes + 4095) / 4096 * 4096
                                  : 0;
  // With one place held in its middle, the next finds room at its end or its beginning.
  const uint64_t least_ring = 3 * std::max(LargestUnit(s), cache_item);
  const int64_t least_rows = std::min(kChunkRows, wish.prompt);
  const int64_t most_rows =
      std::min(kMostPromptRows, RoundUp(wish.prompt, kChunkRows) * std::min<int64_t>(candidate.batch, 4));
  const GenerationPlan least = Fixed(s, wish, candidate, least_ring, least_rows);
  if (!Fits(least, wish)) return std::nullopt;
  GenerationPlan plan = least;
  // More rows and a longer ring as long as they take no more than a quarter of the budget each.
  for (int64_t rows = std::max(most_rows, kChunkRows); rows >= kChunkRows; rows -= kChunkRows) {
    const GenerationPlan more = Fixed(s, wish, candidate, least_ring, rows);
    if (!Fits(more, wish) || !IsModest(more, least, wish)) continue;
    plan = more;
    break;
  }
  const uint64_t left = wish.budget_bytes - plan.total_bytes;
  const uint64_t longer = std::min(std::max(kComfortableRing, least_ring) - least_ring, left / 4);
  plan = Fixed(s, wish, candidate, least_ring + longer / 4096 * 4096, plan.prompt_rows);
  if (plan.total_bytes > wish.budget_bytes) plan = Fixed(s, wish, candidate, least_ring, plan.prompt_rows);
  // Experts of a row and of its guesses, for a quarter of what is left; then what every pass uses; then the
  // other experts. An arena is rounded up to whole pages.
  const auto room = [&](uint64_t share) {
    const uint64_t beside = plan.total_bytes + 2 * kPages;
    return wish.budget_bytes > beside ? (wish.budget_bytes - beside) / share : 0;
  };
  AddPlaces(s, 2 * s.experts.chosen, room(4), &plan);
  ChooseAllResident(s, wish, &plan);
  AddPlaces(s, s.experts.all(), room(1), &plan);
  plan.least_bytes = least.total_bytes;
  if (plan.device.has_value()) plan.device->least_bytes = least.device->total_bytes;
  Predict(s, wish, &plan);
  return plan;
}

// With tables where they fit: the least budget is that without.
std::optional<GenerationPlan> PlanOf(const GenerationSizes& s, const GenerationWish& wish,
                                     const Candidate& candidate) {
  std::optional<GenerationPlan> plan = PlanExactly(s, wish, candidate);
  if (!plan.has_value() || s.table_bytes == 0) return plan;
  std::optional<GenerationPlan> with = PlanExactly(s, wish, {candidate.batch, candidate.place, true});
  if (!with.has_value()) return plan;
  with->least_bytes = plan->least_bytes;
  return with;
}

}  // namespace

double ExpertSizes::used(int64_t rows) const {
  if (layers == 0) return 0;
  const double missed =
      std::pow(1 - static_cast<double>(chosen) / static_cast<double>(each), static_cast<double>(rows));
  return static_cast<double>(layers * each) * (1 - missed);
}

const char* PassBoundName(PassBound bound) {
  return bound == PassBound::kRead ? "read" : bound == PassBound::kCopy ? "copy" : "compute";
}

absl::StatusOr<GenerationPlan> PlanGeneration(const GenerationSizes& sizes, const GenerationWish& wish) {
  if (wish.drafted > 0 && wish.cache == CachePlace::kDrive) {
    return absl::InvalidArgumentError(
        "prompt lookup needs keys and values in memory: on the drive, wrong guesses would be written to it");
  }
  if (wish.cache == CachePlace::kDevice && !wish.device.has_value())
    return absl::InvalidArgumentError(
        "keys and values in device memory need a device with memory of its own: `device cuda`");
  std::vector<int64_t> batches;
  if (wish.batch.has_value()) {
    batches = {std::min(*wish.batch, std::max<int64_t>(wish.sequences, 1))};
  } else {
    for (int64_t b = 1; b < std::min(wish.sequences, kMostBatch); b *= 2) batches.push_back(b);
    batches.push_back(std::max<int64_t>(1, std::min(wish.sequences, kMostBatch)));
  }
  std::optional<GenerationPlan> best;
  uint64_t least = std::numeric_limits<uint64_t>::max(), least_device = least;
  for (const CachePlace place : {CachePlace::kDevice, CachePlace::kHost, CachePlace::kDrive}) {
    if (wish.cache != CachePlace::kAuto && wish.cache != place) continue;
    if (place == CachePlace::kDevice && !wish.device.has_value()) continue;
    if (wish.drafted > 0 && place == CachePlace::kDrive) continue;
    for (const int64_t batch : batches) {
      const std::optional<GenerationPlan> plan = PlanOf(sizes, wish, {batch, place});
      if (!plan.has_value()) {
        GenerationWish unbounded = wish;
        unbounded.budget_bytes = std::numeric_limits<uint64_t>::max() / 8;
        if (unbounded.device.has_value()) unbounded.device->budget_bytes = unbounded.budget_bytes;
        const GenerationPlan wanted = *PlanOf(sizes, unbounded, {batch, place});
        const uint64_t there = wanted.device.has_value() ? wanted.device->least_bytes : 0;
        least_device = std::min(least_device, there);
        // Of host memory: where the device's is enough.
        if (there <= (wish.device.has_value() ? wish.device->budget_bytes : 0))
          least = std::min(least, wanted.least_bytes);
        continue;
      }
      // A larger batch, or a cache further away, has to gain something.
      if (!best.has_value() || plan->tokens_per_second() > 1.02 * best->tokens_per_second()) best = plan;
    }
  }
  if (best.has_value()) return *std::move(best);
  const auto too_small = [](const char* setting, uint64_t budget, uint64_t least_that_works) {
    const auto bytes = [](uint64_t n) { return tiering::FormatBytes(static_cast<int64_t>(n)); };
    return absl::FailedPreconditionError(
        absl::StrCat(setting, " ", bytes(budget), " is too small: the least that works here is ",
                     bytes(least_that_works), " (", least_that_works, " bytes)"));
  };
  if (wish.device.has_value() && wish.device->budget_bytes < least_device)
    return too_small("`device_memory`", wish.device->budget_bytes, least_device);
  return too_small("`host_memory`", wish.budget_bytes, least);
}

}  // namespace penstock::generate
