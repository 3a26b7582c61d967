// Writing a file from its first byte to its last, past the page cache, while the next bytes are made: the
// other way than swap/stream.h. For what others read: weights, checkpoints in other formats.
//
//   WriteStream stream(engine, memory, /*chunk_bytes=*/1 << 20);
//   status = stream.Open("model.pt", bytes);   // the first of as many files as one likes
//   status = stream.Append(data);              // copied; full chunks are written meanwhile
//   status = stream.Overwrite(14, checksum);   // of what has been appended: what is known only now
//   status = stream.Finish();                  // in the file, and closed; an fsync of it makes it durable
//
// A file that is open when the stream goes, or when another is opened, is left as it is: cut short, or longer
// than what it has. Threads: one. Ownership: engine and memory outlive the stream, whose destructor waits for
// its writes. Errors carry path, offset, length and errno, and stay: a file with one cannot be finished.
// kResourceExhausted: no space; kFailedPrecondition: no file is open.
#ifndef PENSTOCK_SWAP_WRITE_STREAM_H_
#define PENSTOCK_SWAP_WRITE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"

namespace penstock::swap {

class WriteStream {
 public:
  // `memory`, at a multiple of kSectorBytes, is cut into chunks, one of which is filled while the others are
  // written: at least two should fit. `chunk_bytes` is a multiple of kSectorBytes.
  WriteStream(aio::Engine& engine, std::span<std::byte> memory, uint64_t chunk_bytes);
  ~WriteStream();
  WriteStream(const WriteStream&) = delete;
  WriteStream& operator=(const WriteStream&) = delete;

  // Makes the file (mode 0666 less the umask), and reserves `bytes`. kAlreadyExists: something has its name.
  absl::Status Open(const std::string& path, uint64_t bytes);
  absl::Status Append(std::span<const std::byte> bytes);
  // Bytes that have been appended become others. What is on the drive already is read there once more.
  absl::Status Overwrite(uint64_t offset, std::span<const std::byte> bytes);
  // The last bytes set out. Nothing can be appended, or become another, after it; Finish comes next.
  absl::Status Flush();
  // All that was appended is in the file, which ends there, and is closed.
  absl::Status Finish();

  uint64_t bytes() const { return sent_ + filled_; }  // appended so far

 private:
  struct Chunk {
    aio::Request request;
    std::byte* memory = nullptr;
    bool pending = false;
  };
  absl::Status CheckOpen() const;
  absl::Status Send();
  absl::Status Settle(Chunk* chunk);
  absl::Status SettleAll();

  aio::Engine& engine_;
  const uint64_t chunk_bytes_;
  std::vector<std::unique_ptr<Chunk>> chunks_;  // a ring
  size_t now_ = 0;                              // the one that is being filled
  uint64_t sent_ = 0;                           // bytes of the file before it
  uint64_t filled_ = 0;
  bool flushed_ = false;
  absl::Status failed_;
  std::unique_ptr<aio::File> file_;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_WRITE_STREAM_H_
