// The small parts: bytes, histogram, errors, arena, file, cutting requests into pieces.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <thread>

#include "aio/bytes.h"
#include "aio/io_error.h"
#include "aio/numa.h"
#include "aio/piece.h"
#include "aio/stats.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::unit_test {
namespace {

using testing::HasSubstr;

TEST(BytesTest, Alignment) {
  EXPECT_EQ(AlignUp(5000, 4096), 8192u);
  EXPECT_EQ(AlignUp(8192, 4096), 8192u);
  EXPECT_EQ(AlignDown(5000, 4096), 4096u);
  EXPECT_TRUE(IsAligned(0, 4096));
  EXPECT_FALSE(IsPowerOfTwo(0));
}

TEST(BytesTest, FormatsAndParses) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(64 * kKiB), "64.0 KiB");
  EXPECT_EQ(FormatBytes(3 * kGiB), "3.00 GiB");
  EXPECT_EQ(*ParseBytes("4096"), 4096u);
  EXPECT_EQ(*ParseBytes("64K"), 64 * kKiB);
  EXPECT_EQ(*ParseBytes("512M"), 512 * kMiB);
  EXPECT_EQ(*ParseBytes("4GiB"), 4 * kGiB);
  EXPECT_EQ(*ParseBytes("1.5g"), kGiB + kGiB / 2);
  EXPECT_EQ(*ParseBytes("1e9"), 1000000000u);
  EXPECT_EQ(*ParseBytes("2TB"), 2048 * kGiB);
  for (const char* bad :
       {"", "x", "-1", "+1", "1Q", "1KK", "0x10", "inf", "nan", "1e30", "0.3", " 1", "1 K", "1Ki"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseBytes(bad).status())) << bad;
  }
}

TEST(BytesTest, ParsingSurvivesAnything) {
  std::mt19937_64 random(5);
  const std::string_view letters = "0123456789.eE+-KMGTiBx \0z";
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (uint64_t n = random() % 12; n != 0; --n) text += letters[random() % letters.size()];
    const auto bytes = ParseBytes(text);
    if (bytes.ok()) {
      EXPECT_LT(*bytes, uint64_t{1} << 63) << text;
    }
  }
}

TEST(HistogramTest, EveryValueIsWithinItsBucket) {
  for (int bucket = 0; bucket + 1 < Histogram::kBuckets; ++bucket) {
    const uint64_t upper = Histogram::BucketUpperNs(bucket);
    ASSERT_EQ(Histogram::BucketOf(upper), bucket);
    ASSERT_EQ(Histogram::BucketOf(upper + 1), bucket + 1);
  }
  EXPECT_EQ(Histogram::BucketOf(UINT64_MAX), Histogram::kBuckets - 1);
}

TEST(HistogramTest, PercentilesAreWithinABucketOfTheTruth) {
  std::mt19937_64 random(1);
  Histogram histogram;
  std::vector<uint64_t> values;
  for (int i = 0; i < 10000; ++i) {
    const uint64_t value = random() % 1000000 + 100;
    values.push_back(value);
    histogram.Record(value);
  }
  std::sort(values.begin(), values.end());
  for (const double share : {0.5, 0.9, 0.99, 0.999}) {
    const double truth = static_cast<double>(values[static_cast<size_t>(share * 10000) - 1]);
    const double told = static_cast<double>(histogram.PercentileNs(share));
    EXPECT_GE(told, truth);
    EXPECT_LE(told, truth * 1.13);
  }
  EXPECT_EQ(histogram.PercentileNs(1.0), values.back());
  EXPECT_EQ(Histogram().PercentileNs(0.5), 0u);
}

TEST(HistogramTest, MergeAndSubtract) {
  Histogram a, b;
  a.Record(10);
  b.Record(1000);
  Histogram both = a;
  both.Merge(b);
  EXPECT_EQ(both.count(), 2u);
  both.Subtract(a);
  EXPECT_EQ(both.count(), 1u);
  EXPECT_GE(both.PercentileNs(0.5), 1000u);
}

