// The I/O engine: large asynchronous transfers between pinned memory and files, as fast as the device goes,
// with next to no CPU, and with an exact status for each.
//
//   ArenaOptions arena_options;  arena_options.bytes = 64 * kMiB;
//   auto arena = Arena::Create(arena_options);            // StatusOr everywhere; checks left out here
//   EngineOptions options;       options.arenas = {arena->get()};
//   auto engine = Engine::Create(options);
//   FileOptions file_options;    file_options.path = "data.bin";
//   auto file = File::Open(file_options);
//   auto region = (*arena)->Allocate(10 * kMiB);
//   Request request;
//   request.PrepareRead(**file, 0, region->data(), region->bytes());
//   absl::Status status = (*engine)->Submit(&request);
//   if (status.ok()) status = (*engine)->Wait(&request);
//
// How it works. Files of one block device share a *device queue*: one thread, one queue for every priority,
// one backend instance (an io_uring, a libaio context, ...). Submit hands requests over to it, which cuts
// them into blocks and keeps blocks in flight up to a byte cap for reads and one for writes: more in
// flight than saturates a device only adds latency. Blocks of different requests overlap, so the device never
// drains between two of them. A request is finished when all its blocks are; after a failure no further block
// of it is started.
//
// Backends: io_uring, else libaio, else threads (pread and pwrite). A backend that the kernel refuses, found
// by a real transfer and not by its set-up, is stepped down from; so are registered buffers. Every step is
// said once (log callback) with its reason and stays visible in stats().fallbacks. `nil` completes everything
// at once and moves nothing: it measures the engine itself. `sim` is a simulated disk in virtual time
// (aio/sim_disk.h).
//
// Errors: Submit refuses what could never work (kInvalidArgument, kFailedPrecondition) and leaves those
// requests as they were. What goes wrong later is in the request's status(). Short transfers are continued,
// EINTR and EAGAIN retried within a bound, EIO retried EngineOptions::io_error_retries times. A sync is not:
// once failed, what was to be written may be lost, whatever a second one says. Nothing aborts, nothing is
// reported done that is not.
//
// Threads: everything is thread-safe. Callbacks run on the device queue's thread. No heap allocation per
// request. A forked child has an engine without threads: what would submit or wait there is
// kFailedPrecondition at once, and to destroy it leaves everything to the parent.
#ifndef PENSTOCK_AIO_ENGINE_H_
#define PENSTOCK_AIO_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/bytes.h"
#include "aio/clock.h"
#include "aio/file.h"
#include "aio/request.h"
#include "aio/stats.h"
#include "base/process_mark.h"

namespace penstock::aio {

class Backend;
class DeviceTransfers;
class SimDisk;

enum class BackendKind : uint8_t { kAuto, kIoUring, kLibaio, kThreads, kNil, kSim };
std::string_view BackendName(BackendKind kind);  // "auto", "io_uring", "libaio", "threads", "nil", "sim"
absl::StatusOr<BackendKind> ParseBackend(std::string_view name);

struct EngineOptions {
  BackendKind backend = BackendKind::kAuto;
  // A backend that is not there: true steps down io_uring -> libaio -> threads; false makes it an error.
  bool allow_fallback = true;

  uint64_t block_bytes = 1 * kMiB;  // requests are cut to this; a multiple of 4096, at most 64 MiB
  uint64_t max_read_bytes_in_flight = 16 * kMiB;   // per device; demand reads may go two blocks beyond it
  uint64_t max_write_bytes_in_flight = 16 * kMiB;  // per device
  uint32_t max_blocks_in_flight = 256;             // per device, reads and writes together; at most 4096
  // Memory whose transfers need no page pinning. Registered with every ring, in runs of at most 1 GiB. Where
  // the limit on locked memory is too low for all of it, the first that fits is, in whole huge pages, and the
  // engine says so. Must outlive the engine.
  std::vector<const Arena*> arenas;
  bool register_buffers = true;  // false: leave the arenas unregistered (to measure what that is worth)
  bool register_files = true;    // keep descriptors in the ring's table (io_uring)

