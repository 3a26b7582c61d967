#include "generate/stream.h"

#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "generate/clock.h"

namespace penstock::generate {
Stream::Stream(WeightSource* source, KvCache* cache, aio::Engine* engine, std::span<std::byte> ring,
               std::vector<std::byte*> homes)
    : source_(*source),
      cache_(cache),
      engine_(*engine),
      memory_(ring),
      ring_(ring.size()),
      homes_(std::move(homes)),
      loaded_(homes_.size(), false) {}

Stream::~Stream() {
  // What was read ahead and is not wanted any more: how it ended is of no matter.
  for (Entry& entry : started_) {
    if (!entry.read.pending) continue;
    engine_.Cancel(entry.read.store == nullptr ? &entry.read.request : &entry.read.tile.request());
    source_.Finish(&entry.read).IgnoreError();
  }
}

void Stream::AppendUnits(size_t first, size_t end) {
  for (size_t unit = first; unit < end; ++unit) appended_.push_back({.unit = unit});
}

void Stream::AppendCache(const CacheRead& read) { appended_.push_back({.is_cache = true, .cache = read}); }

uint64_t Stream::BytesOf(const Item& item) const {
  return item.is_cache ? item.cache.bytes : source_.units()[item.unit].bytes;
}

absl::StatusOr<bool> Stream::StartOne() {
  Item item = appended_.front();
  const bool resident = !item.is_cache && homes_[item.unit] != nullptr;
  const bool at_home = resident && loaded_[item.unit];
  const uint64_t bytes = BytesOf(item);
  std::optional<uint64_t> place;
  if (resident) {
    // Reads to homes run no further ahead than reads to the ring do.
    if (!at_home && homeward_bytes_ > 0 && homeward_bytes_ + bytes > ring_.bytes()) return false;
    item.memory = homes_[item.unit];
  } else {
    place = ring_.Take(bytes);
    if (!place.has_value()) return false;
    item.memory = memory_.data() + *place;
  }
  item.number = next_number_++;
  Entry& entry = started_.emplace_back();
  released_.push_back(false);
  entry.item = item;
  entry.in_ring = place.has_value();
  if (entry.in_ring) entry.place = places_taken_++;
  appended_.pop_front();
  if (item.is_cache) {
    entry.read.store = nullptr;
    ASSIGN_OR_RETURN(entry.read.pending, cache_->StartRead(item.cache, item.memory, &entry.read.request));
  } else if (!at_home) {
    RETURN_IF_ERROR(source_.Start(item.unit, item.memory, &entry.read));
    stats_.weight_bytes += bytes;
    if (resident) {
      loaded_[item.unit] = true;
      homeward_bytes_ += bytes;
    }
  }
  return true;
}

absl::Status Stream::Pump() {
  bool more = !appended_.empty();
  while (more) {
    ASSIGN_OR_RETURN(more, StartOne());
    more = more && !appended_.empty();
  }
  return absl::OkStatus();
}

absl::Status Stream::Arrive(Entry* entry) {
  if (!entry->read.pending) return absl::OkStatus();
  const double begin = Now();
  RETURN_IF_ERROR(source_.Finish(&entry->read));
  stats_.wait_seconds += Now() - begin;
  if (!entry->in_ring) homeward_bytes_ -= BytesOf(entry->item);
  return absl::OkStatus();
}

absl::StatusOr<Stream::Item> Stream::Next() {
  RETURN_IF_ERROR(Pump());
  if (next_handed_ == next_number_) {
    PENSTOCK_CHECK(appended_.empty(), "what is held of a ring leaves no place for what comes next");
    return absl::FailedPreconditionError("generate: a pass uses more weights than it was planned with");
  }
  Entry& entry = started_[next_handed_ - first_started_];
  RETURN_IF_ERROR(Arrive(&entry));
  ++next_handed_;
  if (entry.item.is_cache) cache_->Complete(entry.item.cache, entry.item.memory);
  return entry.item;
}

bool Stream::NextIsThere() const {
  if (next_handed_ == next_number_) return false;
  const Entry& entry = started_[next_handed_ - first_started_];
  if (!entry.read.pending) return true;
  return entry.read.store == nullptr ? entry.read.request.finished() : entry.read.tile.request().finished();
}

absl::Status Stream::Release(const Item& item) {
  const uint64_t index = item.number - first_started_;
  Entry& entry = started_[index];
  if (entry.in_ring) places_gone_ += ring_.Give(entry.place - places_gone_);
  released_[index] = true;
  while (!started_.empty() && released_.front()) {
    started_.pop_front();
    released_.pop_front();
    ++first_started_;
  }
  return Pump();
}

}  // namespace penstock::generate
