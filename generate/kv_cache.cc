#include "generate/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "aio/bytes.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace penstock::generate {
namespace {

constexpr uint64_t kLeastPageBytes = uint64_t{32} << 10;
constexpr uint64_t kWriteBytes = uint64_t{256} << 10;  // of one write, where a page is not longer
constexpr uint64_t kWrites = 8;                        // in flight at once

uint64_t Padded(uint64_t bytes) { return aio::AlignUp(bytes, aio::kSectorBytes); }

uint64_t WriteBytes(const CacheGeometry& geometry) {
  const uint64_t page = geometry.page_bytes();
  return std::max(kWriteBytes / page, uint64_t{1}) * page;
}

}  // namespace

int64_t CacheGeometry::page_records() const {
  const uint64_t whole =
      aio::kSectorBytes / std::gcd(aio::kSectorBytes, record_bytes);  // records that fill whole sectors
  const uint64_t bytes = whole * record_bytes;
  return static_cast<int64_t>(whole * ((kLeastPageBytes + bytes - 1) / bytes));
}

int64_t CacheGeometry::host_positions(int64_t layer, int64_t positions) const {
  const int64_t window = Window(layer);
  return window > 0 ? std::min(positions, 2 * window + kMostPassPositions) : positions;
}

int64_t CacheGeometry::read_positions(int64_t layer, int64_t positions) const {
  const int64_t window = Window(layer);
  return window > 0 ? std::min(positions, window + page_records() + kMostPassPositions) : positions;
}

uint64_t CacheGeometry::device_bytes(int64_t positions) const {
  return Padded(static_cast<uint64_t>(positions) * record_bytes) * static_cast<uint64_t>(layers);
}

uint64_t CacheGeometry::host_bytes(int64_t positions) const {
  if (windows.empty()) return device_bytes(positions);
  uint64_t bytes = 0;
  for (int64_t layer = 0; layer < layers; ++layer)
    bytes += Padded(static_cast<uint64_t>(host_positions(layer, positions)) * record_bytes);
  return bytes;
}

uint64_t CacheGeometry::pass_bytes(int64_t positions) const {
  if (windows.empty()) return file_bytes(positions);
  const int64_t page = page_records();
  uint64_t bytes = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t window = Window(layer), pages = positions / page;
    bytes += static_cast<uint64_t>(window > 0 ? std::min(pages, window / page + 1) : pages) * page_bytes();
  }
  return bytes;
}

uint64_t CacheGeometry::file_bytes(int64_t positions) const {
  return static_cast<uint64_t>(positions / page_records()) * page_bytes() * static_cast<uint64_t>(layers);
}

uint64_t CacheGeometry::tail_bytes() const { return page_bytes() * static_cast<uint64_t>(layers); }

uint64_t KvCache::StagingBytes(const CacheGeometry& geometry) { return kWrites * WriteBytes(geometry); }

std::unique_ptr<KvCache> KvCache::InHostMemory(const CacheGeometry& geometry, aio::Arena* arena,
                                               uint64_t bytes) {
  std::unique_ptr<KvCache> cache(new KvCache(geometry));
  cache->arena_ = arena;
  cache->host_limit_ = bytes;
  return cache;
}

