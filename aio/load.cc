// Keeping a device loaded at one depth: the measuring instrument below profiles and the tools' sweeps.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "aio/profile.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

// One block's place in memory and the request that goes round in it.
struct Slot;

struct Load {
  Engine* engine = nullptr;
  const LoadOptions* options = nullptr;
  uint64_t blocks_per_file = 0;
  int64_t end_ns = 0;

  std::mutex mutex;  // completions come from one thread a device
  uint64_t next_block = 0;
  uint64_t submitted_bytes = 0;
  uint64_t done_bytes = 0;
  int64_t last_ns = 0;
  Histogram latency;
  absl::Status status;

  void Prepare(Slot& slot);
  static void OnComplete(Request& request, void* context);
};

struct Slot {
  Load* load = nullptr;
  std::byte* data = nullptr;
  bool write_next = false;
  uint64_t block = 0;
  Request request;
};

// The slot's next transfer; the caller holds the mutex.
void Load::Prepare(Slot& slot) {
  const LoadOptions& o = *options;
  // In the mix a block that was read is then written, as an update does.
  const bool write = o.kind == LoadKind::kWrite || (o.kind == LoadKind::kMixed && slot.write_next);
  if (!(o.kind == LoadKind::kMixed && write)) slot.block = next_block++;
  slot.write_next = !slot.write_next;
  File& file = *o.files[slot.block % o.files.size()];
  const uint64_t offset = (slot.block / o.files.size()) % blocks_per_file * o.block_bytes;
  submitted_bytes += o.block_bytes;
  if (write) {
    slot.request.PrepareWrite(file, offset, slot.data, o.block_bytes);
  } else {
    slot.request.PrepareRead(file, offset, slot.data, o.block_bytes);
  }
}

void Load::OnComplete(Request& request, void* context) {
  auto* const slot = static_cast<Slot*>(context);
  Load& load = *slot->load;
  const std::lock_guard<std::mutex> lock(load.mutex);
  load.done_bytes += request.done_bytes();
  load.last_ns = std::max(load.last_ns, request.complete_ns());
  load.latency.Record(static_cast<uint64_t>(request.complete_ns() - request.submit_ns()));
  if (!request.ok()) {
    if (load.status.ok()) load.status = request.status();
    return;
  }
  if (!load.status.ok() || request.complete_ns() >= load.end_ns ||
      load.submitted_bytes + load.options->block_bytes > load.options->bytes_max) {
    return;
  }
  load.Prepare(*slot);
  if (absl::Status status = load.engine->Submit(&request); !status.ok()) load.status = status;
}

}  // namespace

absl::StatusOr<LoadResult> RunLoad(Engine& engine, const LoadOptions& options, std::byte* memory) {
  if (options.files.empty() || options.block_bytes == 0 || options.file_bytes < options.block_bytes ||
      options.in_flight_bytes < options.block_bytes) {
    return absl::InvalidArgumentError(
        "load: needs files of at least one block, and at least one block in flight");
  }
  Load load;
  load.engine = &engine;
  load.options = &options;
  load.blocks_per_file = options.file_bytes / options.block_bytes;
  const int64_t start_ns = engine.clock().NowNs();
  load.end_ns = start_ns + static_cast<int64_t>(options.seconds * 1e9);
  load.last_ns = start_ns;

  std::vector<std::unique_ptr<Slot>> slots;
  std::vector<Request*> requests;
  {
    const std::lock_guard<std::mutex> lock(load.mutex);
    for (uint64_t i = 0; i < options.in_flight_bytes / options.block_bytes; ++i) {
      if (i != 0 && load.submitted_bytes + options.block_bytes > options.bytes_max) break;
      slots.push_back(std::make_unique<Slot>());
      Slot& slot = *slots.back();
      slot.load = &load;
      slot.data = memory + i * options.block_bytes;
      slot.request.set_priority(Priority::kPrefetch);
      slot.request.set_on_complete(&Load::OnComplete, &slot);
      slot.write_next = i % 2 == 1;  // half the slots begin with a write
      if (slot.write_next && options.kind == LoadKind::kMixed) slot.block = load.next_block++;
      load.Prepare(slot);
      requests.push_back(&slot.request);
    }
  }
  RETURN_IF_ERROR(engine.Submit(requests));
  RETURN_IF_ERROR(engine.Drain());
  RETURN_IF_ERROR(load.status);
  LoadResult result;
  result.bytes = load.done_bytes;
  result.seconds = static_cast<double>(load.last_ns - start_ns) * 1e-9;
  result.latency = load.latency;
  return result;
}

}  // namespace penstock::aio
