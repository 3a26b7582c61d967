// One measured operation of ds_io and ds_nvme_tune: a file read or written as a whole, in the shape that the
// flags ask for.
#ifndef PENSTOCK_TOOLS_DS_DS_IO_TRANSFER_H_
#define PENSTOCK_TOOLS_DS_DS_IO_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/file.h"

namespace penstock::tools {

struct TransferShape {
  uint64_t bytes = 0;  // of the file
  uint64_t block_bytes = 0;
  uint64_t queue_depth = 0;    // blocks in flight, of one file, all its threads together
  bool single_submit = false;  // blocks are handed over one by one instead of as one request
  bool sequential = false;     // queue_depth blocks, wait for all, the next ones: no overlap between batches
};

// The pieces of memory, requests and segments that a shape needs, made once and used for every loop.
class Transfer {
 public:
  // `memory`: at least one block; where it is smaller than the file it is used round and round.
  Transfer(const TransferShape& shape, std::span<std::byte> memory);

  // Reads or writes [0, shape.bytes) of the file and waits for the end of it.
  absl::Status Run(aio::Engine& engine, aio::File& file, bool read);
  // Failed requests so far.
  uint64_t errors() const { return errors_; }

 private:
  absl::Status RunBlocks(aio::Engine& engine, aio::File& file, bool read);
  void Prepare(aio::Request& request, aio::File& file, bool read, uint64_t offset, uint64_t bytes);

  TransferShape shape_;
  std::span<std::byte> memory_;
  std::vector<aio::Segment> segments_;  // the whole file
  std::vector<std::unique_ptr<aio::Request>> requests_;
  std::vector<aio::Request*> pointers_;
  uint64_t errors_ = 0;
};

// An engine whose caps are the shape's depth, on `arena`.
absl::StatusOr<std::unique_ptr<aio::Engine>> MakeEngine(aio::BackendKind backend, const TransferShape& shape,
                                                        const aio::Arena& arena);

// Opens a file for the tools: created if missing, of the given size, blocks reserved. `fill`: written once in
// full with bytes that do not compress, unless it already has that size.
absl::StatusOr<std::unique_ptr<aio::File>> OpenDataFile(const std::string& path, uint64_t bytes, bool fill,
                                                        aio::Engine& engine, std::span<std::byte> memory);

// Bytes that do not compress and differ from block to block.
void FillRandom(std::span<std::byte> memory, uint64_t seed);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_DS_DS_IO_TRANSFER_H_
