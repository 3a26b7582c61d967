#include "tools/penstock/state_reader.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "swap/checkpoint.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"

namespace penstock::tools {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ResolveStateDirs(const std::vector<std::string>& words) {
  if (words.empty()) return absl::InvalidArgumentError("a state directory or checkpoint is needed");
  if (words.size() > 1) return words;
  absl::StatusOr<std::string> found = swap::FindCheckpoint(words.front());
  if (found.ok()) return std::vector<std::string>{*std::move(found)};
  if (!absl::IsNotFound(found.status())) return found.status();
  return absl::NotFoundError(absl::StrCat(
      words.front(), ": neither a state directory nor a checkpoint, nor a directory of them: no ",
      std::string(swap::kStoreFileName), " there"));
}

absl::StatusOr<FoundState> FindState(const std::vector<std::string>& words) {
  absl::StatusOr<std::vector<std::string>> dirs = ResolveStateDirs(words);
  if (!dirs.ok()) return dirs.status();
  FoundState state;
  absl::StatusOr<zero::PartDirectories> parts = zero::FindParts(*dirs);
  // Whatever stands there, inspecting says it best.
  state.parts = parts.ok() ? *std::move(parts) : zero::PartDirectories{*dirs};
  const bool says_better = absl::IsNotFound(parts.status()) || absl::IsFailedPrecondition(parts.status());
  if (!parts.ok() && !says_better) return parts.status();
  absl::StatusOr<std::vector<swap::Inspection>> inspections = zero::InspectParts(state.parts);
  if (!inspections.ok()) return inspections.status();
  state.inspections = *std::move(inspections);
  return state;
}

absl::StatusOr<std::unique_ptr<StateReader>> StateReader::Open(const FoundState& state, uint64_t memory_bytes,
                                                               std::function<void(const std::string&)> log) {
  auto reader = std::make_unique<StateReader>();
  aio::ArenaOptions arena_options;
  arena_options.bytes = memory_bytes;
  absl::StatusOr<std::unique_ptr<aio::Arena>> arena = aio::Arena::Create(arena_options);
  if (!arena.ok()) return arena.status();
  reader->arena_ = *std::move(arena);
  absl::StatusOr<aio::Region> memory = reader->arena_->Allocate(memory_bytes);
  if (!memory.ok()) return memory.status();
  reader->memory_ = *std::move(memory);
  aio::EngineOptions engine_options;
  engine_options.arenas = {reader->arena_.get()};
  engine_options.log = [log](std::string_view line) { log(std::string(line)); };
  absl::StatusOr<std::unique_ptr<aio::Engine>> engine = aio::Engine::Create(std::move(engine_options));
  if (!engine.ok()) return engine.status();
  reader->engine_ = *std::move(engine);
  for (const std::vector<std::string>& part : state.parts) {
    swap::StoreOptions options;
    options.directories = part;
    options.read_only = true;
    if (state.parts.size() > 1) options.sequence = state.inspections.front().record.sequence;
    // A copy is worth reading wherever it lies; only training has to have direct I/O.
    options.allow_unaligned_file_system = true;
    absl::StatusOr<std::unique_ptr<swap::Store>> store = swap::Store::Open(*reader->engine_, options);
    if (!store.ok()) return store.status();
    reader->parts_.push_back(store->get());
    reader->stores_.push_back(*std::move(store));
  }
  return reader;
}

nlohmann::json ParseOrNull(const std::string& text) {
  nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? nlohmann::json() : json;
}

int64_t AvailableMemoryBytes() {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    int64_t kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %" SCNd64 " kB", &kib) == 1) return kib * 1024;
  }
  return int64_t{4} << 30;
}

ByteProgress::ByteProgress(std::string what, bool quiet)
    : what_(std::move(what)), quiet_(quiet), terminal_(::isatty(STDERR_FILENO) == 1), start_(Now()) {
  shown_ = start_;
}

ByteProgress::~ByteProgress() {
  if (open_) std::fputc('\n', stderr);
}

void ByteProgress::Update(uint64_t done, uint64_t total) {
  const double now = Now();
  if (quiet_ || now - shown_ < (terminal_ ? 0.1 : 5.0)) return;
  shown_ = now;
  const double rate = static_cast<double>(done) / std::max(now - start_, 1e-9);
  const std::string line =
      absl::StrFormat("%s %s of %s  %s  left %s", what_, FormatBytes(static_cast<int64_t>(done)),
                      FormatBytes(static_cast<int64_t>(total)), FormatBandwidth(rate),
                      FormatDuration(static_cast<double>(total - std::min(done, total)) / rate));
  std::fprintf(stderr, terminal_ ? "\r\x1b[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
  open_ = terminal_;
}

}  // namespace penstock::tools
