// The I/O engine alone: writes a file past the page cache and reads it back, and knows every byte by
// checksum.
//
//   io_alone [FILE]          FILE on a local disk; default io-alone.bin, below the current directory
//
// Nothing here knows of models: penstock::aio moves bytes between pinned memory and files, and
// penstock::kernels has a checksum at memory speed. The file is cut into parts of 4 MiB. All of them are
// handed over at once, and the engine keeps as many in flight as the drive likes. Every part's checksum is
// made before it is written and compared when it has been read back. In the end one byte is changed behind
// the engine's back, to show that it is found.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "aio/arena.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/program.h"
#include "kernels/checksum.h"

namespace aio = penstock::aio;

constexpr uint64_t kPartBytes = 4 * aio::kMiB;
constexpr int kParts = 16;

// A step failed: its message names operation, path, offset, length and errno. Files and engine close
// themselves.
int Fail(const absl::Status& status) {
  std::fprintf(stderr, "io_alone: %s\n", std::string(status.message()).c_str());
  return 1;
}

struct Part {
  aio::Region memory;    // of the arena; goes back to it with the part
  aio::Request request;  // one transfer, used again for the next one
  uint64_t checksum = 0;

  uint64_t ChecksumNow() const { return penstock::kernels::Checksum(memory.data(), kPartBytes); }
};

// Waits for all of them; the first error. Memory and request belong to the engine until it has.
absl::Status WaitForAll(aio::Engine& engine, std::vector<std::unique_ptr<Part>>& parts) {
  absl::Status first;
  for (const auto& part : parts) first.Update(engine.Wait(&part->request));
  return first;
}

absl::Status WriteAll(aio::Engine& engine, aio::File& file, std::vector<std::unique_ptr<Part>>& parts) {
  uint64_t offset = 0;
  for (const auto& part : parts) {
    part->checksum = part->ChecksumNow();
    part->request.PrepareWrite(file, offset, part->memory.data(), kPartBytes);
    if (absl::Status status = engine.Submit(&part->request); !status.ok()) return status;
    offset += kPartBytes;
  }
  if (absl::Status status = WaitForAll(engine, parts); !status.ok()) return status;
  return file.SyncData();  // from here on it survives a power cut
}

// Returns the number of parts that are not what was written.
absl::StatusOr<int> ReadAndCompare(aio::Engine& engine, aio::File& file,
                                   std::vector<std::unique_ptr<Part>>& parts) {
  uint64_t offset = 0;
  for (const auto& part : parts) {
    std::memset(part->memory.data(), 0, kPartBytes);  // so that what is compared was really read
    part->request.PrepareRead(file, offset, part->memory.data(), kPartBytes);
    if (absl::Status status = engine.Submit(&part->request); !status.ok()) return status;
    offset += kPartBytes;
  }
  if (absl::Status status = WaitForAll(engine, parts); !status.ok()) return status;
  int wrong = 0;
  for (const auto& part : parts) wrong += part->ChecksumNow() != part->checksum;
  return wrong;
}

// Changes one byte with the system's own calls.
bool Damage(const std::string& path, uint64_t offset) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  char byte = 0;
  bool done = ::pread(fd, &byte, 1, static_cast<off_t>(offset)) == 1;
  byte = static_cast<char>(byte ^ 1);
  done = done && ::pwrite(fd, &byte, 1, static_cast<off_t>(offset)) == 1 && ::fsync(fd) == 0;
  return ::close(fd) == 0 && done;
}

int main(int argc, char** argv) {
  aio::IgnoreFileSizeSignal();  // a file beyond `ulimit -f` is an error, not a signal
  const std::string path = argc > 1 ? argv[1] : "io-alone.bin";

  // Pinned memory, registered with the kernel once, by the engine.
  aio::ArenaOptions arena_options;
  arena_options.bytes = kParts * kPartBytes;
  const absl::StatusOr<std::unique_ptr<aio::Arena>> arena = aio::Arena::Create(arena_options);
  if (!arena.ok()) return Fail(arena.status());

  aio::FileOptions file_options;
  file_options.path = path;
  file_options.create = true;
  file_options.size = kParts * kPartBytes;  // reserved now, so that a full disk is found now
  const absl::StatusOr<std::unique_ptr<aio::File>> file = aio::File::Open(file_options);
  if (!file.ok()) return Fail(file.status());

  aio::EngineOptions options;
  options.arenas = {arena->get()};
  const absl::StatusOr<std::unique_ptr<aio::Engine>> engine = aio::Engine::Create(options);
  if (!engine.ok()) return Fail(engine.status());

  std::vector<std::unique_ptr<Part>> parts;
  for (int i = 0; i < kParts; ++i) {
    absl::StatusOr<aio::Region> memory = (*arena)->Allocate(kPartBytes);
    if (!memory.ok()) return Fail(memory.status());
    parts.push_back(std::make_unique<Part>());
    parts.back()->memory = *std::move(memory);
    std::memset(parts.back()->memory.data(), 'a' + i, kPartBytes);
  }

  if (absl::Status status = WriteAll(**engine, **file, parts); !status.ok()) return Fail(status);
  const absl::StatusOr<int> wrong = ReadAndCompare(**engine, **file, parts);
  if (!wrong.ok()) return Fail(wrong.status());
  const aio::EngineStats stats = (*engine)->stats();
  std::printf("%d MiB written and read with %s, %d of %d parts wrong\n",
              static_cast<int>(kParts * kPartBytes / aio::kMiB), stats.backend.c_str(), *wrong, kParts);

  if (!Damage(path, 5 * kPartBytes + 12345)) {
    std::perror(("io_alone: " + path).c_str());
    return 1;
  }
  const absl::StatusOr<int> found = ReadAndCompare(**engine, **file, parts);
  if (!found.ok()) return Fail(found.status());
  std::printf("after a byte was changed: %d of %d parts wrong\n", *found, kParts);
  return *wrong == 0 && *found == 1 ? 0 : 1;
}
