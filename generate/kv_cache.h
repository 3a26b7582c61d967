// Keys and values of what sequences have read so far (the KV cache), in the memory of a device, in host
// memory or on a drive.
//
// A sequence has a *slot*, and in it for each layer its *records*: one for each position, the keys of all
// key heads, then the values, in the compute type; or a latent (models/families/decoder.h). On a drive,
// records go to the file in *pages* of a few tens of KiB; the positions behind the last whole page, the tail,
// stay in memory. Attention sees the same run of records wherever they live, so that it has the same bits.
//
// A layer that looks back over a window needs no records behind it: in host memory it has room for the window
// twice, and what is in it moves up when that is full; from the drive the pages of the window are read.
//
// Host, device: records = cache->Records(slot, layer, past, count); append there; attend.
// Drive:  StartRead the pages to memory that has room for all that comes (CacheRead::bytes); when that
// is
//         finished, Complete puts the tail behind them; append there; attend; Keep what was appended.
//
// Threads: one. Errors: as aio/engine.h; kResourceExhausted from Create: the drive has no such space.
#ifndef PENSTOCK_GENERATE_KV_CACHE_H_
#define PENSTOCK_GENERATE_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/file.h"

namespace penstock::generate {

// Positions that a pass appends to a sequence, at most.
inline constexpr int64_t kMostPassPositions = 512;

struct CacheGeometry {
  int64_t layers = 0;
  uint64_t record_bytes = 0;          // of one position in one layer (DecoderShape::record_elements)
  std::vector<int64_t> windows = {};  // by layer: positions that it looks at; 0: all; empty: all

  int64_t page_records() const;  // in one page, whose bytes are a multiple of 4096
  uint64_t page_bytes() const { return static_cast<uint64_t>(page_records()) * record_bytes; }
  int64_t Window(int64_t layer) const { return windows.empty() ? 0 : windows[static_cast<size_t>(layer)]; }
  // Positions of such a sequence that have room in a layer's host memory.
  int64_t host_positions(int64_t layer, int64_t positions) const;
  // Positions of a layer that the drive's pages bring for one pass at most, and what they are joined by.
  int64_t read_positions(int64_t layer, int64_t positions) const;

  // Bytes of a sequence of `positions`: in a device's memory; in host memory; in the file, of all layers and
  // of those pages that a pass reads; in memory beside the file.
  uint64_t device_bytes(int64_t positions) const;
  uint64_t host_bytes(int64_t positions) const;
  uint64_t pass_bytes(int64_t positions) const;
  uint64_t file_bytes(int64_t positions) const;
  uint64_t tail_bytes() const;
};

// The records of a sequence's layer, on their way to memory.
struct CacheRead {
  int slot = 0;
  int64_t layer = 0;
  int64_t past = 0;    // positions that are there
  int64_t count = 0;   // positions that come
  int64_t first = 0;   // position that memory begins with
  uint64_t bytes = 0;  // of memory: a multiple of 4096
};

// Where a layer's records are: that of position p at memory + (p - first) * record_bytes.
struct CacheRecords {
  std::byte* memory = nullptr;
  int64_t first = 0;
};

class KvCache {
 public:
  // Bytes of the memory that a cache on a drive writes through.
  static uint64_t StagingBytes(const CacheGeometry& geometry);

  // In host memory: at most `bytes` of `arena`.
  static std::unique_ptr<KvCache> InHostMemory(const CacheGeometry& geometry, aio::Arena* arena,
                                               uint64_t bytes);
  // In a device's memory, which stays the caller's: as many slots of `positions` as it holds.
  static std::unique_ptr<KvCache> OnDevice(const CacheGeometry& geometry, std::span<std::byte> memory,
                                           int64_t positions);
  // In a file without a name in `directory`, of `slots` sequences of at most `positions`. It goes with the
  // process.
  static absl::StatusOr<std::unique_ptr<KvCache>> OnDrive(const CacheGeometry& geometry, aio::Engine* engine,
                                                          aio::Arena* arena, const std::string& directory,
                                                          int slots, int64_t positions);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  bool on_drive() const { return file_ != nullptr; }
  bool on_device() const { return on_device_; }
  const CacheGeometry& geometry() const { return geometry_; }

  // A slot for a sequence that grows to `positions`; nullopt: none now, wait for a Give.
  std::optional<int> Take(int64_t positions);
  void Give(int slot);

  // Host, device. With room for `count` positions behind the `past` ones, and among these all that are looked
  // at. `past` grows from call to call, or begins again with 0.
  CacheRecords Records(int slot, int64_t layer, int64_t past, int64_t count);

  // Host. Gives a slot without records what it needs of another one's first `positions`; false, and nothing
  // is given: that one has no longer what a window looks at.
  bool Copy(int from, int to, int64_t positions);

  // Drive.
  CacheRead ReadOf(int slot, int64_t layer, int64_t past, int64_t count) const;
  // Submits `request`, unless nothing is to be read (false).
  absl::StatusOr<bool> StartRead(const CacheRead& read, std::byte* memory, aio::Request* request);
  void Complete(const CacheRead& read, std::byte* memory) const;
  absl::Status Keep(const CacheRead& read, const std::byte* memory);

  uint64_t read_bytes() const { return read_bytes_; }
  uint64_t written_bytes() const { return written_bytes_; }

 private:
  struct Slot {
    bool taken = false;
    int64_t positions = 0;
    std::byte* records = nullptr;
    aio::Region host;
    std::vector<int64_t> first;  // by layer: the position that its memory begins with
  };
  struct Write {
    aio::Request request;
    std::byte* memory = nullptr;
    int slot = -1;
    int64_t layer = 0;
    bool pending = false;
  };

  explicit KvCache(const CacheGeometry& geometry) : geometry_(geometry) {}
  std::byte* LayerOf(const Slot& slot, int64_t layer) const;  // its memory; host
  uint64_t OffsetOf(int slot, int64_t layer, int64_t position) const;
  std::byte* Tail(int slot, int64_t layer) const;
  absl::Status Settle(Write* write);
  absl::Status WritePages(const CacheRead& read, int64_t first, int64_t end, const std::byte* records);

  const CacheGeometry geometry_;
  aio::Arena* arena_ = nullptr;
  aio::Engine* engine_ = nullptr;
  uint64_t host_limit_ = 0, host_used_ = 0;
  bool on_device_ = false;
  int64_t slot_positions_ = 0;  // of each, where they are alike: on a drive, on a device
  std::unique_ptr<aio::File> file_;
  aio::Region tails_, staging_;
  std::deque<Write> writes_;
  size_t next_write_ = 0;
  std::vector<Slot> slots_;
  uint64_t read_bytes_ = 0, written_bytes_ = 0;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_KV_CACHE_H_
