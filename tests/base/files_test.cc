// Small files, directories and files that are replaced whole.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/lines.h"
#include "base/read_at.h"
#include "base/sha256.h"
#include "base/small_file.h"
#include "base/write_all.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tampered_call.h"

namespace penstock::files_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() {
    std::string pattern = std::filesystem::current_path().string() + "/base-files-XXXXXX";
    if (::mkdtemp(pattern.data()) != nullptr) directory_ = pattern;
  }
  ~FilesTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  std::string Put(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  std::vector<std::string> Names() const { return ListDirectory(directory_).value(); }

  std::string directory_;
};

TEST_F(FilesTest, ASmallFileComesBackWhole) {
  const std::string text(100'000, 'x');
  EXPECT_EQ(ReadSmallFile(Put("a", text)).value(), text);
  EXPECT_EQ(ReadSmallFile(Put("b", "")).value(), "");
  EXPECT_EQ(ReadSmallFile(Path("a"), 100'000).value(), text);
}

TEST_F(FilesTest, APieceIsReadAsFarAsTheFileGoesAndAFailedReadIsNotItsEnd) {
  const int fd = ::open(Put("a", "0123456789").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  std::string piece(4, '.');
  EXPECT_EQ(ReadAt(fd, "a", 3, piece.data(), 4).value(), 4u);
  EXPECT_EQ(piece, "3456");
  EXPECT_EQ(ReadAt(fd, "a", 8, piece.data(), 4).value(), 2u);
  EXPECT_EQ(piece, "8956");
  EXPECT_EQ(ReadAt(fd, "a", 10, piece.data(), 4).value(), 0u);
  ::close(fd);
  const int no_file = ::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(no_file, 0);
  const absl::Status failed = ReadAt(no_file, "the folder", 3, piece.data(), 4).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("read the folder: offset 3, 4 bytes, 0 done"));
  ::close(no_file);
}

TEST_F(FilesTest, AShortWriteGoesOnAndAFailedOneSaysWhy) {
  const int fd = ::open(Put("a", "").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const pid_t child = ::fork();
  if (child == 0) {  // the first write takes 10 bytes
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit most = {.rlim_cur = 10, .rlim_max = 10};
    _exit(::setrlimit(RLIMIT_FSIZE, &most) == 0 ? WriteAll(fd, "0123456789abcdef") : 1);
  }
  int code = 0;
  ASSERT_EQ(::waitpid(child, &code, 0), child);
  EXPECT_EQ(WEXITSTATUS(code), EFBIG);
  EXPECT_EQ(ReadSmallFile(Path("a")).value(), "0123456789");
  ASSERT_EQ(::lseek(fd, 0, SEEK_SET), 0);
  const Tampered ran = RunTampered({.calls = {SYS_write}, .at = 0, .error = EINTR},
                                   [&] { return WriteAll(fd, "0123456789abcdef"); });
  if (ran.can) {
    EXPECT_TRUE(ran.reached);
    EXPECT_EQ(ran.code, 0);
    EXPECT_EQ(ReadSmallFile(Path("a")).value(), "0123456789abcdef");
  }
  ::close(fd);
  EXPECT_EQ(WriteAll(-1, "a"), EBADF);
  EXPECT_EQ(WriteAll(-1, ""), 0);
}

TEST(Sha256Test, DigestsAreThoseOfOthers) {
  for (const auto& [count, digest] :
       {std::pair(0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        {3, "9834876dcfb05cb167a5c24953eba58c4ac89b1adf57f28f2f9d09af107ee8f0"},
        {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
        {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
        {63, "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34"},
        {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
        {119, "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb"},
        {120, "2f3d335432c70b580af0e8e1b3674a7c020d683aa5f73aaaedfdc55af904c21c"},
        {1000, "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3"}}) {
    EXPECT_EQ(Sha256(std::string(static_cast<size_t>(count), 'a')), digest) << count;
  }
}

TEST_F(FilesTest, TheKernelsOwnFilesHaveNoSizeAndAreRead) {
  EXPECT_THAT(ReadSmallFile("/proc/self/status").value(), HasSubstr("Pid:"));
}

TEST_F(FilesTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {Path("pipe"), directory_, std::string("/dev/zero")}) {
    const auto read = ReadSmallFile(path);
    EXPECT_TRUE(absl::IsFailedPrecondition(read.status())) << path << ": " << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(path));
  }
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile(Path("none")).status()));
}

TEST_F(FilesTest, AFileBeyondTheLimitIsRefusedSparseOrNot) {
  Put("sparse", "");
  ASSERT_EQ(::truncate(Path("sparse").c_str(), off_t{1} << 40), 0);
  for (const uint64_t limit : {uint64_t{10}, kSmallFileBytes}) {
    const auto read = ReadSmallFile(Path("sparse"), limit);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("longer than"));
  }
  EXPECT_FALSE(ReadSmallFile(Put("eleven", "12345678901"), 10).ok());
}

TEST_F(FilesTest, WhatAPathNamesIsToldApartFromWhatCannotBeSeen) {
  Put("file", "x");
  ASSERT_EQ(::symlink("file", Path("link").c_str()), 0);
  ASSERT_EQ(::symlink("none", Path("broken").c_str()), 0);
  EXPECT_EQ(KindOf(Path("file")).value(), PathKind::kRegular);
  EXPECT_EQ(KindOf(Path("link")).value(), PathKind::kRegular);
  EXPECT_EQ(LinkKindOf(Path("link")).value(), PathKind::kLink);
  EXPECT_EQ(KindOf(Path("broken")).value(), PathKind::kMissing);
  EXPECT_EQ(KindOf(directory_).value(), PathKind::kDirectory);
  EXPECT_EQ(KindOf(Path("file/below")).value(), PathKind::kMissing);
  EXPECT_EQ(KindOf("/dev/null").value(), PathKind::kOther);
  EXPECT_FALSE(KindOf(Path(std::string(300, 'n'))).ok());  // ENAMETOOLONG is no absence
  EXPECT_FALSE(PathExists(Path(std::string(300, 'n'))).ok());
}

TEST_F(FilesTest, AListingIsSortedAndAMissingDirectoryIsSaid) {
  Put("b", "");
  Put("a", "");
  EXPECT_THAT(Names(), ElementsAre("a", "b"));
  EXPECT_TRUE(absl::IsNotFound(ListDirectory(Path("none")).status()));
  EXPECT_THAT(ListDirectoryIfThere(Path("none")).value(), IsEmpty());
  EXPECT_FALSE(ListDirectoryIfThere(Path("a")).ok());  // a file: ENOTDIR
}

TEST_F(FilesTest, TheDirectoryOfAPath) {
  EXPECT_EQ(DirectoryOf("a/b"), "a");
  EXPECT_EQ(DirectoryOf("b"), ".");
  EXPECT_EQ(DirectoryOf("/b"), "/");
  EXPECT_EQ(DirectoryOf("a/b/"), "a");
  EXPECT_EQ(DirectoryOf("a//b"), "a");
  EXPECT_EQ(DirectoryOf("/"), "/");
}

TEST_F(FilesTest, AReplacedFileHasTheNewTextTheOldModeAndNothingBesideIt) {
  ASSERT_TRUE(ReplaceFile(Path("f"), "one").ok());
  ASSERT_EQ(::chmod(Path("f").c_str(), 0640), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "two").ok());
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "two");
  EXPECT_EQ(std::filesystem::status(Path("f")).permissions(), static_cast<std::filesystem::perms>(0640));
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FilesTest, WithoutACommitNothingHasChanged) {
  Put("f", "old");
  {
    auto file = AtomicFile::Create(Path("f"));
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write("new").ok());
    AtomicFile moved = *std::move(file);
    EXPECT_EQ(ReadSmallFile(moved.temporary_path()).value(), "new");
  }
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "old");
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FilesTest, LinksAreReplacedAndNotFollowed) {
  Put("victim", "mine");
  ASSERT_EQ(::symlink("victim", Path("f").c_str()), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "new").ok());
  EXPECT_EQ(ReadSmallFile(Path("victim")).value(), "mine");
  EXPECT_EQ(LinkKindOf(Path("f")).value(), PathKind::kRegular);
}

