// Looking at state directories without changing, locking for long or trusting them: what a directory holds,
// and what a run is. Needs no I/O engine.
#ifndef PENSTOCK_SWAP_INSPECT_H_
#define PENSTOCK_SWAP_INSPECT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/format.h"

namespace penstock::swap {

enum class Holding : uint8_t {
  kNothing,         // no such directory, or an empty one
  kForeign,         // files, none of which is a store's; or a file in the store's place that is not one
  kNeverCommitted,  // a run that was created (perhaps not completely) and never committed: start it over
  kRun,             // a run that can be resumed
  kDamaged,  // a store that cannot be opened: superblock or all commit records are damaged or gone, or it is
             // of another format, or a part of it is missing; or a directory or file that cannot be read
  kOverwritten,  // a run of one version that was ended while it was being overwritten: of no use
  kInUse,        // locked by a running process, or by a killed one whose writes are not over yet
};
std::string_view HoldingName(
    Holding holding);  // "nothing", "foreign", "never-committed", "run", "damaged", "overwritten", "in-use"

struct Finding {
  Holding holding = Holding::kNothing;
  std::string text;        // one line for people that names the directory
  absl::Status unread;     // not OK: the directory or its file could not be read
  bool beside = false;     // of kForeign: no file is in the store's place, and one can be made there
  Uuid uuid{};             // of a store whose superblock is whole
  std::string identity;    // likewise
  uint32_t directory = 0;  // likewise: which of its directories
  uint32_t directories = 0;
  uint64_t step = 0;  // of a run, an overwritten one too: its last commit. Known in directory 0 only; in
                      // others the directory says no more
  uint64_t updates = 0;
  uint64_t sequence = 0;
};

// What one directory holds. Changes nothing. Waits up to `lock_patience_ms` for a lock to be released before
// it says kInUse. Any trouble is a finding, with its reason in the text.
Finding Probe(const std::string& directory, int lock_patience_ms = 0);
// What several directories hold together: what Store::Open would find. The most worrying of the findings,
// with that of directory 0 for a run.
Finding Probe(const std::vector<std::string>& directories, int lock_patience_ms = 0);

// Whether a start goes on from what was found: true for a run, also one in use; false for nothing, and for a
// run that was never committed, which is started over. Anything else is an error, since nothing may take its
// place unasked: kFailedPrecondition: other files, or what may have been a run's; kDataLoss: damage;
// kOutOfRange: kOverwritten; what the operating system said of what could not be read.
absl::StatusOr<bool> HoldsRun(const Finding& finding);

// A run in numbers.
struct Inspection {
  StoreShape shape;                  // uuid, identity, layout, slots
  Record record;                     // of the newest whole commit; Record::overwriting: its tiles may be gone
  std::vector<std::string> paths;    // of the store files, by directory
  std::vector<uint64_t> file_bytes;  // lengths
  std::vector<uint64_t> allocated_bytes;  // of these, on disk
  uint64_t state_bytes = 0;               // one version of everything
  bool in_use = false;                    // by a running process: the record may be older than this line
  std::vector<std::string> damage;        // healed: copies of superblock and record that are not whole
};

// Reads superblocks and commit records, no tile. Works on a run that is in use. Errors as Store::Open.
// `sequence`: the commit of that number, where it is the last but one.
absl::StatusOr<Inspection> Inspect(const std::vector<std::string>& directories,
                                   std::optional<uint64_t> sequence = std::nullopt);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_INSPECT_H_
