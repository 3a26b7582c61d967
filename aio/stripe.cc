#include "aio/stripe.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

constexpr size_t kRoundUnitsMax = 64;

// Small whole numbers in nearly the proportion of the weights: of all rounds of at most 64 units the one with
// the least error, the shortest of equals.
std::vector<uint32_t> WholeProportion(const std::vector<double>& weights) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  std::vector<uint32_t> best;
  double best_error = 0;
  for (size_t round = weights.size(); round <= std::max(kRoundUnitsMax, weights.size()); ++round) {
    std::vector<uint32_t> units;
    units.reserve(weights.size());
    double total = 0, error = 0;
    for (const double weight : weights) {
      units.push_back(
          static_cast<uint32_t>(std::max(1.0, std::round(weight / sum * static_cast<double>(round)))));
      total += units.back();
    }
    for (size_t i = 0; i < weights.size(); ++i)
      error = std::max(error, std::abs(units[i] / total - weights[i] / sum));
    if (best.empty() || error < best_error - 1e-9) {
      best = units;
      best_error = error;
    }
  }
  return best;
}

}  // namespace

absl::StatusOr<StripeLayout> StripeLayout::Make(uint64_t unit_bytes, const std::vector<double>& weights) {
  if (weights.empty()) return absl::InvalidArgumentError("stripe: no files");
  if (unit_bytes == 0 || !IsAligned(unit_bytes, kSectorBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("stripe: units of ", unit_bytes, " bytes, must be multiples of 4096"));
  }
  for (const double weight : weights) {
    if (!(weight > 0) || !std::isfinite(weight)) {
      return absl::InvalidArgumentError(absl::StrCat("stripe: weight ", weight, " is not a positive number"));
    }
  }
  StripeLayout layout;
  layout.unit_bytes_ = unit_bytes;
  layout.units_a_round_ = WholeProportion(weights);
  // Spread evenly: each unit goes to the file that is furthest behind its share.
  uint32_t total = 0;
  for (const uint32_t units : layout.units_a_round_) total += units;
  std::vector<uint32_t> given(weights.size(), 0);
  for (uint32_t i = 0; i < total; ++i) {
    uint32_t next = 0;
    double furthest = -1e300;
    for (uint32_t f = 0; f < layout.files(); ++f) {
      const double behind = static_cast<double>(layout.units_a_round_[f]) * (i + 1) / total - given[f];
      if (given[f] < layout.units_a_round_[f] && behind > furthest + 1e-12) {
        furthest = behind;
        next = f;
      }
    }
    layout.round_.push_back(next);
    layout.rank_.push_back(given[next]++);
  }
  return layout;
}

StripeLayout::Extent StripeLayout::At(uint64_t logical_offset, uint64_t bytes) const {
  const uint64_t unit = logical_offset / unit_bytes_;
  const uint64_t within = logical_offset % unit_bytes_;
  const uint64_t round = unit / round_.size();
  const auto place = static_cast<size_t>(unit % round_.size());
  const uint32_t file = round_[place];
  return {file, (round * units_a_round_[file] + rank_[place]) * unit_bytes_ + within,
          std::min(bytes, unit_bytes_ - within)};
}

uint64_t StripeLayout::FileBytes(uint32_t file, uint64_t logical_bytes) const {
  const uint64_t round_bytes = unit_bytes_ * round_.size();
  const uint64_t rounds = logical_bytes / round_bytes;
  uint64_t bytes = rounds * units_a_round_[file] * unit_bytes_;
  uint64_t rest = logical_bytes % round_bytes;
  for (size_t i = 0; rest != 0; ++i) {
    const uint64_t here = std::min(rest, unit_bytes_);
    if (round_[i] == file) bytes += here;
    rest -= here;
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<StripedFile>> StripedFile::Open(const StripedFileOptions& options) {
  std::vector<double> weights = options.weights;
  if (weights.empty()) weights.assign(options.directories.size(), 1.0);
  if (weights.size() != options.directories.size()) {
    return absl::InvalidArgumentError(absl::StrCat("striped file ", options.name, ": ", weights.size(),
                                                   " weights for ", options.directories.size(),
                                                   " directories"));
  }
  ASSIGN_OR_RETURN(auto layout, StripeLayout::Make(options.unit_bytes, weights));
  auto striped = std::make_unique<StripedFile>();
  striped->layout_ = std::move(layout);
  for (uint32_t i = 0; i < striped->layout_.files(); ++i) {
    FileOptions file_options = options.file;
    file_options.path = absl::StrCat(options.directories[i], "/", options.name);
    file_options.size = striped->layout_.FileBytes(i, options.size);
    ASSIGN_OR_RETURN(auto file, File::Open(file_options));
    striped->files_.push_back(std::move(file));
  }
  return striped;
}

absl::Status StripedFile::SyncData() const {
  absl::Status first;
  for (const auto& file : files_) first.Update(file->SyncData());
  return first;
}

void StripedTransfer::Prepare(Op op, StripedFile& file, uint64_t offset, void* data, uint64_t bytes) {
  while (parts_.size() < file.files().size()) parts_.push_back(std::make_unique<Part>());
  for (auto& part : parts_) part->segments.clear();
  auto* at = static_cast<std::byte*>(data);
  for (uint64_t left = bytes; left != 0;) {
    const StripeLayout::Extent extent = file.layout().At(offset, left);
    Part& part = *parts_[extent.file];
    if (part.segments.empty()) part.offset = extent.offset;
    part.segments.push_back({at, extent.bytes});
    at += extent.bytes;
    offset += extent.bytes;
    left -= extent.bytes;
  }
  pointers_.clear();
  for (size_t i = 0; i < file.files().size(); ++i) {
    Part& part = *parts_[i];
    if (part.segments.empty()) continue;
    op == Op::kRead ? part.request.PrepareRead(*file.files()[i], part.offset, part.segments)
                    : part.request.PrepareWrite(*file.files()[i], part.offset, part.segments);
    part.request.set_priority(priority_);
    pointers_.push_back(&part.request);
  }
}

}  // namespace penstock::aio
