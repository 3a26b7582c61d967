// io_uring: one ring, created, used and destroyed by the queue's thread (SINGLE_ISSUER), completions run when
// that thread asks (DEFER_TASKRUN), the arenas registered as fixed buffers, files in the ring's table. Waits
// are bounded by a timeout argument of io_uring_enter; other threads wake the ring through an eventfd that it
// always has a read on.
//
// A ring that the kernel no longer serves is closed: what was not handed over never will be. What was goes on
// in the kernel, which tells when the last of it is over by letting go of the ring's file table, and with it
// of one end of a pipe: the witness. Until then nothing is reported as failed.
#include "aio/backend.h"

#ifdef PENSTOCK_HAVE_URING

#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <functional>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "aio/ring_memory.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

constexpr unsigned kFileSlots = 256;
constexpr uint64_t kBufferBytes = kGiB;  // the kernel's limit for one registered buffer
constexpr int kTeardownPollMs = 20;
constexpr int kTeardownPollsTold = 100;

struct Rung {
  const char* name;
  unsigned flags;
};
// The best first: each later one is for kernels that refuse the one before.
constexpr Rung kRungs[] = {
    {"single issuer, deferred completions",
     IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_CLAMP},
    {"cooperative completions", IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_CLAMP},
    {"plain", 0},
};

class IoUringBackend final : public Backend {
 public:
  ~IoUringBackend() override {
    if (ring_open_) CloseRing();
    if (wake_fd_ >= 0) close(wake_fd_);
    if (witness_fd_ >= 0) close(witness_fd_);
  }

  std::string_view name() const override { return "io_uring"; }
  absl::Status Start(const BackendConfig& config) override;
  void Finish() override;
  void Queue(Piece& piece) override;
  int64_t Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) override;
  void Wake() override;
  int RegisterFile(int fd) override;
  void UnregisterFile(int index) override;
  int FixedBuffer(const void* data, uint64_t bytes) const override;

 private:
  absl::Status OpenRing(const BackendConfig& config);
  void CloseRing();
  absl::Status RegisterTable(const BackendConfig& config);
  absl::Status Probe();
  int ProbeTransfer(int fd, bool fixed);
  void RegisterBuffers(const BackendConfig& config);
  int Register(std::span<const iovec> runs, uint64_t bytes);
  void ArmWake();
  size_t Reap(std::span<Completion> out);
  int64_t BreakDown();

  io_uring ring_{};
  bool ring_open_ = false;
  int wake_fd_ = -1;
  uint64_t wake_value_ = 0;
  uint32_t wake_entries_ = 0;  // of the chain that waits for a wake, not seen completed
  int witness_fd_ = -1;
  Refusals refusals_;
  int64_t error_ = 0;  // -errno: no ring any more
  int teardown_polls_ = 0;
  std::function<void(std::string_view)> note_;
  size_t outstanding_ = 0;  // pieces queued, or in the kernel
  std::vector<iovec> buffers_;
  std::vector<bool> file_slot_used_;  // empty: no file table
};

absl::Status IoUringBackend::OpenRing(const BackendConfig& config) {
  const unsigned entries = config.options->max_blocks_in_flight + kMostWanted;  // transfers, and the wake
  int error = 0;
  for (const Rung& rung : kRungs) {
    io_uring_params params{};
    params.flags = rung.flags;
    error = -io_uring_queue_init_params(entries, &ring_, &params);
    if (error != 0) {
      if (error == EPERM || error == ENOSYS) break;  // not a matter of flags
      config.note(absl::StrCat("io_uring with ", rung.name, " refused: ", ErrnoText(error)));
      continue;
    }
    ring_open_ = true;
    AfterRingMapped();
    if ((params.features & IORING_FEAT_EXT_ARG) == 0 || (params.features & IORING_FEAT_NODROP) == 0) {
      return absl::UnavailableError("io_uring: this kernel's lacks timed waits (needs Linux 5.11)");
    }
    return absl::OkStatus();
  }
  const char* const hint = error == EPERM    ? "; seccomp or sysctl kernel.io_uring_disabled forbids it"
                           : error == ENOSYS ? "; the kernel or its seccomp filter has none"
                           : error == ENOMEM ? "; the limit on locked memory (`ulimit -l`) is too low"
                                             : "";
  return absl::UnavailableError(absl::StrCat("io_uring_setup: ", ErrnoText(error), hint));
}

