// A piece: the part of a request that is at the device as one transfer, and how a request is cut into pieces.
//
// Direct I/O takes only whole sectors at aligned addresses. A request may be anything, so there are three
// kinds of piece:
//
// - in place: offset and length are whole sectors and the memory is aligned: device and caller's memory, no
//   copy
// - bounced: through one of the queue's bounce buffers: ragged address, ragged end of a read, or many short
//   segments
// - one sector: a ragged head or tail of a write: the sector is read, changed and written back
//   (read-modify-write)
//
// Example, sector 4096, block 1 MiB: a write of 1 MiB + 5000 bytes at offset 100 becomes
//   sector [0, 4096) with 3996 bytes changed; whole sectors from 4096 on, in place if the memory happens to
//   be aligned there, else bounced; the sector with the last bytes.
//
// Everything here is internal to aio and runs on the device queue's thread.
#ifndef PENSTOCK_AIO_PIECE_H_
#define PENSTOCK_AIO_PIECE_H_

#include <cstddef>
#include <cstdint>

#include "aio/file.h"
#include "aio/request.h"

namespace penstock::aio {

struct Piece;

// What a device queue keeps about a file that it has seen.
struct FileSlot {
  File* file = nullptr;
  int registered = -1;            // index in the ring's file table, -1: none
  uint32_t writes_in_flight = 0;  // pieces
  // One-sector writes that ended within the last sector and made the file longer than it should be. They are
  // done when the file is cut back, which waits until no other write is in flight; until then none is
  // started.
  Piece* trims = nullptr;
  uint32_t trim_count = 0;
  FileSlot* next = nullptr;
};

struct Piece {
  enum class Kind : uint8_t { kInPlace, kBounced, kOneSector, kSync };

  Request* request = nullptr;
  FileSlot* slot = nullptr;
  Kind kind = Kind::kInPlace;
  Op op = Op::kRead;          // at the device now: a one-sector write starts as a read
  uint64_t offset = 0;        // in the file, of the whole transfer
  uint64_t bytes = 0;         // of the whole transfer
  std::byte* data = nullptr;  // caller's memory or bounce buffer
  uint64_t moved_bytes = 0;   // of the transfer, so far
  uint64_t resume_bytes = 0;  // where the part now at the device begins: moved_bytes, down to a whole sector
  int fixed_buffer = -1;      // index of the registered buffer that `data` lies in
  int bounce = -1;            // index of the bounce buffer
  uint64_t lead_bytes = 0;    // transfer bytes before the caller's first one
  uint64_t user_bytes = 0;    // caller's bytes in it
  uint32_t segment = 0;       // where those bytes are in the caller's memory
  uint64_t segment_offset = 0;
  uint64_t charged_bytes = 0;  // counted as in flight
  uint32_t attempts = 0;       // without progress
  uint32_t io_errors = 0;
  uint64_t file_end = UINT64_MAX;  // one sector: where the file ended, if within it
  int64_t start_ns = 0;
  Piece* next = nullptr;  // in the free list, the retry list or FileSlot::trims

  // The part that goes to the device now.
  int fd() const { return slot->file->fd(); }
  uint64_t device_offset() const { return offset + resume_bytes; }
  uint64_t device_bytes() const { return bytes - resume_bytes; }
  std::byte* device_data() const { return data + resume_bytes; }
};

struct CutLimits {
  uint64_t block_bytes = 0;
  uint64_t bounce_bytes = 0;
};

class Cutter {
 public:
  // The next piece of the request, without its bounce buffer: sets everything from `request` to
  // `segment_offset`, with data null for bounced ones. Does not change the request; false when it is fully
  // cut.
  static bool Next(const Request& request, const CutLimits& limits, Piece& piece);
  // Marks the piece as cut from its request.
  static void Take(Request& request, const Piece& piece);

  // Copies the caller's bytes of a piece into its bounce buffer, or out of it.
  static void CopyIn(const Piece& piece);
  static void CopyOut(const Piece& piece);

 private:
  static void Advance(const Request& request, uint32_t& segment, uint64_t& segment_offset, uint64_t bytes);
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_PIECE_H_
