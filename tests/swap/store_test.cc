// The store on the real disk: what is committed comes back bit for bit, what is not is as if it never was,
// and whatever is wrong is named.
#include "swap/store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "swap/inspect.h"
#include "swap/store_files.h"
#include "tests/swap/count_allocations.h"
#include "tests/swap/fake_model.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    aio::EngineOptions engine_options;
    engine_options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(engine_options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    options_.directories = {scratch_.Sub("run")};
    options_.lock_patience_ms = 50;
  }

  std::unique_ptr<Store> Create(const std::string& identity = "{}") {
    auto store = Store::Create(*engine_, options_, layout_, identity);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  std::unique_ptr<Store> Open() {
    auto store = Store::Open(*engine_, options_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  // A store at step 0 that holds `model`.
  std::unique_ptr<Store> CreateCommitted(FakeModel* model) {
    auto store = Create();
    model->Initialize();
    EXPECT_TRUE(model->WriteAll(*store, 1).ok());
    const absl::Status committed = store->CommitNow({.step = 0, .updates = 0, .payload = "first"});
    EXPECT_TRUE(committed.ok()) << committed;
    return store;
  }
  void Step(Store& store, FakeModel* model, uint64_t step) {
    model->UpdateAll(step);
    ASSERT_TRUE(model->WriteAll(store, step + 1).ok());
    const absl::Status committed =
        store.CommitNow({.step = step, .updates = step, .payload = absl::StrCat("p", step)});
    ASSERT_TRUE(committed.ok()) << committed;
  }
  std::string File(int directory = 0) const { return StorePath(options_.directories[directory]); }
  void Flip(const std::string& path, uint64_t offset, uint8_t mask = 1) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    uint8_t byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= mask;
    ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(::fsync(fd), 0);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }

  ScratchDirectory scratch_;
  std::unique_ptr<aio::Engine> engine_;
  StoreOptions options_;
  Layout layout_ = SmallLayout();
};

TEST_F(StoreTest, WhatIsCommittedComesBack) {
  FakeModel model(layout_, 1), read(layout_, 2);
  {
    auto store = CreateCommitted(&model);
    for (uint64_t step = 1; step <= 5; ++step) Step(*store, &model, step);
    EXPECT_EQ(store->committed_step(), 5u);
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 5u);
  EXPECT_EQ(store->recovered().updates, 5u);
  EXPECT_EQ(store->recovered().sequence, 6u);
  EXPECT_EQ(store->recovered().payload, "p5");
  EXPECT_THAT(store->recovered().damage, IsEmpty());
  EXPECT_EQ(store->identity(), "{}");
  const absl::Status read_back = read.ReadAll(*store);
  ASSERT_TRUE(read_back.ok()) << read_back;
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, SegmentsThatLieApartInMemoryAreGathered) {
  FakeModel model(layout_, 1, /*adjacent=*/false), read(layout_, 2);
  CreateCommitted(&model).reset();
  auto store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, WhatIsNotCommittedIsAsIfItNeverWas) {
  FakeModel model(layout_, 1), committed(layout_, 1), read(layout_, 2);
  committed.Initialize();
  {
    auto store = CreateCommitted(&model);
    model.UpdateAll(1);
    ASSERT_TRUE(model.WriteAll(*store, 2).ok());
    // The newest version is the one just written; the committed one is still there.
    ASSERT_TRUE(read.ReadAll(*store, Which::kNewest).ok());
    EXPECT_EQ(read.Difference(model), "");
    ASSERT_TRUE(read.ReadAll(*store, Which::kCommitted).ok());
    EXPECT_EQ(read.Difference(committed), "");
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 0u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(committed), "");
}

TEST_F(StoreTest, TilesThatASkippedStepLeavesAloneStayWhereTheyAre) {
  FakeModel model(layout_, 1), read(layout_, 2);
  {
    auto store = CreateCommitted(&model);
    model.Update(2, 1);
    ASSERT_TRUE(model.WriteTile(*store, 2, 2).ok());
    ASSERT_TRUE(store->CommitNow({.step = 1, .updates = 1, .payload = ""}).ok());
    EXPECT_EQ(store->committed(2).version, 2u);
    EXPECT_EQ(store->committed(1).version, 1u);
    ASSERT_TRUE(store->CommitNow({.step = 2, .updates = 1, .payload = "skipped"}).ok());
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 2u);
  EXPECT_EQ(store->recovered().updates, 1u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, DroppedVersionsAreGoneAndRedoneFromTheOldOnes) {
  FakeModel model(layout_, 1), speculative(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  speculative.Initialize();
  speculative.UpdateAll(99);
  ASSERT_TRUE(speculative.WriteAll(*store, 2).ok());
  EXPECT_EQ(store->newest_version(0), 2u);
  ASSERT_TRUE(store->DropAllWritten().ok());
  EXPECT_EQ(store->newest_version(0), 1u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
  Step(*store, &model, 1);
  store.reset();
  store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, AnyRunOfSegmentsIsOneTransferToAnyPlaces) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  const Geometry& g = store->geometry();
  for (uint32_t tile = 0; tile < g.tiles(); ++tile) {
    for (uint32_t first = 0; first < 4; ++first) {
      for (uint32_t count = 1; first + count <= 4; ++count) {
        for (bool adjacent : {true, false}) {
          AlignedBuffer memory(g.slot_bytes(tile) + 5 * kBlockBytes);
          std::vector<void*> places;
          uint64_t at = 0;
          for (uint32_t i = 0; i < count; ++i) {
            places.push_back(memory.data() + at);
            at += PaddedBytes(g.segment_bytes(tile, first + i)) + (adjacent ? 0 : kBlockBytes);
          }
          TileIo io;
          ASSERT_TRUE(store->ReadSegments(&io, tile, first, count, places, aio::Priority::kPrefetch).ok());
          ASSERT_TRUE(store->Wait(&io).ok());
          const absl::Status verified = store->VerifyRead(io);
          ASSERT_TRUE(verified.ok()) << verified;
          for (uint32_t i = 0; i < count; ++i) {
            ASSERT_EQ(0, std::memcmp(places[i], model.tile(tile)[first + i].data(),
                                     g.segment_bytes(tile, first + i)));
          }
        }
      }
    }
  }
}

TEST_F(StoreTest, ScratchIsThereAndTouchesNoVersion) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  const uint64_t bytes = store->geometry().scratch_bytes(2);
  ASSERT_GT(bytes, 0u);
  AlignedBuffer out(PaddedBytes(bytes)), in(PaddedBytes(bytes));
  for (uint64_t i = 0; i < bytes; ++i) out.data()[i] = static_cast<std::byte>(i * 7);
  TileIo io;
  ASSERT_TRUE(store->WriteScratch(&io, 2, 0, out.data(), bytes, aio::Priority::kWriteBehind).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  ASSERT_TRUE(store->ReadScratch(&io, 2, 0, in.data(), bytes, aio::Priority::kDemand).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_EQ(0, std::memcmp(in.data(), out.data(), bytes));
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->WriteScratch(&io, 2, 1, out.data(), bytes, aio::Priority::kWriteBehind)));
  EXPECT_TRUE(absl::IsInvalidArgument(store->ReadScratch(&io, 1, 0, in.data(), 1, aio::Priority::kDemand)));
}

TEST_F(StoreTest, MisuseIsRefusedWithItsReason) {
  FakeModel model(layout_, 1);
  model.Initialize();
  auto store = Create();
  void* place = model.tile(0)[0].data();
  TileIo io;
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store->ReadSegments(&io, 0, 0, 1, std::span(&place, 1), aio::Priority::kDemand)));
  EXPECT_THAT(std::string(store->CommitNow({}).message()), HasSubstr("tile 0 was never written"));
  EXPECT_TRUE(absl::IsInvalidArgument(model.WriteTile(*store, 0, 0)));  // versions start with 1
  ASSERT_TRUE(model.WriteAll(*store, 1).ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(store->CommitNow({.payload = std::string(kDefaultPayloadCapacity + 1, 'x')})));
  ASSERT_TRUE(store->CommitNow({.step = 7, .updates = 7, .payload = ""}).ok());
  EXPECT_THAT(std::string(store->CommitNow({.step = 6, .updates = 7, .payload = ""}).message()),
              HasSubstr("commit of step 6"));
  EXPECT_THAT(std::string(model.WriteTile(*store, 0, 1).message()), HasSubstr("not above the committed 1"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->ReadSegments(&io, 0, 3, 2, std::vector<void*>(2, place), aio::Priority::kDemand)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->ReadSegments(&io, 99, 0, 1, std::span(&place, 1), aio::Priority::kDemand)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->NoteWritten(&io, {})));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->VerifyRead(io)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Retain()));  // two slots

  // A write that nobody took notice of: nothing can be committed over its head.
  ASSERT_TRUE(model.Submit(*store, &io, 1, 2).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_THAT(std::string(store->CommitNow({.step = 8, .updates = 8, .payload = ""}).message()),
              HasSubstr("writes that were not noted"));
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(*store, 1, 3)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->DropWritten(1)));
  ASSERT_TRUE(model.Note(*store, &io).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(model.Note(*store, &io)));  // once
  ASSERT_TRUE(store->CommitNow({.step = 8, .updates = 8, .payload = ""}).ok());
}

