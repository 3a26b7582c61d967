// Checkpoints: whole or not there, true to the commit they were taken of, while training goes on.
#include "swap/checkpoint.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "swap/checkpoint_copy.h"
#include "swap/checkpoint_files.h"
#include "swap/inspect.h"
#include "swap/store_files.h"
#include "swap/verify.h"
#include "tests/leaks.h"
#include "tests/soak.h"
#include "tests/swap/fake_model.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/scratch_directory.h"

// In the place of the C library's: what names the path and happens for the `failing.when`th time fails with
// EIO.
static struct {
  std::string call;
  std::string path;
  int when = 0;  // 0: never
} failing;

static bool Fails(const char* call, const std::string& path) {
  if (failing.when == 0 || failing.call != call || path != failing.path) return false;
  if (--failing.when > 0) return false;
  errno = EIO;
  return true;
}

extern "C" dirent* readdir(DIR* directory) {
  static const auto real = reinterpret_cast<dirent* (*)(DIR*)>(::dlsym(RTLD_NEXT, "readdir"));
  std::error_code error;
  const std::string of =
      std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", ::dirfd(directory)), error);
  return Fails("readdir", of) ? nullptr : real(directory);
}
extern "C" int stat(const char* path, struct stat* info) noexcept {
  static const auto real = reinterpret_cast<int (*)(const char*, struct stat*)>(::dlsym(RTLD_NEXT, "stat"));
  return Fails("stat", path) ? -1 : real(path, info);
}

namespace penstock::swap::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    aio::EngineOptions engine_options;
    engine_options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(engine_options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    run_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
    run_.slots = 3;
    checkpoints_.parent = scratch_.Sub("checkpoints");
    checkpoints_.memory = memory_.span();
  }
  void Start() {
    auto store = Store::Create(*engine_, run_, layout_, R"({"model":"fake"})");
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    model_.Initialize();
    ASSERT_TRUE(model_.WriteAll(*store_, 1).ok());
    ASSERT_TRUE(store_->CommitNow({.step = 0, .updates = 0, .payload = "p0"}).ok());
  }
  void Step(uint64_t step) {
    model_.UpdateAll(step);
    ASSERT_TRUE(model_.WriteAll(*store_, step + 1).ok());
    ASSERT_TRUE(store_->CommitNow({.step = step, .updates = step, .payload = absl::StrCat("p", step)}).ok());
  }
  // Three steps of the model, in memory.
  CheckpointSource SourceOfModel() {
    model_.Initialize();
    for (uint64_t u = 1; u <= 3; ++u) model_.UpdateAll(u);
    CheckpointSource source;
    source.layout = layout_;
    source.identity = R"({"model":"fake"})";
    source.step = 3;
    source.updates = 3;
    source.payload = "p3";
    source.fetch = [this](const Store& target, uint32_t tile, aio::Priority, CheckpointTile* to) {
      to->version = 4;
      for (uint32_t s = 0; s < target.geometry().segments(tile); ++s) {
        to->data[s] = model_.tile(tile)[s].data();
        to->checksums[s] = target.SegmentChecksum(tile, s, to->version, to->data[s]);
      }
      return absl::OkStatus();
    };
    return source;
  }

  std::vector<CheckpointEntry> Kept() {
    const auto all = ListCheckpoints(checkpoints_.parent);
    EXPECT_TRUE(all.ok()) << all.status();
    return all.value_or(std::vector<CheckpointEntry>());
  }

  // The bytes of a checkpoint are those of the model after that many updates.
  void ExpectCheckpoint(const std::string& path, uint64_t step) {
    StoreOptions options;
    options.directories = {path};
    options.read_only = true;
    auto store = Store::Open(*engine_, options);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ((*store)->recovered().step, step);
    EXPECT_EQ((*store)->recovered().payload, absl::StrCat("p", step));
    EXPECT_EQ((*store)->identity(), R"({"model":"fake"})");
    FakeModel oracle(layout_, 1), read(layout_, 2);
    oracle.Initialize();
    for (uint64_t u = 1; u <= step; ++u) oracle.UpdateAll(u);
    const absl::Status status = read.ReadAll(**store);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(read.Difference(oracle), "");
  }

  ScratchDirectory scratch_;
  std::unique_ptr<aio::Engine> engine_;
  Layout layout_ = SmallLayout(7);
  FakeModel model_{layout_, 1};
  AlignedBuffer memory_{3 << 20};
  StoreOptions run_;
  CheckpointOptions checkpoints_;
  std::unique_ptr<Store> store_;
};

