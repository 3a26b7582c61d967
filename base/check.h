// Assertions that stay on in every build, for what cannot happen: a broken one is a defect of this program,
// never of its input, its machine or its caller (those get an absl::Status).
//
//   PENSTOCK_CHECK(slot < slots, "a tile slot beyond the plan");
//
// What went on after a broken promise could write wrong bytes over right ones; the process ends instead, with
// one line that says what to report. What is on the drive is whole: a commit is never half (swap/FORMAT.md).
#ifndef PENSTOCK_BASE_CHECK_H_
#define PENSTOCK_BASE_CHECK_H_

namespace penstock {

// Prints file, line, condition and `what` in one line on stderr, and ends the process.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const char* what);

}  // namespace penstock

#define PENSTOCK_CHECK(condition, what) \
  (static_cast<bool>(condition) ? void() : ::penstock::CheckFailed(__FILE__, __LINE__, #condition, what))

#endif  // PENSTOCK_BASE_CHECK_H_
