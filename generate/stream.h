// What a pass needs from the drive, in the order in which it needs it, read ahead as far as there is memory:
// units of weights, and where the KV cache is on a drive, the records of each layer and sequence.
//
//   stream.AppendUnits(0, n);                       // a pass, and the next: nothing waits at their seam
//   ASSIGN_OR_RETURN(const Stream::Item item, stream.Next());   // waits for it; what comes is read meanwhile
//   ... use item.memory ...
//   RETURN_IF_ERROR(stream.Release(item));
//
// Some units are *resident*: they are read once, to a home of their own, and stay. All others go through the
// ring. Nothing is read that was not appended.
//
// Threads: one; the engine's own do the transfers. Reads are started in Append, Next and Release. Errors: of
// the read that failed; after one only destruction is left.
#ifndef PENSTOCK_GENERATE_STREAM_H_
#define PENSTOCK_GENERATE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/kv_cache.h"
#include "generate/ring.h"
#include "generate/weight_source.h"

namespace penstock::generate {

struct StreamStats {
  uint64_t weight_bytes = 0;  // read from the drive
  double wait_seconds = 0;    // in Next, for a read
};

// A unit of weights, or a layer's records of a sequence.
struct StreamItem {
  uint64_t number = 0;  // of all items, from 0
  bool is_cache = false;
  size_t unit = 0;
  CacheRead cache = {};
  std::byte* memory = nullptr;
};

// What a pass takes in order, wherever its products are computed.
class ItemStream {
 public:
  virtual ~ItemStream() = default;
  virtual void AppendUnits(size_t first, size_t end) = 0;
  virtual void AppendCache(const CacheRead& read) = 0;
  // kFailedPrecondition: nothing was appended that has not been handed out.
  virtual absl::StatusOr<StreamItem> Next() = 0;
  virtual absl::Status Release(const StreamItem& item) = 0;
};

class Stream : public ItemStream {
 public:
  using Item = StreamItem;

  // `homes`: by unit, null where it is not resident. `cache`: null where it is in host memory. All outlive
  // the stream.
  Stream(WeightSource* source, KvCache* cache, aio::Engine* engine, std::span<std::byte> ring,
         std::vector<std::byte*> homes);
  // Waits for what is in flight.
  ~Stream() override;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void AppendUnits(size_t first, size_t end) override;
  void AppendCache(const CacheRead& read) override;
  // Starts what fits now.
  absl::Status Pump();
  absl::StatusOr<Item> Next() override;
  absl::Status Release(const Item& item) override;
  // Whether Next would not wait.
  bool NextIsThere() const;

  const StreamStats& stats() const { return stats_; }

 private:
  struct Entry {
    Item item;
    UnitRead read;
    bool in_ring = false;
    uint64_t place = 0;  // number of its place in the ring
  };

  absl::StatusOr<bool> StartOne();
  absl::Status Arrive(Entry* entry);
  uint64_t BytesOf(const Item& item) const;

  WeightSource& source_;
  KvCache* const cache_;
  aio::Engine& engine_;
  const std::span<std::byte> memory_;
  Ring ring_;
  std::vector<std::byte*> homes_;
  std::vector<bool> loaded_;     // by unit: it is at home, or on its way there
  std::deque<Item> appended_;    // not started
  std::deque<Entry> started_;    // not released, in order; entries before handed_ are with the caller
  uint64_t first_started_ = 0;   // number of started_.front()
  uint64_t next_number_ = 0;     // of the next item to start
  uint64_t next_handed_ = 0;     // of the next item to hand out
  uint64_t homeward_bytes_ = 0;  // on their way to homes
  uint64_t places_taken_ = 0;    // in the ring, ever
  uint64_t places_gone_ = 0;     // of those, before the oldest held
  std::deque<bool> released_;    // parallel to started_
  StreamStats stats_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_STREAM_H_