TEST_F(StoreTest, ReadOnlyStoresCannotBeWritten) {
  FakeModel model(layout_, 1), read(layout_, 2);
  CreateCommitted(&model).reset();
  options_.read_only = true;
  auto store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(*store, 0, 2)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->CommitNow({.step = 1, .updates = 1, .payload = ""})));
}

TEST_F(StoreTest, DamageIsNamedByRange) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  const Geometry& g = store->geometry();
  const uint64_t offset = g.segment_offset(3, store->committed(3).slot, 2);
  Flip(File(), offset + 77);
  const absl::Status status = read.ReadTile(*store, 3);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr(File()), HasSubstr(absl::StrCat("offset ", offset)),
                               HasSubstr("tile 3 segment 2"), HasSubstr("version 1")));
  EXPECT_TRUE(read.ReadTile(*store, 2).ok());
}

TEST_F(StoreTest, StaleAndMisdirectedTilesAreFound) {
  layout_.tiles.assign(3, layout_.tiles[0]);  // equal tiles, so that one fits into the place of another
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  const Geometry& g = store->geometry();
  const auto copy = [&](uint64_t from, uint64_t to) {
    std::vector<char> bytes(g.slot_bytes(0));
    const int fd = ::open(File().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_EQ(::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(from)),
              static_cast<ssize_t>(bytes.size()));
    ASSERT_EQ(::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(to)),
              static_cast<ssize_t>(bytes.size()));
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  };
  // A write that was lost: the slot still holds what stood there two versions ago.
  copy(g.slot_offset(0, 1 - store->committed(0).slot), g.slot_offset(0, store->committed(0).slot));
  EXPECT_TRUE(absl::IsDataLoss(read.ReadTile(*store, 0)));
  // A write that landed on another tile.
  copy(g.slot_offset(2, store->committed(2).slot), g.slot_offset(1, store->committed(1).slot));
  EXPECT_TRUE(absl::IsDataLoss(read.ReadTile(*store, 1)));
  EXPECT_TRUE(read.ReadTile(*store, 2).ok());
}