TEST_F(FilesTest, DevicesAndPipesAreNotReplaced) {
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  const absl::Status status = ReplaceFile(Path("pipe"), "new");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("pipe"));
  EXPECT_EQ(LinkKindOf(Path("pipe")).value(), PathKind::kOther);
  EXPECT_THAT(Names(), ElementsAre("pipe"));
}

TEST_F(FilesTest, AKillLeavesNothingBesideTheFile) {
  Put("f", "old");
  const Tampered ran = RunTampered({.calls = {SYS_write}, .at = 0},
                                   [&] { return ReplaceFile(Path("f"), "new").ok() ? 0 : 1; });
  if (!ran.can) GTEST_SKIP() << "no process can be traced here";
  EXPECT_TRUE(ran.reached);
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "old");
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FilesTest, WhatKilledWritersOfAFileLeftIsRemovedByItsNextWriter) {
  const auto write = [&] { return ReplaceFile(Path("f"), "new").ok() ? 0 : 1; };
  const auto link = [&] { return ReplaceLink("f", Path("l")).ok() ? 0 : 1; };
  // What renames it, after what gave it a temporary name: where there are files without one, a link.
  const auto at_rename = [](const std::function<int()>& body) {
    return RunTampered({.calls =
                            {
#ifdef SYS_rename
                                SYS_rename,
#endif
                                SYS_renameat, SYS_renameat2}},
                       body);
  };
  for (int kills = 0; kills < 5; ++kills) {
    for (const std::function<int()>& body : {std::function<int()>(write), std::function<int()>(link)}) {
      const Tampered ran = at_rename(body);
      if (!ran.can) GTEST_SKIP() << "no process can be traced here";
      EXPECT_TRUE(ran.reached);
    }
  }
  EXPECT_EQ(Names().size(), 10U);
  EXPECT_EQ(write(), 0);
  EXPECT_EQ(link(), 0);
  EXPECT_THAT(Names(), ElementsAre("f", "l"));
}

