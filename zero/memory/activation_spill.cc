#include "zero/memory/activation_spill.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

uint64_t BytesOf(const torch::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

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
  auto spill = std::unique_ptr<ActivationSpill>(new ActivationSpill(engine));
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
      if (place->request.pending()) (void)engine_.Wait(&place->request);
    }
  }
}

absl::Status ActivationSpill::Write(tiering::Position position, int micro_batch, torch::Tensor input,
                                    Done done, void* context) {
  Place& to = place(position, micro_batch);
  to.tensor = std::move(input);
  const uint64_t bytes = BytesOf(to.tensor);
  if (bytes > to.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the input at position ", position.value(), " has ", bytes,
                                                   " bytes, more than the ", to.bytes,
                                                   " of the example that was planned for"));
  }
  to.sizes = to.tensor.sizes().vec();
  to.type = to.tensor.scalar_type();
  to.checksum = kernels::Checksum(to.tensor.data_ptr(), bytes);
  to.request.set_priority(aio::Priority::kWriteBehind);
  to.request.set_on_complete(done, context);
  to.request.PrepareWrite(*to.file, to.offset, to.tensor.data_ptr(), bytes);
  return engine_.Submit(&to.request);
}

absl::Status ActivationSpill::Written(tiering::Position position, int micro_batch) {
  Place& from = place(position, micro_batch);
  from.tensor = torch::Tensor();
  return from.request.status();
}

absl::Status ActivationSpill::Read(tiering::Position position, int micro_batch, Done done, void* context) {
  Place& from = place(position, micro_batch);
  absl::Status status = Guarded("memory for the input of a stage", [&] {
    from.tensor = torch::empty(from.sizes, torch::TensorOptions().dtype(from.type));
  });
  if (!status.ok()) return status;
  from.request.set_priority(aio::Priority::kPrefetch);
  from.request.set_on_complete(done, context);
  from.request.PrepareRead(*from.file, from.offset, from.tensor.data_ptr(), BytesOf(from.tensor));
  return engine_.Submit(&from.request);
}

absl::StatusOr<torch::Tensor> ActivationSpill::Take(tiering::Position position, int micro_batch) {
  Place& from = place(position, micro_batch);
  torch::Tensor tensor = std::exchange(from.tensor, torch::Tensor());
  RETURN_IF_ERROR(from.request.status());
  const uint64_t bytes = BytesOf(tensor);
  if (kernels::Checksum(tensor.data_ptr(), bytes) != from.checksum) {
    return absl::DataLossError(
        absl::StrCat("input at position ", position.value(), ", micro-batch ", micro_batch, ", offset ",
                     from.offset, ", ", bytes, " bytes of ", from.file->path(),
                     ": what came back from the drive is not what was written; the last "
                     "commit is whole: continue with --resume, and mistrust the drive"));
  }
  return tensor;
}

}  // namespace penstock::zero
