// What the ranks of a run say to each other: bytes to and from every other rank, over channels that do not
// wait for each other, and the end of all of it when one of them fails.
//
// Every rank makes the same calls on a channel in the same order, with the same sizes; calls on different
// channels are independent. Sums are made by the caller, in the order of the ranks (zero/lanes/rank_lanes.h), so
// that they have the same bits on every rank and in every run.
//
// A rank whose process ends, or that does not answer for CommOptions::patience_seconds (a process that is
// stopped, a host that is gone), is noticed by the others: every call fails with kUnavailable, one line that
// names the rank, and what it said before it left if it could. A rank that is merely slow is waited for.
//
// A process that connects ignores SIGPIPE from then on, unless it has a handler of its own for it.
//
// Threads: calls on different channels may be made from different threads at once; Abort from any.
#ifndef PENSTOCK_ZERO_RANKS_COMM_H_
#define PENSTOCK_ZERO_RANKS_COMM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/ranks/rank_environment.h"

namespace penstock::zero {

enum class Channel : uint8_t { kSetup, kGather, kReduce, kAgree, kCheckpoint };
inline constexpr int kChannels = 5;

// An exchange under way. Its memory belongs to it until Wait has returned, or the comm is gone.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual absl::Status Wait() = 0;
};

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return environment_.rank; }
  int world() const { return environment_.world; }
  const RankEnvironment& environment() const { return environment_; }
  virtual std::string name() const = 0;  // "Gloo over 10.0.0.1"

  // Starts to send `bytes` from send[k] to every other rank k, and to receive as many from it to receive[k];
  // what stands at [rank()] is not looked at.
  virtual absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, std::span<const void* const> send,
                                                          std::span<void* const> receive, size_t bytes) = 0;
  // Every call fails from now on, here and on the other ranks, which are told why. The first one counts.
  virtual void Abort(const absl::Status& why) = 0;
  // Why every call fails; OK as long as they do not.
  virtual absl::Status failure() = 0;

  // Begin and Wait.
  absl::Status AllToAll(Channel channel, std::span<const void* const> send, std::span<void* const> receive,
                        size_t bytes);
  // Every rank's `bytes` at run + rank * bytes go to the same place in all of them.
  absl::Status AllGather(Channel channel, void* run, size_t bytes);
  // Every rank's text, by rank.
  absl::StatusOr<std::vector<std::string>> AllTexts(Channel channel, const std::string& mine);

 protected:
  explicit Comm(RankEnvironment environment) : environment_(std::move(environment)) {}

 private:
  const RankEnvironment environment_;
};

struct CommOptions {
  double patience_seconds = 30;  // without a sign of life
  double meeting_seconds = 300;  // for all ranks to come
};

// "rank 2 of 4"
std::string RankName(int rank, int world);

// Meets the other ranks over LibTorch's TCPStore and connects to each of them with Gloo. kUnavailable:
// somebody did not come, or another process has the port; kUnimplemented: built without Gloo.
absl::StatusOr<std::unique_ptr<Comm>> ConnectGloo(const RankEnvironment& environment,
                                                  const CommOptions& options);

// OK where ConnectNccl can be tried: built with NCCL, and its library is there.
absl::Status NcclThere();
// Connects the CUDA devices of ranks that `host` connects, one each, with NCCL: a comm whose memory is the
// devices', for Channel::kGather and kReduce. It ends with `host`, whose failure ends every call; its own
// failures, once it stands, are also `host`'s. All ranks call this together, having chosen their device
// (cudaSetDevice). Where one of them cannot all have its error, and `host` goes on.
absl::StatusOr<std::shared_ptr<Comm>> ConnectNccl(const std::shared_ptr<Comm>& host);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_COMM_H_