std::unique_ptr<KvCache> KvCache::OnDevice(const CacheGeometry& geometry, std::span<std::byte> memory,
                                           int64_t positions) {
  std::unique_ptr<KvCache> cache(new KvCache(geometry));
  cache->on_device_ = true;
  cache->slot_positions_ = positions;
  const uint64_t bytes = geometry.device_bytes(positions);
  for (uint64_t at = 0; at + bytes <= memory.size(); at += bytes) {
    Slot& slot = cache->slots_.emplace_back();
    slot.positions = positions;
    slot.records = memory.data() + at;
  }
  return cache;
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::OnDrive(const CacheGeometry& geometry, aio::Engine* engine,
                                                          aio::Arena* arena, const std::string& directory,
                                                          int slots, int64_t positions) {
  std::unique_ptr<KvCache> cache(new KvCache(geometry));
  cache->engine_ = engine;
  cache->arena_ = arena;
  cache->slot_positions_ = positions;
  cache->slots_.resize(static_cast<size_t>(slots));
  aio::FileOptions options;
  options.path = directory + "/keys and values";
  options.nameless = true;
  options.size = std::max(geometry.file_bytes(positions) * static_cast<uint64_t>(slots), aio::kSectorBytes);
  ASSIGN_OR_RETURN(cache->file_, aio::File::Open(options));
  ASSIGN_OR_RETURN(cache->tails_, arena->Allocate(geometry.tail_bytes() * static_cast<uint64_t>(slots)));
  ASSIGN_OR_RETURN(cache->staging_, arena->Allocate(StagingBytes(geometry)));
  for (uint64_t i = 0; i < kWrites; ++i)
    cache->writes_.emplace_back().memory = cache->staging_.data() + i * WriteBytes(geometry);
  return cache;
}

KvCache::~KvCache() {
  // Nobody reads it any more: how the last writes ended is of no matter.
  for (Write& write : writes_) Settle(&write).IgnoreError();
}

std::optional<int> KvCache::Take(int64_t positions) {
  if (on_drive() || on_device()) {
    PENSTOCK_CHECK(positions <= slot_positions_, "a sequence longer than its cache's slots");
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].taken) continue;
      slots_[i].taken = true;
      return static_cast<int>(i);
    }
    return std::nullopt;
  }
  const uint64_t bytes = geometry_.host_bytes(positions);
  if (host_used_ + bytes > host_limit_) return std::nullopt;
  absl::StatusOr<aio::Region> region = arena_->Allocate(bytes);
  if (!region.ok()) return std::nullopt;  // in pieces now: what is given back joins them
  auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.taken; });
  if (free == slots_.end()) free = slots_.insert(slots_.end(), Slot{});
  free->taken = true;
  free->positions = positions;
  free->host = *std::move(region);
  free->records = free->host.data();
  free->first.assign(static_cast<size_t>(geometry_.layers), 0);
  host_used_ += bytes;
  return static_cast<int>(free - slots_.begin());
}

void KvCache::Give(int slot) {
  Slot& given = slots_[static_cast<size_t>(slot)];
  PENSTOCK_CHECK(given.taken, "a cache's slot is given back twice");
  given.taken = false;
  if (on_drive() || on_device()) return;
  host_used_ -= geometry_.host_bytes(given.positions);
  given.host.Release();
}

std::byte* KvCache::LayerOf(const Slot& slot, int64_t layer) const {
  std::byte* memory = slot.records;
  for (int64_t before = 0; before < layer; ++before)
    memory += Padded(static_cast<uint64_t>(geometry_.host_positions(before, slot.positions)) *
                     geometry_.record_bytes);
  return memory;
}

bool KvCache::Copy(int from, int to, int64_t positions) {
  const Slot& source = slots_[static_cast<size_t>(from)];
  Slot& target = slots_[static_cast<size_t>(to)];
  const auto needed = [&](int64_t layer) {
    const int64_t window = geometry_.Window(layer);
    return window > 0 ? std::max<int64_t>(0, positions + 1 - window) : 0;
  };
  for (int64_t layer = 0; layer < geometry_.layers; ++layer) {
    if (source.first[static_cast<size_t>(layer)] > needed(layer)) return false;
  }
  for (int64_t layer = 0; layer < geometry_.layers; ++layer) {
    const int64_t first = needed(layer), behind = first - source.first[static_cast<size_t>(layer)];
    std::memcpy(LayerOf(target, layer),
                LayerOf(source, layer) + static_cast<uint64_t>(behind) * geometry_.record_bytes,
                static_cast<uint64_t>(positions - first) * geometry_.record_bytes);
    target.first[static_cast<size_t>(layer)] = first;
  }
  return true;
}

CacheRecords KvCache::Records(int slot, int64_t layer, int64_t past, int64_t count) {
  Slot& of = slots_[static_cast<size_t>(slot)];
  const auto bytes_of = [&](int64_t positions) {
    return Padded(static_cast<uint64_t>(positions) * geometry_.record_bytes);
  };
  if (on_device_ || geometry_.windows.empty())
    return {of.records + bytes_of(of.positions) * static_cast<uint64_t>(layer), 0};
  std::byte* const memory = LayerOf(of, layer);
  int64_t& first = of.first[static_cast<size_t>(layer)];
  if (past < first) first = 0;  // it is read once more
  const int64_t room = geometry_.host_positions(layer, of.positions);
  if (past + count - first > room) {
    const int64_t seen = std::min(past - first, geometry_.Window(layer) - 1);
    const auto bytes = [&](int64_t n) { return static_cast<size_t>(n) * geometry_.record_bytes; };
    std::memmove(memory, memory + bytes(past - seen - first), bytes(seen));
    first = past - seen;
  }
  PENSTOCK_CHECK(past + count - first <= room, "a pass appends more positions than its cache has room for");
  return {memory, first};
}

