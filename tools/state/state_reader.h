// State directories and checkpoints, opened for reading by the verbs that look at what others wrote: verify
// and export. Needs no LibTorch.
#ifndef PENSTOCK_TOOLS_STATE_STATE_READER_H_
#define PENSTOCK_TOOLS_STATE_STATE_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "swap/inspect.h"
#include "swap/store.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {

// Below the first state directory: where a run without a drive keeps its checkpoints, unless told.
inline constexpr const char* kCheckpointsBeside = "checkpoints";

// What arguments of the command line mean: several are the directories of one striped run; a single one is a
// state directory, a checkpoint, or the directory of all checkpoints (its newest), also that of a run without
// a drive, by its state directory. kNotFound: no run there.
absl::StatusOr<std::vector<std::string>> ResolveStateDirs(const std::vector<std::string>& arguments);

// kInvalidArgument: weights are to be written to `out` where they would be taken for a state or checkpoint,
// or that for them: `out`, a file or, with `into_directory`, a directory that also gets a config.json, is
// within a state or checkpoint, or is a directory that ResolveStateDirs takes.
absl::Status CheckNoRunAt(const std::string& out, bool into_directory);

// The same, as the parts that its ranks keep: one, unless there are several.
struct FoundState {
  zero::ShardDirectories parts;
  std::vector<swap::Inspection> inspections;  // of one step
  const std::string& name() const { return parts.front().front(); }
};
absl::StatusOr<FoundState> FindState(const std::vector<std::string>& arguments);

// kFailedPrecondition where a training has the state: reading it would keep the trainer out. Names the newest
// of its checkpoints, which can be read any time. A lock that is held a moment longer (by a process that was
// killed) is waited for.
absl::Status CheckNotTrained(const FoundState& state);

// A run or checkpoint that nothing will write to meanwhile: the lock is shared with other readers and keeps
// trainers out. Errors as swap::Store::Open.
class StateReader {
 public:
  // `memory_bytes` of pinned memory become memory(); `log` takes lines about fallbacks of the I/O engine.
  static absl::StatusOr<std::unique_ptr<StateReader>> Open(const FoundState& state, uint64_t memory_bytes,
                                                           std::function<void(const std::string&)> log);
  std::span<swap::Store* const> parts() const { return parts_; }  // by rank
  aio::Engine& engine() const { return *engine_; }
  std::span<std::byte> memory() const { return {memory_.data(), memory_.bytes()}; }

 private:
  // Destroyed from the last to the first.
  std::unique_ptr<aio::Arena> arena_;
  aio::Region memory_;
  std::unique_ptr<aio::Engine> engine_;
  std::vector<std::unique_ptr<swap::Store>> stores_;
  std::vector<swap::Store*> parts_;
};

// The JSON of a store's identity or of a commit's payload; null where it is none.
nlohmann::json ParseOrNull(const std::string& text);

// A budget where none is given, for each of `sharing` processes: half of what this one may still take
// (zero/memory/host_memory.h) beyond what it takes beside any budget.
int64_t DefaultHostMemory(int sharing, int threads);

// Progress in bytes on stderr: a line redrawn in place on a terminal, a line every five seconds elsewhere.
class ByteProgress {
 public:
  ByteProgress(std::string what, bool quiet);
  ~ByteProgress();  // ends the line
  ByteProgress(const ByteProgress&) = delete;
  ByteProgress& operator=(const ByteProgress&) = delete;
  void Update(uint64_t done, uint64_t total);

 private:
  const std::string what_;
  const bool quiet_;
  const bool terminal_;
  bool open_ = false;
  double start_ = 0;
  double shown_ = 0;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_STATE_STATE_READER_H_
