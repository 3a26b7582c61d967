// State directories: who may use them, what they hold, what is never touched, and several of them as one
// store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "swap/inspect.h"
#include "swap/store.h"
#include "tests/swap/store_fixture.h"
#include "tests/tampered_call.h"

namespace penstock::swap::directory_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using DirectoryTest = StoreTest;

TEST_F(DirectoryTest, ASecondRunIsRefusedWhileTheFirstOneLives) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  const auto second = Store::Open(*engine_, options_);
  ASSERT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(File()));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kInUse);
  options_.overwrite = true;
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Create(*engine_, options_, layout_, "{}").status()));
  store.reset();
  EXPECT_NE(Open(), nullptr);
}

// From one engine to the next, as where its memory is divided anew: nobody comes in between.
TEST_F(DirectoryTest, ARunThatIsClosedAndHeldIsNobodyElses) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  HeldFiles held = Store::Close(std::move(store));
  ASSERT_EQ(held.size(), 1U);
  engine_.reset();
  auto engine = aio::Engine::Create({});
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Open(*engine_, options_).status()));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kInUse);
  auto again = Store::Open(*engine_, options_, std::move(held));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->recovered().payload, "first");
  Step(**again, &model, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Open(*engine_, options_).status()));
  held = Store::Close(*std::move(again));
  held.clear();  // or not at all
  store = Open();
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(store->committed_step(), 1U);
  EXPECT_TRUE(model.ReadAll(*store).ok());
}

// Who only looks holds a lock for a moment. A creation in that moment waits for it, whatever its patience
// with other runs.
TEST_F(DirectoryTest, ALookAtAFileThatIsBeingMadeDoesNotRefuseItsCreation) {
  options_.lock_patience_ms = 0;
  options_.overwrite = true;
  std::atomic<bool> over = false;
  std::atomic<int> creation = 0;
  std::atomic<int> looks = 0;
  std::thread looker([&] {
    for (int seen = 0; !over.load();) {
      const int now = creation.load();
      if (now == seen) continue;  // it looks once at each
      const auto file = PlainFile::Open(File());
      if (!file.ok() || !file->TryLock(/*exclusive=*/false, 0).value_or(false)) continue;
      seen = now;
      ++looks;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int i = 0; i < 60 || (looks == 0 && i < 6000); ++i) {
    ++creation;
    const auto store = Store::Create(*engine_, options_, layout_, "{}");
    EXPECT_TRUE(store.ok()) << store.status();
    if (!store.ok()) break;
    ASSERT_EQ(std::remove(File().c_str()), 0);  // so that none waits for the looker to overwrite it
  }
  over = true;
  looker.join();
  EXPECT_GT(looks, 0) << "nobody looked: nothing was tried";
}

TEST_F(DirectoryTest, FilesArePrivateAndLinksAreNotFollowed) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  struct stat info;
  ASSERT_EQ(::stat(File().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(options_.directories[0].c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);

  const std::string other = scratch_.Sub("elsewhere");
  std::filesystem::rename(File(), other);
  ASSERT_EQ(::symlink(other.c_str(), File().c_str()), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Open(*engine_, options_).status()));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kForeign);
  options_.overwrite = true;
  EXPECT_FALSE(Store::Create(*engine_, options_, layout_, "{}").ok());
  EXPECT_TRUE(std::filesystem::exists(other));
}

TEST_F(DirectoryTest, ALinkToTheDirectoryOfSomebodyElseIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to make a link of another user";
  const std::string link = scratch_.Sub("link");
  std::filesystem::create_directory(scratch_.Sub("real"));
  ASSERT_EQ(::symlink(scratch_.Sub("real").c_str(), link.c_str()), 0);
  options_.directories = {link};
  EXPECT_TRUE(Store::Create(*engine_, options_, layout_, "{}").ok());  // root's own link
  ASSERT_EQ(::lchown(link.c_str(), 12345, 12345), 0);
  const auto store = Store::Open(*engine_, options_);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("symbolic link of another user"));
}