void IoUringBackend::CloseRing() {
  ring_open_ = false;
  BeforeRingUnmapped();
  io_uring_queue_exit(&ring_);
}

absl::Status IoUringBackend::Start(const BackendConfig& config) {
  note_ = config.note;
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  if (wake_fd_ < 0) return absl::UnavailableError(absl::StrCat("eventfd: ", ErrnoText(errno)));
  RETURN_IF_ERROR(OpenRing(config));
  io_uring_ring_dontfork(&ring_);
  io_uring_register_ring_fd(&ring_);  // saves a look-up a call; not worth a word where it fails
  RETURN_IF_ERROR(RegisterTable(config));
  if (config.options->register_buffers) RegisterBuffers(config);
  absl::Status status = Probe();
  if (!status.ok() && !buffers_.empty()) {
    config.note(
        absl::StrCat("registered buffers do not work: ", std::string(status.message()), "; plain ones"));
    io_uring_unregister_buffers(&ring_);
    buffers_.clear();
    status = Probe();
  }
  return status;
}

// A table of files, with one end of a pipe in it whatever else: whoever has the other end is told when the
// ring is gone.
absl::Status IoUringBackend::RegisterTable(const BackendConfig& config) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::UnavailableError(absl::StrCat("pipe: ", ErrnoText(errno)));
  witness_fd_ = ends[0];
  std::vector<int> table(config.options->register_files ? kFileSlots : 1, -1);
  table[0] = ends[1];
  int error = -io_uring_register_files(&ring_, table.data(), static_cast<unsigned>(table.size()));
  if (error != 0 && table.size() > 1) {
    config.note("io_uring: no table of registered files; plain descriptors");
    table.resize(1);
    error = -io_uring_register_files(&ring_, table.data(), 1);
  }
  close(ends[1]);
  if (error != 0) return absl::UnavailableError(absl::StrCat("io_uring_register: ", ErrnoText(error)));
  file_slot_used_.assign(table.size(), false);
  file_slot_used_[0] = true;
  return absl::OkStatus();
}

// Closing a ring lets go of files and buffers some time later; asking for it does so now, so that locks on
// the files are gone and the memory is free to be registered elsewhere.
void IoUringBackend::Finish() {
  if (!ring_open_) return;
  if (!file_slot_used_.empty()) io_uring_unregister_files(&ring_);
  if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
  io_uring_unregister_ring_fd(&ring_);
  file_slot_used_.clear();
  buffers_.clear();
}

void IoUringBackend::RegisterBuffers(const BackendConfig& config) {
  std::vector<iovec> all;
  uint64_t total = 0;
  for (const Arena* arena : config.options->arenas) {
    for (uint64_t at = 0; at < arena->bytes(); at += kBufferBytes) {
      all.push_back({arena->data() + at, std::min(kBufferBytes, arena->bytes() - at)});
    }
    total += arena->bytes();
  }
  if (all.empty()) return;
  const int error = Register(all, total);
  if (error == 0) return;
  rlimit limit{};
  std::string hint;
  if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    hint =
        absl::StrCat("; the limit on locked memory is ", FormatBytes(limit.rlim_cur), ": raise `ulimit -l`");
  }
  // What fits: the longest run from the start on. Trying is the only way to learn it, since the limit counts
  // what the user's other processes hold too.
  uint64_t fits = 0;
  if (error == ENOMEM) {
    for (uint64_t step = std::bit_floor(total); step >= kHugePageBytes; step /= 2) {
      if (fits + step >= total || Register(all, fits + step) != 0) continue;
      fits += step;
      io_uring_unregister_buffers(&ring_);
    }
    if (fits != 0 && Register(all, fits) != 0) fits = 0;
  }
  if (fits == 0) {
    config.note(absl::StrCat("buffers not registered: ", ErrnoText(error), hint,
                             "; transfers pin their pages one by one"));
    return;
  }
  config.note(absl::StrCat("only the first ", FormatBytes(fits), " of ", FormatBytes(total),
                           " registered as buffers: ", ErrnoText(error), hint,
                           "; transfers beyond pin their pages one by one"));
}

