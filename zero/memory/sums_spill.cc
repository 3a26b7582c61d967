#include "zero/memory/sums_spill.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"

namespace penstock::zero {
namespace {

// 0: they stay, or there are none.
uint64_t BytesOf(const tiering::Plan& plan, tiering::BlockIndex block) {
  if (!plan.moves_sums(block)) return 0;
  return static_cast<uint64_t>(plan.summed_elements(block)) * sizeof(float);
}

uint64_t RoomOf(const tiering::Plan& plan, tiering::BlockIndex block) {
  return static_cast<uint64_t>(tiering::AlignUp(static_cast<int64_t>(BytesOf(plan, block)), tiering::kPage));
}

}  // namespace

uint64_t SumsSpill::Bytes(const tiering::Plan& plan) {
  uint64_t bytes = 0;
  for (const tiering::BlockIndex b : plan.blocks.indices()) bytes += RoomOf(plan, b);
  return bytes;
}

absl::StatusOr<std::unique_ptr<SumsSpill>> SumsSpill::Create(aio::Engine& engine, const tiering::Plan& plan,
                                                             const std::string& directory) {
  auto spill = std::unique_ptr<SumsSpill>(new SumsSpill(engine));
  uint64_t offset = 0;
  for (const tiering::BlockIndex b : plan.blocks.indices()) {
    auto& place = spill->places_.emplace_back();
    if (BytesOf(plan, b) == 0) continue;
    place = std::make_unique<Place>();
    place->bytes = BytesOf(plan, b);
    place->offset = std::exchange(offset, offset + RoomOf(plan, b));
  }
  aio::FileOptions options;
  options.path = absl::StrCat(directory, "/penstock.sums");
  options.nameless = true;
  options.size = offset;
  ASSIGN_OR_RETURN(spill->file_, aio::File::Open(options));
  return spill;
}

SumsSpill::~SumsSpill() {
  for (auto& place : places_) {
    if (place != nullptr && place->request.pending()) (void)engine_.Wait(&place->request);
  }
}

absl::Status SumsSpill::Submit(Place& place, Done done, void* context) {
  place.done = done;
  place.context = context;
  place.request.set_on_complete(
      [](aio::Request&, void* of) {
        auto* ended = static_cast<Place*>(of);
        ended->done(ended->context);
      },
      &place);
  return engine_.Submit(&place.request);
}

absl::Status SumsSpill::Write(tiering::BlockIndex block, const void* sums, Done done, void* context) {
  Place& place = *places_[block];
  place.reads = false;
  place.checksum = kernels::Checksum(sums, place.bytes);
  place.request.set_priority(aio::Priority::kWriteBehind);
  place.request.PrepareWrite(*file_, place.offset, sums, place.bytes);
  return Submit(place, done, context);
}

absl::Status SumsSpill::Read(tiering::BlockIndex block, void* sums, Done done, void* context) {
  Place& place = *places_[block];
  place.reads = true;
  place.sums = sums;
  place.request.set_priority(aio::Priority::kPrefetch);
  place.request.PrepareRead(*file_, place.offset, sums, place.bytes);
  return Submit(place, done, context);
}

absl::Status SumsSpill::Ended(tiering::BlockIndex block) {
  const Place& place = *places_[block];
  RETURN_IF_ERROR(place.request.status());
  if (!place.reads || kernels::Checksum(place.sums, place.bytes) == place.checksum) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "gradient sums of block ", block.value(), ", offset ", place.offset, ", ", place.bytes, " bytes of ",
      file_->path(),
      ": what came back from the drive is not what was written; the last commit is whole: continue "
      "with `resume`, and mistrust the drive"));
}

}  // namespace penstock::zero
