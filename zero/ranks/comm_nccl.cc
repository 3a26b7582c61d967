// Exchanges between CUDA devices, over NCCL, which is loaded when it is first asked for: programs start and
// run without it. No header of LibTorch's is needed.
//
// One communicator and one stream, on which every rank enqueues the same exchanges in the same order. Two
// lanes exchange (zero/lanes/rank_lanes.h), each in the order of the program, but which of them comes first
// differs from rank to rank: what a device has enqueued first would wait for what another has enqueued last,
// for ever, be it in one communicator or in two whose kernels do not fit on the device together. So rank 0's
// order is everybody's: before an exchange all ranks meet on the host and hear which lane's
// is next, and of what: whoever comes with another exchange than rank 0 ends all of it, since NCCL would take
// the bytes of one for those of another, or wait for ever where their numbers differ. That costs no message
// of its own. A rank's other lane waits for its turn. That ends: where rank 0 enqueued an exchange, all that
// it depends on was over there, and came before it in the order; the other ranks run the same program, so
// that theirs comes too. An exchange is one group of sends and receives, so that sums are the caller's, in
// the order of the ranks, and the bytes are those of an all-gather or of a reduce-scatter. The communicator
// does not block: whoever waits looks every few microseconds whether the exchange is over, has failed, or the
// ranks have lost each other (`host`), in which case what is in flight is given up.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {
namespace {

// Of the device's processors the communicator may hold so many: what it holds while it waits for the others
// must leave room for compute.
constexpr int kMostBlocks = 16;

struct Nccl {
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The one that LibTorch has loaded, if it has. Stays loaded.
absl::StatusOr<const Nccl*> Load() {
  static const absl::StatusOr<const Nccl*> loaded = []() -> absl::StatusOr<const Nccl*> {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return absl::FailedPreconditionError(absl::StrCat("NCCL: ", dlerror()));
    auto* const nccl = new Nccl;
    const bool whole =
        Find(library, "ncclGetUniqueId", &nccl->get_unique_id) &&
        Find(library, "ncclCommInitRankConfig", &nccl->init) &&
        Find(library, "ncclCommGetAsyncError", &nccl->async_error) &&
        Find(library, "ncclCommAbort", &nccl->abort) && Find(library, "ncclCommFinalize", &nccl->finalize) &&
        Find(library, "ncclCommDestroy", &nccl->destroy) &&
        Find(library, "ncclGroupStart", &nccl->group_start) &&
        Find(library, "ncclGroupEnd", &nccl->group_end) && Find(library, "ncclSend", &nccl->send) &&
        Find(library, "ncclRecv", &nccl->receive) && Find(library, "ncclGetErrorString", &nccl->error_string);
    if (!whole) {
      return absl::FailedPreconditionError("libnccl.so.2 is older than 2.14, which this needs");
    }
    return nccl;
  }();
  return loaded;
}

absl::Status CudaStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // told here: where the run goes on without NCCL, nobody must find it again
  return absl::InternalError(absl::StrCat(call, ": ", cudaGetErrorString(error)));
}

class NcclComm final : public Comm {
 public:
  NcclComm(std::shared_ptr<Comm> host, const Nccl& nccl, int device)
      : Comm(host->environment()), host_(std::move(host)), nccl_(nccl), device_(device) {}

  ~NcclComm() override {
    (void)cudaSetDevice(device_);
    if (comm_ != nullptr && connected_ && host_->failure().ok()) {
      // What others still receive from here must arrive.
      const auto until = Clock::now() + kFarewell;
      const absl::Status over = Settled([&] { return nccl_.finalize(comm_); }, "taking leave", until);
      if (over.ok() && comm_ != nullptr) (void)nccl_.destroy(std::exchange(comm_, nullptr));
    }
    GiveUp();
    for (Lane& lane : lanes_) {
      for (cudaEvent_t event : lane.events) {
        if (event != nullptr) (void)cudaEventDestroy(event);
      }
    }
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    (void)cudaFree(trial_);
  }

  // What needs nobody else.
  absl::Status Prepare() {
    absl::Status status =
        CudaStatus(cudaMalloc(&trial_, kTrialBytes * static_cast<size_t>(world())), "cudaMalloc");
    if (status.ok())
      status = CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (Lane& lane : lanes_) {
      for (cudaEvent_t& event : lane.events) {
        if (status.ok())
          status = CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
      }
    }
    return status;
  }

  // `id`: rank 0's. With an exchange, because the first one connects the ranks and takes memory, which must
  // not happen while something else waits on the device. The host's comm goes on whatever becomes of it.
  absl::Status Connect(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = kMostBlocks;
    absl::Status status = Settled([&] { return nccl_.init(&comm_, world(), id, rank(), &config); },
                                  "connecting", Clock::now() + kMeeting);
    if (status.ok()) status = AllGather(Channel::kAllGather, {"a trial"}, trial_, kTrialBytes);
    connected_ = status.ok();
    return status;
  }