  uint64_t bounce_bytes =
      256 * kKiB;  // one bounce buffer; there are bounce_buffers of them per device, made on first use
  uint32_t bounce_buffers = 8;
  // EIO, ETIMEDOUT and the like of a read or write are tried again this often before they count.
  int io_error_retries = 1;
  int worker_threads = 4;  // per device: of the `threads` backend, and of device_transfers
  // Memory of a device that transfers may have besides the host's (aio/device_transfers.h); null: none. Not
  // on a simulated disk.
  std::shared_ptr<DeviceTransfers> device_transfers;
  int nice = 0;  // added to the queue threads' nice value; below 0 needs the right to do so
  int64_t stuck_after_ms =
      30'000;  // a request unfinished after this is reported (again at each doubling); 0: never
  uint64_t saturating_bytes_in_flight = 8 * kMiB;  // see set_saturating_bytes_in_flight

  SimDisk* sim = nullptr;  // for kSim: the disk; must outlive the engine
  // One line without a newline; called from any thread, one at a time. Empty: stderr, with "penstock: aio: "
  // before it.
  std::function<void(std::string_view)> log;
  // Instead of `backend`: makes the backend of each device. For tests that put faults between engine and
  // kernel.
  std::function<std::unique_ptr<Backend>()> backend_factory;
};

class Engine {
 public:
  // kInvalidArgument: an option out of its range, by name. kUnavailable: the backend does not work here and
  // falling back was forbidden, with the reason.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options);
  // Cancels what has not reached the device, waits for what has, runs the callbacks of both, and stops.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes the requests over. All or none: kInvalidArgument names the first that is malformed (nothing
  // prepared, no memory, offset + length beyond 2^63, a write to a read-only file, still pending from
  // before).
  absl::Status Submit(Request* request);
  absl::Status Submit(std::span<Request* const> requests);

  static constexpr int64_t kForever = -1;

  // Waits until the request is finished and its callback has returned, and returns its status. A request that
  // was never submitted: kFailedPrecondition at once. After `timeout_ms`: kDeadlineExceeded with what it is
  // waiting for; it stays pending. From a callback: kFailedPrecondition (it would wait for itself).
  absl::Status Wait(Request* request, int64_t timeout_ms = kForever);
  // Waits for all of them; the first failure in the order given. Nothing to wait for is fine.
  absl::Status WaitAll(std::span<Request* const> requests, int64_t timeout_ms = kForever);
  // Waits until at least `count` of them are finished (or all, or the time is over); returns how many are.
  size_t WaitSome(std::span<Request* const> requests, size_t count, int64_t timeout_ms = kForever);
  // Waits until nothing that was submitted is pending. kDeadlineExceeded lists what is.
  absl::Status Drain(int64_t timeout_ms = kForever);

  // Asks for the request to end early: blocks not yet at the device are dropped and it finishes as kCancelled
  // (if any block was dropped), as soon as those at the device are done. Returns at once; completion is
  // reported as always. A request that is not pending is left alone.
  void Cancel(Request* request);

  // The smallest number of bytes in flight, reads and writes together, that brings a device to 95% of its
  // peak (aio/profile.h measures it). Stats tell how long each device was at or above it.
  void set_saturating_bytes_in_flight(uint64_t bytes);
  uint64_t saturating_bytes_in_flight() const;
  // Caps of twice the saturating bytes in each direction, so that handing over in batches never drains the
  // drive, but at most 64 MiB, beyond which only latency grows; where the options have more, that. From the
  // next block on.
  void RaiseCapsToSaturation();
  // New caps from the next block on, per device.
  void set_max_in_flight(uint64_t read_bytes, uint64_t write_bytes);

  EngineStats stats() const;
  // That all devices have handed over and taken so far: of the statistics the one that waits for no lock.
  uint64_t moved_bytes() const;
  const EngineOptions& options() const;
  const Clock& clock() const;
  // The backend in use: what was asked for, or what the ladder came down to.
  std::string backend_name() const;
  // One line for each request that is not finished, oldest first, at most `limit`: what, where, how far, how
  // long.
  std::string DescribePending(size_t limit = 8) const;

  // Virtual time (`sim` only; on the others Poll does nothing and NextEventNs is kNever). Nothing moves
  // unless one of these or a Wait is called; callbacks run inside them. A Wait advances the clock as far as
  // it must.
  static constexpr int64_t kNever = INT64_MAX;
  bool virtual_time() const;
  // Starts what can start and finishes what is due at the clock's present time; returns the requests
  // finished.
  size_t Poll();
  // When the next block completes; kNever when none is in flight. Poll first, so that queued blocks count.
  int64_t NextEventNs() const;
  // Runs all events up to and including `ns` and leaves the clock there.
  void RunUntil(int64_t ns);

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  const ProcessMark made_in_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_ENGINE_H_