TEST_F(DirectoryTest, SpaceIsWhatWasSaidBefore) {
  options_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
  const auto bytes = BytesOnDisk(options_, layout_, "{}");
  ASSERT_TRUE(bytes.ok());
  Create().reset();
  for (int d = 0; d < 2; ++d) {
    struct stat info;
    ASSERT_EQ(::stat(File(d).c_str(), &info), 0);
    EXPECT_EQ(static_cast<uint64_t>(info.st_size), (*bytes)[d]);
    EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, (*bytes)[d]);  // reserved, not sparse
  }
}

TEST_F(DirectoryTest, TooLittleSpaceIsRefusedBeforeAnythingIsMade) {
  layout_.tiles.assign(1 << 20, TileLayout{{kMaxTileBytes}, 0});  // 2 PiB
  const std::string parent = options_.directories.front();
  options_.directories = {parent + "/new/run"};
  const auto store = Store::Create(*engine_, options_, layout_, "{}");
  EXPECT_TRUE(absl::IsResourceExhausted(store.status())) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("too little"));
  EXPECT_FALSE(std::filesystem::exists(parent + "/new"));
}

TEST_F(DirectoryTest, AFileSystemWithoutDirectIoIsRefusedAndLeftAsItWas) {
  std::string memory = "/dev/shm/swap-test-XXXXXX";
  if (::mkdtemp(memory.data()) == nullptr) GTEST_SKIP() << "no /dev/shm";
  options_.directories = {memory + "/new/run"};
  const auto store = Store::Create(*engine_, options_, layout_, "{}");
  EXPECT_TRUE(absl::IsFailedPrecondition(store.status())) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr(memory));
  EXPECT_TRUE(std::filesystem::is_empty(memory));
  options_.allow_unaligned_file_system = true;
  EXPECT_TRUE(Store::Create(*engine_, options_, layout_, "{}").ok());
  std::filesystem::remove_all(memory);
}

TEST_F(DirectoryTest, ARunIsNotOverwrittenUnlessAsked) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  EXPECT_TRUE(absl::IsAlreadyExists(Store::Create(*engine_, options_, layout_, "{}").status()));
  EXPECT_EQ(Open()->recovered().step, 0u);  // unharmed
  std::ofstream(options_.directories[0] + "/notes.txt") << "mine";
  options_.overwrite = true;
  ASSERT_NE(Create(), nullptr);
  EXPECT_TRUE(absl::IsNotFound(Store::Open(*engine_, options_).status()));
  EXPECT_TRUE(std::filesystem::exists(options_.directories[0] + "/notes.txt"));
}

// While the new files are made the old ones are the run: a call that fails leaves it. Of several directories
// one that fails, or a kill, between the first and the last that change hands leaves a run that never was.
TEST_F(DirectoryTest, AnOverwriteThatIsCutShortLeavesTheOldRunOrOneThatNeverWas) {
  namespace fs = std::filesystem;
  layout_ = SmallLayout(9);
  options_.lock_patience_ms = 5000;
  std::vector<uint64_t> calls = NamingCalls();
  calls.insert(calls.end(), {SYS_fsync, SYS_fdatasync, SYS_fallocate, SYS_ftruncate});
  for (const int directories : {1, 3}) {
    options_.directories.clear();
    for (int d = 0; d < directories; ++d)
      options_.directories.push_back(scratch_.Sub(absl::StrCat("of-", directories, "-", d)));
    FakeModel model(layout_, 1);
    auto store = CreateCommitted(&model);
    Step(*store, &model, 1);
    store.reset();
    const auto copy = [&](const std::string& from, const std::string& to) {
      for (const std::string& directory : options_.directories) {
        fs::remove_all(directory + to);
        fs::copy(directory + from, directory + to);
      }
    };
    copy("", "-kept");
    StoreOptions over = options_;
    over.overwrite = true;
    for (const int error : {EIO, 0}) {
      bool reached = true;
      for (size_t at = 0; reached; ++at) {
        SCOPED_TRACE(absl::StrCat(directories, " directories, error ", error, " at ", at));
        copy("-kept", "");
        const Tampered ran = RunTampered({.calls = calls, .at = at, .error = error}, [&] {
          auto engine = aio::Engine::Create({});
          return engine.ok() && Store::Create(**engine, over, layout_, "{}").ok() ? 0 : 1;
        });
        if (!ran.can) GTEST_SKIP() << "no process can be traced here";
        reached = ran.reached;
        const bool may_be_lost = ran.code == 0 || error == 0 || directories > 1;
        auto opened = Store::Open(*engine_, options_);
        if (may_be_lost && absl::IsNotFound(opened.status())) continue;
        ASSERT_TRUE(opened.ok()) << opened.status();
        EXPECT_NE(ran.code, 0);
        FakeModel read(layout_, 2);
        ASSERT_TRUE(read.ReadAll(**opened).ok());
        EXPECT_EQ(read.Difference(model), "");
        opened->reset();
        for (const std::string& directory : options_.directories) {
          const auto entries = fs::directory_iterator(directory);
          EXPECT_EQ(std::distance(begin(entries), end(entries)), 1) << "what is left is removed";
        }
      }
      EXPECT_EQ(Probe(options_.directories).holding, Holding::kNeverCommitted);
    }
  }
}

