// Taking back the last commit of one store among several that commit together.
#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/store.h"
#include "swap/store_files.h"

namespace penstock::swap {

absl::Status Store::GoBackTo(uint64_t sequence) {
  RETURN_IF_ERROR(CheckWritable());
  const bool written = std::any_of(written_.begin(), written_.end(),
                                   [](const Written& tile) { return tile.state != Written::State::kNone; });
  if (commit_ != nullptr || retained_.has_value() || written || transfers_.load() > 0) {
    return absl::FailedPreconditionError("a commit is taken back only right after opening");
  }
  if (sequence == record_.sequence) return absl::OkStatus();
  if (shape_.slots == 1) {
    return absl::DataLossError(
        absl::StrCat(files_[0]->path(), " keeps one version, of step ", record_.step,
                     ": it cannot take its last commit back; go on from a checkpoint"));
  }
  std::vector<std::vector<std::byte>> copies;
  const auto newest = static_cast<uint32_t>(record_.sequence % kRecordPlaces);
  AlignedBuffer buffer(geometry_.record_capacity());
  for (uint32_t place = 0; place < kRecordPlaces; ++place) {
    for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
      copies.emplace_back();
      if (place == newest) continue;
      // The other copy may be readable.
      if (ReadFully(engine_, *files_[0], geometry_.record_offset(place, copy), buffer.span()).ok())
        copies.back().assign(buffer.data(), buffer.data() + buffer.bytes());
    }
  }
  FoundRecord found = NewestRecord(geometry_, shape_.uuid, copies);
  if (sequence + 1 != record_.sequence || found.record.sequence != sequence) {
    return absl::DataLossError(
        absl::StrCat(files_[0]->path(), ": its last commit is number ", record_.sequence, ", of step ",
                     record_.step, ", and the one before it is ",
                     found.record.sequence == 0
                         ? "gone"
                         : absl::StrCat("number ", found.record.sequence, ", of step ", found.record.step),
                     ": it cannot go back to number ", sequence, "; go on from a checkpoint"));
  }
  // Neither zeros, which would say that there never was a record, nor anything that looks like one.
  constexpr std::string_view kTakenBack = "taken back";
  AlignedBuffer sector(kSectorBytes);
  std::fill_n(sector.data(), kSectorBytes, std::byte{0});
  std::transform(kTakenBack.begin(), kTakenBack.end(), sector.data(), [](char c) { return std::byte(c); });
  for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
    RETURN_IF_ERROR(WriteFully(engine_, *files_[0], geometry_.record_offset(newest, copy), sector.span()));
  }
  RETURN_IF_ERROR(SyncFully(engine_, *files_[0]));
  record_ = std::move(found.record);
  recovered_.sequence = record_.sequence;
  recovered_.step = record_.step;
  recovered_.updates = record_.updates;
  recovered_.payload = record_.payload;
  SizeTables();
  return absl::OkStatus();
}

}  // namespace penstock::swap
