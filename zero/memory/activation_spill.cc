#include "zero/memory/activation_spill.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"

namespace penstock::zero {
namespace {

// At every position room for the largest: the order of the stages may change.
uint64_t RoomForAnInput(const tiering::ModelGraph& graph) {
  int64_t largest = 0;
  for (const tiering::StageShape& stage : graph.stages)
    largest = std::max(largest, stage.input_scratch_bytes);
  return static_cast<uint64_t>(tiering::AlignUp(largest, tiering::kPage));
}

}  // namespace

std::vector<uint64_t> ActivationSpill::BytesIn(size_t directories, const tiering::ModelGraph& graph,
                                               const tiering::Plan& plan) {
  std::vector<uint64_t> bytes(directories, 0);
  size_t next = 0;
  for (const tiering::Position position : plan.all_positions()) {
    if (!plan.SpillsInput(position)) continue;
    for (int m = 0; m < plan.micro_batches; ++m) bytes[next++ % directories] += RoomForAnInput(graph);
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<ActivationSpill>> ActivationSpill::Create(
    aio::Engine& engine, const tiering::ModelGraph& graph, const tiering::Plan& plan,
    const std::vector<std::string>& directories) {
  auto spill = std::unique_ptr<ActivationSpill>(new ActivationSpill(engine, graph.inputs_beside));
  std::vector<uint64_t> sizes(directories.size(), 0);
  spill->places_.resize(static_cast<size_t>(plan.positions));
  const uint64_t room = RoomForAnInput(graph);
  size_t next = 0;
  for (const tiering::Position position : plan.all_positions()) {
    if (!plan.SpillsInput(position)) continue;
    for (int m = 0; m < plan.micro_batches; ++m) {
      auto& place = spill->places_[position].emplace_back(std::make_unique<Place>());
      const size_t directory = next++ % directories.size();
      place->offset = std::exchange(sizes[directory], sizes[directory] + room);
      place->bytes = room;
    }
  }
  for (size_t d = 0; d < directories.size(); ++d) {
    aio::FileOptions options;
    options.path = absl::StrCat(directories[d], "/penstock.inputs");
    options.nameless = true;
    options.size = sizes[d];
    ASSIGN_OR_RETURN(std::unique_ptr<aio::File> file, aio::File::Open(options));
    spill->files_.push_back(std::move(file));
  }
  next = 0;
  for (auto& position : spill->places_) {
    for (auto& place : position) place->file = spill->files_[next++ % directories.size()].get();
  }
  return spill;
}

ActivationSpill::~ActivationSpill() {
  for (auto& position : places_) {
    for (auto& place : position) {
      for (auto& value : place->values) {
        if (value->request.pending()) (void)engine_.Wait(&value->request);
      }
    }
  }
}

void ActivationSpill::OnValueDone(aio::Request&, void* context) {
  auto* place = static_cast<Place*>(context);
  if (place->outstanding.fetch_sub(1) == 1) place->done(place->context);
}

template <typename Prepare>
absl::Status ActivationSpill::Submit(Place& place, aio::Priority priority, Done done, void* context,
                                     Prepare&& prepare) {
  place.done = done;
  place.context = context;
  place.refused = absl::OkStatus();
  // One more than the values, taken off at the end: none of them may report before all are submitted.
  const auto count = static_cast<int>(place.values.size());
  place.outstanding.store(count + 1, std::memory_order_relaxed);
  int submitted = 0;
  for (auto& value : place.values) {
    value->request.set_priority(priority);
    value->request.set_on_complete(&ActivationSpill::OnValueDone, &place);
    prepare(*value);
    place.refused = engine_.Submit(&value->request);
    if (!place.refused.ok()) break;
    ++submitted;
  }
  if (submitted == 0 && count > 0) return place.refused;
  const int missing = count - submitted;
  if (place.outstanding.fetch_sub(missing + 1) == missing + 1) done(context);
  return absl::OkStatus();
}

absl::Status ActivationSpill::StatusOf(const Place& place) {
  absl::Status status = place.refused;
  RETURN_IF_ERROR(status);  // the values behind it have their last status
  for (const auto& value : place.values) status.Update(value->request.status());
  return status;
}

absl::Status ActivationSpill::Write(tiering::Position position, int micro_batch,
                                    std::span<const TensorView> values, Done done, void* context) {
  Place& to = place(position, micro_batch);
  uint64_t at = 0;
  while (to.values.size() < values.size()) to.values.push_back(std::make_unique<Value>());
  to.values.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    Value& value = *to.values[i];
    value.data = values[i].data;
    value.bytes = static_cast<uint64_t>(values[i].bytes());
    value.offset = to.offset + at;
    at += i + 1 < values.size() ? tiering::AlignUp(static_cast<int64_t>(value.bytes), tiering::kPage)
                                : value.bytes;
  }
  if (at > to.bytes && grows_) {
    RETURN_IF_ERROR(Grow(to, at));
    at = to.offset;
    for (auto& value : to.values) {
      value->offset = at;
      at += static_cast<uint64_t>(tiering::AlignUp(static_cast<int64_t>(value->bytes), tiering::kPage));
    }
  } else if (at > to.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the input at position ", position.value(), " has ", at,
                                                   " bytes, more than the ", to.bytes,
                                                   " of the example that was planned for"));
  }
  for (auto& value : to.values) value->checksum = kernels::Checksum(value->data, value->bytes);
  return Submit(to, aio::Priority::kWriteBehind, done, context, [&](Value& value) {
    value.request.PrepareWrite(*to.file, value.offset, value.data, value.bytes);
  });
}