TEST(StatsTest, WhatAnEngineBeforeHasCountedComesToIt) {
  DeviceStats drive;
  drive.device = "vda";
  drive.backend = "io_uring";
  EngineStats now, before;
  drive.device_read_bytes = 10;
  drive.peak_in_flight_bytes = 4;
  drive.in_flight_bytes = 3;
  drive.classes[0][0].requests = 2;
  now.devices = {drive};
  now.saturated_ns = 5;
  drive.device_read_bytes = 100;
  drive.peak_in_flight_bytes = 8;
  drive.in_flight_bytes = 7;
  before.devices = {drive};
  before.saturated_ns = 50;
  drive.device = "vdb";
  before.devices.push_back(drive);
  now.Merge(before);
  ASSERT_EQ(now.devices.size(), 2U);
  EXPECT_EQ(now.DeviceReadBytes(), 210U);
  EXPECT_EQ(now.saturated_ns, 55);
  EXPECT_EQ(now.devices[0].device_read_bytes, 110U);
  EXPECT_EQ(now.devices[0].peak_in_flight_bytes, 8U);
  EXPECT_EQ(now.devices[0].in_flight_bytes, 3U);
  EXPECT_EQ(now.devices[0].classes[0][0].requests, 4U);
  EXPECT_EQ(now.devices[1].in_flight_bytes, 0U);
}