TEST_F(StoreTest, ASecondRunIsRefusedWhileTheFirstOneLives) {
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

TEST_F(StoreTest, FilesArePrivateAndLinksAreNotFollowed) {
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

TEST_F(StoreTest, ALinkToTheDirectoryOfSomebodyElseIsRefused) {
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

TEST_F(StoreTest, SpaceIsWhatWasSaidBefore) {
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

TEST_F(StoreTest, TooLittleSpaceIsRefusedBeforeAnythingIsMade) {
  layout_.tiles.assign(1 << 20, TileLayout{{kMaxTileBytes}, 0});  // 2 PiB
  const auto store = Store::Create(*engine_, options_, layout_, "{}");
  EXPECT_TRUE(absl::IsResourceExhausted(store.status())) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("too little"));
  EXPECT_FALSE(std::filesystem::exists(File()));
}

TEST_F(StoreTest, ARunIsNotOverwrittenUnlessAsked) {
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

TEST_F(StoreTest, AFileThatIsNotOursIsNeverRemoved) {
  std::filesystem::create_directory(options_.directories[0]);
  std::ofstream(File()) << "somebody's thesis";
  options_.overwrite = true;
  const auto store = Store::Create(*engine_, options_, layout_, "{}");
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("was not made by this program"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Store::Open(*engine_, options_).status()));
  EXPECT_EQ(Probe(options_.directories).holding, Holding::kForeign);
  EXPECT_EQ(std::filesystem::file_size(File()), 17u);
}

TEST_F(StoreTest, ProbeTellsWhatADirectoryHolds) {
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
  Flip(File(), kBlockBytes + 33);
  EXPECT_EQ(holding(), Holding::kDamaged);
  EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, options_).status()));
}

