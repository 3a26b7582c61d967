// Opening what claims to be a checkpoint: finding it, looking at it, opening it, reading every tile of it.
// Input: the line of the `latest` file up to the first newline, then store_image.h.
//
// Works in a directory of its own below the current one; in memory (/dev/shm) it is fastest.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "aio/engine.h"
#include "swap/aligned_buffer.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "swap/store.h"
#include "swap/verify.h"
#include "tests/fuzz/store_image.h"

namespace penstock::fuzz {
namespace {

class CheckpointWorld {
 public:
  CheckpointWorld() {
    std::string name = std::filesystem::current_path().string() + "/fuzz-checkpoint-XXXXXX";
    FUZZ_CHECK(::mkdtemp(name.data()) != nullptr);
    parent_ = name;
    checkpoint_ = parent_ + "/" + swap::CheckpointName(3);
    FUZZ_CHECK(::mkdir(checkpoint_.c_str(), 0700) == 0);
    aio::EngineOptions options;
    options.backend = aio::BackendKind::kThreads;
    options.worker_threads = 1;
    options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(options);
    FUZZ_CHECK(engine.ok());
    engine_ = *std::move(engine);
  }
  ~CheckpointWorld() {
    engine_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(parent_, ignored);
  }

  void Run(std::string_view latest, const StoreImage& image) {
    Put(parent_ + "/latest", latest.data(), latest.size(), latest.size());
    // Tiles lie behind the first MiB; what is between is a hole.
    Put(checkpoint_ + "/penstock.store", image.bytes.data(), image.bytes.size(), image.bytes.size());
    const auto found = swap::FindCheckpoint(parent_);
    if (!found.ok()) {
      Refused(found.status());
      return;
    }
    FUZZ_CHECK(*found == checkpoint_);  // whatever `latest` says, it is one of these
    const swap::Finding finding = swap::Probe(checkpoint_);
    FUZZ_CHECK(!finding.text.empty());
    const auto inspection = swap::Inspect({checkpoint_});
    swap::StoreOptions options;
    options.directories = {checkpoint_};
    options.read_only = true;
    options.lock_patience_ms = 0;
    options.allow_unaligned_file_system = true;
    const auto store = swap::Store::Open(*engine_, options);
    const bool overwritten = inspection.ok() && inspection->record.overwriting;
    const bool expected = inspection.ok() && !overwritten;
    if (expected != store.ok()) {
      std::fprintf(stderr, "inspect: %s; open: %s\n", inspection.status().ToString().c_str(),
                   store.status().ToString().c_str());
    }
    FUZZ_CHECK(expected == store.ok());
    FUZZ_CHECK(overwritten == (finding.holding == swap::Holding::kOverwritten));
    if (!store.ok()) {
      Refused(store.status());
      FUZZ_CHECK(finding.holding != swap::Holding::kRun);
      return;
    }
    Accepted();
    FUZZ_CHECK(finding.holding == swap::Holding::kRun);
    FUZZ_CHECK(finding.step == (*store)->committed_step());
    const auto report = swap::VerifyAll(**store, memory_.span());
    if (!report.ok()) Refused(report.status());
  }

 private:
  static void Put(const std::string& path, const void* data, size_t bytes, uint64_t length) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(::write(fd, data, bytes) == static_cast<ssize_t>(bytes));
    FUZZ_CHECK(::ftruncate(fd, static_cast<off_t>(length)) == 0);
    ::close(fd);
  }

  std::string parent_;
  std::string checkpoint_;
  std::unique_ptr<aio::Engine> engine_;
  swap::AlignedBuffer memory_{64 << 10};
};

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using penstock::fuzz::StoreImage;
  static penstock::fuzz::CheckpointWorld world;
  static const StoreImage pristine = penstock::fuzz::MakeStoreImage();
  const std::string_view text = penstock::fuzz::TextOf(data, bytes);
  const size_t line = std::min(text.find('\n'), text.size());
  StoreImage image = pristine;
  const size_t rest = std::min(line + 1, text.size());
  penstock::fuzz::ApplyPatches(image, data + rest, bytes - rest);
  world.Run(text.substr(0, line), image);
  return 0;
}