// Free space says nothing of a quota: where that has room for one of both, the old run goes first.
TEST_F(DirectoryTest, AnOverwriteBeyondAQuotaTakesTheRoomOfTheOldRun) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  for (const bool larger : {true, false}) {
    StoreOptions over = options_;
    over.overwrite = true;
    const Layout layout = larger ? SmallLayout(40) : layout_;
    ASSERT_GT(layout.tiles.size(), larger ? layout_.tiles.size() : 0);
    const Tampered ran = RunTampered({.calls = {SYS_fallocate}, .at = 0, .error = EDQUOT}, [&] {
      auto engine = aio::Engine::Create({});
      return engine.ok() && Store::Create(**engine, over, layout, "{}").ok() ? 0 : 1;
    });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    ASSERT_TRUE(ran.reached);
    EXPECT_EQ(ran.code, larger ? 1 : 0);
    EXPECT_EQ(Probe(options_.directories).holding, larger ? Holding::kRun : Holding::kNeverCommitted);
  }
}

TEST_F(DirectoryTest, AFileThatIsNotOursIsNeverRemoved) {
  std::filesystem::create_directory(options_.directories[0]);
  std::ofstream(File()) << "somebody's thesis";
  options_.overwrite = true;
  const auto store = Store::Create(*engine_, options_, layout_, "{}");
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("was not made by this program"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Open(*engine_, options_).status()));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kForeign);
  EXPECT_EQ(std::filesystem::file_size(File()), 17u);
}

TEST_F(DirectoryTest, ProbeTellsWhatADirectoryHolds) {
  const auto holding = [&] { return Probe(options_.directories).holding; };
  EXPECT_EQ(holding(), Holding::kNothing);
  std::filesystem::create_directory(options_.directories[0]);
  EXPECT_EQ(holding(), Holding::kNothing);
  std::ofstream(options_.directories[0] + "/notes.txt") << "mine";
  EXPECT_EQ(holding(), Holding::kForeign);
  std::ofstream(File()).close();
  EXPECT_EQ(holding(), Holding::kNeverCommitted);  // creation cut short
  std::filesystem::resize_file(File(), 1 << 20);
  EXPECT_EQ(holding(), Holding::kNeverCommitted);
  EXPECT_TRUE(absl::IsNotFound(Store::Open(*engine_, options_).status()));

  options_.overwrite = true;
  FakeModel model(layout_, 1);
  auto store = Create(R"({"model":"x"})");
  EXPECT_EQ(holding(), Holding::kInUse);
  store.reset();
  EXPECT_EQ(holding(), Holding::kNeverCommitted);
  store = CreateCommitted(&model);
  Step(*store, &model, 1);
  const uint64_t record_0 = store->geometry().record_offset(0, 0);
  const uint64_t capacity = store->geometry().record_capacity();
  store.reset();
  const Finding run = Probe(options_.directories);
  EXPECT_EQ(run.holding, Holding::kRun);
  EXPECT_EQ(run.step, 1u);
  EXPECT_EQ(run.identity, "{}");
  for (uint64_t copy = 0; copy < 4; ++copy) Flip(File(), record_0 + copy * capacity + 40);
  EXPECT_EQ(holding(), Holding::kDamaged);
  EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, options_).status()));
  Flip(File(), 33);
  Flip(File(), kSectorBytes + 33);
  EXPECT_EQ(holding(), Holding::kDamaged);
  EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, options_).status()));
}

