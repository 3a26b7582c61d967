// What the ranks of a run say to each other: bytes to and from every other rank, over channels that do not
// wait for each other, and the end of all of it when one of them fails.
//
// Every rank makes the same calls on a channel in the same order, with the same sizes; calls on different
// channels are independent. Sums are made by the caller, in the order of the ranks (zero/lanes/rank_lanes.h),
// so that they have the same bits on every rank and in every run.
//
// Ranks that do not make the same calls do not wait for each other. An exchange has a name (What), and only
// the same exchange of another rank answers it: nothing is received in place of something else, or in another
// size. What a rank is at goes with its signs of life, and rank 0 compares: all fail within some seconds,
// with one line that names both ranks and what each of them is at. The name costs an exchange no message.
//
// A rank whose process ends, or that does not answer for CommOptions::patience_seconds (a process that is
// stopped, a host that is gone), is noticed by the others: every call fails with kUnavailable, one line that
// names the rank, and what it said before it left if it could. A rank that is merely slow is waited for, but
// not for ever: sixty times the patience, and once more the patience where this rank is asked to stop.
//
// A process that connects ignores SIGPIPE from then on, unless it has a handler of its own for it.
//
// Threads: calls on different channels may be made from different threads at once; Abort from any.
#ifndef PENSTOCK_ZERO_RANKS_COMM_H_
#define PENSTOCK_ZERO_RANKS_COMM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/ranks/rank_environment.h"

namespace penstock::zero {

enum class Channel : uint8_t { kSetup, kAllGather, kReduceScatter, kAgree, kCheckpoint };
inline constexpr int kChannels = 5;

// What an exchange is of: the same on all ranks, or they do not exchange. -1: does not apply.
struct What {
  const char* name = "";  // a literal: "weights"
  int64_t step = -1;
  int block = -1;
  int64_t piece = -1;
  uint64_t calls = 0;  // Comm::calls(): with all that was done before

  std::string Text(size_t bytes) const;
};

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
  virtual std::string name() const = 0;  // "TCP over 10.0.0.1"

  // What this rank does next, in words: all say the same in the same order, whether it needs an exchange or
  // not ("step 7", "an evaluation of 4 batches").
  virtual void Enter(const std::string& /*call*/) {}
  // Of everything that was entered.
  virtual uint64_t calls() const { return 0; }
  // Asked now and then, on another thread, whether this rank is to stop; empty: it is not.
  virtual void WatchStops(std::function<bool()> /*stops*/) {}  // NOLINT(performance-unnecessary-value-param)

  // Starts to send `bytes` from send[k] to every other rank k, and to receive as many from it to receive[k];
  // what stands at [rank()] is not looked at.
  virtual absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& what,
                                                          std::span<const void* const> send,
                                                          std::span<void* const> receive, size_t bytes) = 0;
  // Every call fails from now on, here and on the other ranks, with `why` as the reason. The first one
  // counts.
  virtual void Abort(const absl::Status& why) = 0;
  // Why every call fails; OK as long as they do not.
  virtual absl::Status failure() = 0;

  // Begin and Wait.
  absl::Status AllToAll(Channel channel, const What& what, std::span<const void* const> send,
                        std::span<void* const> receive, size_t bytes);
  // Every rank's `bytes` at run + rank * bytes go to the same place in all of them.
  absl::Status AllGather(Channel channel, const What& what, void* run, size_t bytes);
  // Every rank's text, by rank. kInvalidArgument on all ranks: one is longer than 16 MiB.
  absl::StatusOr<std::vector<std::string>> AllTexts(Channel channel, const What& what,
                                                    const std::string& mine);

 protected:
  explicit Comm(RankEnvironment environment) : environment_(std::move(environment)) {}

 private:
  const RankEnvironment environment_;
};

struct CommOptions {
  double patience_seconds = 30;  // without a sign of life
  double meeting_seconds = 300;  // for all ranks to come
  // For a rank that gives signs of life and does not come to an exchange; 0: sixty times the patience, half
  // an hour at least.
  double longest_wait_seconds = 0;
};

// "rank 2 of 4"
std::string RankName(int rank, int world);

// OK where ConnectNccl can be tried: built with NCCL, and its library is there.
absl::Status NcclThere();
// Connects the CUDA devices of ranks that `host` connects, one each, with NCCL: a comm whose memory is the
// devices', for Channel::kAllGather and kReduceScatter. It ends with `host`, whose failure ends every call;
// its own failures, once it stands, are also `host`'s. All ranks call this together, having chosen their
// device (cudaSetDevice). Where one of them cannot all have its error, and `host` goes on.
absl::StatusOr<std::shared_ptr<Comm>> ConnectNccl(const std::shared_ptr<Comm>& host);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_COMM_H_
