// Exchanges between CUDA devices, over NCCL, which is loaded when it is first asked for: programs start and
// run without it. No header of LibTorch's is needed.
//
// A communicator and a stream for each of the two lanes that exchange (zero/lanes/rank_lanes.h), because each keeps
// an order of its own. An exchange is one group of sends and receives, so that sums are the caller's, in the
// order of the ranks, and the bytes are those of an all-gather or of a reduce-scatter. The communicators do
// not block: whoever waits looks every few microseconds whether the exchange is over, has failed, or the
// ranks have lost each other (`host`), in which case what is in flight is given up.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "zero/ranks/comm.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {
namespace {

// Of the device's processors a communicator may hold so many: what both hold while they wait for the others
// must leave room for each other and for compute.
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
  return absl::InternalError(absl::StrCat(call, ": ", cudaGetErrorString(error)));
}

class NcclComm final : public Comm {
 public:
  NcclComm(std::shared_ptr<Comm> host, const Nccl& nccl, int device)
      : Comm(host->environment()), host_(std::move(host)), nccl_(nccl), device_(device) {}

  ~NcclComm() override {
    (void)cudaSetDevice(device_);
    for (Link& link : links_) {
      if (link.comm != nullptr && connected_ && host_->failure().ok()) {
        // What others still receive from here must arrive.
        const auto until = Clock::now() + kFarewell;
        const ncclResult_t result = nccl_.finalize(link.comm);
        const absl::Status over = Settled(result, link, "taking leave", until);
        if (over.ok() && link.comm != nullptr) (void)nccl_.destroy(std::exchange(link.comm, nullptr));
      }
      GiveUp(link);
      for (cudaEvent_t event : link.events) {
        if (event != nullptr) (void)cudaEventDestroy(event);
      }
      if (link.stream != nullptr) (void)cudaStreamDestroy(link.stream);
    }
    (void)cudaFree(trial_);
  }

