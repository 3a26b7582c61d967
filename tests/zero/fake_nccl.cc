#include "tests/zero/fake_nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

struct CUstream_st {
  ncclComm* comm = nullptr;  // whose exchanges were enqueued last
};
struct CUevent_st {
  ncclComm* comm = nullptr;
  size_t after = 0;  // so many of its exchanges are over
};
struct ncclComm {
  int id = 0, rank = 0, world = 0;
  size_t begun = 0, over = 0;
};

namespace {

struct Move {
  int peer;
  void* memory;
  size_t bytes;
};
// What one rank has of an exchange.
struct Part {
  ncclComm* comm;
  size_t number;
  std::vector<Move> sends, receives;
};

std::mutex mutex;
std::vector<std::deque<Part>> devices;  // [rank], in the order in which they were enqueued
std::vector<int> made;                  // [rank] communicators
int ids = 0;
bool stuck = false;
thread_local std::unique_ptr<Part> group;
thread_local cudaStream_t group_stream = nullptr;

void Deliver(const Part& from, const Part& to) {
  for (const Move& send : from.sends) {
    if (send.peer != to.comm->rank) continue;
    for (const Move& receive : to.receives) {
      if (receive.peer != from.comm->rank) continue;
      if (receive.bytes != send.bytes) std::abort();
      std::memcpy(receive.memory, send.memory, send.bytes);
    }
  }
}

// Ends what all ranks run.
void Go() {
  for (;;) {
    const bool all_run =
        std::none_of(devices.begin(), devices.end(), [](const auto& queue) { return queue.empty(); });
    if (!all_run) return;
    const Part& first = devices.front().front();
    const bool same = std::all_of(devices.begin(), devices.end(), [&](const auto& queue) {
      return queue.front().comm->id == first.comm->id && queue.front().number == first.number;
    });
    if (!same) {  // every device waits for another one's later exchange
      stuck = true;
      return;
    }
    for (const auto& from : devices) {
      for (const auto& to : devices) Deliver(from.front(), to.front());
    }
    for (auto& queue : devices) {
      ++queue.front().comm->over;
      queue.pop_front();
    }
  }
}

}  // namespace

namespace penstock::zero {

void ResetFakeNccl(int ranks) {
  std::lock_guard lock(mutex);
  devices.assign(static_cast<size_t>(ranks), {});
  made.assign(static_cast<size_t>(ranks), 0);
  stuck = false;
}
int FakeCommunicators() {
  std::lock_guard lock(mutex);
  return *std::max_element(made.begin(), made.end());
}

}  // namespace penstock::zero

extern "C" {

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "said by the stand-in"; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard lock(mutex);
  event->comm = stream->comm;
  event->after = stream->comm == nullptr ? 0 : stream->comm->begun;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard lock(mutex);
  return event->comm == nullptr || event->comm->over >= event->after ? cudaSuccess : cudaErrorNotReady;
}

const char* ncclGetErrorString(ncclResult_t) { return "the devices wait for each other, for ever"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof(*id));
  ++ids;
  std::memcpy(id, &ids, sizeof(ids));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank, ncclConfig_t*) {
  std::lock_guard lock(mutex);
  auto* const made_now = new ncclComm;
  std::memcpy(&made_now->id, &id, sizeof(made_now->id));
  made_now->rank = rank;
  made_now->world = world;
  ++made[static_cast<size_t>(rank)];
  *comm = made_now;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  std::lock_guard lock(mutex);
  *state = stuck ? ncclSystemError : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }  // events know it still: a test is short
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart() {
  group = std::make_unique<Part>();
  group->comm = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* memory, size_t bytes, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  group->comm = comm;
  group_stream = stream;
  group->sends.push_back({peer, const_cast<void*>(memory), bytes});
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* memory, size_t bytes, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  group->comm = comm;
  group_stream = stream;
  group->receives.push_back({peer, memory, bytes});
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  std::lock_guard lock(mutex);
  if (group->comm == nullptr) return ncclSuccess;
  group_stream->comm = group->comm;
  group->number = group->comm->begun++;
  devices[static_cast<size_t>(group->comm->rank)].push_back(std::move(*group));
  Go();
  return ncclInProgress;
}

}  // extern "C"