  std::string name() const override { return absl::StrCat("NCCL beside ", host_->name()); }

  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& what,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    if (channel != Channel::kAllGather && channel != Channel::kReduceScatter)
      return absl::InvalidArgumentError("devices gather and reduce; everything else is of the hosts");
    absl::Status status = CudaStatus(cudaSetDevice(device_), "cudaSetDevice");
    RETURN_IF_ERROR(status);
    std::unique_lock turn(order_mutex_);
    // The first one of all is known, and whoever cannot connect is not there to say so.
    if (connected_) status = Turn(Asked(channel, what.Text(bytes)), turn);
    if (!status.ok()) {
      if (!host_->failure().ok()) GiveUp();
      return status;
    }
    absl::StatusOr<std::unique_ptr<Exchange>> begun = Enqueue(channel, send, receive, bytes);
    next_.reset();
    turn.unlock();
    turn_there_.notify_all();
    return begun;
  }

  void Abort(const absl::Status& why) override { host_->Abort(why); }
  absl::Status failure() override { return host_->failure(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Channel kOrder = Channel::kAllGather;  // the hosts' own, idle where the devices gather
  static constexpr absl::string_view kExchanging = "an exchange between devices";
  static constexpr std::chrono::microseconds kLongestPause{100};
  static constexpr std::chrono::seconds kMeeting{120}, kFarewell{5};
  static constexpr size_t kTrialBytes = 4096;

  // What a rank would exchange next. The text fits in.
  struct Asked {
    Asked() = default;
    Asked(Channel of, const std::string& what) : channel(of) { what.copy(text.data(), text.size() - 1); }
    Channel channel = Channel::kSetup;
    std::array<char, 127> text{};
  };

  struct Lane {
    // Two may be under way at once (zero/lanes/rank_lanes.cc): a third waits for nobody else's event.
    std::array<cudaEvent_t, 2> events{};
    size_t begun = 0;
  };

  class Pending final : public Exchange {
   public:
    Pending(NcclComm* of, cudaEvent_t event) : of_(of), event_(event) {}
    absl::Status Wait() override {
      (void)cudaSetDevice(of_->device_);
      return of_->Until(kExchanging, of_->Deadline(), [this](absl::Status* status) {
        const cudaError_t state = cudaEventQuery(event_);
        if (state == cudaErrorNotReady) return false;
        *status = CudaStatus(state, kExchanging);
        return true;
      });
    }

   private:
    NcclComm* const of_;
    const cudaEvent_t event_;
  };

  static bool Goes(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }
  // Training waits for whoever is slow as long as the host's comm has them; connecting does not.
  Clock::time_point Deadline() const {
    return connected_ ? Clock::time_point::max() : Clock::now() + kMeeting;
  }

  // Until the next exchange of all ranks is this channel's. One lane asks for both.
  absl::Status Turn(const Asked& mine, std::unique_lock<std::mutex>& turn) {
    while (!next_.has_value() || next_->channel != mine.channel) {
      RETURN_IF_ERROR(host_->failure());
      if (next_.has_value() || asking_) {
        turn_there_.wait_for(turn, kLongestPause);  // whether the ranks lose each other is told by nobody
        continue;
      }
      asking_ = true;
      turn.unlock();
      std::vector<Asked> wanted(static_cast<size_t>(world()));
      wanted[static_cast<size_t>(rank())] = mine;
      const absl::Status asked =
          host_->AllGather(kOrder, {"the order of device exchanges"}, wanted.data(), sizeof(Asked));
      turn.lock();
      asking_ = false;
      if (asked.ok()) {
        next_ = wanted.front();
        next_->text.back() = '\0';
      }
      turn_there_.notify_all();
      RETURN_IF_ERROR(asked);
    }
    if (next_->text == mine.text) return absl::OkStatus();
    host_->Abort(absl::UnavailableError(absl::StrCat(
        RankName(rank(), world()), " is at ", mine.text.data(), " between devices and rank 0 at ",
        next_->text.data(), ": they do not do the same; give all ranks the same flags, data and calls")));
    return host_->failure();
  }

  absl::StatusOr<std::unique_ptr<Exchange>> Enqueue(Channel channel, std::span<const void* const> send,
                                                    std::span<void* const> receive, size_t bytes) {
    absl::Status status = Settled(
        [&] {
          ncclResult_t result = nccl_.group_start();
          for (size_t k = 0; k < send.size() && Goes(result); ++k) {
            if (static_cast<int>(k) == rank() || bytes == 0) continue;
            const auto peer = static_cast<int>(k);
            result = nccl_.send(send[k], bytes, ncclInt8, peer, comm_, stream_);
            if (Goes(result)) result = nccl_.receive(receive[k], bytes, ncclInt8, peer, comm_, stream_);
          }
          const ncclResult_t ended = nccl_.group_end();
          return Goes(result) ? ended : result;
        },
        kExchanging, Deadline());
    Lane& lane = lanes_[channel == Channel::kAllGather ? 0 : 1];
    cudaEvent_t const event = lane.events[lane.begun++ % lane.events.size()];
    if (status.ok()) status = CudaStatus(cudaEventRecord(event, stream_), "cudaEventRecord");
    RETURN_IF_ERROR(status);
    return std::make_unique<Pending>(this, event);
  }

  // What waits on the device for those who are gone would wait for ever.
  void GiveUp() {
    std::lock_guard lock(comm_mutex_);
    if (comm_ != nullptr) (void)nccl_.abort(std::exchange(comm_, nullptr));
  }

  absl::Status Failed(ncclResult_t result, absl::string_view what) {
    absl::Status status =
        absl::UnavailableError(absl::StrCat("NCCL, ", what, ": ", nccl_.error_string(result)));
    GiveUp();
    if (connected_) host_->Abort(status);
    const absl::Status cause = host_->failure();  // another rank's, perhaps
    return cause.ok() ? status : cause;
  }

  // Looks again and again until `done`, or until the ranks have lost each other.
  template <typename Done>
  absl::Status Until(absl::string_view what, Clock::time_point deadline, Done done) {
    for (auto pause = std::chrono::microseconds(2);; pause = std::min(pause * 2, kLongestPause)) {
      absl::Status status;
      ncclResult_t state = ncclSuccess;
      {
        std::lock_guard lock(comm_mutex_);  // nobody gives it up meanwhile
        if (comm_ == nullptr) {
          status = host_->failure();
          return status.ok() ? absl::UnavailableError(absl::StrCat("NCCL, ", what, ": given up")) : status;
        }
        if (done(&status)) return status;
        if (const ncclResult_t asked = nccl_.async_error(comm_, &state); !Goes(asked)) state = asked;
      }
      if (!Goes(state)) return Failed(state, what);
      absl::Status lost = host_->failure();
      if (lost.ok() && Clock::now() > deadline) {
        lost = absl::DeadlineExceededError(absl::StrCat("NCCL, ", what, ": the other ranks did not come"));
      }
      if (!lost.ok()) {
        GiveUp();
        return lost;
      }
      std::this_thread::sleep_for(pause);
    }
  }

  // A call that does not block is over when its communicator says so.
  template <typename Call>
  absl::Status Settled(Call call, absl::string_view what, Clock::time_point deadline) {
    ncclResult_t result = ncclSuccess;
    {
      std::lock_guard lock(comm_mutex_);
      // Only "connecting" makes one; a lost one is not called.
      if (comm_ == nullptr && connected_) {
        const absl::Status cause = host_->failure();
        return cause.ok() ? absl::UnavailableError("NCCL: given up before") : cause;
      }
      result = call();
    }
    if (!Goes(result)) return Failed(result, what);
    return Until(what, deadline, [&](absl::Status*) {
      ncclResult_t state = ncclSuccess;
      return nccl_.async_error(comm_, &state) == ncclSuccess && state == ncclSuccess;
    });
  }

  const std::shared_ptr<Comm> host_;
  const Nccl& nccl_;
  const int device_;
  void* trial_ = nullptr;
  bool connected_ = false;
  cudaStream_t stream_ = nullptr;
  std::mutex comm_mutex_;  // of comm_, which whoever finds it lost gives up; held for calls, not for waiting
  ncclComm_t comm_ = nullptr;
  std::mutex order_mutex_;  // held while an exchange is enqueued; of what follows
  std::condition_variable turn_there_;
  std::optional<Asked> next_;  // rank 0's, which is everybody's next exchange; none: not asked yet
  bool asking_ = false;
  std::array<Lane, 2> lanes_;  // gather, reduce
};

}  // namespace

absl::Status NcclThere() { return Load().status(); }

absl::StatusOr<std::shared_ptr<Comm>> ConnectNccl(const std::shared_ptr<Comm>& host) {
  const absl::StatusOr<const Nccl*> nccl = Load();
  int device = 0;
  absl::Status mine = nccl.status();
  if (mine.ok()) mine = CudaStatus(cudaGetDevice(&device), "cudaGetDevice");
  std::shared_ptr<NcclComm> comm;
  if (mine.ok()) {
    comm = std::make_shared<NcclComm>(host, **nccl, device);
    mine = comm->Prepare();
  }
  ncclUniqueId id{};
  if (mine.ok() && host->rank() == 0) {
    if (const ncclResult_t got = (*nccl)->get_unique_id(&id); got != ncclSuccess)
      mine = absl::UnavailableError(absl::StrCat("NCCL: ", (*nccl)->error_string(got)));
  }
  // Whoever cannot must say so before the others wait for it.
  RETURN_IF_ERROR(AgreeOnStatus(*host, Channel::kSetup, mine));
  std::vector<ncclUniqueId> everybodys(static_cast<size_t>(host->world()));
  everybodys[static_cast<size_t>(host->rank())] = id;
  absl::Status status = host->AllGather(Channel::kSetup, {"the id of NCCL"}, everybodys.data(), sizeof(id));
  RETURN_IF_ERROR(status);
  status = comm->Connect(everybodys.front());
  RETURN_IF_ERROR(AgreeOnStatus(*host, Channel::kSetup, status));
  return comm;
}

}  // namespace penstock::zero