TEST_F(FilesTest, WhatIsBeingWrittenOrIsOfAnotherNameIsNoLeftover) {
  const std::string digits = "0123456789abcdef";
  for (const std::string& name :
       std::vector<std::string>{".f." + digits + ".old", ".f.0123.new", ".ff." + digits + ".new"})
    Put(name, "not a killed writer's of f");
  absl::StatusOr<AtomicFile> writing = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(writing.ok() && writing->Write("last").ok());
  const std::string written = ".f." + digits + ".new", dead = ".f.fedcba9876543210.new";
  const int fd = ::open(Put(written, "being written").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_TRUE(*TryLockFile(fd, written));
  Put(dead, "killed");
  ASSERT_EQ(::chmod(Path(dead).c_str(), 0444), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "new").ok());
  EXPECT_THAT(Names(),
              ElementsAre(".f.0123.new", written, ".f." + digits + ".old", ".ff." + digits + ".new", "f"));
  EXPECT_TRUE(writing->Commit().ok());
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "last");
  ::close(fd);
}

// Each may take the other's link for a leftover, and makes its own once more.
TEST_F(FilesTest, LinksThatAreReplacedAtOnceAllSucceed) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(ReplaceLink(std::to_string(t), Path("l")).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Names(), ElementsAre("l"));
}

