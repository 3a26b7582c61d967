// Linux AIO: the same data path as io_uring without registered buffers. Wants direct I/O on preallocated
// files, or io_submit blocks. Woken through an eventfd on which the context always has polls: as many as end
// any wait together.
#include "aio/backend.h"

#ifdef PENSTOCK_HAVE_LIBAIO

#include <libaio.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"

namespace penstock::aio {
namespace {

// A poll on the eventfd: no piece has this for its data.
void* const kWake = nullptr;

class LibaioBackend final : public Backend {
 public:
  ~LibaioBackend() override {
    if (context_ != nullptr) io_destroy(context_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  std::string_view name() const override { return "libaio"; }

  absl::Status Start(const BackendConfig& config) override {
    const uint32_t count = config.options->max_blocks_in_flight;
    control_blocks_.resize(count + kMostWanted);
    for (iocb& block : control_blocks_) free_.push_back(&block);
    queued_.reserve(count + kMostWanted);
    events_.resize(count + kMostWanted);
    failed_.reserve(count);
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return absl::UnavailableError(absl::StrCat("eventfd: ", ErrnoText(errno)));
    if (const int error = -io_setup(static_cast<int>(count + kMostWanted), &context_); error != 0) {
      context_ = nullptr;
      const char* const hint = error == EAGAIN   ? "; all of fs.aio-max-nr is in use: raise it with sysctl"
                               : error == ENOSYS ? "; the kernel or its seccomp filter has none"
                                                 : "";
      return absl::UnavailableError(absl::StrCat("io_setup: ", ErrnoText(error), hint));
    }
    return Probe();
  }

  void Queue(Piece& piece) override {
    iocb* const block = free_.back();
    free_.pop_back();
    if (piece.op == Op::kSync) {
      io_prep_fdsync(block, piece.fd());
    } else if (piece.op == Op::kRead) {
      io_prep_pread(block, piece.fd(), piece.device_data(), piece.device_bytes(),
                    static_cast<long long>(piece.device_offset()));
    } else {
      io_prep_pwrite(block, piece.fd(), piece.device_data(), piece.device_bytes(),
                     static_cast<long long>(piece.device_offset()));
    }
    block->data = &piece;
    queued_.push_back(block);
  }

  int64_t Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) override;

  void Wake() override {
    const uint64_t one = 1;
    while (write(wake_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

 private:
  absl::Status Probe();
  void ArmWake();
  void Submit();
  int64_t BreakDown();

  io_context_t context_ = nullptr;
  int wake_fd_ = -1;
  uint32_t polls_ = 0;  // queued or in the kernel
  std::vector<iocb> control_blocks_;
  std::vector<iocb*> free_;
  std::vector<iocb*> queued_;  // not yet taken by the kernel
  std::vector<io_event> events_;
  std::vector<Completion> failed_;  // refused by io_submit
  uint32_t in_kernel_ = 0;          // transfers
  Refusals refusals_;
  int64_t error_ = 0;  // -errno: takes nothing any more, and ends when the kernel has nothing of it
};

absl::Status LibaioBackend::Probe() {
  const int fd = memfd_create("penstock-probe", MFD_CLOEXEC);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("memfd_create: ", ErrnoText(errno)));
  char text[64] = "penstock";
  iocb block{};
  iocb* blocks[] = {&block};
  io_prep_pwrite(&block, fd, text, sizeof(text), 0);
  int result = io_submit(context_, 1, blocks);
  io_event event{};
  if (result == 1) {
    do {
      result = io_getevents(context_, 1, 1, &event, nullptr);
    } while (result == -EINTR);
    if (result == 1) result = static_cast<int>(static_cast<long>(event.res)) == sizeof(text) ? 0 : -EIO;
  }
  close(fd);
  if (result != 0)
    return absl::UnavailableError(absl::StrCat("io_submit probe: ", ErrnoText(std::abs(result))));
  ArmWake();
  Submit();
  if (!queued_.empty() || error_ != 0) {
    return absl::UnavailableError("no poll through libaio (needs Linux 4.19)");
  }
  return absl::OkStatus();
}

void LibaioBackend::ArmWake() {
  for (; polls_ < kMostWanted; ++polls_) {
    iocb* const block = free_.back();
    free_.pop_back();
    io_prep_poll(block, wake_fd_, POLLIN);
    block->data = kWake;
    queued_.push_back(block);
  }
}

// Hands over as many as the kernel takes. Some may stay queued (no resources now); one that is refused
// outright is completed with its error, and the rest goes on.
void LibaioBackend::Submit() {
  size_t done = 0;
  while (done < queued_.size() && error_ == 0) {
    ++syscalls_;
    const int taken = io_submit(context_, static_cast<long>(queued_.size() - done), queued_.data() + done);
    if (taken > 0) {
      for (const size_t end = done + static_cast<size_t>(taken); done < end; ++done) {
        if (queued_[done]->data != kWake) ++in_kernel_;
      }
      refusals_.Taken();
    } else if (taken == -EINTR) {
      continue;
    } else if (taken == 0 || taken == -EAGAIN || taken == -ENOMEM) {
      break;
    } else if (queued_[done]->data == kWake) {
      error_ = taken;  // nobody could wake it
    } else {
      iocb* const refused = queued_[done++];
      failed_.push_back({static_cast<Piece*>(refused->data), taken});
      free_.push_back(refused);
    }
  }
  queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(done));
}

int64_t LibaioBackend::Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) {
  if (error_ == 0) {
    ArmWake();
    Submit();
  }
  size_t count = std::min(out.size(), failed_.size());
  std::copy_n(failed_.begin(), count, out.begin());
  failed_.erase(failed_.begin(), failed_.begin() + static_cast<ptrdiff_t>(count));
  if (error_ == 0 && !queued_.empty()) {
    // What the kernel would not take waits for completions, or for a moment if there are none to come.
    want = 1;
    if (in_kernel_ == 0) {
      timeout_ns = 0;
      if (refusals_.Last()) error_ = -EAGAIN;
    }
  }
  if (error_ != 0) {
    if (in_kernel_ == 0 && count == 0) return BreakDown();
    want = 1;
  }
  timespec limit{};
  if (timeout_ns > 0) {
    limit.tv_sec = timeout_ns / 1'000'000'000;
    limit.tv_nsec = timeout_ns % 1'000'000'000;
  }
  const bool wait = timeout_ns != 0 && count == 0;
  const long least = wait ? static_cast<long>(std::max(1u, std::min(want, kMostWanted))) : 0;
  const long most = static_cast<long>(std::min(events_.size(), out.size() - count + kMostWanted));
  ++syscalls_;
  const int got =
      io_getevents(context_, least, most, events_.data(), wait && timeout_ns < 0 ? nullptr : &limit);
  if (got == -EINTR) return static_cast<int64_t>(count);
  if (got < 0) {
    error_ = got;
    return BreakDown();
  }
  bool woken = false;
  for (int i = 0; i < got; ++i) {
    const io_event& event = events_[static_cast<size_t>(i)];
    free_.push_back(event.obj);
    if (event.data == kWake) {
      --polls_;
      woken = true;
    } else {
      --in_kernel_;
      out[count++] = {static_cast<Piece*>(event.data), static_cast<int64_t>(static_cast<long>(event.res))};
    }
  }
  if (woken) {
    uint64_t value = 0;
    ++syscalls_;
    if (read(wake_fd_, &value, sizeof(value)) < 0 && errno != EAGAIN && errno != EINTR) error_ = -errno;
  }
  return static_cast<int64_t>(count);
}

// io_destroy waits until the kernel is done with all that it took.
int64_t LibaioBackend::BreakDown() {
  if (context_ != nullptr) io_destroy(std::exchange(context_, nullptr));
  return error_;
}

}  // namespace

std::unique_ptr<Backend> MakeLibaioBackend() { return std::make_unique<LibaioBackend>(); }

}  // namespace penstock::aio

#else

namespace penstock::aio {
std::unique_ptr<Backend> MakeLibaioBackend() { return nullptr; }
}  // namespace penstock::aio

#endif