TEST_F(StoreTest, AFlippedBitInTheNewestRecordCostsNothing) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  const Geometry g = store->geometry();
  store.reset();
  const uint64_t place = 2 % kRecordPlaces;  // of the second commit
  Flip(File(), g.record_offset(place, 0) + kBlockBytes + 3);
  store = Open();
  EXPECT_EQ(store->recovered().step, 1u);
  ASSERT_EQ(store->recovered().damage.size(), 1u);
  EXPECT_THAT(store->recovered().damage[0], HasSubstr("place 0 copy 0"));
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, ARecordCutShortLeavesTheOneBefore) {
  FakeModel model(layout_, 1), before(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  before.Initialize();
  Step(*store, &model, 1);
  const Geometry g = store->geometry();
  store.reset();
  for (uint32_t copy = 0; copy < 2; ++copy) Flip(File(), g.record_offset(0, copy) + kBlockBytes + 3);
  store = Open();
  EXPECT_EQ(store->recovered().step, 0u);
  EXPECT_EQ(store->recovered().damage.size(), 2u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(before), "");
  // The next commit heals the place.
  Step(*store, &before, 1);
  store.reset();
  store = Open();
  EXPECT_THAT(store->recovered().damage, IsEmpty());
  EXPECT_EQ(store->recovered().step, 1u);
}

TEST_F(StoreTest, ACutOffFileIsNamed) {
  FakeModel model(layout_, 1);
  CreateCommitted(&model).reset();
  std::filesystem::resize_file(File(), std::filesystem::file_size(File()) - kBlockBytes);
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
  std::swap(options_, others);
  CreateCommitted(&model).reset();
  std::swap(options_, others);
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

TEST_F(StoreTest, PowerSyncCommitsToo) {
  options_.sync = Sync::kPower;
  options_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  for (uint64_t step = 1; step <= 3; ++step) Step(*store, &model, step);
  EXPECT_GE(engine_->stats().Total(aio::Op::kSync).requests,
            4u * 3u);  // two files before the record, one after it
  store.reset();
  store = Open();
  EXPECT_EQ(store->recovered().step, 3u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, ARetainedVersionStaysWhileTrainingGoesOn) {
  options_.slots = 3;
  FakeModel model(layout_, 1), kept(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  ASSERT_TRUE(store->Retain().ok());
  ASSERT_NE(store->retained(), nullptr);
  EXPECT_EQ(store->retained()->step, 1u);
  kept.Initialize();
  kept.UpdateAll(1);
  for (uint64_t step = 2; step <= 6; ++step) {
    Step(*store, &model, step);
    ASSERT_TRUE(read.ReadAll(*store, Which::kRetained).ok());
    EXPECT_EQ(read.Difference(kept), "");
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(model), "");
  }
  store->Release(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(read.ReadTile(*store, 0, Which::kRetained)));
  EXPECT_TRUE(read.ReadTile(*store, 1, Which::kRetained).ok());
  store->Release();
  EXPECT_EQ(store->retained(), nullptr);
}

TEST_F(StoreTest, CallbacksReportCompletions) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  std::atomic<int> tiles{0}, commits{0};
  TileIo io;
  io.set_on_complete([](TileIo&, void* context) { ++*static_cast<std::atomic<int>*>(context); }, &tiles);
  model.Update(0, 1);
  ASSERT_TRUE(model.Submit(*store, &io, 0, 2).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_EQ(tiles.load(), 1);
  ASSERT_TRUE(model.Note(*store, &io).ok());
  CommitIo commit;
  commit.set_on_complete([](CommitIo&, void* context) { ++*static_cast<std::atomic<int>*>(context); },
                         &commits);
  ASSERT_TRUE(store->Commit(&commit, {.step = 1, .updates = 1, .payload = ""}).ok());
  while (!commit.finished()) ASSERT_TRUE(engine_->Drain().ok());
  ASSERT_TRUE(engine_->Drain().ok());
  EXPECT_EQ(commits.load(), 1);
  ASSERT_TRUE(store->FinishCommit(&commit).ok());
  EXPECT_GT(commit.duration_ns(), 0);
  EXPECT_EQ(commit.sequence(), 2u);
}

// Promise: reading, writing and committing allocate nothing once every object has been used.
TEST_F(StoreTest, TheSteadyStateAllocatesNothing) {
  if (!CountsAllocations()) GTEST_SKIP() << "allocations are not counted in this build";
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  std::vector<TileIo> ios(layout_.tiles.size());
  std::vector<std::vector<const void*>> sources(ios.size());
  std::vector<std::vector<void*>> places(ios.size());
  for (uint32_t t = 0; t < ios.size(); ++t) {
    for (const FakeModel::Segment& segment : model.tile(t)) {
      sources[t].push_back(segment.data());
      places[t].push_back(segment.data());
    }
  }
  CommitIo commit;
  const std::string payload(1000, 'x');
  uint64_t before = 0;
  for (uint64_t step = 1; step <= 6; ++step) {
    if (step == 3) before = AllocationsOfThisThread();
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->ReadSegments(&ios[t], t, 0, 4, places[t], aio::Priority::kPrefetch).ok());
    }
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->Wait(&ios[t]).ok());
      ASSERT_TRUE(store->VerifyRead(ios[t]).ok());
      ASSERT_TRUE(store->WriteTile(&ios[t], t, step + 1, sources[t], aio::Priority::kWriteBehind).ok());
    }
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->Wait(&ios[t]).ok());
      uint64_t checksums[4];
      for (uint32_t s = 0; s < 4; ++s) checksums[s] = store->SegmentChecksum(t, s, step + 1, sources[t][s]);
      ASSERT_TRUE(store->NoteWritten(&ios[t], checksums).ok());
    }
    ASSERT_TRUE(store->Commit(&commit, {.step = step, .updates = step, .payload = payload}).ok());
    while (!commit.finished()) ASSERT_TRUE(engine_->Drain().ok());
    ASSERT_TRUE(store->FinishCommit(&commit).ok());
  }
  EXPECT_EQ(AllocationsOfThisThread() - before, 0u);
}

TEST_F(StoreTest, InspectTellsWhatARunIs) {
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

}  // namespace
}  // namespace penstock::swap