// Whoever may write into the directory may have put links there.
TEST_F(FilesTest, NoNameThatCanBeGuessedIsWritten) {
  Put("victim", "mine");
  const std::string pid = std::to_string(::getpid());
  for (const char* name : {"f.partial", "f.part", "f.new"})
    ASSERT_EQ(::symlink("victim", Path(name).c_str()), 0);
  for (const char* before : {"f.", "f.new-"}) ASSERT_EQ(::symlink("victim", Path(before + pid).c_str()), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "new").ok());
  EXPECT_EQ(ReadSmallFile(Path("victim")).value(), "mine");
}

TEST_F(FilesTest, EveryWholeLineIsSeenAndATornOneIsNot) {
  const std::string longest(200'000, 'l');
  Put("f", "a\n\n" + longest + "\ntorn");
  const int fd = ::open(Path("f").c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<std::string> lines;
  const auto take = [&](std::string_view line) {
    lines.emplace_back(line);
    return true;
  };
  EXPECT_EQ(ForEachLine(fd, Path("f"), take).value(), 200'004U);
  EXPECT_THAT(lines, ElementsAre("a", "", longest));
  EXPECT_EQ(ForEachLine(fd, Path("f"), [](std::string_view line) { return !line.empty(); }).value(), 2U);
  ::close(fd);
}

TEST_F(FilesTest, AReadOfLinesThatFailsIsNoEnd) {
  Put("f", std::string(70'000, 'x') + "\n" + std::string(70'000, 'y') + "\n");
  for (size_t at = 0; at < 4; ++at) {
    const Tampered ran = RunTampered({.calls = {SYS_pread64}, .at = at, .error = EIO}, [&] {
      const int fd = ::open(Path("f").c_str(), O_RDONLY | O_CLOEXEC);
      const auto bytes = ForEachLine(fd, Path("f"), [](std::string_view) { return true; });
      return absl::IsDataLoss(bytes.status()) ? 0 : 1;
    });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    EXPECT_TRUE(ran.reached && ran.code == 0) << at << ": " << ran.code;
  }
}

TEST_F(FilesTest, WhatMustNotBeReplacedIsNot) {
  Put("f", "old");
  EXPECT_TRUE(absl::IsAlreadyExists(ReplaceFile(Path("f"), "new", {.replace = false})));
  // Taken between Create and Commit.
  auto file = AtomicFile::Create(Path("g"), {.replace = false});
  ASSERT_TRUE(file.ok());
  Put("g", "theirs");
  EXPECT_TRUE(absl::IsAlreadyExists(file->Commit()));
  EXPECT_EQ(ReadSmallFile(Path("g")).value(), "theirs");
  EXPECT_FALSE(ReplaceFile(directory_, "new").ok());
  EXPECT_TRUE(absl::IsNotFound(ReplaceFile(Path("none/f"), "new")));
}

// A state of three files, of which a reader begins at the index.
class FilesTogetherTest : public FilesTest {
 protected:
  static constexpr const char* kNames[] = {"config", "part-1", "part-2", "index"};
  void PutState(const std::string& state) const {
    for (const char* name : kNames) Put(name, state);
  }
  absl::Status Replace(const std::string& state, const AtomicFileOptions& options = {}) const {
    std::vector<AtomicFile> files;
    for (const char* name : kNames) {
      absl::StatusOr<AtomicFile> file = AtomicFile::Create(Path(name), options);
      if (!file.ok()) return file.status();
      if (absl::Status status = file->Write(state); !status.ok()) return status;
      files.push_back(*std::move(file));
    }
    return AtomicFile::CommitTogether(std::move(files), {Path("single"), Path("index")});
  }
  // What a reader finds: the one state of all files, "" for no key, "mixed".
  std::string Found() const {
    if (absl::StatusOr<std::string> single = ReadSmallFile(Path("single")); single.ok()) return *single;
    const absl::StatusOr<std::string> index = ReadSmallFile(Path("index"));
    if (!index.ok()) return "";
    for (const char* name : kNames) {
      if (ReadSmallFile(Path(name)).value_or("") != *index) return "mixed";
    }
    return *index;
  }
};

TEST_F(FilesTogetherTest, FilesThatBelongTogetherAreReplacedTogether) {
  ASSERT_TRUE(Replace("one").ok());
  EXPECT_EQ(Found(), "one");
  Put("single", "older");
  ASSERT_TRUE(Replace("two").ok());
  EXPECT_EQ(Found(), "two");
  EXPECT_THAT(Names(), ElementsAre("config", "index", "part-1", "part-2"));
  EXPECT_TRUE(absl::IsAlreadyExists(Replace("three", {.replace = false})));
  EXPECT_EQ(Found(), "two");
  EXPECT_THAT(Names(), ElementsAre("config", "index", "part-1", "part-2"));
}

TEST_F(FilesTogetherTest, AKillAtAnyMomentLeavesTheOldOnesTheNewOnesOrNoKey) {
  for (const bool single : {false, true}) {
    bool reached = true;
    for (size_t at = 0; reached; ++at) {
      for (const std::string& name : Names()) std::filesystem::remove(Path(name));
      if (single) {
        Put("single", "old");
        Put("config", "old");
      } else {
        PutState("old");
      }
      const Tampered ran =
          RunTampered({.calls = NamingCalls(), .at = at}, [&] { return Replace("new").ok() ? 0 : 1; });
      if (!ran.can) GTEST_SKIP() << "no process can be traced here";
      reached = ran.reached;
      const std::string found = Found();
      EXPECT_TRUE(found == "old" || found == "new" || found.empty()) << at << ": " << found;
      if (reached) continue;
      EXPECT_EQ(ran.code, 0);
      EXPECT_EQ(found, "new");
      EXPECT_GE(at, 10U);
    }
  }
}

TEST_F(FilesTogetherTest, AFailureAtAnyMomentLeavesTheOldOnesWhole) {
  std::vector<uint64_t> calls = NamingCalls();
  calls.push_back(SYS_fsync);
  bool reached = true;
  for (size_t at = 0; reached; ++at) {
    for (const std::string& name : Names()) std::filesystem::remove(Path(name));
    PutState("old");
    const Tampered ran = RunTampered({.calls = calls, .at = at, .error = ENOSPC}, [&] {
      const absl::Status status = Replace("new");
      return status.ok() ? 0 : absl::IsResourceExhausted(status) ? 1 : 2;
    });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    reached = ran.reached;
    const std::string found = Found();
    EXPECT_TRUE(found == "old" || found == "new") << at << ": " << found;
    EXPECT_EQ(ran.code, reached ? 1 : 0) << at;
    EXPECT_TRUE(found == "new" || Names().size() == 4U) << at;
  }
}

// Each of them has its own parts, as shards are; what it replaces is what the one before it has left.
TEST_F(FilesTogetherTest, ManyAtOnceNeverMixAndLeaveNothing) {
  std::vector<std::thread> threads;
  for (int writer = 0; writer < 4; ++writer) {
    threads.emplace_back([&, writer] {
      for (int round = 0; round < 40; ++round) {
        const std::string state = std::string(1, static_cast<char>('a' + writer)) + std::to_string(round);
        const int parts = 1 + (round + writer) % 3;
        std::vector<AtomicFile> files;
        const auto add = [&](const std::string& name) {
          absl::StatusOr<AtomicFile> file = AtomicFile::Create(Path(name));
          ASSERT_TRUE(file.ok() && file->Write(state).ok());
          files.push_back(*std::move(file));
        };
        std::set<std::string> own;
        for (int part = 0; part < parts; ++part)
          own.insert("part-" + std::to_string(part) + "-of-" + std::to_string(parts));
        add("config");
        for (const std::string& name : own) add(name);
        add("index");
        const absl::Status status =
            AtomicFile::CommitTogether(std::move(files), {Path("single"), Path("index")}, [&] {
              std::vector<std::string> old;
              for (const std::string& name : Names()) {
                if (name.starts_with("part-") && own.count(name) == 0) old.push_back(Path(name));
              }
              return old;
            });
        ASSERT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string state = ReadSmallFile(Path("index")).value();
  const std::vector<std::string> names = Names();
  EXPECT_TRUE(names.size() >= 3U && names.size() <= 5U) << testing::PrintToString(names);
  for (const std::string& name : names) EXPECT_EQ(ReadSmallFile(Path(name)).value(), state) << name;
}

TEST_F(FilesTogetherTest, WhatKilledOnesLeftGoesAndWhatOthersWriteStays) {
  PutState("old");
  const std::string digits = "0123456789abcdef";
  Put(".part-1." + digits + ".old", "older");
  Put(".another." + digits + ".old", "of another state");
  Put(".part-9-of-9." + digits + ".new", "killed");
  Put(".part-1.0123.new", "not one of these names");
  const std::string written = ".index." + digits + ".new";
  Put(written, "being written");
  const int fd = ::open(Path(written).c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_TRUE(*TryLockFile(fd, written));
  ASSERT_TRUE(Replace("new").ok());
  EXPECT_EQ(Found(), "new");
  EXPECT_THAT(Names(), ElementsAre(".another." + digits + ".old", written, ".part-1.0123.new", "config",
                                   "index", "part-1", "part-2"));
  ::close(fd);
}

TEST_F(FilesTogetherTest, ASmallFileThatIsAsItWasIsNotTouched) {
  Put("single", "old");
  Put("config", "same");
  const auto inode = [&] {
    struct stat info {};
    EXPECT_EQ(::stat(Path("config").c_str(), &info), 0);
    return info.st_ino;
  };
  const ino_t before = inode();
  std::vector<AtomicFile> files;
  for (const auto& [name, text] : {std::pair{"config", "same"}, {"single", "new"}}) {
    absl::StatusOr<AtomicFile> file = AtomicFile::Create(Path(name));
    ASSERT_TRUE(file.ok() && file->Write(text).ok());
    files.push_back(*std::move(file));
  }
  ASSERT_TRUE(AtomicFile::CommitTogether(std::move(files), {Path("single"), Path("index")}).ok());
  EXPECT_EQ(inode(), before);
  EXPECT_THAT(Names(), ElementsAre("config", "single"));
}

TEST_F(FilesTest, ALockThatIsInterruptedIsNotHeldByAnother) {
  Put("f", "");
  const int fd = ::open(Path("f").c_str(), O_RDWR | O_CLOEXEC), other = ::open(Path("f").c_str(), O_RDWR);
  EXPECT_TRUE(*TryLockFile(fd, "f", LockMode::kShared));
  EXPECT_TRUE(*TryLockFile(other, "f", LockMode::kShared));
  EXPECT_FALSE(*TryLockFile(fd, "f"));
  UnlockFile(other);
  EXPECT_TRUE(*TryLockFile(fd, "f"));
  EXPECT_FALSE(*TryLockFile(other, "f", LockMode::kShared));
  EXPECT_EQ(TryLockFile(-1, "f").status().code(), absl::StatusCode::kFailedPrecondition);
  ::close(fd);
  const Tampered ran = RunTampered({.calls = {SYS_flock}, .at = 0, .error = EINTR},
                                   [&] { return TryLockFile(other, "f").value_or(false) ? 0 : 1; });
  if (!ran.can) GTEST_SKIP() << "no process can be traced here";
  EXPECT_EQ(ran.code, 0);
  EXPECT_TRUE(ran.reached);
  ::close(other);
}

TEST_F(FilesTest, ManyAtOnceNeverMix) {
  std::vector<std::thread> threads;
  for (char c = 'a'; c < 'e'; ++c) {
    threads.emplace_back([&, c] {
      for (int i = 0; i < 50; ++i) EXPECT_TRUE(ReplaceFile(Path("f"), std::string(5000, c)).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string text = ReadSmallFile(Path("f")).value();
  EXPECT_EQ(text, std::string(5000, text[0]));
  EXPECT_THAT(Names(), ElementsAre("f"));
}

}  // namespace
}  // namespace penstock::files_test