uint64_t KvCache::OffsetOf(int slot, int64_t layer, int64_t position) const {
  const uint64_t slot_bytes = geometry_.file_bytes(slot_positions_);
  return slot_bytes * static_cast<uint64_t>(slot) +
         slot_bytes / static_cast<uint64_t>(geometry_.layers) * static_cast<uint64_t>(layer) +
         static_cast<uint64_t>(position) * geometry_.record_bytes;
}

std::byte* KvCache::Tail(int slot, int64_t layer) const {
  return tails_.data() + geometry_.tail_bytes() * static_cast<uint64_t>(slot) +
         geometry_.page_bytes() * static_cast<uint64_t>(layer);
}

CacheRead KvCache::ReadOf(int slot, int64_t layer, int64_t past, int64_t count) const {
  const int64_t window = geometry_.Window(layer), page = geometry_.page_records();
  const int64_t first = window > 0 ? std::max<int64_t>(0, past + 1 - window) / page * page : 0;
  const auto all = static_cast<uint64_t>(past + count - first);
  return {slot, layer, past, count, first, Padded(all * geometry_.record_bytes)};
}

absl::StatusOr<bool> KvCache::StartRead(const CacheRead& read, std::byte* memory, aio::Request* request) {
  const int64_t whole = read.past / geometry_.page_records() * geometry_.page_records();
  if (whole == read.first) return false;
  for (Write& write : writes_) {
    if (write.slot == read.slot && write.layer == read.layer) RETURN_IF_ERROR(Settle(&write));
  }
  const uint64_t bytes = static_cast<uint64_t>(whole - read.first) * geometry_.record_bytes;
  request->PrepareRead(*file_, OffsetOf(read.slot, read.layer, read.first), memory, bytes);
  request->set_priority(aio::Priority::kPrefetch);
  RETURN_IF_ERROR(engine_->Submit(request));
  read_bytes_ += bytes;
  return true;
}

void KvCache::Complete(const CacheRead& read, std::byte* memory) const {
  const int64_t whole = read.past / geometry_.page_records() * geometry_.page_records();
  std::memcpy(memory + static_cast<uint64_t>(whole - read.first) * geometry_.record_bytes,
              Tail(read.slot, read.layer), static_cast<uint64_t>(read.past - whole) * geometry_.record_bytes);
}

absl::Status KvCache::Settle(Write* write) {
  if (!write->pending) return absl::OkStatus();
  write->pending = false;
  return engine_->Wait(&write->request);
}

absl::Status KvCache::Keep(const CacheRead& read, const std::byte* memory) {
  const int64_t page = geometry_.page_records(), all = read.past + read.count;
  const int64_t from = read.past / page * page, whole = all / page * page;
  const auto at = [&](int64_t position) {
    return memory + static_cast<uint64_t>(position - read.first) * geometry_.record_bytes;
  };
  const auto run = static_cast<int64_t>(WriteBytes(geometry_) / geometry_.record_bytes);
  for (int64_t first = from; first < whole; first += run)
    RETURN_IF_ERROR(WritePages(read, first, std::min(first + run, whole), at(first)));
  std::memcpy(Tail(read.slot, read.layer), at(whole),
              static_cast<uint64_t>(all - whole) * geometry_.record_bytes);
  return absl::OkStatus();
}

absl::Status KvCache::WritePages(const CacheRead& read, int64_t first, int64_t end,
                                 const std::byte* records) {
  Write& write = writes_[next_write_];
  next_write_ = (next_write_ + 1) % writes_.size();
  RETURN_IF_ERROR(Settle(&write));
  const uint64_t bytes = static_cast<uint64_t>(end - first) * geometry_.record_bytes;
  const uint64_t offset = OffsetOf(read.slot, read.layer, first);
  // Of the sequence that had this slot before: two writes of one place have no order.
  for (Write& other : writes_) {
    if (other.pending && other.request.offset() < offset + bytes &&
        offset < other.request.offset() + other.request.bytes())
      RETURN_IF_ERROR(Settle(&other));
  }
  std::memcpy(write.memory, records, bytes);
  write.slot = read.slot;
  write.layer = read.layer;
  write.request.PrepareWrite(*file_, offset, write.memory, bytes);
  write.request.set_priority(aio::Priority::kWriteBehind);
  RETURN_IF_ERROR(engine_->Submit(&write.request));
  write.pending = true;
  written_bytes_ += bytes;
  return absl::OkStatus();
}

}  // namespace penstock::generate
