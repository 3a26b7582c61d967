// In which process something was made. A forked child has its parent's memory and none of its threads: what
// has threads there, or waits for them, must leave everything alone, and say so.
//
//   const ProcessMark made_in_;
//   RETURN_IF_ERROR(made_in_.Check("this engine"));   // at the begin of each call
//   if (!made_in_.here()) (void)impl_.release();      // in a destructor: nothing is waited for or closed
//
// A number is compared, no system is called. Thread-safe.
#ifndef PENSTOCK_BASE_PROCESS_MARK_H_
#define PENSTOCK_BASE_PROCESS_MARK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace penstock {

class ProcessMark {
 public:
  ProcessMark();
  // False in every process that was forked from the one that made the mark.
  bool here() const;
  // kFailedPrecondition in those: `what` belongs to the parent.
  absl::Status Check(absl::string_view what) const;

 private:
  uint64_t forks_;
};

}  // namespace penstock

#endif  // PENSTOCK_BASE_PROCESS_MARK_H_