TEST(IoErrorTest, NamesEverythingAndTheWayOut) {
  const absl::Status status = MakeIoError({.op = "write",
                                           .path = "/nvme/a",
                                           .device = "nvme0n1",
                                           .offset = 8192,
                                           .bytes = 4096,
                                           .done_bytes = 512,
                                           .error = ENOSPC});
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  for (const char* part :
       {"write", "/nvme/a", "nvme0n1", "8192", "4096", "512", "No space left", "errno 28", "free space"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
  EXPECT_EQ(IoErrorCode(EIO), absl::StatusCode::kDataLoss);
  EXPECT_EQ(IoErrorCode(EBADF), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(IoErrorCode(0), absl::StatusCode::kOk);
  for (int error = 1; error < 134; ++error) EXPECT_NE(IoErrorCode(error), absl::StatusCode::kOk) << error;
}

std::unique_ptr<Arena> MakeArena(uint64_t bytes) {
  ArenaOptions options;
  options.bytes = bytes;
  auto arena = Arena::Create(options);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

TEST(ArenaTest, IsAlignedTouchedAndSaysItsPages) {
  auto arena = MakeArena(5 * kMiB);
  EXPECT_EQ(arena->bytes(), 6 * kMiB);
  EXPECT_TRUE(IsAligned(reinterpret_cast<uint64_t>(arena->data()), kHugePageBytes));
  EXPECT_TRUE(PageKindName(arena->page_kind()) != "unknown");
  arena->data()[0] = std::byte{1};
  arena->data()[arena->bytes() - 1] = std::byte{1};
  for (const bool huge : {true, false}) {
    ArenaOptions options;
    options.bytes = 4 * kMiB;
    options.try_hugetlb = false;
    options.try_transparent = huge;
    auto other = Arena::Create(options);
    ASSERT_OK(other.status());
    if (!huge) {
      EXPECT_EQ((*other)->page_kind(), PageKind::kSmall);
    }
  }
}

TEST(ArenaTest, RegionsAreApartAndComeBack) {
  auto arena = MakeArena(4 * kMiB);
  auto a = arena->Allocate(100), b = arena->Allocate(5000), c = arena->Allocate(kMiB, kHugePageBytes);
  ASSERT_TRUE(a.ok() && b.ok() && c.ok());
  EXPECT_TRUE(IsAligned(reinterpret_cast<uint64_t>(b->data()), 4096));
  EXPECT_TRUE(IsAligned(reinterpret_cast<uint64_t>(c->data()), kHugePageBytes));
  EXPECT_TRUE(arena->Contains(b->data(), 5000));
  EXPECT_FALSE(arena->Contains(arena->data() + arena->bytes() - 1, 2));
  EXPECT_EQ(arena->stats().regions, 3u);
  EXPECT_EQ(arena->stats().waste_bytes, 28u + 56u);  // 100 -> 128, 5000 -> 5056
  Region moved = *std::move(a);
  EXPECT_TRUE(a->empty());
  moved = Region();
  b->Release();
  b->Release();
  *c = Region();
  const ArenaStats stats = arena->stats();
  EXPECT_EQ(stats.used_bytes, 0u);
  EXPECT_EQ(stats.waste_bytes, 0u);
  EXPECT_EQ(stats.regions, 0u);
  EXPECT_EQ(stats.largest_free_bytes, arena->bytes());
  EXPECT_GT(stats.peak_bytes, kMiB);
}

TEST(ArenaTest, FullIsBackPressureAndTooMuchIsAnError) {
  auto arena = MakeArena(2 * kMiB);
  auto all = arena->Allocate(2 * kMiB);
  ASSERT_OK(all.status());
  const auto more = arena->Allocate(1);
  EXPECT_TRUE(absl::IsResourceExhausted(more.status()));
  EXPECT_THAT(std::string(more.status().message()), HasSubstr("0 B of 2.00 MiB free"));
  EXPECT_EQ(arena->stats().refusals, 1u);
  all->Release();
  EXPECT_OK(arena->Allocate(1).status());
  EXPECT_TRUE(absl::IsInvalidArgument(arena->Allocate(3 * kMiB).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(arena->Allocate(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(arena->Allocate(1, 3).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(arena->Allocate(1, 4 * kMiB).status()));
  ArenaOptions none;
  EXPECT_TRUE(absl::IsInvalidArgument(Arena::Create(none).status()));
  none.bytes = uint64_t{1} << 49;
  none.touch = none.lock = false;
  EXPECT_TRUE(absl::IsResourceExhausted(Arena::Create(none).status()));
}

// Random allocations and releases against a plain list: never overlapping, always accounted for.
TEST(ArenaTest, SurvivesRandomUse) {
  auto arena = MakeArena(8 * kMiB);
  std::mt19937_64 random(3);
  std::vector<Region> live;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 == 0 || live.empty()) {
      const uint64_t alignment = uint64_t{1} << (random() % 16);
      auto region = arena->Allocate(1 + random() % 300000, alignment);
      if (!region.ok()) {
        ASSERT_TRUE(absl::IsResourceExhausted(region.status()));
        live.erase(live.begin() + static_cast<ptrdiff_t>(random() % live.size()));
        continue;
      }
      ASSERT_TRUE(IsAligned(reinterpret_cast<uint64_t>(region->data()), alignment));
      for (const Region& other : live) {
        ASSERT_TRUE(region->data() + region->bytes() <= other.data() ||
                    other.data() + other.bytes() <= region->data());
      }
      live.push_back(*std::move(region));
    } else {
      live.erase(live.begin() + static_cast<ptrdiff_t>(random() % live.size()));
    }
    uint64_t asked = 0;
    for (const Region& region : live) asked += region.bytes();
    const ArenaStats stats = arena->stats();
    ASSERT_EQ(stats.used_bytes - stats.waste_bytes, asked);
  }
  live.clear();
  EXPECT_EQ(arena->stats().largest_free_bytes, arena->bytes());
}

TEST(ArenaTest, ManyThreads) {
  auto arena = MakeArena(8 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        auto region = arena->Allocate(100000);
        if (!region.ok()) continue;
        std::memset(region->data(), t, region->bytes());
        for (uint64_t at = 0; at < region->bytes(); at += 4096)
          ASSERT_EQ(region->data()[at], static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->stats().used_bytes, 0u);
}

TEST(NumaTest, ListsAndNodes) {
  EXPECT_EQ(ParseCpuList("0-3,8,10-11"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(ParseCpuList("5"), std::vector<int>{5});
  EXPECT_EQ(ParseCpuList("3-1,-4,x,7-,2"), std::vector<int>{2});
  EXPECT_EQ(ParseCpuList(""), std::vector<int>{});
  EXPECT_GE(NumaNodes(), 1);
  EXPECT_FALSE(PinThreadToNode(pthread_self(), -1));
  EXPECT_FALSE(PinThreadToNode(pthread_self(), 4000));
}

TEST(FileTest, OpensWithCareAndTellsWhatIsWrong) {
  ScratchDirectory directory;
  FileOptions options;
  options.path = directory / "file";
  EXPECT_TRUE(absl::IsNotFound(File::Open(options).status()));
  options.create = true;
  auto file = File::Open(options);
  ASSERT_OK(file.status());
  struct stat info {};
  ASSERT_EQ(fstat((*file)->fd(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_TRUE(fcntl((*file)->fd(), F_GETFD) & FD_CLOEXEC);
  EXPECT_TRUE(fcntl((*file)->fd(), F_GETFL) & O_DIRECT);
  EXPECT_GE((*file)->alignment().offset, 4096u);
  EXPECT_TRUE(IsPowerOfTwo((*file)->alignment().memory));
  EXPECT_NE((*file)->device_name(), "");
  options.exclusive = true;
  EXPECT_TRUE(absl::IsAlreadyExists(File::Open(options).status()));
  options.exclusive = false;
  options.path = directory / "link";
  ASSERT_EQ(symlink((directory / "file").c_str(), options.path.c_str()), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(File::Open(options).status()));
  options.path = directory.path();
  EXPECT_TRUE(absl::IsFailedPrecondition(File::Open(options).status()));
  options.path = "";
  EXPECT_TRUE(absl::IsInvalidArgument(File::Open(options).status()));
  options.path = directory / "odd";
  options.offset_alignment = 3000;
  EXPECT_TRUE(absl::IsInvalidArgument(File::Open(options).status()));
  EXPECT_OK(SyncDirectory(directory.path()));
  EXPECT_TRUE(absl::IsNotFound(SyncDirectory(directory / "none")));
}

TEST(FileTest, ANamelessFileLeavesAndTouchesNothingInItsDirectory) {
  ScratchDirectory directory;
  FileOptions options;
  options.path = directory / "scratch";
  options.nameless = true;
  options.size = 1 << 20;
  std::ofstream(options.path) << "somebody's";
  auto file = File::Open(options);
  ASSERT_OK(file.status());
  EXPECT_EQ(*(*file)->Size(), options.size);
  EXPECT_TRUE((*file)->direct());
  EXPECT_EQ(fcntl((*file)->fd(), F_GETFL) & O_ACCMODE, O_RDWR);
  EXPECT_EQ(std::filesystem::file_size(options.path), 10u);
  size_t names = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) ++names;
  EXPECT_EQ(names, 1u);
  options.path = directory / "none/scratch";
  EXPECT_TRUE(absl::IsNotFound(File::Open(options).status()));
}

TEST(FileTest, AnOpenDescriptorNamesItsFileAndRemainsItsOwners) {
  ScratchDirectory directory;
  const std::string path = directory / "file";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(write(fd, "0123456789", 10), 10);
  ASSERT_EQ(unlink(path.c_str()), 0);
  FileOptions options;
  options.path = "a name for errors";
  options.descriptor = fd;
  {
    auto file = File::Open(options);
    ASSERT_OK(file.status());
    EXPECT_EQ(*(*file)->Size(), 10u);
    EXPECT_TRUE((*file)->direct());
    EXPECT_EQ((*file)->path(), options.path);
    EXPECT_NE((*file)->fd(), fd);
  }
  EXPECT_EQ(lseek(fd, 0, SEEK_CUR), 10);
  EXPECT_EQ(fcntl(fd, F_GETFL) & (O_DIRECT | O_APPEND), O_APPEND);
  ASSERT_EQ(close(fd), 0);
  const auto closed = File::Open(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(closed.status())) << closed.status();
  EXPECT_EQ(ErrnoOf(closed.status()), EBADF);
  EXPECT_THAT(std::string(closed.status().message()), testing::HasSubstr(options.path));
}

TEST(FileTest, ADescriptorGivesNoMoreThanItWasOpenedFor) {
  ScratchDirectory directory;
  const std::string path = directory / "file";
  std::ofstream(path) << "bytes";
  for (const int mode : {O_RDONLY, O_WRONLY, O_PATH}) {
    const int fd = open(path.c_str(), mode | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    for (const bool read_only : {false, true}) {
      FileOptions options;
      options.path = path;
      options.descriptor = fd;
      options.read_only = read_only;
      const auto file = File::Open(options);
      const bool allowed = mode == (read_only ? O_RDONLY : O_WRONLY);
      EXPECT_EQ(file.ok(), allowed) << mode << " " << read_only << " " << file.status();
      EXPECT_EQ(ErrnoOf(file.status()), allowed ? 0 : EBADF);
    }
    close(fd);
  }
}

TEST(IoErrorTest, TheErrnoOfAStatusIsTheLastOneThatItNames) {
  EXPECT_EQ(ErrnoOf(MakeIoError({.op = "write", .path = "/a", .bytes = 5, .error = ENOSPC})), ENOSPC);
  EXPECT_EQ(ErrnoOf(MakeIoError({.op = "read", .path = "/(errno 3)/b", .error = EIO})), EIO);
  EXPECT_EQ(ErrnoOf(absl::OkStatus()), 0);
  EXPECT_EQ(ErrnoOf(absl::InternalError("no number (errno )")), 0);
  EXPECT_EQ(ErrnoOf(absl::InternalError("cut off (errno 12")), 0);
}

TEST(IoErrorTest, AnErrorWithoutErrnoIsStillOne) {
  EXPECT_TRUE(absl::IsInternal(MakeIoError({.op = "write", .path = "/a", .error = 0})));
}

// Whatever stands in the place of a file is named for what it is, at once.
TEST(FileTest, WhatIsNoFileIsNamedAndDoesNotBlock) {
  ScratchDirectory directory;
  ASSERT_EQ(mkfifo((directory / "fifo").c_str(), 0600), 0);
  ASSERT_TRUE(std::filesystem::create_directory(directory / "directory"));
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Its address is shorter than a path may be.
  const std::string here = std::filesystem::relative(directory / "socket").string();
  ASSERT_LT(here.size(), sizeof(address.sun_path));
  here.copy(address.sun_path, here.size());
  ASSERT_EQ(bind(socket_fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  std::filesystem::create_symlink(directory / "elsewhere", directory / "link");
  for (const auto& [path, kind] : {std::pair{directory / "fifo", "a FIFO"},
                                   {directory / "directory", "a directory"},
                                   {directory / "socket", "a socket"},
                                   {std::string("/dev/zero"), "a character device"},
                                   {directory / "link", "a symbolic link"}}) {
    for (const bool read_only : {false, true}) {
      for (const bool direct : {false, true}) {
        for (const bool create : {false, true}) {
          FileOptions options;
          options.path = path;
          options.read_only = read_only;
          options.direct = direct;
          options.create = create;
          const auto file = File::Open(options);
          EXPECT_TRUE(absl::IsFailedPrecondition(file.status())) << path << ": " << file.status();
          EXPECT_THAT(std::string(file.status().message()),
                      testing::AllOf(testing::HasSubstr(path), testing::HasSubstr(kind)));
          EXPECT_TRUE(std::filesystem::exists(std::filesystem::symlink_status(path)));
        }
      }
    }
  }
  close(socket_fd);
}

// An open that does not wait must not make transfers that do not.
TEST(FileTest, FilesAreNotLeftInNonblockingMode) {
  ScratchDirectory directory;
  for (const bool direct : {false, true}) {
    FileOptions options;
    options.path = directory / "file";
    options.create = true;
    options.direct = direct;
    const auto file = File::Open(options);
    ASSERT_OK(file.status());
    const int flags = fcntl((*file)->fd(), F_GETFL);
    EXPECT_EQ(flags & O_NONBLOCK, 0);
    EXPECT_EQ((flags & O_DIRECT) != 0, direct);
  }
}

TEST(FileTest, RefusesAFileSystemInMemoryUnlessAllowed) {
  if (!std::filesystem::exists("/dev/shm")) GTEST_SKIP() << "no /dev/shm";
  FileOptions options;
  options.path = "/dev/shm/penstock-test-" + std::to_string(getpid());
  options.create = true;
  const auto refused = File::Open(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("tmpfs"));
  EXPECT_FALSE(std::filesystem::exists(options.path));
  options.allow_unaligned_file_system = true;
  EXPECT_OK(File::Open(options).status());
  unlink(options.path.c_str());
}

TEST(FileTest, PreallocatesOrSaysWhatIsMissing) {
  ScratchDirectory directory;
  FileOptions options;
  options.path = directory / "file";
  options.create = true;
  options.size = 3 * kMiB;
  auto file = File::Open(options);
  ASSERT_OK(file.status());
  EXPECT_EQ(*(*file)->Size(), 3 * kMiB);
  struct stat info {};
  ASSERT_EQ(fstat((*file)->fd(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, 3 * kMiB);
  // A terabyte more than there is.
  const auto space = QueryFileSystem(directory.path());
  ASSERT_OK(space.status());
  const absl::Status full = (*file)->Preallocate(space->free_bytes + 1024 * kGiB);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("missing: No space left"));
  EXPECT_EQ(*(*file)->Size(), 3 * kMiB);
  ASSERT_OK((*file)->Resize(kMiB));
  EXPECT_EQ(*(*file)->Size(), kMiB);
  ASSERT_OK((*file)->SyncData());
}

TEST(FileTest, LockExcludesOthers) {
  ScratchDirectory directory;
  FileOptions options;
  options.path = directory / "file";
  options.create = true;
  auto one = File::Open(options), two = File::Open(options);
  ASSERT_TRUE(one.ok() && two.ok());
  ASSERT_OK((*one)->Lock(0));
  EXPECT_TRUE(absl::IsFailedPrecondition((*two)->Lock(20)));
  one->reset();
  EXPECT_OK((*two)->Lock(0));
}

TEST(FileTest, NoDescriptorLeaks) {
  ScratchDirectory directory;
  const auto count = [] {
    const std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  };
  const auto before = count();
  for (int i = 0; i < 20; ++i) {
    FileOptions options;
    options.path = directory / "file";
    options.create = true;
    EXPECT_OK(File::Open(options).status());
    options.path = directory.path();
    EXPECT_FALSE(File::Open(options).ok());
    EngineOptions engine_options;
    EXPECT_OK(Engine::Create(engine_options).status());
  }
  EXPECT_EQ(count(), before);
}

// Every request, however odd, is cut into pieces that cover it exactly, in order, each as direct I/O wants
// it.
TEST(CutterTest, PiecesCoverARequestExactly) {
  ScratchDirectory directory;
  FileOptions options;
  options.path = directory / "file";
  options.create = true;
  auto file = File::Open(options);
  ASSERT_OK(file.status());
  const Alignment& alignment = (*file)->alignment();
  auto arena = MakeArena(8 * kMiB);
  std::mt19937_64 random(17);
  const CutLimits limits{kMiB, 256 * kKiB};
  for (int round = 0; round < 2000; ++round) {
    std::vector<Segment> segments;
    uint64_t at = random() % 5000;
    for (uint64_t n = 1 + random() % 8; n != 0; --n) {
      const uint64_t bytes =
          random() % 3 == 0 ? 4096 * (random() % 100) : random() % (uint64_t{1} << (random() % 20));
      if (at + bytes > arena->bytes()) break;
      segments.push_back({arena->data() + at, bytes});
      at += bytes + random() % 100;
      if (random() % 2 == 0) at = AlignUp(at, 4096);
    }
    Request request;
    const uint64_t offset = random() % 3 == 0 ? 4096 * (random() % 10) : random() % 20000;
    const bool write = random() % 2 == 0;
    write ? request.PrepareWrite(**file, offset, segments) : request.PrepareRead(**file, offset, segments);
    uint64_t covered = 0;
    Piece piece;
    while (Cutter::Next(request, limits, piece)) {
      ASSERT_GT(piece.user_bytes, 0u);
      ASSERT_EQ(piece.offset + piece.lead_bytes, offset + covered);
      ASSERT_TRUE(IsAligned(piece.offset, alignment.offset));
      ASSERT_TRUE(IsAligned(piece.bytes, alignment.offset));
      ASSERT_GE(piece.bytes, piece.lead_bytes + piece.user_bytes);
      ASSERT_LE(piece.bytes, piece.data == nullptr ? limits.bounce_bytes : limits.block_bytes);
      if (piece.data != nullptr) {
        ASSERT_EQ(piece.kind, Piece::Kind::kInPlace);
        ASSERT_TRUE(IsAligned(reinterpret_cast<uint64_t>(piece.data), alignment.memory));
        ASSERT_EQ(piece.bytes, piece.user_bytes);
      } else if (write && piece.kind == Piece::Kind::kBounced) {
        ASSERT_EQ(piece.bytes, piece.user_bytes) << "a bounced write must not touch its neighbours";
      }
      covered += piece.user_bytes;
      Cutter::Take(request, piece);
    }
    ASSERT_EQ(covered, request.bytes());
  }
}

}  // namespace
}  // namespace penstock::aio::unit_test
