#include "swap/checkpoint_copy.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/status_macros.h"
#include "swap/checkpoint_files.h"

namespace penstock::swap {
namespace {

constexpr uint64_t kAll = ~uint64_t{0};

// Commits on a thread that is not the engine's only user: Store::CommitNow would wait for everybody's
// transfers.
absl::Status CommitAlone(Store& store, const CommitInfo& info) {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  struct Signal {
    std::mutex& mutex;
    std::condition_variable& ended;
    bool& done;
  } signal{mutex, ended, done};
  CommitIo io;
  io.set_on_complete(
      [](CommitIo&, void* context) {
        auto* to = static_cast<Signal*>(context);
        std::lock_guard lock(to->mutex);
        to->done = true;
        to->ended.notify_one();  // under the lock: the waiter's stack is gone soon after
      },
      &signal);
  RETURN_IF_ERROR(store.Commit(&io, info));
  std::unique_lock lock(mutex);
  ended.wait(lock, [&] { return done; });
  return store.FinishCommit(&io);
}

// Reads what `store` holds for the copy, one tile after the other, into `memory`.
class RetainedTiles {
 public:
  RetainedTiles(Store& store, std::span<std::byte> memory)
      : store_(store), record_(*store.retained()), memory_(memory) {}

  absl::Status Fetch(uint32_t tile, aio::Priority priority, CheckpointTile* to) {
    const Geometry& g = store_.geometry();
    std::array<void*, kMaxSegments> places;
    const std::span<void* const> segments = g.SegmentPlaces(tile, memory_.data(), &places);
    // Checked: never a checkpoint of damage.
    RETURN_IF_ERROR(store_.ReadTileNow(&io_, tile, segments, priority, VersionChoice::kRetained));
    to->version = record_.tiles[tile].version;
    std::copy(segments.begin(), segments.end(), to->data.begin());
    std::copy_n(record_.checksums.begin() + static_cast<ptrdiff_t>(g.first_segment(tile)), segments.size(),
                to->checksums.begin());
    return absl::OkStatus();
  }