TEST_F(CheckpointTest, HoldsItsStepWhileTrainingGoesOn) {
  Start();
  Step(1);
  Step(2);
  checkpoints_.memory = checkpoints_.memory.first(store_->geometry().slot_bytes(6));  // it needs no more
  auto copy = CheckpointCopy::OfStore(*store_, checkpoints_);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ((*copy)->step(), 2u);
  const std::string path = (*copy)->path();
  uint64_t step = 3;
  for (uint32_t tile = 0; tile < (*copy)->tiles(); ++tile) {
    EXPECT_EQ((*copy)->tiles_done(), tile);  // none that was not allowed
    EXPECT_FALSE((*copy)->finished());
    EXPECT_FALSE(fs::exists(path));  // not before it is whole
    (*copy)->Allow(1);
    Step(step++);
    while ((*copy)->tiles_done() == tile && !(*copy)->finished()) ::usleep(1000);
  }
  const absl::Status finished = (*copy)->Finish();
  ASSERT_TRUE(finished.ok()) << finished;
  EXPECT_EQ(store_->retained(), nullptr);
  ExpectCheckpoint(path, 2);
  // The run was not touched by it.
  FakeModel read(layout_, 2);
  ASSERT_TRUE(read.ReadAll(*store_).ok());
  EXPECT_EQ(read.Difference(model_), "");
  EXPECT_THAT(*FindCheckpoint(checkpoints_.parent), HasSubstr("step-00000002"));
}

TEST_F(CheckpointTest, ARunOfTwoSlotsIsCopiedWithinAStep) {
  run_.slots = 2;
  Start();
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  ExpectCheckpoint(*FindCheckpoint(checkpoints_.parent), 1);
  EXPECT_TRUE(absl::IsAlreadyExists(WriteCheckpoint(*store_, checkpoints_)));
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  ExpectCheckpoint(*FindCheckpoint(checkpoints_.parent), 2);
}

TEST_F(CheckpointTest, TheOldestGoWhenMoreThanKAreKept) {
  Start();
  checkpoints_.keep = 2;
  for (uint64_t step = 1; step <= 5; ++step) {
    Step(step);
    ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  }
  std::vector<uint64_t> steps;
  for (const CheckpointEntry& entry : Kept()) steps.push_back(entry.step);
  EXPECT_THAT(steps, ElementsAre(4, 5));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(checkpoints_.parent))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("latest", "step-00000004", "step-00000005"));
}

// One that is kept no longer is cut piece by piece before it goes, but not under the hands of somebody who
// has it open or has given it another name.
TEST_F(CheckpointTest, WhatSomebodyHasOpenIsNotCutBeforeItGoes) {
  Start();
  checkpoints_.keep = 1;
  constexpr off_t kLarge = off_t{40} << 20;
  enum Other { kNobody, kReader, kName };
  for (const Other other : {kNobody, kReader, kName}) {
    const auto step = static_cast<uint64_t>(other) * 2 + 1;
    Step(step);
    ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
    const std::string file = *FindCheckpoint(checkpoints_.parent) + "/penstock.store";
    ASSERT_EQ(::truncate(file.c_str(), kLarge), 0);  // as if it were large
    // Looks on without having it open.
    const int watch = ::open(file.c_str(), O_PATH | O_CLOEXEC);
    const int reader = other == kReader ? ::open(file.c_str(), O_RDONLY | O_CLOEXEC) : -1;
    if (other == kName) fs::create_hard_link(file, scratch_.Sub("kept"));
    Step(step + 1);
    ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
    EXPECT_FALSE(fs::exists(file));
    struct stat info;
    ASSERT_EQ(::fstat(watch, &info), 0);
    EXPECT_EQ(info.st_size, other == kNobody ? 0 : kLarge);
    ::close(watch);
    if (reader >= 0) ::close(reader);
  }
}

// Under the names of ours: nothing is written through them, and what they lead to stays.
// A checkpoint is there from its rename on. Where `latest` cannot be written, what is kept no longer goes all
// the same: a full disk would stay full.
TEST_F(CheckpointTest, WithoutLatestItIsThereAndTheOldOnesGo) {
  Start();
  checkpoints_.keep = 1;
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const std::string latest = checkpoints_.parent + "/latest";
  ASSERT_TRUE(fs::exists(latest));
  fs::remove(latest);
  fs::create_directory(latest);  // in its way
  std::ofstream(latest + "/thesis.txt") << "mine";
  Step(1);
  const absl::Status written = WriteCheckpoint(*store_, checkpoints_);
  EXPECT_TRUE(written.ok()) << written;
  const auto all = Kept();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].step, 1u);
  ExpectCheckpoint(all[0].path, 1);
  EXPECT_TRUE(fs::exists(latest + "/thesis.txt"));
  fs::remove_all(latest);
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  std::string name;
  std::ifstream(latest) >> name;
  EXPECT_EQ(name, CheckpointName(2));
}

