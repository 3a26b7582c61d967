#include "tools/ds/ds_io_transfer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "aio/io_error.h"
#include "base/status_macros.h"

namespace penstock::tools {

using aio::Request;

Transfer::Transfer(const TransferShape& shape, std::span<std::byte> memory) : shape_(shape), memory_(memory) {
  if (!shape.single_submit && !shape.sequential) {
    // One request for it all, over the memory again and again if that is shorter.
    for (uint64_t at = 0; at < shape.bytes; at += memory.size()) {
      segments_.push_back({memory.data(), std::min<uint64_t>(memory.size(), shape.bytes - at)});
    }
    requests_.push_back(std::make_unique<Request>());
    return;
  }
  const uint64_t blocks = (shape.bytes + shape.block_bytes - 1) / shape.block_bytes;
  const uint64_t count = shape.sequential ? std::min(blocks, shape.queue_depth) : blocks;
  for (uint64_t i = 0; i < count; ++i) requests_.push_back(std::make_unique<Request>());
  pointers_.reserve(count);
}

void Transfer::Prepare(Request& request, aio::File& file, bool read, uint64_t offset, uint64_t bytes) {
  const uint64_t places = std::max<uint64_t>(1, memory_.size() / shape_.block_bytes);
  std::byte* const data = memory_.data() + (offset / shape_.block_bytes) % places * shape_.block_bytes;
  read ? request.PrepareRead(file, offset, data, bytes) : request.PrepareWrite(file, offset, data, bytes);
  request.set_priority(aio::Priority::kPrefetch);
}

absl::Status Transfer::Run(aio::Engine& engine, aio::File& file, bool read) {
  if (shape_.single_submit || shape_.sequential) return RunBlocks(engine, file, read);
  Request& request = *requests_[0];
  read ? request.PrepareRead(file, 0, segments_) : request.PrepareWrite(file, 0, segments_);
  request.set_priority(aio::Priority::kPrefetch);
  absl::Status status = engine.Submit(&request);
  if (status.ok()) status = engine.Wait(&request);
  if (!status.ok()) ++errors_;
  return status;
}

absl::Status Transfer::RunBlocks(aio::Engine& engine, aio::File& file, bool read) {
  absl::Status first;
  for (uint64_t offset = 0; offset < shape_.bytes && first.ok();) {
    pointers_.clear();
    for (auto& request : requests_) {
      if (offset == shape_.bytes) break;
      const uint64_t bytes = std::min(shape_.block_bytes, shape_.bytes - offset);
      Prepare(*request, file, read, offset, bytes);
      offset += bytes;
      pointers_.push_back(request.get());
      if (!shape_.single_submit) continue;
      RETURN_IF_ERROR(engine.Submit(request.get()));
    }
    if (!shape_.single_submit) {
      RETURN_IF_ERROR(engine.Submit(pointers_));
    }
    if (absl::Status status = engine.WaitAll(pointers_); first.ok()) first = status;
    for (const Request* request : pointers_) errors_ += request->ok() ? 0 : 1;
  }
  return first;
}

absl::StatusOr<std::unique_ptr<aio::Engine>> MakeEngine(aio::BackendKind backend, const TransferShape& shape,
                                                        const aio::Arena& arena) {
  aio::EngineOptions options;
  options.backend = backend;
  options.allow_fallback =
      false;  // a named engine is that one or an error; kAuto walks the ladder all the same
  options.block_bytes = shape.block_bytes;
  options.max_read_bytes_in_flight = shape.queue_depth * shape.block_bytes;
  options.max_write_bytes_in_flight = options.max_read_bytes_in_flight;
  options.max_blocks_in_flight = static_cast<uint32_t>(std::clamp<uint64_t>(shape.queue_depth, 1, 4096));
  options.arenas = {&arena};
  options.worker_threads = static_cast<int>(std::clamp<uint64_t>(shape.queue_depth, 1, 16));
  return aio::Engine::Create(std::move(options));
}

void FillRandom(std::span<std::byte> memory, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (size_t at = 0; at + 8 <= memory.size(); at += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory.data() + at, &state, 8);
  }
}

namespace {

// Written under another name and renamed when whole: a run that was cut off leaves no file of the right size
// with holes in it, whose reads would never reach the device.
absl::Status MakeDataFile(const std::string& path, uint64_t bytes, aio::Engine& engine,
                          std::span<std::byte> memory) {
  aio::FileOptions options;
  options.path = path + ".part";
  options.create = true;
  options.truncate = true;
  options.size = bytes;
  absl::Status status;
  {
    ASSIGN_OR_RETURN(auto file, aio::File::Open(options));
    FillRandom(memory, bytes + std::hash<std::string>()(path));
    TransferShape shape;
    shape.bytes = bytes;
    shape.block_bytes = engine.options().block_bytes;
    shape.queue_depth = engine.options().max_blocks_in_flight;
    Transfer transfer(shape, memory);
    status = transfer.Run(engine, *file, false);
    if (status.ok()) status = file->SyncData();
  }
  if (status.ok() && rename(options.path.c_str(), path.c_str()) != 0) {
    status = aio::MakeIoError({.op = "rename", .path = path, .error = errno});
  }
  if (!status.ok()) unlink(options.path.c_str());
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<aio::File>> OpenDataFile(const std::string& path, uint64_t bytes, bool fill,
                                                        aio::Engine& engine, std::span<std::byte> memory) {
  aio::FileOptions options;
  options.path = path;
  if (!fill) {
    options.create = true;
    options.size = bytes;
    return aio::File::Open(options);
  }
  for (const bool made : {false, true}) {
    if (made) {
      RETURN_IF_ERROR(MakeDataFile(path, bytes, engine, memory));
    }
    auto file = aio::File::Open(options);
    if (!file.ok() && (made || !absl::IsNotFound(file.status()))) return file.status();
    if (!file.ok()) continue;
    ASSIGN_OR_RETURN(const auto size, (*file)->Size());
    if (size == bytes) return file;
  }
  return absl::UnavailableError("open " + path + ": its size changed while it was being made");
}

}  // namespace penstock::tools
