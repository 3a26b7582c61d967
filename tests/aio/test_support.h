// What the tests of aio share: a scratch directory on the disk at hand, patterns, and an engine on any
// backend.
#ifndef PENSTOCK_TESTS_AIO_TEST_SUPPORT_H_
#define PENSTOCK_TESTS_AIO_TEST_SUPPORT_H_

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aio/arena.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace penstock::aio {

#define ASSERT_OK(expression)                           \
  do {                                                  \
    const absl::Status ok_status = (expression);        \
    ASSERT_TRUE(ok_status.ok()) << ok_status.message(); \
  } while (false)
#define EXPECT_OK(expression)                           \
  do {                                                  \
    const absl::Status ok_status = (expression);        \
    EXPECT_TRUE(ok_status.ok()) << ok_status.message(); \
  } while (false)

// A directory under the current one (not /tmp, which may be in memory), removed with everything in it.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    char name[] = "aio-test-XXXXXX";
    path_ = std::filesystem::absolute(mkdtemp(name)).string();
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Bytes that tell where they belong: a function of seed and position.
inline std::byte PatternAt(uint64_t seed, uint64_t position) {
  uint64_t z = (position / 8 + 1) * 0x9e3779b97f4a7c15 + seed * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 29)) * 0x94d049bb133111eb;
  return static_cast<std::byte>((z >> (8 * (position % 8))) & 0xff);
}
inline void FillPattern(uint64_t seed, uint64_t position, std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) data[i] = PatternAt(seed, position + i);
}
// The first place where memory differs from the pattern; `bytes` if nowhere.
inline uint64_t Mismatch(uint64_t seed, uint64_t position, const std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (data[i] != PatternAt(seed, position + i)) return i;
  }
  return bytes;
}

// Lines that an engine said.
class Log {
 public:
  std::function<void(std::string_view)> Sink() {
    return [this](std::string_view line) {
      const std::lock_guard<std::mutex> lock(mutex_);
      lines_.emplace_back(line);
    };
  }
  std::vector<std::string> lines() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lines_;
  }
  bool Has(const std::string& part) const {
    for (const std::string& line : lines()) {
      if (line.find(part) != std::string::npos) return true;
    }
    return false;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Why the kernel itself has no such backend, asked past the engine; empty: it has. An engine that cannot be
// made all the same is a failure and no reason to leave a test out.
inline std::string MissingInKernel(BackendKind kind) {
  long result = 0;
  if (kind == BackendKind::kIoUring) {
    alignas(8) std::byte params[256] = {};  // io_uring_params, which two headers define
    result = syscall(SYS_io_uring_setup, 4, params);
    if (result >= 0) close(static_cast<int>(result));
  } else if (kind == BackendKind::kLibaio) {
    unsigned long context = 0;
    result = syscall(SYS_io_setup, 4, &context);
    if (result >= 0) syscall(SYS_io_destroy, context);
  }
  if (result >= 0) return "";
  return std::string("no ") + std::string(BackendName(kind)) + " here: " + std::strerror(errno);
}

// One backend with everything that is needed to use it; the same test body then runs on every one.
struct World {
  ScratchDirectory directory;
  VirtualClock clock;
  std::unique_ptr<SimDisk> disk;
  std::unique_ptr<Arena> arena;
  Log log;
  std::unique_ptr<Engine> engine;
  std::string skip;  // why this kernel does not have this backend

  explicit World(BackendKind kind, EngineOptions options = {}, SimDiskOptions sim = {}) {
    ArenaOptions arena_options;
    arena_options.bytes = 64 * kMiB;
    auto made = Arena::Create(arena_options);
    if (!made.ok()) {
      ADD_FAILURE() << made.status();
      std::abort();
    }
    arena = *std::move(made);
    options.backend = kind;
    options.allow_fallback = false;
    if (options.arenas.empty()) options.arenas = {arena.get()};
    options.log = log.Sink();
    if (kind == BackendKind::kSim) {
      sim.clock = &clock;
      disk = std::make_unique<SimDisk>(sim);
      options.sim = disk.get();
    }
    auto started = Engine::Create(options);
    if (!started.ok()) {
      skip = MissingInKernel(kind);
      if (!skip.empty()) return;
      ADD_FAILURE() << started.status();
      std::abort();
    }
    engine = *std::move(started);
  }

  FileOptions NewFile(const std::string& name) {
    FileOptions options;
    options.path = disk != nullptr ? "/sim/" + name : directory / name;
    options.create = true;
    options.sim = disk.get();
    return options;
  }
  std::unique_ptr<File> Open(const std::string& name, uint64_t size = 0) {
    FileOptions options = NewFile(name);
    options.size = size;
    auto file = File::Open(options);
    EXPECT_TRUE(file.ok()) << file.status().message();
    return file.ok() ? *std::move(file) : nullptr;
  }
  Region Allocate(uint64_t bytes, uint64_t alignment = kSectorBytes) {
    auto region = arena->Allocate(bytes, alignment);
    EXPECT_TRUE(region.ok()) << region.status().message();
    return region.ok() ? *std::move(region) : Region();
  }
  absl::Status Write(File& file, uint64_t offset, const void* data, uint64_t bytes) {
    Request request;
    request.PrepareWrite(file, offset, data, bytes);
    if (absl::Status status = engine->Submit(&request); !status.ok()) return status;
    return engine->Wait(&request);
  }
  absl::Status Read(File& file, uint64_t offset, void* data, uint64_t bytes) {
    Request request;
    request.PrepareRead(file, offset, data, bytes);
    if (absl::Status status = engine->Submit(&request); !status.ok()) return status;
    return engine->Wait(&request);
  }
};

}  // namespace penstock::aio

#endif  // PENSTOCK_TESTS_AIO_TEST_SUPPORT_H_
