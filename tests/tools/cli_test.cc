#include "tools/base/cli.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <sstream>
#include <stdexcept>

#include "base/io_error.h"

namespace penstock::tools::cli_test {
namespace {

TEST(OrBug, WhatIsThrownIsOneLineAndExitCode1) {
  std::ostringstream err;
  EXPECT_EQ(OrBug([] { return 2; }, "penstock 1.0", "plan", err), 2);
  EXPECT_EQ(err.str(), "");
  EXPECT_EQ(
      OrBug([]() -> int { throw std::runtime_error("first line\nsecond"); }, "penstock 1.0", "plan --x", err),
      kExitFailed);
  EXPECT_EQ(
      err.str(),
      "penstock 1.0: this is a bug: first line; please report this line, the arguments (plan --x) and what "
      "`penstock env` says; committed steps are safe\n");
  err.str("");
  EXPECT_EQ(OrBug([]() -> int { throw 3; }, "penstock 1.0", "plan", err), kExitFailed);
  EXPECT_NE(err.str().find("this is a bug: something that is no exception was thrown"), std::string::npos);
}

TEST(OrBug, WhatHasNoMemoryIsNoBug) {
  std::ostringstream err;
  EXPECT_EQ(OrBug([]() -> int { throw std::bad_alloc(); }, "penstock 1.0", "plan", err), kExitFailed);
  EXPECT_EQ(
      err.str(),
      "penstock 1.0: the system gave this process no more memory: free some, raise its limit (ulimit -v), "
      "or give a smaller --host-memory; committed steps are safe\n");
}

TEST(StreamError, IsNeverOk) {
  errno = 0;
  EXPECT_FALSE(StreamError("x: write").ok());
  errno = ENOSPC;
  EXPECT_EQ(StreamError("x: write").code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace penstock::tools::cli_test