// A start goes on from a run, and takes the place of nothing or of what was never committed; all else it is
// told of.
TEST_F(DirectoryTest, WhatIsThereIsNeverTakenForNoRun) {
  const auto holds = [&] { return HoldsRun(Probe(options_.directories)); };
  EXPECT_EQ(*holds(), false);
  std::filesystem::create_directory(options_.directories[0]);
  std::ofstream(options_.directories[0] + "/notes.txt") << "mine";
  EXPECT_TRUE(absl::IsFailedPrecondition(holds().status()));
  EXPECT_TRUE(Probe(options_.directories).beside);
  std::ofstream(File()).close();
  EXPECT_EQ(*holds(), false);
  options_.overwrite = true;
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  EXPECT_EQ(*holds(), true);  // and in use
  store.reset();
  EXPECT_EQ(*holds(), true);
  std::filesystem::resize_file(File(), std::filesystem::file_size(File()) - kSectorBytes);
  EXPECT_TRUE(absl::IsDataLoss(holds().status()));
  std::filesystem::remove(File());
  std::ofstream(File()) << std::string(1 << 20, 'x');
  EXPECT_TRUE(absl::IsFailedPrecondition(holds().status()));
  EXPECT_FALSE(Probe(options_.directories).beside);
  Finding unread;
  unread.unread = absl::UnavailableError("one call failed");
  EXPECT_EQ(HoldsRun(unread).status(), unread.unread);
}

// What was modified after a time is news, unless this process did it.
TEST_F(DirectoryTest, WhatAStoreOfThisProcessEndedWithIsNoNews) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  EXPECT_TRUE(SeeCommits(options_.directories, 0).empty());
  Step(*store, &model, 1);
  store.reset();
  const std::vector<CommitSeen> seen = SeeCommits(options_.directories, 0);
  EXPECT_EQ(seen, SeeCommits(options_.directories));
  EXPECT_EQ(seen.size(), 1u);
  const pid_t other = ::fork();  // another process goes on with it
  if (other == 0) {
    auto engine = aio::Engine::Create({});
    auto resumed = Store::Open(**engine, options_);
    Step(**resumed, &model, 2);
    resumed->reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(SeeCommits(options_.directories, 0).empty());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckSeen(options_.directories, seen)));
}

TEST_F(DirectoryTest, ACutOffFileIsNamed) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  std::filesystem::resize_file(File(), std::filesystem::file_size(File()) - kSectorBytes);
  const auto store = Store::Open(*engine_, options_);
  EXPECT_TRUE(absl::IsDataLoss(store.status()));
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("cut off"));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kDamaged);
}

class StripedStoreTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    options_.directories = {scratch_.Sub("d0"), scratch_.Sub("d1"), scratch_.Sub("d2")};
    layout_ = SmallLayout(9);
  }
};