// Registers the first `bytes` of these runs; returns an errno. buffers_ is what is registered.
int IoUringBackend::Register(std::span<const iovec> runs, uint64_t bytes) {
  buffers_.clear();
  for (const iovec& run : runs) {
    if (bytes == 0) break;
    buffers_.push_back({run.iov_base, std::min<uint64_t>(run.iov_len, bytes)});
    bytes -= buffers_.back().iov_len;
  }
  const int error =
      -io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size()));
  if (error != 0) buffers_.clear();
  return error;
}

// A real transfer through the ring: set-up alone proves nothing (polled rings set up fine and then refuse to
// read).
absl::Status IoUringBackend::Probe() {
  const int fd = memfd_create("penstock-probe", MFD_CLOEXEC);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("memfd_create: ", ErrnoText(errno)));
  int result = ProbeTransfer(fd, false);
  if (result == 0 && !buffers_.empty()) result = ProbeTransfer(fd, true);
  close(fd);
  if (result == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("io_uring probe write: ", ErrnoText(result)));
}

// Writes from memory to the scratch file (never into memory: the arena may be in use). Returns an errno.
int IoUringBackend::ProbeTransfer(int fd, bool fixed) {
  static const char kProbe[64] = "penstock";
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) return EBUSY;
  if (fixed) {
    io_uring_prep_write_fixed(entry, fd, buffers_[0].iov_base, sizeof(kProbe), 0, 0);
  } else {
    io_uring_prep_write(entry, fd, kProbe, sizeof(kProbe), 0);
  }
  int result = 0;
  do {
    result = io_uring_submit_and_wait(&ring_, 1);
  } while (result == -EINTR);
  if (result < 0) return -result;
  io_uring_cqe* done = nullptr;
  if (const int error = io_uring_peek_cqe(&ring_, &done); error != 0) return -error;
  const int moved = done->res;
  io_uring_cqe_seen(&ring_, done);
  if (moved < 0) return -moved;
  return moved == static_cast<int>(sizeof(kProbe)) ? 0 : EIO;
}

void IoUringBackend::Queue(Piece& piece) {
  if (!ring_open_) return;                               // the queue fails it with all others
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);  // there is one for each piece
  ++outstanding_;
  const bool registered = piece.slot->registered >= 0;
  const int fd = registered ? piece.slot->registered : piece.fd();
  const auto bytes = static_cast<unsigned>(piece.device_bytes());
  if (piece.op == Op::kSync) {
    io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
  } else if (piece.op == Op::kRead && piece.fixed_buffer >= 0) {
    io_uring_prep_read_fixed(entry, fd, piece.device_data(), bytes, piece.device_offset(),
                             piece.fixed_buffer);
  } else if (piece.op == Op::kRead) {
    io_uring_prep_read(entry, fd, piece.device_data(), bytes, piece.device_offset());
  } else if (piece.fixed_buffer >= 0) {
    io_uring_prep_write_fixed(entry, fd, piece.device_data(), bytes, piece.device_offset(),
                              piece.fixed_buffer);
  } else {
    io_uring_prep_write(entry, fd, piece.device_data(), bytes, piece.device_offset());
  }
  if (registered) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(entry, &piece);
}

// A read of the eventfd, and linked to it what completes with it, so that a wake ends every wait.
void IoUringBackend::ArmWake() {
  if (wake_entries_ != 0) return;
  for (wake_entries_ = 0; wake_entries_ < kMostWanted; ++wake_entries_) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    if (wake_entries_ == 0) {
      io_uring_prep_read(entry, wake_fd_, &wake_value_, sizeof(wake_value_), 0);
    } else {
      io_uring_prep_nop(entry);
    }
    if (wake_entries_ + 1 < kMostWanted) io_uring_sqe_set_flags(entry, IOSQE_IO_LINK);
    io_uring_sqe_set_data(entry, this);  // no piece has this address
  }
}