// What cannot be listed or looked at is not gone: nothing passes for empty, for the end or for the newest,
// and nothing is removed.
TEST_F(CheckpointTest, AListingThatFailsIsNotAnEmptyOne) {
  Start();
  for (uint64_t step = 1; step <= 3; ++step) {
    Step(step);
    ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  }
  store_.reset();
  const std::vector<CheckpointSeen> seen = *SeeCheckpoints(checkpoints_.parent);
  const auto fails = [&](const char* call, const std::string& path, int when) {
    const auto with = [&](const auto& body) {
      failing = {call, path, when};
      const absl::Status status = body();
      EXPECT_EQ(failing.when, 0) << "the call was never made";
      failing.when = 0;
      EXPECT_TRUE(absl::IsDataLoss(status)) << call << " " << when << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    };
    with([&] { return ListCheckpoints(checkpoints_.parent).status(); });
    with([&] { return FindCheckpoint(checkpoints_.parent).status(); });
    with([&] { return KeepNewestCheckpoints(checkpoints_.parent, 1); });
    with([&] { return ReplacedCheckpoints::Lock(checkpoints_.parent, seen).status(); });
    EXPECT_EQ(Kept().size(), 3u);
  };
  for (int entry = 1; entry <= 6; ++entry) fails("readdir", checkpoints_.parent, entry);
  fails("stat", checkpoints_.parent, 1);
  fails("stat", StorePath(checkpoints_.parent + "/" + CheckpointName(3)), 1);
  ExpectCheckpoint(*FindCheckpoint(checkpoints_.parent), 3);
}

// Checkpoints of one step that must not take each other's place, as Python's front end names them, are found
// as any other.
TEST_F(CheckpointTest, SeveralOfOneStepHaveNumbers) {
  Start();
  Step(1);
  Step(2);
  const std::string& parent = checkpoints_.parent;
  for (const int number : {1, 10, 2}) {
    checkpoints_.naming.emplace();
    checkpoints_.naming->tag = absl::StrCat("tag", number);
    checkpoints_.naming->name = CheckpointName(2, number);
    checkpoints_.naming->file = scratch_.Sub(absl::StrCat("file", number));
    checkpoints_.naming->file_name = "client_state-x.pt";
    std::ofstream(checkpoints_.naming->file) << number;
    const absl::Status written = WriteCheckpoint(*store_, checkpoints_);
    ASSERT_TRUE(written.ok()) << written;
    const std::string tag = absl::StrCat(parent, "/tag", number);
    EXPECT_EQ(fs::read_symlink(tag).string(), CheckpointName(2, number));
    EXPECT_FALSE(fs::exists(checkpoints_.naming->file));
    EXPECT_TRUE(fs::exists(tag + "/client_state-x.pt"));
    ExpectCheckpoint(tag, 2);
  }
  EXPECT_TRUE(absl::IsAlreadyExists(WriteCheckpoint(*store_, checkpoints_)));
  Step(3);
  checkpoints_.naming.reset();
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  for (const char* other :
       {"step-2.1", "step-2.02", "step-2.", "step-.2", "step-2.2.2", "step-2.x", "step-2x"}) {
    fs::copy(parent + "/" + CheckpointName(3), parent + "/" + other);
  }
  std::vector<std::string> names;
  for (const CheckpointEntry& entry : Kept()) names.push_back(entry.name);
  EXPECT_THAT(names,
              testing::ElementsAre("step-00000002", "step-00000002.2", "step-00000002.10", "step-00000003"));
  // They go as others do, and what they hold with them.
  ASSERT_TRUE(KeepNewestCheckpoints(parent, 2).ok());
  names.clear();
  for (const CheckpointEntry& entry : Kept()) names.push_back(entry.name);
  EXPECT_THAT(names, testing::ElementsAre("step-00000002.10", "step-00000003"));
  EXPECT_FALSE(fs::exists(parent + "/.step-00000002.partial"));
  EXPECT_FALSE(fs::exists(parent + "/.step-00000002.2.partial"));
}