TEST_F(StripedStoreTest, TilesAreOnAllDirectoriesAndComeBackInAnyOrderOfThem) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  std::vector<int> tiles(3);
  for (uint32_t t = 0; t < 9; ++t) ++tiles[store->geometry().directory(t)];
  EXPECT_THAT(tiles, ElementsAre(3, 3, 3));
  store.reset();
  std::swap(options_.directories[0], options_.directories[2]);
  std::filesystem::rename(options_.directories[1], scratch_.Sub("moved"));
  options_.directories[1] = scratch_.Sub("moved");
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kRun);
  EXPECT_EQ(Probe(options_.directories).step, 1u);
  store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StripedStoreTest, WeightsDecideHowMuchADirectoryHolds) {
  options_.weights = {1, 7, 1};
  auto store = Create();
  const Geometry& g = store->geometry();
  EXPECT_GT(g.file_bytes(1), 2 * g.file_bytes(0));
  store.reset();
  options_.overwrite = true;
  options_.weights = {1, 2};
  EXPECT_TRUE(absl::IsInvalidArgument(Store::Create(*engine_, options_, layout_, "{}").status()));
  options_.weights = {1, 2, -1};
  EXPECT_TRUE(absl::IsInvalidArgument(Store::Create(*engine_, options_, layout_, "{}").status()));
}

TEST_F(StripedStoreTest, LostSwappedAndSurplusDirectoriesAreNamed) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  StoreOptions others = options_;
  others.directories = {scratch_.Sub("x0"), scratch_.Sub("x1"), scratch_.Sub("x2")};
  const StoreOptions own = options_;
  options_ = others;
  CreateCommitted(&model).reset();
  options_ = own;
  const auto message = [&](std::vector<std::string> directories) {
    StoreOptions options = options_;
    options.directories = std::move(directories);
    EXPECT_EQ(Probe(options.directories).holding, Holding::kDamaged);
    const auto store = Store::Open(*engine_, options);
    EXPECT_FALSE(store.ok());
    return std::string(store.status().message());
  };
  const auto& mine = options_.directories;
  EXPECT_THAT(message({mine[0], mine[2]}), HasSubstr("directory 1 of the 3"));
  EXPECT_THAT(message({mine[0], mine[2]}), HasSubstr(mine[1]));
  EXPECT_THAT(message({mine[1], mine[2]}), HasSubstr("directory 0 of the 3"));
  EXPECT_THAT(message({mine[0], mine[1], others.directories[2]}), HasSubstr("belongs to run"));
  EXPECT_THAT(message({mine[0], mine[1], mine[2], scratch_.Sub("new")}), HasSubstr("were given"));
  StoreOptions twice = options_;
  twice.directories = {mine[0], mine[1], mine[1]};
  EXPECT_THAT(std::string(Store::Open(*engine_, twice).status().message()), HasSubstr("given twice"));
  std::filesystem::remove(StorePath(mine[1]));
  EXPECT_THAT(message(mine), HasSubstr("directory 1 of the 3"));
}

TEST_F(DirectoryTest, InspectTellsWhatARunIs) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  auto seen = Inspect(options_.directories);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_TRUE(seen->in_use);
  EXPECT_EQ(seen->record.step, 1u);
  EXPECT_EQ(seen->record.payload, "p1");
  EXPECT_EQ(seen->state_bytes, store->geometry().state_bytes());
  EXPECT_THAT(seen->paths, ElementsAre(File()));
  for (uint32_t t = 0; t < store->geometry().tiles(); ++t) {
    EXPECT_EQ(seen->record.tiles[t].slot, store->committed(t).slot);
  }
  store.reset();
  seen = Inspect(options_.directories);
  ASSERT_TRUE(seen.ok());
  EXPECT_FALSE(seen->in_use);
  EXPECT_TRUE(absl::IsNotFound(Inspect({scratch_.Sub("nowhere")}).status()));
}

TEST_F(DirectoryTest, AFileThatWasCutOffIsDamageForAllWhoLook) {
  options_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  for (const int d : {0, 1}) {
    const auto bytes = std::filesystem::file_size(File(d));
    std::filesystem::resize_file(File(d), bytes - kSectorBytes);
    const Finding finding = Probe(options_.directories);
    EXPECT_EQ(finding.holding, Holding::kDamaged) << d;
    EXPECT_THAT(finding.text, HasSubstr("cut off"));
    const auto inspection = Inspect(options_.directories);
    EXPECT_TRUE(absl::IsDataLoss(inspection.status())) << inspection.status();
    EXPECT_THAT(std::string(inspection.status().message()), HasSubstr(File(d)));
    EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, options_).status()));
    std::filesystem::resize_file(File(d), bytes);
  }
  EXPECT_TRUE(Inspect(options_.directories).ok());
}

