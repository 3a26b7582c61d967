// Reading long runs of a store in order, ahead of their consumer, in bounded memory: what verify,
// export and checkpoints are made of. The training step does not use it: it knows its own order (zero/).
//
//   ReadStream stream(engine, memory, /*chunk_bytes=*/4 << 20, next_range);
//   while (std::optional<ReadStream::Chunk> chunk = stream.Next()) {
//     ... chunk->data, until the next call ...
//   }
//
// Threads: one. Ownership: engine, files and memory outlive the stream, whose destructor waits for its reads.
#ifndef PENSTOCK_SWAP_STREAM_H_
#define PENSTOCK_SWAP_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"

namespace penstock::swap {

class ReadStream {
 public:
  // Bytes [offset, offset + bytes) of a file; `offset` is a multiple of kSectorBytes. What stands between the
  // end and the next such multiple is read as well and not shown.
  struct Range {
    aio::File* file = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  // A piece of a range, at most chunk_bytes long, in order.
  struct Chunk {
    uint64_t range = 0;   // how many ranges came before its own
    uint64_t offset = 0;  // within the range
    std::span<const std::byte> data;
    absl::Status status;  // if not ok, `data` has the right length and means nothing
  };

  // `memory` is cut into chunks, which are all kept in flight: at least two should fit. `chunk_bytes` is a
  // multiple of kSectorBytes. `next_range` gives the ranges one by one, nullopt at the end; it is called as
  // reading gets there.
  ReadStream(aio::Engine& engine, std::span<std::byte> memory, uint64_t chunk_bytes,
             std::function<std::optional<Range>()> next_range);
  ~ReadStream();
  ReadStream(const ReadStream&) = delete;
  ReadStream& operator=(const ReadStream&) = delete;

  // The next chunk; waits for it. Its memory is used again from the following call on. nullopt: all done.
  std::optional<Chunk> Next();

 private:
  struct Slot {
    aio::Request request;
    std::byte* memory = nullptr;
    uint64_t range = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    absl::Status submitted;
  };
  bool Issue(Slot* slot);

  aio::Engine& engine_;
  uint64_t chunk_bytes_;
  std::function<std::optional<Range>()> next_range_;
  std::vector<std::unique_ptr<Slot>> slots_;  // a ring: the oldest read is at head_
  size_t head_ = 0;
  size_t issued_ = 0;         // reads not yet given out
  std::optional<Range> now_;  // being cut
  uint64_t cut_ = 0;
  uint64_t ranges_ = 0;
  bool end_ = false;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_STREAM_H_