// Whoever wants those gone that are there may wait for a directory: what others keep there meanwhile stays.
TEST_F(CheckpointTest, OnlyWhatWasSeenIsRemoved) {
  Start();
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const std::vector<CheckpointSeen> seen = *SeeCheckpoints(checkpoints_.parent);
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const absl::Status refused = ReplacedCheckpoints::Lock(checkpoints_.parent, seen).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(CheckpointName(1)));
  EXPECT_EQ(Kept().size(), 2u);
  EXPECT_FALSE(ReplacedCheckpoints::Lock(checkpoints_.parent, {}).ok());
  EXPECT_TRUE(SeeCheckpoints(checkpoints_.parent, /*until_ns=*/0)->empty());
  EXPECT_EQ(Kept().size(), 2u);
  auto replaced = ReplacedCheckpoints::Lock(checkpoints_.parent, *SeeCheckpoints(checkpoints_.parent));
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_TRUE(replaced->Remove().ok());
  EXPECT_TRUE(Kept().empty());
  EXPECT_FALSE(fs::exists(checkpoints_.parent + "/latest"));
}

// A new run, whose state is in memory: until it has a checkpoint, nothing but the old ones is durable.
TEST_F(CheckpointTest, ThoseThatAreReplacedStayUntilTheFirstOfTheNewRunStands) {
  Start();
  for (uint64_t step = 1; step <= 4; ++step) {
    Step(step);
    ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  }
  checkpoints_.replaces = *SeeCheckpoints(checkpoints_.parent);
  checkpoints_.keep = 2;
  CheckpointSource broken = SourceOfModel();
  broken.fetch = [](const Store&, uint32_t, aio::Priority, CheckpointTile*) {
    return absl::DataLossError("no such tile");
  };
  const auto copy = [&](CheckpointSource source) {
    const auto made = CheckpointCopy::OfMemory(*engine_, checkpoints_, std::move(source));
    made->AllowAll();
    return made->Finish();
  };
  const auto steps = [&] {
    std::set<uint64_t> found;
    for (const CheckpointEntry& entry : Kept()) found.insert(entry.step);
    return found;
  };
  EXPECT_TRUE(absl::IsDataLoss(copy(std::move(broken))));
  EXPECT_EQ(Kept().size(), 4u);
  EXPECT_EQ(*SeeCheckpoints(checkpoints_.parent), checkpoints_.replaces);

  // One that is read just then stays, and does not count among the two that are kept.
  auto reader = PlainFile::Open(StorePath(checkpoints_.parent + "/step-00000004"));
  ASSERT_TRUE(reader.ok() && *reader->TryLock(/*exclusive=*/false, 0));
  for (const uint64_t step : {3, 5}) {
    CheckpointSource source = SourceOfModel();
    source.step = step;
    const absl::Status status = copy(std::move(source));
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(steps(), (std::set<uint64_t>{3, 4, 5}));
  // And the one of the same step is the new run's.
  ExpectCheckpoint(checkpoints_.parent + "/step-00000003", 3);
  EXPECT_NE(SeeCheckpoints(checkpoints_.parent)->front(), checkpoints_.replaces[2]);
  EXPECT_FALSE(fs::exists(checkpoints_.parent + "/.step-00000003.partial"));
  // Nobody's name is taken while it is read.
  CheckpointSource same = SourceOfModel();
  same.step = 4;
  EXPECT_TRUE(absl::IsFailedPrecondition(copy(std::move(same))));
  *reader = *PlainFile::Open(StorePath(checkpoints_.parent + "/step-00000003"));
  CheckpointSource last = SourceOfModel();
  last.step = 4;
  ASSERT_TRUE(copy(std::move(last)).ok());
  EXPECT_EQ(steps(), (std::set<uint64_t>{4, 5}));
}

// What is replaced is known to the first rank alone, unless its caller tells the others.
TEST_F(CheckpointTest, OfSeveralRanksTheFirstJudgesWhetherAStepIsTaken) {
  Start();
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const std::vector<CheckpointSeen> seen = *SeeCheckpoints(checkpoints_.parent);
  const auto create = [&](int rank, std::span<const CheckpointSeen> replaces) {
    return PartialCheckpoint::Create(checkpoints_.parent, CheckpointName(1), rank, nullptr, replaces)
        .status();
  };
  EXPECT_TRUE(absl::IsAlreadyExists(create(0, {})));
  EXPECT_TRUE(create(0, seen).ok());
  EXPECT_TRUE(create(1, {}).ok());
}

// A kill between the two renames that replace a checkpoint where names cannot be exchanged.
TEST_F(CheckpointTest, OneThatLostItsNameToNobodyHasItAgain) {
  Start();
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const std::string place = checkpoints_.parent + "/step-00000001";
  const std::string aside = checkpoints_.parent + "/.step-00000001.superseded";
  fs::rename(place, aside);
  ASSERT_TRUE(RemovePartialCheckpoints(checkpoints_.parent).ok());
  ExpectCheckpoint(place, 1);
  fs::copy(place, aside);
  ASSERT_TRUE(RemovePartialCheckpoints(checkpoints_.parent).ok());
  ExpectCheckpoint(place, 1);
  EXPECT_FALSE(fs::exists(aside));
}

// Somebody moves a checkpoint away in the very moment in which it is to go: what they got is theirs, whole.
TEST_F(CheckpointTest, OneThatIsMovedAwayAsItGoesStaysWhole) {
  constexpr uint64_t kBytes = 40 << 20;  // sparse; enough to be given back in pieces
  const std::string parent = checkpoints_.parent, mine = scratch_.Sub("mine");
  const std::string going = parent + "/." + CheckpointName(1) + ".partial";
  const auto make = [&](const std::string& directory, int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string part = RankDirectory(directory, rank);
      fs::create_directories(part);
      std::ofstream(StorePath(part)).close();
      fs::resize_file(StorePath(part), kBytes);
    }
  };
  int moved = 0;
  for (int i = 0; i < 100 && moved == 0; ++i) {
    make(parent + "/" + CheckpointName(1), 300);
    auto partial = PartialCheckpoint::Create(parent, CheckpointName(2), -1);
    ASSERT_TRUE(partial.ok()) << partial.status();
    make(partial->directory(), 1);
    std::atomic<bool> over = false;
    std::thread mover([&] {
      while (!over.load() && ::rename(going.c_str(), mine.c_str()) != 0) continue;
    });
    const absl::Status published = partial->Publish(1, [](double) {});
    over = true;
    mover.join();
    EXPECT_TRUE(published.ok()) << published;
    for (int rank = 0; rank < 300; ++rank) {
      const std::string file = StorePath(RankDirectory(mine, rank));
      if (!fs::exists(file)) continue;
      ++moved;
      ASSERT_EQ(fs::file_size(file), kBytes);
    }
    fs::remove_all(mine);
    fs::remove_all(parent);
  }
  EXPECT_GT(moved, 0) << "nothing was moved away in time, a hundred times";
}

