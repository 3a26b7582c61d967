#include "tools/state/state_reader.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "models/deepspeed/checkpoint.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_files.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"
#include "zero/memory/host_memory.h"

namespace penstock::tools {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What a store says in JSON can be read. Another program's may say it in any other way.
absl::Status CheckTexts(const swap::Inspection& inspection) {
  for (const auto& [what, text] :
       {std::pair<const char*, const std::string&>{"identity", inspection.shape.identity},
        {"commit record", inspection.record.payload}}) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string::npos || (text[first] != '{' && text[first] != '[')) continue;
    if (const absl::Status status = ParseJson(text, absl::StrCat("its ", what)).status(); !status.ok())
      return absl::DataLossError(absl::StrCat(inspection.paths.front(), ": ", status.message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ResolveStateDirs(const std::vector<std::string>& arguments) {
  if (arguments.empty()) return absl::InvalidArgumentError("a state directory or checkpoint is needed");
  if (arguments.size() > 1) return arguments;
  absl::StatusOr<std::string> found = swap::FindCheckpoint(arguments.front());
  if (absl::IsNotFound(found.status())) {
    // Of a run without a drive.
    absl::StatusOr<std::string> beside =
        swap::FindCheckpoint(absl::StrCat(arguments.front(), "/", kCheckpointsBeside));
    if (!absl::IsNotFound(beside.status())) found = std::move(beside);
  }
  if (found.ok()) return std::vector<std::string>{*std::move(found)};
  if (!absl::IsNotFound(found.status())) return found.status();
  if (absl::Status parts = zero::FindShards(arguments).status();
      !absl::IsNotFound(parts) && !absl::IsFailedPrecondition(parts))
    return parts;
  ASSIGN_OR_RETURN(const bool theirs, models::IsDeepSpeedCheckpoint(arguments.front()));
  if (theirs) {
    return absl::NotFoundError(absl::StrCat(
        arguments.front(),
        ": a checkpoint of DeepSpeed's: penstock import-checkpoint makes a state directory of it, "
        "and penstock zero_to_fp32 writes its weights"));
  }
  return absl::NotFoundError(absl::StrCat(
      arguments.front(), ": neither a state directory nor a checkpoint, nor a directory of them: no ",
      std::string(swap::kStoreFileName), " there"));
}

absl::Status CheckNoRunAt(const std::string& out, bool into_directory) {
  RETURN_IF_ERROR(swap::CheckOutsideStores(into_directory ? out : DirectoryOf(out)));
  if (!into_directory) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> run = ResolveStateDirs({out});
  if (absl::IsNotFound(run.status())) return absl::OkStatus();
  RETURN_IF_ERROR(run.status());
  return absl::InvalidArgumentError(
      absl::StrCat(out, " stands for the checkpoint ", run->front(),
                   ", in whose place a model beside it would be read: give another directory"));
}

absl::StatusOr<FoundState> FindState(const std::vector<std::string>& arguments) {
  ASSIGN_OR_RETURN(std::vector<std::string> dirs, ResolveStateDirs(arguments));
  FoundState state;
  absl::StatusOr<zero::ShardDirectories> parts = zero::FindShards(dirs);
  const bool says_better = absl::IsNotFound(parts.status()) || absl::IsFailedPrecondition(parts.status());
  if (!parts.ok() && !says_better) return parts.status();
  // Whatever stands there, inspecting says it best.
  state.parts = parts.ok() ? *std::move(parts) : zero::ShardDirectories{dirs};
  ASSIGN_OR_RETURN(state.inspections, zero::InspectShards(state.parts));
  for (const swap::Inspection& inspection : state.inspections) RETURN_IF_ERROR(CheckTexts(inspection));
  return state;
}

absl::Status CheckNotTrained(const FoundState& state) {
  constexpr int kPatienceMs = 1000;
  for (size_t part = 0; part < state.parts.size(); ++part) {
    if (!state.inspections[part].in_use) continue;
    if (swap::Probe(state.parts[part], kPatienceMs).holding != swap::Holding::kInUse) continue;
    const nlohmann::json payload = ParseOrNull(state.inspections[part].record.payload);
    std::string where;
    if (payload.is_object() && payload.contains("run") && payload["run"].is_object() &&
        payload["run"].contains("checkpoint_dir") && payload["run"]["checkpoint_dir"].is_string()) {
      where = payload["run"]["checkpoint_dir"].get<std::string>();
    }
    ASSIGN_OR_RETURN(const std::vector<swap::CheckpointEntry> there, swap::ListCheckpoints(where));
    return absl::FailedPreconditionError(
        absl::StrCat(state.parts[part].front(), " is in use by another process, which trains in it: ",
                     there.empty() ? "read a checkpoint of it, which train writes with `checkpoint_dir` and "
                                     "`checkpoint_every`, or wait until it is done"
                                   : absl::StrCat("read its newest checkpoint, ", there.back().path)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StateReader>> StateReader::Open(const FoundState& state, uint64_t memory_bytes,
                                                               std::function<void(const std::string&)> log) {
  RETURN_IF_ERROR(CheckNotTrained(state));
  auto reader = std::make_unique<StateReader>();
  aio::ArenaOptions arena_options;
  arena_options.bytes = memory_bytes;
  ASSIGN_OR_RETURN(reader->arena_, aio::Arena::Create(arena_options));
  ASSIGN_OR_RETURN(aio::Region memory, reader->arena_->Allocate(memory_bytes));
  reader->memory_ = std::move(memory);
  aio::EngineOptions engine_options;
  engine_options.arenas = {reader->arena_.get()};
  engine_options.log = [log = std::move(log)](std::string_view line) { log(std::string(line)); };
  ASSIGN_OR_RETURN(reader->engine_, aio::Engine::Create(std::move(engine_options)));
  for (const std::vector<std::string>& part : state.parts) {
    swap::StoreOptions options;
    options.directories = part;
    options.read_only = true;
    if (state.parts.size() > 1) options.sequence = state.inspections.front().record.sequence;
    // A copy is worth reading wherever it lies; only training has to have direct I/O.
    options.allow_unaligned_file_system = true;
    ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> store, swap::Store::Open(*reader->engine_, options));
    reader->parts_.push_back(store.get());
    reader->stores_.push_back(std::move(store));
  }
  return reader;
}

nlohmann::json ParseOrNull(const std::string& text) { return ParseJson(text, "").value_or(nlohmann::json()); }

int64_t DefaultHostMemory(int sharing, int threads) {
  // What this process has already is part of its overhead.
  const zero::HostMemory memory = zero::FindHostMemory();
  const int64_t free = memory.free_bytes / sharing + memory.own_bytes;
  return std::max<int64_t>(1, (free - zero::ProcessOverheadBytes(threads)) / 2);
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