absl::Status ActivationSpill::Grow(Place& place, uint64_t bytes) {
  ASSIGN_OR_RETURN(const uint64_t size, place.file->Size());
  const auto begin = static_cast<uint64_t>(tiering::AlignUp(static_cast<int64_t>(size), tiering::kPage));
  const auto room = static_cast<uint64_t>(tiering::AlignUp(static_cast<int64_t>(bytes), tiering::kPage));
  RETURN_IF_ERROR(place.file->Preallocate(begin + room));
  place.offset = begin;
  place.bytes = room;
  return absl::OkStatus();
}

absl::Status ActivationSpill::Written(tiering::Position position, int micro_batch) {
  return StatusOf(place(position, micro_batch));
}

absl::Status ActivationSpill::Read(tiering::Position position, int micro_batch,
                                   std::span<const TensorView> values, Done done, void* context) {
  Place& from = place(position, micro_batch);
  bool same = values.size() == from.values.size();
  for (size_t i = 0; same && i < values.size(); ++i)
    same = static_cast<uint64_t>(values[i].bytes()) == from.values[i]->bytes;
  if (!same) {
    return absl::InternalError(absl::StrCat("the input at position ", position.value(),
                                            " is to be restored to values of other sizes than it had"));
  }
  for (size_t i = 0; i < values.size(); ++i) from.values[i]->data = values[i].data;
  return Submit(from, aio::Priority::kPrefetch, done, context, [&](Value& value) {
    value.request.PrepareRead(*from.file, value.offset, value.data, value.bytes);
  });
}

absl::Status ActivationSpill::TakeRead(tiering::Position position, int micro_batch) {
  const Place& from = place(position, micro_batch);
  RETURN_IF_ERROR(StatusOf(from));
  for (const auto& value : from.values) {
    if (kernels::Checksum(value->data, value->bytes) == value->checksum) continue;
    return absl::DataLossError(
        absl::StrCat("input at position ", position.value(), ", micro-batch ", micro_batch, ", offset ",
                     value->offset, ", ", value->bytes, " bytes of ", from.file->path(),
                     ": what came back from the drive is not what was written; the last "
                     "commit is whole: continue with `resume`, and mistrust the drive"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