TEST_F(CheckpointTest, LinksAreNeitherFollowedNorRemoved) {
  run_.directories = {scratch_.Sub("a")};
  Start();
  fs::create_directories(checkpoints_.parent);
  const auto link = [&](const std::string& name) {
    fs::create_directory_symlink(scratch_.Sub("a"), checkpoints_.parent + "/" + name);
  };
  Step(1);
  link(".step-00000001.partial");
  const absl::Status status = WriteCheckpoint(*store_, checkpoints_);
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(".step-00000001.partial is in the way"));
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  link("step-00000000");
  link(".step-00000007.partial");
  store_.reset();  // nobody uses what they lead to
  EXPECT_TRUE(RemovePartialCheckpoints(checkpoints_.parent).ok());
  EXPECT_TRUE(KeepNewestCheckpoints(checkpoints_.parent, 1).ok());
  const auto seen = SeeCheckpoints(checkpoints_.parent);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_FALSE(ReplacedCheckpoints::Lock(checkpoints_.parent, *seen).ok());
  EXPECT_TRUE(fs::exists(scratch_.Sub("a/penstock.store")));
  EXPECT_TRUE(fs::exists(checkpoints_.parent + "/step-00000002")) << "a refusal removes nothing";
  size_t links = 0;
  for (const auto& entry : fs::directory_iterator(checkpoints_.parent)) links += entry.is_symlink() ? 1 : 0;
  EXPECT_EQ(links, 3u);
}

// Half of them finished, half given up on their way.
TEST_F(CheckpointTest, HundredsOfThemLeaveNoDescriptorMemoryOrFile) {
  Start();
  checkpoints_.keep = 3;
  tests::Held before;
  const auto last = 400 * static_cast<uint64_t>(tests::Soak());
  for (uint64_t step = 1; step <= last; ++step) {
    Step(step);
    auto copy = CheckpointCopy::OfStore(*store_, checkpoints_);
    ASSERT_TRUE(copy.ok()) << copy.status();
    if (step % 2 == 0) {
      const absl::Status finished = (*copy)->Finish();
      ASSERT_TRUE(finished.ok()) << finished;
    } else {
      (*copy)->Allow(static_cast<uint32_t>(step % 7));
    }
    copy->reset();
    EXPECT_EQ(store_->retained(), nullptr);
    if (step == 40) before = {};  // whatever grows once has grown
  }
  const tests::Held after;
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_LE(tests::ThreadsOnceAtMost(before.threads), before.threads);
  // 8 KiB for each would be 2.9 MB.
  EXPECT_LT(after.resident_bytes, before.resident_bytes + (2 << 20));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(checkpoints_.parent))
    names.push_back(entry.path().filename());
  EXPECT_EQ(names.size(), 4u) << ::testing::PrintToString(names);
  EXPECT_EQ(Kept().size(), 3u);
  ExpectCheckpoint(*FindCheckpoint(checkpoints_.parent), last);
}

