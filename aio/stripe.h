// One logical file over several directories, each on a drive of its own, in proportion to how fast the drives
// are.
//
//   StripedFileOptions options;
//   options.directories = {"/nvme0", "/nvme1"};
//   options.weights = {7.0e9, 3.5e9};        // measured bandwidths: twice as many units go to the first
//   options.name = "state.bin";  options.size = 100 * kGiB;
//   auto file = StripedFile::Open(options);
//   StripedTransfer transfer;
//   transfer.PrepareRead(**file, offset, data, bytes);
//   absl::Status status = transfer.Submit(*engine);
//   if (status.ok()) status = transfer.Wait(*engine);
//
// Layout: the logical file is cut into units of `unit_bytes`. A round hands out as many units as the weights'
// smallest whole-number proportion asks for, spread evenly, and repeats. A file's units lie one after another
// in it, so a long transfer is one request a file, scattered over the caller's memory, and all drives work at
// the same time.
//
// Threads: StripedFile is immutable after opening. A StripedTransfer belongs to one thread and follows the
// rules of Request. Ownership: file and memory outlive the transfer's completion.
#ifndef PENSTOCK_AIO_STRIPE_H_
#define PENSTOCK_AIO_STRIPE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"

namespace penstock::aio {

class StripeLayout {
 public:
  // A run of the logical file that lies within one unit.
  struct Extent {
    uint32_t file = 0;
    uint64_t offset = 0;  // in that file
    uint64_t bytes = 0;
  };

  // Weights are any positive numbers, one a file; they are rounded to a round of at most 64 units, and every
  // file gets at least one. kInvalidArgument: no files, a weight that is not positive, a unit that is not a
  // multiple of 4096.
  static absl::StatusOr<StripeLayout> Make(uint64_t unit_bytes, const std::vector<double>& weights);

  // Where the byte at `logical_offset` is, and how many of the following, at most `bytes`, are with it.
  Extent At(uint64_t logical_offset, uint64_t bytes) const;
  // How long a file must be to hold its part of the first `logical_bytes`.
  uint64_t FileBytes(uint32_t file, uint64_t logical_bytes) const;

  uint32_t files() const { return static_cast<uint32_t>(units_a_round_.size()); }
  uint64_t unit_bytes() const { return unit_bytes_; }
  uint32_t units_a_round(uint32_t file) const { return units_a_round_[file]; }

 private:
  uint64_t unit_bytes_ = 0;
  std::vector<uint32_t> round_;          // the file of each unit of a round
  std::vector<uint32_t> rank_;           // how many units of the same file come before it in the round
  std::vector<uint32_t> units_a_round_;  // of each file
};

struct StripedFileOptions {
  std::vector<std::string> directories;
  std::vector<double> weights;  // empty: all the same
  std::string name;             // of the file in each directory
  uint64_t unit_bytes = 4 * kMiB;
  uint64_t size = 0;  // logical; each file is preallocated to its part
  FileOptions file;   // everything else; path and size are filled in
};

class StripedFile {
 public:
  // Opens or creates a file in every directory. An error names the one it is about; nothing stays open then.
  static absl::StatusOr<std::unique_ptr<StripedFile>> Open(const StripedFileOptions& options);

  const StripeLayout& layout() const { return layout_; }
  const std::vector<std::unique_ptr<File>>& files() const { return files_; }
  // fdatasync of every file.
  absl::Status SyncData() const;

 private:
  StripeLayout layout_;
  std::vector<std::unique_ptr<File>> files_;
};

class StripedTransfer {
 public:
  void PrepareRead(StripedFile& file, uint64_t offset, void* data, uint64_t bytes) {
    Prepare(Op::kRead, file, offset, data, bytes);
  }
  void PrepareWrite(StripedFile& file, uint64_t offset, const void* data, uint64_t bytes) {
    Prepare(Op::kWrite, file, offset, const_cast<void*>(data), bytes);
  }
  void set_priority(Priority priority) { priority_ = priority; }

  absl::Status Submit(Engine& engine) { return engine.Submit(pointers_); }
  // The first failure, in the order of the directories: it names path and device.
  absl::Status Wait(Engine& engine, int64_t timeout_ms = Engine::kForever) {
    return engine.WaitAll(pointers_, timeout_ms);
  }
  // One a file that has a part in the transfer.
  const std::vector<Request*>& requests() const { return pointers_; }

 private:
  struct Part {
    Request request;
    std::vector<Segment> segments;  // keeps its capacity: no allocation once it has grown
    uint64_t offset = 0;
  };
  void Prepare(Op op, StripedFile& file, uint64_t offset, void* data, uint64_t bytes);

  Priority priority_ = Priority::kDemand;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<Request*> pointers_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_STRIPE_H_
