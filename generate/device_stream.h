// What a pass needs, in a device's memory: the units of a stream are copied there in order, ahead of their
// use as far as there are places for them; some live there and are copied once. Records of the KV cache pass
// through: they come in host memory, as the stream brings them.
//
//   the drive -> Stream's ring or homes, host memory -> places or homes, the device's memory -> products
//
// A place is free again when its item is released: what is copied there next waits for what has been enqueued
// to compute by then (zero::Device::CopyIn). So the code that computes there need not wait.
//
// Threads: one; the device's own call back. Errors: of the read or of the copy that failed; after one only
// destruction is left.
#ifndef PENSTOCK_GENERATE_DEVICE_STREAM_H_
#define PENSTOCK_GENERATE_DEVICE_STREAM_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/memory_plan.h"
#include "generate/stream.h"
#include "generate/weight_source.h"
#include "zero/compute/device.h"

namespace penstock::generate {

class DeviceStream : public ItemStream {
 public:
  // `ring`: kDevicePlaces times the largest unit, of the device. `homes`: by unit, in its memory, null where
  // it does not live there. All outlive the stream.
  DeviceStream(const WeightSource* source, Stream* stream, zero::Device* device, std::span<std::byte> ring,
               std::vector<std::byte*> homes);
  // Waits for what is being copied.
  ~DeviceStream() override;
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  void AppendUnits(size_t first, size_t end) override;
  void AppendCache(const CacheRead& read) override;
  absl::StatusOr<StreamItem> Next() override;
  absl::Status Release(const StreamItem& item) override;

  double copy_wait_seconds() const { return copy_wait_seconds_; }

 private:
  struct Ordered {
    bool is_cache = false;
    size_t unit = 0;
    bool at_home = false;
  };
  // One that is in the device's memory, or on its way there.
  struct Upload {
    StreamItem item;    // as it is handed out
    StreamItem host;    // of a record of the cache: as the stream gave it
    uint64_t copy = 0;  // its number among all copies, from 1; 0: it was at home
    int place = -1;
  };
  // Memory of the stream's that is still read.
  struct Copying {
    uint64_t copy = 0;
    StreamItem host;
  };

  // Starts the copy of the next item, whose turn it is.
  absl::Status UploadOne();
  // And of those behind it whose units are there, as far as there are places.
  absl::Status UploadAhead();
  bool IsOver(uint64_t copy);
  absl::Status WaitFor(uint64_t copy);
  // Gives back what copies that are over were made from.
  absl::Status Settle();

  const WeightSource& source_;
  Stream& stream_;
  zero::Device& device_;
  const std::span<std::byte> ring_;
  const uint64_t place_bytes_;
  const std::vector<std::byte*> homes_;
  std::vector<bool> at_home_;    // by unit: appended before, so that it is there by then
  std::deque<Ordered> order_;    // appended, not uploaded
  std::deque<Upload> uploads_;   // not handed out
  std::vector<Upload> held_;     // with the caller
  std::deque<Copying> copying_;  // host memory that is still read
  std::vector<int> free_;        // places
  uint64_t next_number_ = 0, next_copy_ = 1;
  double copy_wait_seconds_ = 0;

  std::mutex mutex_;  // of the following
  std::condition_variable over_;
  uint64_t copies_over_ = 0;  // they end in the order of their start
  absl::Status failed_;       // of the first that did
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_DEVICE_STREAM_H_