size_t IoUringBackend::Reap(std::span<Completion> out) {
  size_t count = 0;
  unsigned seen = 0;
  unsigned head = 0;
  io_uring_cqe* entry = nullptr;
  io_uring_for_each_cqe(&ring_, head, entry) {
    void* const tag = io_uring_cqe_get_data(entry);
    if (tag == this) {
      --wake_entries_;
    } else if (count == out.size()) {
      break;
    } else {
      --outstanding_;
      out[count++] = {static_cast<Piece*>(tag), entry->res};
    }
    ++seen;
  }
  io_uring_cq_advance(&ring_, seen);
  return count;
}

int64_t IoUringBackend::Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) {
  if (!ring_open_) return BreakDown();
  ArmWake();
  // What is left of a wake comes at once, and does not fill a wait for more.
  if (wake_entries_ != kMostWanted) want = 1;
  __kernel_timespec limit{};
  if (timeout_ns > 0) {
    limit.tv_sec = timeout_ns / 1'000'000'000;
    limit.tv_nsec = timeout_ns % 1'000'000'000;
  }
  io_uring_cqe* first = nullptr;
  ++syscalls_;
  const int result = timeout_ns == 0
                         ? io_uring_submit_and_get_events(&ring_)
                         : io_uring_submit_and_wait_timeout(&ring_, &first, std::max(1u, want),
                                                            timeout_ns > 0 ? &limit : nullptr, nullptr);
  if (result >= 0 || result == -ETIME || result == -EINTR) {
    refusals_.Taken();
  } else if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM) {
    // Out of memory for what is new, or completions must be taken first. Those of what is in flight come all
    // the same, and as long as there are any it is no matter for how long.
    const bool has_some = outstanding_ > io_uring_sq_ready(&ring_);
    if (refusals_.Last()) {
      if (has_some) {
        refusals_.Taken();
      } else {
        error_ = result;
      }
    }
    ++syscalls_;
    io_uring_get_events(&ring_);
  } else {
    error_ = result;
  }
  if (error_ != 0) return BreakDown();
  return static_cast<int64_t>(Reap(out));
}

// Closes the ring; its error once the kernel has nothing of it any more, 0 until then.
int64_t IoUringBackend::BreakDown() {
  if (ring_open_) {
    file_slot_used_.clear();
    buffers_.clear();
    CloseRing();
  }
  pollfd witness{witness_fd_, POLLIN, 0};
  if (poll(&witness, 1, kTeardownPollMs) == 1) return error_;
  if (++teardown_polls_ == kTeardownPollsTold) {
    note_(
        "io_uring is closed, and the kernel still holds it: transfers in flight end when it lets go (a "
        "process that was "
        "forked may hold it too)");
  }
  return 0;
}

void IoUringBackend::Wake() {
  const uint64_t one = 1;
  while (write(wake_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

int IoUringBackend::RegisterFile(int fd) {
  for (size_t i = 0; i < file_slot_used_.size(); ++i) {
    if (file_slot_used_[i]) continue;
    if (io_uring_register_files_update(&ring_, static_cast<unsigned>(i), &fd, 1) != 1) return -1;
    file_slot_used_[i] = true;
    return static_cast<int>(i);
  }
  return -1;
}

void IoUringBackend::UnregisterFile(int index) {
  if (!ring_open_) return;
  int none = -1;
  io_uring_register_files_update(&ring_, static_cast<unsigned>(index), &none, 1);
  file_slot_used_[static_cast<size_t>(index)] = false;
}

int IoUringBackend::FixedBuffer(const void* data, uint64_t bytes) const {
  const auto* const at = static_cast<const char*>(data);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto* const base = static_cast<const char*>(buffers_[i].iov_base);
    if (at >= base && at < base + buffers_[i].iov_len) {
      return bytes <= static_cast<uint64_t>(base + buffers_[i].iov_len - at) ? static_cast<int>(i) : -1;
    }
  }
  return -1;
}

}  // namespace

std::unique_ptr<Backend> MakeIoUringBackend() { return std::make_unique<IoUringBackend>(); }

}  // namespace penstock::aio

#else

namespace penstock::aio {
std::unique_ptr<Backend> MakeIoUringBackend() { return nullptr; }
}  // namespace penstock::aio

#endif
