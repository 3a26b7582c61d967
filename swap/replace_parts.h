// The parts of a run in its state directories, replaced all at once by those of another number of ranks.
//
//   DIR/.penstock.next/rank-0/penstock.store, ...   the new parts while they are made, in each directory
//   DIR/.penstock.whole/                            the same under another name in the first directory: they
//                                                   count, and not all of them are in their places yet
//
// That renaming is the one moment at which the new parts become the run. A kill before it leaves the old ones
// as they were, and what is in `.penstock.next` is dropped by the next start. A kill after it leaves moves
// that the next start makes (FinishReplacement); who only reads is refused until then.
#ifndef PENSTOCK_SWAP_REPLACE_PARTS_H_
#define PENSTOCK_SWAP_REPLACE_PARTS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_lock.h"
#include "swap/store.h"

namespace penstock::swap {

// Where the new parts of each of these state directories are made: the store of one rank, or rank-K/ of each.
std::vector<std::string> NextDirectories(const std::vector<std::string>& directories);

// Where a store of one rank may be before FinishReplacement puts it into this directory.
std::vector<std::string> PlacesBefore(const std::string& directory);

// Returns whether a kill has left new parts that count and are not all in their places.
absl::StatusOr<bool> IsReplacementCutShort(const std::vector<std::string>& directories);

// Moves these to their places, and drops new parts that never came to count. Does nothing where neither is
// there, or another process is at work on it. kFailedPrecondition: an old part is in use, or a new one that
// counts is not there with all of its directories, of which one may not be mounted.
absl::Status FinishReplacement(const std::vector<std::string>& directories);

// A part that is in some of the directories alone is not gone: a drive may not be mounted.
// kFailedPrecondition: there is such a part, whose place another state must not take.
absl::Status CheckNoneInHalves(const std::vector<std::string>& directories);

class PartsReplacement {
 public:
  // `directories`: of the state, as all ranks are given them. Locks them against others who replace their
  // parts, finishes what a kill left, and notes the newest commits that are there. kFailedPrecondition:
  // another process is at it, a place for a part is on another file system than its directory, or what is
  // there is not all of one run.
  static absl::StatusOr<std::unique_ptr<PartsReplacement>> Begin(std::vector<std::string> directories);

  // The stores in NextDirectories, which are closed, take the places of the old ones, which are removed.
  // kFailedPrecondition: an old part is in use, or was trained on since Begin: it is as it was. After any
  // other error FinishReplacement goes on. `at_change` runs before each change of a directory: for tests.
  absl::Status Commit(const std::function<void()>& at_change = nullptr);
  // Drops new parts that were not committed.
  ~PartsReplacement();
  PartsReplacement(const PartsReplacement&) = delete;
  PartsReplacement& operator=(const PartsReplacement&) = delete;

 private:
  explicit PartsReplacement(std::vector<std::string> directories) : directories_(std::move(directories)) {}

  const std::vector<std::string> directories_;
  std::vector<std::unique_ptr<DirectoryLock>> locks_;
  std::vector<CommitSeen> seen_;
  std::vector<std::string> made_;  // of the places of new parts
  bool counts_ = false;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_REPLACE_PARTS_H_
