#include "generate/device_stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "generate/clock.h"

namespace penstock::generate {
namespace {

constexpr size_t kMostAhead = 256;  // units at home between two that are copied take no place

}  // namespace

DeviceStream::DeviceStream(const WeightSource* source, Stream* stream, zero::Device* device,
                           std::span<std::byte> ring, std::vector<std::byte*> homes)
    : source_(*source),
      stream_(*stream),
      device_(*device),
      ring_(ring),
      place_bytes_(source->largest_unit_bytes()),
      homes_(std::move(homes)),
      at_home_(homes_.size(), false) {
  PENSTOCK_CHECK(ring_.size() >= kDevicePlaces * place_bytes_, "a ring of the device has all its places");
  for (int place = 0; place < static_cast<int>(kDevicePlaces); ++place) free_.push_back(place);
}

DeviceStream::~DeviceStream() {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [&] { return copies_over_ + 1 == next_copy_; });
}

void DeviceStream::AppendUnits(size_t first, size_t end) {
  for (size_t unit = first; unit < end; ++unit) {
    order_.push_back({.unit = unit, .at_home = at_home_[unit]});
    if (at_home_[unit]) continue;
    stream_.AppendUnits(unit, unit + 1);
    at_home_[unit] = homes_[unit] != nullptr;  // from then on
  }
}

void DeviceStream::AppendCache(const CacheRead& read) {
  order_.push_back({.is_cache = true});
  stream_.AppendCache(read);
}

bool DeviceStream::IsOver(uint64_t copy) {
  const std::lock_guard lock(mutex_);
  return copies_over_ >= copy;
}

absl::Status DeviceStream::WaitFor(uint64_t copy) {
  std::unique_lock lock(mutex_);
  if (copies_over_ < copy) {
    const double begin = Now();
    over_.wait(lock, [&] { return copies_over_ >= copy; });
    copy_wait_seconds_ += Now() - begin;
  }
  return failed_;
}

absl::Status DeviceStream::Settle() {
  while (!copying_.empty() && IsOver(copying_.front().copy)) {
    RETURN_IF_ERROR(WaitFor(copying_.front().copy));
    RETURN_IF_ERROR(stream_.Release(copying_.front().host));
    copying_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status DeviceStream::UploadOne() {
  const Ordered next = order_.front();
  Upload upload;
  upload.item.number = next_number_++;
  upload.item.unit = next.unit;
  if (next.at_home) {
    upload.item.memory = homes_[next.unit];
  } else {
    ASSIGN_OR_RETURN(const StreamItem host, stream_.Next());
    PENSTOCK_CHECK(host.is_cache == next.is_cache && (next.is_cache || host.unit == next.unit),
                   "the stream brings what was appended to it");
    if (next.is_cache) {
      upload.item.is_cache = true;
      upload.item.cache = host.cache;
      upload.item.memory = host.memory;
      upload.host = host;
    } else {
      upload.item.memory = homes_[next.unit];
      if (upload.item.memory == nullptr) {
        upload.place = free_.back();
        free_.pop_back();
        upload.item.memory = ring_.data() + static_cast<uint64_t>(upload.place) * place_bytes_;
      }
      upload.copy = next_copy_++;
      copying_.push_back({upload.copy, host});
      const uint64_t bytes = source_.units()[next.unit].bytes;
      device_.CopyIn(upload.item.memory, host.memory, static_cast<int64_t>(bytes), /*after_compute=*/true,
                     [this](const absl::Status& status) {
                       const std::lock_guard lock(mutex_);
                       failed_.Update(status);
                       ++copies_over_;
                       over_.notify_all();
                     });
    }
  }
  order_.pop_front();
  uploads_.push_back(upload);
  return absl::OkStatus();
}

absl::Status DeviceStream::UploadAhead() {
  RETURN_IF_ERROR(Settle());
  RETURN_IF_ERROR(stream_.Pump());
  while (!order_.empty() && uploads_.size() < kMostAhead) {
    const Ordered& next = order_.front();
    // Records are taken when it is their turn: they lie in the stream's ring.
    if (next.is_cache) break;
    const bool wants_place = !next.at_home && homes_[next.unit] == nullptr;
    if ((wants_place && free_.empty()) || (!next.at_home && !stream_.NextIsThere())) break;
    RETURN_IF_ERROR(UploadOne());
  }
  return absl::OkStatus();
}

absl::StatusOr<StreamItem> DeviceStream::Next() {
  RETURN_IF_ERROR(UploadAhead());
  if (uploads_.empty()) {
    if (order_.empty())
      return absl::FailedPreconditionError("generate: a pass uses more weights than it was planned with");
    PENSTOCK_CHECK(order_.front().is_cache || !free_.empty(), "an item has a place while few are held");
    // All that was copied has been handed out, and waited for: the stream has its ring for what comes next.
    PENSTOCK_CHECK(copying_.empty(), "what was waited for is given back");
    RETURN_IF_ERROR(UploadOne());
    RETURN_IF_ERROR(UploadAhead());
  }
  held_.push_back(uploads_.front());
  uploads_.pop_front();
  RETURN_IF_ERROR(WaitFor(held_.back().copy));
  return held_.back().item;
}

absl::Status DeviceStream::Release(const StreamItem& item) {
  const auto held = std::find_if(held_.begin(), held_.end(),
                                 [&](const Upload& each) { return each.item.number == item.number; });
  PENSTOCK_CHECK(held != held_.end(), "what is released was handed out");
  if (held->item.is_cache) RETURN_IF_ERROR(stream_.Release(held->host));
  if (held->place >= 0) free_.push_back(held->place);
  held_.erase(held);
  return UploadAhead();
}

}  // namespace penstock::generate