 private:
  Store& store_;
  const Record& record_;
  const std::span<std::byte> memory_;
  TileIo io_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointCopy>> CheckpointCopy::OfStore(Store& store,
                                                                        const CheckpointOptions& options) {
  if (store.committed_sequence() == 0) return absl::FailedPreconditionError("nothing is committed yet");
  const uint64_t largest = store.geometry().largest_slot_bytes();
  if (options.memory.size() < largest) {
    return absl::InvalidArgumentError(absl::StrCat("a checkpoint needs memory for one tile: ", largest,
                                                   " bytes, not ", options.memory.size()));
  }
  RETURN_IF_ERROR(store.Retain());
  CheckpointSource source;
  source.layout = LayoutWithoutScratch(store.shape());
  source.identity = store.identity();
  source.uuid = store.uuid();
  source.step = store.committed_step();
  source.updates = store.committed_updates();
  source.payload = store.committed_payload();
  auto tiles = std::make_shared<RetainedTiles>(store, options.memory);
  source.fetch = [tiles](const Store&, uint32_t tile, aio::Priority priority, CheckpointTile* to) {
    return tiles->Fetch(tile, priority, to);
  };
  return std::unique_ptr<CheckpointCopy>(
      new CheckpointCopy(store.engine(), options, std::move(source), &store));
}

std::unique_ptr<CheckpointCopy> CheckpointCopy::OfMemory(aio::Engine& engine,
                                                         const CheckpointOptions& options,
                                                         CheckpointSource source) {
  return std::unique_ptr<CheckpointCopy>(new CheckpointCopy(engine, options, std::move(source), nullptr));
}

CheckpointCopy::CheckpointCopy(aio::Engine& engine, const CheckpointOptions& options, CheckpointSource source,
                               Store* held)
    : engine_(engine),
      options_(options),
      source_(std::move(source)),
      held_(held),
      name_(options_.naming.has_value() && !options_.naming->name.empty() ? options_.naming->name
                                                                          : CheckpointName(source_.step)),
      path_(absl::StrCat(options.parent, "/", name_)),
      thread_([this] { Run(); }) {}

CheckpointCopy::~CheckpointCopy() {
  {
    std::lock_guard lock(mutex_);
    given_up_ = true;
  }
  leave_there_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (held_ != nullptr) held_->Release();
}

void CheckpointCopy::Allow(uint32_t tiles) {
  {
    std::lock_guard lock(mutex_);
    allowed_ += std::min<uint64_t>(tiles, kAll - allowed_);
  }
  leave_there_.notify_all();
}

void CheckpointCopy::AllowAll() {
  {
    std::lock_guard lock(mutex_);
    allowed_ = kAll;
  }
  leave_there_.notify_all();
}

void CheckpointCopy::FinishTiles() {
  {
    std::unique_lock lock(mutex_);
    allowed_ = kAll;
    awaited_ = true;
    leave_there_.notify_all();
    over_.wait(lock, [&] { return tiles_over_; });
  }
  if (held_ != nullptr) std::exchange(held_, nullptr)->Release();
}

absl::Status CheckpointCopy::Finish() {
  FinishTiles();
  {
    std::lock_guard lock(mutex_);
    hurries_ = true;
  }
  leave_there_.notify_all();
  if (thread_.joinable()) thread_.join();
  return status_;
}

double CheckpointCopy::seconds() const {
  const auto until = finished() ? ended_ : std::chrono::steady_clock::now();
  return std::chrono::duration<double>(until - begun_).count();
}

std::optional<aio::Priority> CheckpointCopy::WaitForLeave() {
  std::unique_lock lock(mutex_);
  leave_there_.wait(lock, [&] { return given_up_ || started_ < allowed_; });
  if (given_up_) return std::nullopt;
  ++started_;
  const bool behind = allowed_ != kAll && started_ < allowed_;
  return behind || awaited_ ? aio::Priority::kPrefetch : aio::Priority::kWriteBehind;
}

void CheckpointCopy::Rest(double worked) {
  std::unique_lock lock(mutex_);
  leave_there_.wait_for(lock, std::chrono::duration<double>(9 * worked),
                        [&] { return given_up_ || hurries_; });
}

void CheckpointCopy::Run() {
  status_ = Write();
  ended_ = std::chrono::steady_clock::now();
  finished_.store(true, std::memory_order_release);
}

absl::Status CheckpointCopy::Write() {
  const bool alone = !options_.meet;
  absl::StatusOr<PartialCheckpoint> partial = PartialCheckpoint::Create(
      options_.parent, name_, alone ? -1 : options_.rank, options_.lock, options_.replaces);
  absl::Status status = partial.ok() ? WriteStore(partial->directory()) : partial.status();
  if (status.ok() && options_.rank == 0 && options_.naming.has_value() &&
      !options_.naming->description.empty()) {
    status =
        ReplaceFile(absl::StrCat(partial->directory(), "/", kDescriptionFile), options_.naming->description);
  }
  if (status.ok() && options_.naming.has_value() && !options_.naming->file.empty())
    status = partial->TakeIn(options_.naming->file, options_.naming->file_name);
  {
    std::lock_guard lock(mutex_);
    tiles_over_ = true;
  }
  over_.notify_all();
  if (!alone) status = options_.meet(status);
  if (!status.ok() || !partial.ok()) return status;
  if (alone || options_.rank == 0) {
    return partial->Publish(
        options_.keep, [this](double worked) { Rest(worked); }, options_.naming);
  }
  partial->HandOver();
  return absl::OkStatus();
}

absl::Status CheckpointCopy::WriteStore(const std::string& directory) {
  StoreOptions target_options;
  target_options.directories = {directory};
  target_options.sync = Sync::kPower;  // a checkpoint is there to stay
  target_options.slots = 1;
  target_options.payload_capacity = std::max<uint64_t>(1, source_.payload.size());
  target_options.uuid = source_.uuid;
  target_options.lock_patience_ms = 0;
  target_options.allow_unaligned_file_system = options_.allow_unaligned_file_system;
  ASSIGN_OR_RETURN(std::unique_ptr<Store> target,
                   Store::Create(engine_, target_options, source_.layout, source_.identity));
  RETURN_IF_ERROR(WriteTiles(*target));
  return CommitAlone(*target, {source_.step, source_.updates, source_.payload, options_.id});
}

absl::Status CheckpointCopy::WriteTiles(Store& target) {
  TileIo io;
  CheckpointTile from;
  for (uint32_t tile = 0; tile < tiles(); ++tile) {
    const std::optional<aio::Priority> priority = WaitForLeave();
    if (!priority.has_value()) return absl::CancelledError(absl::StrCat(path_, " was given up"));
    const uint32_t segments = target.geometry().segments(tile);
    absl::Status status = source_.fetch(target, tile, *priority, &from);
    if (status.ok()) {
      status = target.WriteTile(&io, tile, from.version,
                                std::span<const void* const>(from.data.data(), segments), *priority);
    }
    RETURN_IF_ERROR(status);
    (void)target.Wait(&io);  // NoteWritten returns its error
    status = target.NoteWritten(&io, std::span<const uint64_t>(from.checksums.data(), segments));
    RETURN_IF_ERROR(status);
    tiles_done_.fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

}  // namespace penstock::swap