TEST_F(CheckpointTest, WhatIsNotOursIsNotRemoved) {
  Start();
  checkpoints_.keep = 1;
  fs::create_directories(checkpoints_.parent + "/step-00000000");
  std::ofstream(checkpoints_.parent + "/step-00000000/penstock.store")
      << "somebody's thesis, and long enough";
  fs::create_directories(checkpoints_.parent + "/.step-00000009.partial");
  std::ofstream(checkpoints_.parent + "/.step-00000009.partial/notes.txt") << "mine";
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  EXPECT_TRUE(fs::exists(checkpoints_.parent + "/step-00000000/penstock.store"));
  EXPECT_TRUE(fs::exists(checkpoints_.parent + "/.step-00000009.partial/notes.txt"));
}

// Neither is one moved that has them in it, nor do they become part of another.
TEST_F(CheckpointTest, OneThatHasSomebodysFilesStaysAndNoOtherTakesThemIn) {
  Start();
  const std::string& parent = checkpoints_.parent;
  checkpoints_.keep = 1;
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  const std::string first = parent + "/step-00000001";
  std::ofstream(first + "/config.json") << "mine";
  // One that is old enough to go.
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  ExpectCheckpoint(first, 1);
  EXPECT_TRUE(fs::exists(first + "/config.json"));
  EXPECT_FALSE(fs::exists(parent + "/.step-00000001.partial"));
  // One whose name another run's takes.
  checkpoints_.replaces = *SeeCheckpoints(parent);
  CheckpointSource source = SourceOfModel();
  source.step = 1;
  const absl::Status refused = CheckpointCopy::OfMemory(*engine_, checkpoints_, std::move(source))->Finish();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(first + "/config.json is not of the checkpoint"));
  ExpectCheckpoint(first, 1);
  EXPECT_TRUE(fs::exists(first + "/config.json"));
  EXPECT_EQ(Kept().size(), 2u);
  checkpoints_.replaces.clear();
  // What lies where the next one is made, beside a store of another run too.
  const std::string half = parent + "/.step-00000003.partial";
  fs::create_directories(half);
  fs::copy_file(StorePath(first), StorePath(half));
  std::ofstream(half + "/config.json") << "mine";
  Step(3);
  const absl::Status in_the_way = WriteCheckpoint(*store_, checkpoints_);
  EXPECT_TRUE(absl::IsAlreadyExists(in_the_way)) << in_the_way;
  EXPECT_THAT(std::string(in_the_way.message()), HasSubstr(half + "/config.json is in the way"));
  EXPECT_TRUE(fs::exists(half + "/config.json") && fs::exists(StorePath(half)));
  fs::remove(half + "/config.json");
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(parent + "/step-00000003"), fs::directory_iterator()), 1);
  // What comes into it while it is made.
  auto partial = PartialCheckpoint::Create(parent, CheckpointName(4), -1);
  ASSERT_TRUE(partial.ok()) << partial.status();
  fs::create_directories(partial->directory());
  fs::copy_file(StorePath(first), StorePath(partial->directory()));
  std::ofstream(partial->directory() + "/config.json") << "mine";
  EXPECT_TRUE(absl::IsFailedPrecondition(partial->Publish(0, nullptr)));
  EXPECT_FALSE(fs::exists(parent + "/step-00000004"));
  EXPECT_TRUE(fs::exists(parent + "/.step-00000004.partial/config.json"));
  // What only has the name of one that a kill has set aside.
  fs::create_directories(parent + "/.step-00000009.superseded");
  std::ofstream(parent + "/.step-00000009.superseded/notes.txt") << "mine";
  ASSERT_TRUE(RemovePartialCheckpoints(parent).ok());
  EXPECT_TRUE(fs::exists(parent + "/.step-00000009.superseded/notes.txt"));
}

