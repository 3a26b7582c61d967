// One run at a time keeps checkpoints in a directory, and a killed one keeps nobody out.
#include "swap/checkpoint_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "tests/swap/scratch_directory.h"

// In the place of the C library's: a file system that has no locks, while `flock_error` is not 0.
static int flock_error = 0;
extern "C" int flock(int fd, int operation) noexcept {
  if (flock_error == 0) return static_cast<int>(::syscall(SYS_flock, fd, operation));
  errno = flock_error;
  return -1;
}

namespace penstock::swap::checkpoint_lock_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CheckpointLockTest : public ::testing::Test {
 protected:
  std::string LockFile() const { return parent_ + "/" + CheckpointLock::kName; }

  ScratchDirectory scratch_;
  const std::string parent_ = scratch_.Sub("run") + "/checkpoints";
};

TEST_F(CheckpointLockTest, OneHasItAndTheOtherIsToldWhereAndWhatToDo) {
  fs::create_directories(parent_);
  auto first = CheckpointLock::Take(parent_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = CheckpointLock::Take(parent_ + "/");
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr(parent_), HasSubstr("in use by another process"),
                    HasSubstr("give another `checkpoint_dir`")));
  EXPECT_TRUE(CheckpointLock::Take(scratch_.Sub("other")).ok());
  first->reset();
  EXPECT_TRUE(CheckpointLock::Take(parent_).ok());
  EXPECT_TRUE(fs::is_empty(parent_)) << "nothing is left in the directory";
}

TEST_F(CheckpointLockTest, AKilledProcessKeepsNobodyOut) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto lock = CheckpointLock::Take(parent_);
    const char told = lock.ok() ? 'y' : 'n';
    (void)!::write(ready[1], &told, 1);
    for (;;) ::pause();
  }
  char told = 0;
  ASSERT_EQ(::read(ready[0], &told, 1), 1);
  EXPECT_EQ(told, 'y');
  EXPECT_FALSE(CheckpointLock::Take(parent_).ok());
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::exists(LockFile()));
  EXPECT_TRUE(CheckpointLock::Take(parent_).ok());
  for (const int fd : ready) ::close(fd);
}

TEST_F(CheckpointLockTest, DirectoriesThatItMadeGoWhereNothingWasKept) {
  { ASSERT_TRUE(CheckpointLock::Take(parent_).ok()); }
  EXPECT_FALSE(fs::exists(scratch_.Sub("run")));
  {
    const auto lock = CheckpointLock::Take(parent_);
    ASSERT_TRUE(lock.ok()) << lock.status();
    std::ofstream(parent_ + "/step-00000001") << "kept";
  }
  EXPECT_TRUE(fs::exists(parent_ + "/step-00000001"));
  EXPECT_FALSE(fs::exists(LockFile()));
}

TEST_F(CheckpointLockTest, WhereNoneCanBeLockedIsSaid) {
  std::ofstream(scratch_.Sub("file")) << "text";
  for (const std::string& parent : {scratch_.Sub("file"), scratch_.Sub("file") + "/below"}) {
    const auto lock = CheckpointLock::Take(parent);
    EXPECT_TRUE(absl::IsFailedPrecondition(lock.status())) << lock.status();
    EXPECT_THAT(std::string(lock.status().message()),
                AllOf(HasSubstr(parent), HasSubstr("ot a directory"), HasSubstr("`checkpoint_dir`")));
  }
  fs::create_directories(parent_);
  fs::create_symlink(scratch_.Sub("target"), LockFile());
  EXPECT_FALSE(CheckpointLock::Take(parent_).ok());
  EXPECT_FALSE(fs::exists(scratch_.Sub("target"))) << "no link is followed";
}

TEST_F(CheckpointLockTest, WhereTheFileSystemHasNoLocksNothingIsLeftBehind) {
  for (const int error : {ENOLCK, EOPNOTSUPP, EIO}) {
    flock_error = error;
    const auto lock = CheckpointLock::Take(parent_);
    flock_error = 0;
    EXPECT_TRUE(absl::IsFailedPrecondition(lock.status())) << lock.status();
    EXPECT_THAT(std::string(lock.status().message()), HasSubstr("cannot be locked"));
    EXPECT_FALSE(fs::exists(scratch_.Sub("run"))) << "made for nothing";
  }
  // What was there stays: a killed run's file, too.
  fs::create_directories(parent_);
  std::ofstream(LockFile()).close();
  flock_error = ENOLCK;
  EXPECT_FALSE(CheckpointLock::Take(parent_).ok());
  flock_error = 0;
  EXPECT_TRUE(fs::exists(LockFile()));
}

}  // namespace
}  // namespace penstock::swap::checkpoint_lock_test
