// aio_copy SOURCE TARGET: copies a file past the page cache, reading and writing at the same time.
//
// Shows the whole life of the engine: an arena that is registered once, files, requests that are used again
// and again, and a callback. Each slot of the arena goes round on its own: when its read is done, its write
// is submitted from the callback; when the write is done, its next read. The main thread only waits.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "aio/arena.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/program.h"

namespace {

using penstock::aio::Arena;
using penstock::aio::Engine;
using penstock::aio::File;
using penstock::aio::Request;

// A StatusOr's value, or the end of the program with its message.
template <typename T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "aio_copy: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);
}

constexpr uint64_t kSlotBytes = 4 * penstock::aio::kMiB;
constexpr int kSlots = 8;

struct Copy {
  Engine* engine;
  File* source;
  File* target;
  uint64_t bytes;
  std::mutex mutex;  // source and target may be on different devices, and then have different I/O threads
  uint64_t next_offset = 0;
  absl::Status status;
};

struct Slot {
  Copy* copy;
  penstock::aio::Region memory;
  Request request;
};

void OnComplete(Request& request, void* context) {
  auto* slot = static_cast<Slot*>(context);
  Copy& copy = *slot->copy;
  const std::lock_guard<std::mutex> lock(copy.mutex);
  if (!request.ok()) {
    copy.status = request.status();
  } else if (request.op() == penstock::aio::Op::kRead) {
    const uint64_t offset = request.offset(), bytes = request.bytes();
    request.PrepareWrite(*copy.target, offset, slot->memory.data(), bytes);
    copy.status.Update(copy.engine->Submit(&request));
  } else if (copy.next_offset < copy.bytes && copy.status.ok()) {
    const uint64_t offset = copy.next_offset, bytes = std::min(kSlotBytes, copy.bytes - offset);
    copy.next_offset += bytes;
    request.PrepareRead(*copy.source, offset, slot->memory.data(), bytes);
    copy.status.Update(copy.engine->Submit(&request));
  }
}

}  // namespace

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  if (argc != 3) {
    std::fprintf(stderr, "usage: aio_copy SOURCE TARGET\n");
    return 2;
  }
  penstock::aio::ArenaOptions arena_options;
  arena_options.bytes = kSlots * kSlotBytes;
  const std::unique_ptr<Arena> arena = Must(Arena::Create(arena_options));

  penstock::aio::FileOptions source_options;
  source_options.path = argv[1];
  source_options.read_only = true;
  const std::unique_ptr<File> source = Must(File::Open(source_options));
  const uint64_t bytes = Must(source->Size());
  penstock::aio::FileOptions target_options;
  target_options.path = argv[2];
  target_options.create = true;
  target_options.truncate = true;
  target_options.size = bytes;
  const std::unique_ptr<File> target = Must(File::Open(target_options));

  penstock::aio::EngineOptions options;
  options.arenas = {arena.get()};
  const std::unique_ptr<Engine> engine = Must(Engine::Create(options));

  Copy copy{engine.get(), source.get(), target.get(), bytes, {}, 0, {}};
  std::vector<std::unique_ptr<Slot>> slots;
  for (int i = 0; i < kSlots && copy.next_offset < bytes; ++i) {
    slots.push_back(std::make_unique<Slot>());
    Slot& slot = *slots.back();
    slot.copy = &copy;
    slot.memory = Must(arena->Allocate(kSlotBytes));
    slot.request.set_on_complete(&OnComplete, &slot);
    const std::lock_guard<std::mutex> lock(copy.mutex);
    const uint64_t offset = copy.next_offset;
    if (offset == bytes) break;
    copy.next_offset += std::min(kSlotBytes, bytes - offset);
    slot.request.PrepareRead(*source, offset, slot.memory.data(), copy.next_offset - offset);
    copy.status.Update(engine->Submit(&slot.request));
  }
  copy.status.Update(engine->Drain());
  copy.status.Update(target->SyncData());
  if (!copy.status.ok()) {
    std::fprintf(stderr, "aio_copy: %s\n", std::string(copy.status.message()).c_str());
    return 1;
  }
  const penstock::aio::EngineStats stats = engine->stats();
  std::printf("%llu bytes copied with %s on %s pages, %.1f ms of CPU per GiB on the I/O thread\n",
              static_cast<unsigned long long>(bytes), stats.backend.c_str(),
              std::string(penstock::aio::PageKindName(arena->page_kind())).c_str(), stats.CpuMsPerGiB());
  return 0;
}
