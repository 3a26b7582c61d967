// What a device queue asks of the kernel, or of what stands in for it: take transfers, hand back completions,
// be woken.
//
// A backend belongs to one device queue. All calls come from the queue's thread, Start first, but Wake, which
// may come from any thread at any time between Start and the destructor. Backends do not interpret results:
// short transfers, errors and retries are the queue's business, so every backend behaves the same.
#ifndef PENSTOCK_AIO_BACKEND_H_
#define PENSTOCK_AIO_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "aio/device_transfers.h"
#include "aio/engine.h"
#include "aio/piece.h"

namespace penstock::aio {

// Run is never asked to wait for more than this. A wake counts for as many, so that it ends every wait.
inline constexpr uint32_t kMostWanted = 8;

struct Completion {
  Piece* piece = nullptr;
  int64_t result = 0;                                // bytes moved, or -errno
  std::shared_ptr<const std::string> why = nullptr;  // of an error, what errno does not tell
};

struct BackendConfig {
  const EngineOptions* options = nullptr;
  // Tells of a step down within the backend (plain instead of registered buffers, ...), once each.
  std::function<void(std::string_view)> note;
};

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual std::string_view name() const = 0;

  // Sets up and proves with a real transfer that it works here. An error: kUnavailable, with the reason.
  virtual absl::Status Start(const BackendConfig& config) = 0;

  // The last call on the queue's thread, nothing being in flight: gives back what belongs to that thread. The
  // destructor may then run on another one.
  virtual void Finish() {}

  // Takes a transfer: piece.op, fd(), device_offset(), device_bytes(), device_data(), fixed_buffer,
  // slot->registered. It need not reach the kernel before the next Run. Never more than max_blocks_in_flight
  // at once.
  virtual void Queue(Piece& piece) = 0;

  // Hands queued transfers to the kernel and waits until `want` completions are there, or Wake was called, or
  // `timeout_ns` is over (-1: no limit; 0: do not wait). Returns how many were put into `out`, possibly 0, or
  // -errno if the backend has broken down for good. The queue then fails all transfers that are in flight, so
  // by that time neither kernel nor device has any of them, and none is ever handed over. Only Wake,
  // ForgetFile and Finish are called after that.
  virtual int64_t Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) = 0;

  // Makes the present Run return soon, or the next one if none is under way. Thread-safe.
  virtual void Wake() = 0;

  // Index of a registered file or buffer, -1 if there is none. A buffer's run of `bytes` lies wholly inside
  // it.
  virtual int RegisterFile(int /*fd*/) { return -1; }
  virtual void UnregisterFile(int /*index*/) {}
  // The file is about to be closed, or the queue to end; nothing of it is in flight.
  virtual void ForgetFile(int /*fd*/) {}
  virtual int FixedBuffer(const void* /*data*/, uint64_t /*bytes*/) const { return -1; }

  // Whose memory transfers may have besides the host's; null: nobody's.
  virtual const DeviceTransfers* device_transfers() const { return nullptr; }

  // When the next transfer ends, for backends in virtual time.
  virtual int64_t NextEventNs() const { return INT64_MAX; }
  // CPU time of threads that the backend runs beside the queue's. Thread-safe.
  virtual int64_t WorkerCpuNs() const { return 0; }

  uint64_t syscalls() const { return syscalls_; }

 protected:
  uint64_t syscalls_ = 0;
};

// The patience of a backend with a kernel that does not take what is queued, for want of memory or places:
// that passes, or does not.
class Refusals {
 public:
  void Taken() { since_ns_ = 0; }
  // One more; pauses, for some milliseconds in the end. True when they have lasted for too long.
  bool Last();

 private:
  int64_t since_ns_ = 0;
  int64_t pause_us_ = 0;
};

// Null where the build lacks it.
std::unique_ptr<Backend> MakeIoUringBackend();
std::unique_ptr<Backend> MakeLibaioBackend();
std::unique_ptr<Backend> MakeThreadsBackend();
std::unique_ptr<Backend> MakeNilBackend();
std::unique_ptr<Backend> MakeSimBackend(SimDisk* disk);
// Transfers with memory of a device, by threads; all others by the backend behind.
std::unique_ptr<Backend> MakeDeviceBackend(std::unique_ptr<Backend> behind,
                                           std::shared_ptr<DeviceTransfers> transfers);

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_BACKEND_H_