TEST_F(CheckpointTest, ARanksPartIsItsOwnAlone) {
  const std::string whole = checkpoints_.parent + "/.step-00000001.partial", part = RankDirectory(whole, 1);
  const auto create = [&] {
    auto made = PartialCheckpoint::Create(checkpoints_.parent, CheckpointName(1), 1);
    if (made.ok()) made->HandOver();
    return made.status();
  };
  // As a killed run leaves it, which had another client_state.
  fs::create_directories(part);
  for (const char* name : {"penstock.store", "client_state-1.pt", ".parameters.json.0123456789abcdef.new"})
    std::ofstream(part + "/" + name).close();
  EXPECT_TRUE(create().ok());
  EXPECT_FALSE(fs::exists(part + "/client_state-1.pt"));
  fs::create_directories(part);
  std::ofstream(part + "/notes.txt") << "mine";
  const absl::Status refused = create();
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank-1/notes.txt is in the way"));
  EXPECT_TRUE(fs::exists(part + "/notes.txt"));
}

TEST_F(CheckpointTest, OneThatIsGivenUpLeavesNothing) {
  Start();
  {
    auto copy = CheckpointCopy::OfStore(*store_, checkpoints_);
    ASSERT_TRUE(copy.ok());
    (*copy)->Allow(3);
    while ((*copy)->tiles_done() < 3) ::usleep(1000);
    EXPECT_TRUE(fs::exists(checkpoints_.parent + "/.step-00000000.partial"));
  }
  EXPECT_EQ(store_->retained(), nullptr);
  EXPECT_TRUE(fs::is_empty(checkpoints_.parent));
  EXPECT_TRUE(absl::IsNotFound(FindCheckpoint(checkpoints_.parent).status()));
}

TEST_F(CheckpointTest, WhatAKilledRunLeftIsCleanedUp) {
  Start();
  // As a killed run leaves it: the file, without superblock or commit.
  fs::create_directories(checkpoints_.parent + "/.step-00000007.partial");
  std::ofstream(checkpoints_.parent + "/.step-00000007.partial/penstock.store").close();
  std::ofstream(checkpoints_.parent + "/.latest.partial") << "step-0";
  std::ofstream(checkpoints_.parent + "/.latest.0123456789abcdef.new") << "step-0";
  std::ofstream(checkpoints_.parent + "/.latest.thesis.new") << "mine";
  EXPECT_TRUE(absl::IsNotFound(FindCheckpoint(checkpoints_.parent).status()));
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  EXPECT_FALSE(fs::exists(checkpoints_.parent + "/.step-00000007.partial"));
  EXPECT_FALSE(fs::exists(checkpoints_.parent + "/.latest.partial"));
  EXPECT_FALSE(fs::exists(checkpoints_.parent + "/.latest.0123456789abcdef.new"));
  EXPECT_TRUE(fs::exists(checkpoints_.parent + "/.latest.thesis.new"));
}

TEST_F(CheckpointTest, OneWhoseNameWasJustGivenIsTheNewestWhateverLatestSays) {
  Start();
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  std::ofstream(checkpoints_.parent + "/latest") << "step-00000001\n";  // killed between the two renames
  EXPECT_THAT(*FindCheckpoint(checkpoints_.parent), HasSubstr("step-00000002"));
}

TEST_F(CheckpointTest, StateInMemoryMakesACheckpointLikeAStoresOwn) {
  auto copy = CheckpointCopy::OfMemory(*engine_, checkpoints_, SourceOfModel());
  const absl::Status finished = copy->Finish();
  ASSERT_TRUE(finished.ok()) << finished;
  ExpectCheckpoint(*FindCheckpoint(checkpoints_.parent), 3);
}

// A drive that is never idle would keep transfers of the lowest priority waiting until somebody waits for
// them.
TEST_F(CheckpointTest, WhatIsBehindItsPaceIsNoLongerOvertakenByEverything) {
  std::vector<aio::Priority> priorities;
  std::promise<void> entered, left;
  CheckpointSource source = SourceOfModel();
  source.fetch = [&, fetch = source.fetch, may_go = left.get_future().share()](
                     const Store& target, uint32_t tile, aio::Priority priority, CheckpointTile* to) {
    priorities.push_back(priority);
    if (tile == 0) {
      entered.set_value();
      may_go.wait();
    }
    return fetch(target, tile, priority, to);
  };
  auto copy = CheckpointCopy::OfMemory(*engine_, checkpoints_, source);
  ASSERT_GE(copy->tiles(), 6u);
  copy->Allow(1);
  entered.get_future().wait();
  copy->Allow(3);
  left.set_value();
  while (copy->tiles_done() < 4) std::this_thread::yield();
  ASSERT_TRUE(copy->Finish().ok());
  // At leisure; two that others wait behind, one that none does; and what is waited for.
  const auto leisure = aio::Priority::kWriteBehind, behind = aio::Priority::kPrefetch;
  EXPECT_THAT(std::vector(priorities.begin(), priorities.begin() + 4),
              testing::ElementsAre(leisure, behind, behind, leisure));
  EXPECT_EQ(priorities.back(), behind);
}