// Both header copies lie side by side, and one lost erase block takes both. What stands behind them tells a
// run from one that was never committed, and a run is not started over.
TEST_F(DirectoryTest, ZeroedHeadersBeforeARunAreDamageForAllWhoLook) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  const uint64_t records = store->geometry().record_offset(0, 0);
  store.reset();
  const auto zero = [&](const std::string& path, uint64_t bytes) {
    const std::string zeros(bytes, '\0');
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .write(zeros.data(), static_cast<std::streamsize>(bytes));
  };
  const auto expect = [&](Holding holding, absl::StatusCode code) {
    const Finding finding = Probe(options_.directories);
    EXPECT_EQ(finding.holding, holding) << finding.text;
    const absl::Status inspected = Inspect(options_.directories).status();
    EXPECT_EQ(inspected.code(), code) << inspected;
    const absl::Status opened = Store::Open(*engine_, options_).status();
    EXPECT_EQ(opened.code(), code) << opened;
    if (code == absl::StatusCode::kNotFound) return;
    for (const std::string& text :
         {finding.text, std::string(inspected.message()), std::string(opened.message())}) {
      EXPECT_THAT(text, ::testing::AllOf(HasSubstr("overwritten"), HasSubstr("`checkpoint_dir`")));
    }
  };
  // The headers; the bodies too; the records too: tiles are left.
  for (const uint64_t bytes : {2 * kSectorBytes, records, kTileAreaAlignment}) {
    SCOPED_TRACE(absl::StrCat(bytes, " bytes"));
    zero(File(), bytes);
    expect(Holding::kDamaged, absl::StatusCode::kDataLoss);
  }
  // It is ours, and may be replaced.
  options_.overwrite = true;
  Create().reset();
  expect(Holding::kNeverCommitted, absl::StatusCode::kNotFound);
  // Cut short as creation leaves it: bodies, perhaps torn; then header copy 1, perhaps torn.
  std::string begin(records, '\0');
  std::ifstream(File(), std::ios::binary).read(begin.data(), static_cast<std::streamsize>(records));
  for (const uint64_t whole : {2 * kSectorBytes, 2 * kSectorBytes + 4096, records}) {
    for (const uint64_t of_header : {uint64_t{0}, uint64_t{512}, kSectorBytes - 512}) {
      std::string cut = begin;
      std::fill_n(cut.begin(), kSectorBytes, '\0');
      std::fill(cut.begin() + static_cast<ptrdiff_t>(whole), cut.end(), '\0');
      // The first 512 bytes of the header, or all but those, or none.
      const uint64_t from = of_header > 512 ? 512 : 0;
      std::string header(kSectorBytes, '\0');
      header.replace(from, of_header, begin, kSectorBytes + from, of_header);
      cut.replace(kSectorBytes, kSectorBytes, header);
      std::fstream(File(), std::ios::in | std::ios::out | std::ios::binary)
          .write(cut.data(), static_cast<std::streamsize>(cut.size()));
      expect(Holding::kNeverCommitted, absl::StatusCode::kNotFound);
    }
  }
  EXPECT_NE(Create(), nullptr);

  // Of several directories, any: with a commit in directory 0 all of them were whole.
  options_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
  for (const int d : {0, 1}) {
    SCOPED_TRACE(absl::StrCat("directory ", d));
    CreateCommitted(&model).reset();
    zero(File(d), 2 * kSectorBytes);
    expect(Holding::kDamaged, absl::StatusCode::kDataLoss);
    zero(File(d), kTileAreaAlignment);
    expect(Holding::kDamaged, absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace penstock::swap::directory_test