  // What needs nobody else.
  absl::Status Prepare() {
    absl::Status status =
        CudaStatus(cudaMalloc(&trial_, kTrialBytes * static_cast<size_t>(world())), "cudaMalloc");
    for (Link& link : links_) {
      if (status.ok())
        status =
            CudaStatus(cudaStreamCreateWithFlags(&link.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      for (cudaEvent_t& event : link.events) {
        if (status.ok())
          status = CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
      }
    }
    return status;
  }

  // `ids`: rank 0's, one for each lane. An exchange on each, because the first one connects the ranks and
  // takes memory, which must not happen while something else waits on the device. The host's comm goes on
  // whatever becomes of it.
  absl::Status Connect(const std::array<ncclUniqueId, 2>& ids) {
    for (size_t i = 0; i < links_.size(); ++i) {
      Link& link = links_[i];
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      config.maxCTAs = kMostBlocks;
      const auto until = Clock::now() + kMeeting;
      absl::Status status =
          Settled(nccl_.init(&link.comm, world(), ids[i], rank(), &config), link, "connecting", until);
      if (status.ok()) status = AllGather(i == 0 ? Channel::kGather : Channel::kReduce, trial_, kTrialBytes);
      if (!status.ok()) return status;
    }
    connected_ = true;
    return absl::OkStatus();
  }

  std::string name() const override { return absl::StrCat("NCCL beside ", host_->name()); }

  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    if (channel != Channel::kGather && channel != Channel::kReduce)
      return absl::InvalidArgumentError("devices gather and reduce; everything else is of the hosts");
    Link& link = links_[channel == Channel::kGather ? 0 : 1];
    absl::Status status = host_->failure();
    if (!status.ok()) GiveUp(link);
    if (status.ok() && link.comm == nullptr) status = absl::UnavailableError("NCCL: given up before");
    if (status.ok()) status = CudaStatus(cudaSetDevice(device_), "cudaSetDevice");
    if (!status.ok()) return status;
    ncclResult_t result = nccl_.group_start();
    for (size_t k = 0; k < send.size() && Goes(result); ++k) {
      if (static_cast<int>(k) == rank() || bytes == 0) continue;
      const auto peer = static_cast<int>(k);
      result = nccl_.send(send[k], bytes, ncclInt8, peer, link.comm, link.stream);
      if (Goes(result)) result = nccl_.receive(receive[k], bytes, ncclInt8, peer, link.comm, link.stream);
    }
    const ncclResult_t ended = nccl_.group_end();
    status = Settled(Goes(result) ? ended : result, link, kExchanging, Deadline());
    // Two may be under way at once (zero/lanes/rank_lanes.cc): a third waits for nobody else's event.
    cudaEvent_t const event = link.events[link.begun++ % link.events.size()];
    if (status.ok()) status = CudaStatus(cudaEventRecord(event, link.stream), "cudaEventRecord");
    if (!status.ok()) return status;
    return std::make_unique<Pending>(this, &link, event);
  }

  void Abort(const absl::Status& why) override { host_->Abort(why); }
  absl::Status failure() override { return host_->failure(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr absl::string_view kExchanging = "an exchange between devices";
  static constexpr std::chrono::microseconds kLongestPause{100};
  static constexpr std::chrono::seconds kMeeting{120}, kFarewell{5};
  static constexpr size_t kTrialBytes = 4096;

  struct Link {
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    std::array<cudaEvent_t, 2> events{};
    size_t begun = 0;
  };

  class Pending final : public Exchange {
   public:
    Pending(NcclComm* of, Link* link, cudaEvent_t event) : of_(of), link_(link), event_(event) {}
    absl::Status Wait() override {
      (void)cudaSetDevice(of_->device_);
      return of_->Until(*link_, kExchanging, of_->Deadline(), [this](absl::Status* status) {
        const cudaError_t state = cudaEventQuery(event_);
        if (state == cudaErrorNotReady) return false;
        *status = CudaStatus(state, kExchanging);
        return true;
      });
    }

   private:
    NcclComm* const of_;
    Link* const link_;
    const cudaEvent_t event_;
  };

  static bool Goes(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }
  // Training waits for whoever is slow as long as the host's comm has them; connecting does not.
  Clock::time_point Deadline() const {
    return connected_ ? Clock::time_point::max() : Clock::now() + kMeeting;
  }

  // What waits on the device for those who are gone would wait for ever.
  void GiveUp(Link& link) {
    if (link.comm != nullptr) (void)nccl_.abort(std::exchange(link.comm, nullptr));
  }

  absl::Status Failed(ncclResult_t result, Link& link, absl::string_view what) {
    absl::Status status =
        absl::UnavailableError(absl::StrCat("NCCL, ", what, ": ", nccl_.error_string(result)));
    GiveUp(link);
    if (connected_) host_->Abort(status);
    const absl::Status cause = host_->failure();  // another rank's, perhaps
    return cause.ok() ? status : cause;
  }

  // Looks again and again until `done`, or until the ranks have lost each other.
  template <typename Done>
  absl::Status Until(Link& link, absl::string_view what, Clock::time_point deadline, Done done) {
    for (auto pause = std::chrono::microseconds(2);; pause = std::min(pause * 2, kLongestPause)) {
      if (link.comm == nullptr) return absl::UnavailableError(absl::StrCat("NCCL, ", what, ": given up"));
      absl::Status status;
      if (done(&status)) return status;
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = nccl_.async_error(link.comm, &state);
      if (!Goes(asked)) return Failed(asked, link, what);
      if (!Goes(state)) return Failed(state, link, what);
      absl::Status lost = host_->failure();
      if (lost.ok() && Clock::now() > deadline) {
        lost = absl::DeadlineExceededError(absl::StrCat("NCCL, ", what, ": the other ranks did not come"));
      }
      if (!lost.ok()) {
        GiveUp(link);
        return lost;
      }
      std::this_thread::sleep_for(pause);
    }
  }

  // A call that does not block is over when its communicator says so.
  absl::Status Settled(ncclResult_t result, Link& link, absl::string_view what, Clock::time_point deadline) {
    if (!Goes(result)) return Failed(result, link, what);
    return Until(link, what, deadline, [&](absl::Status*) {
      ncclResult_t state = ncclSuccess;
      return nccl_.async_error(link.comm, &state) == ncclSuccess && state == ncclSuccess;
    });
  }

  const std::shared_ptr<Comm> host_;
  const Nccl& nccl_;
  const int device_;
  void* trial_ = nullptr;
  bool connected_ = false;
  std::array<Link, 2> links_;
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
  std::array<ncclUniqueId, 2> ids{};
  for (ncclUniqueId& id : ids) {
    if (!mine.ok() || host->rank() != 0) continue;
    if (const ncclResult_t got = (*nccl)->get_unique_id(&id); got != ncclSuccess)
      mine = absl::UnavailableError(absl::StrCat("NCCL: ", (*nccl)->error_string(got)));
  }
  // Whoever cannot must say so before the others wait for it.
  if (absl::Status all = AgreeOnStatus(*host, Channel::kSetup, mine); !all.ok()) return all;
  std::vector<std::array<ncclUniqueId, 2>> everybodys(static_cast<size_t>(host->world()));
  everybodys[static_cast<size_t>(host->rank())] = ids;
  absl::Status status = host->AllGather(Channel::kSetup, everybodys.data(), sizeof(ids));
  if (!status.ok()) return status;
  status = comm->Connect(everybodys.front());
  if (absl::Status all = AgreeOnStatus(*host, Channel::kSetup, status); !all.ok()) return all;
  return comm;
}

}  // namespace penstock::zero