TEST_F(CheckpointTest, DamageIsNotCopied) {
  Start();
  Step(1);
  const Geometry& g = store_->geometry();
  const int fd = ::open(store_->path(3).c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::pwrite(fd, "x", 1, static_cast<off_t>(g.segment_offset(3, store_->committed(3).slot, 1))), 1);
  ::fsync(fd);
  ::close(fd);
  const absl::Status status = WriteCheckpoint(*store_, checkpoints_);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tile 3 segment 1"));
  EXPECT_TRUE(fs::is_empty(checkpoints_.parent));
}

TEST_F(CheckpointTest, ARunGoesOnFromACheckpointSomewhereElse) {
  Start();
  Step(1);
  Step(2);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  Step(3);
  StoreOptions from;
  from.directories = {*FindCheckpoint(checkpoints_.parent)};
  from.read_only = true;
  auto checkpoint = Store::Open(*engine_, from);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  // Verify works on it as on a run.
  const auto report = VerifyAll(**checkpoint, memory_.span());
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->whole());
  EXPECT_EQ(report->bytes, store_->geometry().state_bytes());

  StoreOptions to;
  to.directories = {scratch_.Sub("x"), scratch_.Sub("y"), scratch_.Sub("z")};  // on more disks
  auto fresh = Store::Create(*engine_, to, layout_, (*checkpoint)->identity());
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  const absl::Status restored = RestoreCheckpoint(**checkpoint, **fresh, memory_.span());
  ASSERT_TRUE(restored.ok()) << restored;
  FakeModel again(layout_, 5);
  ASSERT_TRUE(again.ReadAll(**fresh).ok());
  again.UpdateAll(3);
  ASSERT_TRUE(again.WriteAll(**fresh, (*fresh)->newest_version(0) + 1).ok());
  ASSERT_TRUE((*fresh)->CommitNow({.step = 3, .updates = 3, .payload = "p3"}).ok());
  EXPECT_EQ(again.Difference(model_), "");
  EXPECT_EQ((*fresh)->committed_step(), 3u);
}

// A whole run depends on the first commit of a state that was restored: it does not pass for one that never
// was.
TEST_F(CheckpointTest, DamageToARestoredStatesRecordIsNeverARunThatWasNotCommitted) {
  Start();
  Step(1);
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  StoreOptions from;
  from.directories = {*FindCheckpoint(checkpoints_.parent)};
  from.read_only = true;
  auto checkpoint = Store::Open(*engine_, from);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const uint32_t slots : {1u, 2u, 3u}) {
    StoreOptions to;
    to.directories = {scratch_.Sub(absl::StrCat("restored", slots))};
    to.slots = slots;
    auto fresh = Store::Create(*engine_, to, layout_, (*checkpoint)->identity());
    ASSERT_TRUE(fresh.ok()) << fresh.status();
    const absl::Status restored = RestoreCheckpoint(**checkpoint, **fresh, memory_.span());
    ASSERT_TRUE(restored.ok()) << restored;
    const Geometry geometry = (*fresh)->geometry();
    const auto place = static_cast<uint32_t>((*fresh)->committed_sequence() % kRecordPlaces);
    fresh->reset();
    const auto damage = [&](uint32_t of_place) {
      std::fstream file(StorePath(to.directories[0]), std::ios::in | std::ios::out | std::ios::binary);
      for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
        file.seekp(static_cast<std::streamoff>(geometry.record_offset(of_place, copy)) + 40);
        file.write("damaged", 7);
      }
    };
    damage(place);
    const Finding found = Probe(to.directories[0]);
    EXPECT_EQ(found.holding, Holding::kRun) << found.text;
    EXPECT_EQ(found.step, 1u);
    damage(1 - place);
    EXPECT_EQ(Probe(to.directories[0]).holding, Holding::kDamaged);
    EXPECT_TRUE(absl::IsDataLoss(Inspect(to.directories).status()));
    EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, to).status()));
  }
}

TEST_F(CheckpointTest, ACheckpointIsNeverWrittenTo) {
  Start();
  ASSERT_TRUE(WriteCheckpoint(*store_, checkpoints_).ok());
  StoreOptions options;
  options.directories = {*FindCheckpoint(checkpoints_.parent)};
  auto checkpoint = Store::Open(*engine_, options);
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_THAT(std::string(model_.WriteTile(**checkpoint, 0, 9).message()),
              HasSubstr("what stands there is committed"));
}

}  // namespace
}  // namespace penstock::swap::checkpoint_test
