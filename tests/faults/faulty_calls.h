// The C library's file calls as a test program sees them: counted, and failing when they are told to.
//
// faulty_calls.cc defines the calls (open, stat, readdir, read, rename, ...) in the executable itself, so
// that the program under test, which is linked into it, and the C++ library reach these definitions first.
// fsync and fdatasync are counted and fail as the others do, and do not reach the drive: a process that fails
// or is killed leaves the page cache, in which the next one finds what this one wrote.
//
// Calls on paths outside of the watched directories, and on descriptors that were opened outside of them, go
// through uncounted. Transfers of io_uring are no calls of the C library: tests/zero/fault_test.cc makes
// those fail.
#ifndef PENSTOCK_TESTS_FAULTS_FAULTY_CALLS_H_
#define PENSTOCK_TESTS_FAULTS_FAULTY_CALLS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::tests {

// Which call fails. Threads: set before the calls that it is for.
struct FaultyCall {
  int64_t number = 0;  // the n-th counted call, from 1; 0: none
  int error = 0;       // errno
  // false: that call alone. true: all later ones of the same function too.
  bool lasting = false;
  // The process is killed (SIGKILL) at that call, which never happens.
  bool kills = false;
};

// Watches the calls below `directory` from now on; at most 8 directories. Counting starts at 0.
void WatchCalls(const std::vector<std::string>& directories, const FaultyCall& faulty);
// Counted so far.
int64_t CountedCalls();
// The function that was made to fail, with its path: "rename /a/b"; empty: none yet.
std::string FailedCall();
// The functions in the order of their counted calls, from the first; at most the first 65,536.
std::vector<const char*> CountedFunctions();

}  // namespace penstock::tests

#endif  // PENSTOCK_TESTS_FAULTS_FAULTY_CALLS_H_
