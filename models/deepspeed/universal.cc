#include "models/deepspeed/universal.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "base/atomic_file.h"
#include "base/check.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/read_ahead.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "models/weights/torch_writer.h"
#include "models/weights/transpose.h"
#include "swap/checkpoint_files.h"
#include "swap/write_stream.h"
#include "zero/config/json_field.h"

namespace penstock::models {
namespace {

constexpr size_t kKinds = 3;
constexpr const char* kFiles[kKinds] = {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"};
constexpr int64_t kTogether = 128 << 10;    // elements
constexpr size_t kBatches = 2;              // one is written while the next is read
constexpr size_t kFileChunks = 3;           // of a file that is written
constexpr uint64_t kSmallBytes = 64 << 10;  // a chunk of the others
constexpr size_t kParameters = 2;  // whose files are open: one is written, the other's ends are on their way

using Buffers = std::array<std::vector<float>, kKinds>;

// What is written of a tensor at once: values [from, from + elements) as they are published. Of one that is
// published transposed they are `width` columns of those that are kept.
struct Part {
  const PublishedTensor* tensor = nullptr;
  int64_t from = 0, elements = 0;
  int64_t column = 0, width = 0;
  bool begins() const { return from == 0; }
  bool ends() const { return from + elements == tensor->elements(); }
};

// Parts of several tensors, small ones and large ones: what is read while the batch before it is written.
struct Batch {
  Buffers values;  // of all parts, one after the other
  std::vector<Part> parts;
};

// The files of a parameter, and how their bytes go to the drive.
struct Files {
  std::array<std::unique_ptr<swap::WriteStream>, kKinds> streams;
  std::array<std::unique_ptr<TorchWriter>, kKinds> writers;  // null: none is open

  absl::Status Finish() {
    for (std::unique_ptr<TorchWriter>& writer : writers) {
      if (writer != nullptr) RETURN_IF_ERROR(writer->Finish());
      writer.reset();
    }
    return absl::OkStatus();
  }
};

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::ErrnoToStatus(error.value(), absl::StrCat(path, ": cannot be made"));
}

// A file's bytes are on the drive.
absl::Status SyncFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  const int failed = fd < 0 || ::fsync(fd) != 0 ? errno : 0;
  if (fd >= 0) ::close(fd);
  return failed == 0 ? absl::OkStatus() : absl::ErrnoToStatus(failed, absl::StrCat(path, ": fsync"));
}

// Whether WriteUniversal or DeepSpeed's ds_to_universal gives an entry of a checkpoint this name and kind.
// `depth`: 0 in the tag's directory, 1 in zero/, 2 in a parameter's.
bool IsOfCheckpoint(int depth, std::string_view name, PathKind kind) {
  if (kind == PathKind::kDirectory) return depth == 0 ? name == "zero" : depth == 1;
  if (kind != PathKind::kRegular) return false;
  if (depth == 0)
    return name.ends_with("_model_states.pt") &&
           (name.starts_with("mp_rank_") || name.starts_with("zero_pp_rank_"));
  if (depth == 1) return name == "optimizer_state.pt";
  return name == "step.pt" || std::find(std::begin(kFiles), std::end(kFiles), name) != std::end(kFiles);
}

// The files and directories of a checkpoint, whole or cut short, each directory behind what is in it.
// kInvalidArgument: something in it is not of a checkpoint.
absl::Status ListCheckpoint(const std::string& tag, const std::string& directory, int depth,
                            std::vector<std::string>* paths) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(path));
    if (!IsOfCheckpoint(depth, name, kind)) {
      return absl::InvalidArgumentError(absl::StrCat(tag, " is neither replaced nor removed: ", path,
                                                     " is not of a universal checkpoint: move it away"));
    }
    if (kind == PathKind::kDirectory) {
      RETURN_IF_ERROR(ListCheckpoint(tag, path, depth + 1, paths));
    } else {
      paths->push_back(path);
    }
  }
  paths->push_back(directory);
  return absl::OkStatus();
}

// kInvalidArgument: the directory at `tag` has something else than a checkpoint's files. A missing one has
// not.
absl::Status CheckOnlyCheckpoint(const std::string& tag, PathKind kind) {
  if (kind == PathKind::kMissing) return absl::OkStatus();
  if (kind != PathKind::kDirectory)
    return absl::InvalidArgumentError(absl::StrCat(tag, " is no universal checkpoint, and is not replaced"));
  std::vector<std::string> paths;
  return ListCheckpoint(tag, tag, 0, &paths);
}

// Removes a checkpoint. Where something else is in it, all of it stays.
absl::Status RemoveCheckpoint(const std::string& tag) {
  ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(tag));
  if (kind == PathKind::kMissing) return absl::OkStatus();
  std::vector<std::string> paths;
  RETURN_IF_ERROR(ListCheckpoint(tag, tag, 0, &paths));
  for (const std::string& path : paths) {
    if (::remove(path.c_str()) != 0) return MakeIoError({.op = "remove", .path = path, .error = errno});
  }
  return absl::OkStatus();
}

class UniversalWriter {
 public:
  UniversalWriter(const DeepSpeedProgress& run, const ModelLayout& layout, const ReadMoments& read,
                  const UniversalOptions& options)
      : run_(run),
        layout_(layout),
        read_(read),
        options_(options),
        whole_(options.directory + "/" + options.tag),
        tag_(options.directory + "/." + options.tag + ".partial"),
        aside_(options.directory + "/." + options.tag + ".replaced") {
    total_ = static_cast<uint64_t>(layout.parameters()) * kKinds * sizeof(float);
  }

  absl::Status Run() {
    RETURN_IF_ERROR(swap::CheckOutsideStores(options_.directory));
    RETURN_IF_ERROR(Lock());
    RETURN_IF_ERROR(MakeStreams());
    RETURN_IF_ERROR(Clear());
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(Latest()));
    if (kind == PathKind::kDirectory)
      return MakeIoError({.op = "replace", .path = Latest(), .error = EISDIR});
    absl::StatusOr<std::string> latest = ReadSmallFile(Latest());
    if (!latest.ok() && !absl::IsNotFound(latest.status())) return latest.status();
    if (latest.ok()) latest_ = *std::move(latest);
    absl::Status status = WriteTag();
    if (status.ok()) status = Show();
    if (!status.ok()) {
      (void)RemoveCheckpoint(tag_);  // what was written in vain
      return status;
    }
    status = ReplaceFile(Latest(), options_.tag);
    // Its last sync may have failed when it had its name: then the new checkpoint is the one it names.
    if (!status.ok() && ReadSmallFile(Latest()).value_or("") != options_.tag) {
      const absl::Status hidden = Hide();
      if (hidden.ok()) (void)RemoveCheckpoint(tag_);
      status.Update(hidden);
      return status;
    }
    // The one that had its name; what stays of it is removed by the next export of this tag.
    (void)RemoveCheckpoint(aside_);
    (void)RemoveCheckpoint(tag_);
    return status;
  }

 private:
  static absl::Status Rename(const std::string& from, const std::string& to) {
    std::error_code error;
    std::filesystem::rename(from, to, error);
    if (!error) return absl::OkStatus();
    return absl::ErrnoToStatus(error.value(), absl::StrCat(to, ": cannot be made of ", from));
  }

  // Of two that write to one directory, the later one is refused. Where a directory cannot be locked, as on
  // NFS, nobody is.
  absl::Status Lock() {
    RETURN_IF_ERROR(MakeDirectory(options_.directory));
    ASSIGN_OR_RETURN(const bool locked, lock_.Take(options_.directory));
    if (locked) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(options_.directory, ": another process is writing a checkpoint there"));
  }

  // What a killed one has left goes, or comes back; what may not be replaced is refused before that.
  absl::Status Clear() {
    ASSIGN_OR_RETURN(PathKind whole, LinkKindOf(whole_));
    ASSIGN_OR_RETURN(const PathKind aside, LinkKindOf(aside_));
    ASSIGN_OR_RETURN(const PathKind partial, LinkKindOf(tag_));
    RETURN_IF_ERROR(CheckOnlyCheckpoint(aside_, aside));
    RETURN_IF_ERROR(CheckOnlyCheckpoint(tag_, partial));
    if (whole == PathKind::kMissing && aside == PathKind::kDirectory) {
      RETURN_IF_ERROR(Rename(aside_, whole_));
      whole = PathKind::kDirectory;
    }
    replaces_ = whole != PathKind::kMissing;
    if (replaces_ && !options_.overwrite)
      return absl::AlreadyExistsError(
          absl::StrCat(whole_, " is there already: use `overwrite` to replace it"));
    ASSIGN_OR_RETURN(const PathKind zero, LinkKindOf(whole_ + "/zero"));
    if (replaces_ && (whole != PathKind::kDirectory || zero != PathKind::kDirectory))
      return absl::InvalidArgumentError(
          absl::StrCat(whole_, " is no universal checkpoint, and is not replaced"));
    RETURN_IF_ERROR(CheckOnlyCheckpoint(whole_, whole));
    RETURN_IF_ERROR(SyncDirectory(options_.directory));  // the name of the one that stays
    RETURN_IF_ERROR(RemoveCheckpoint(aside_));
    return RemoveCheckpoint(tag_);
  }

  absl::Status WriteTag() {
    RETURN_IF_ERROR(MakeDirectory(tag_ + "/zero"));
    RETURN_IF_ERROR(WriteParameters());
    RETURN_IF_ERROR(WriteOptimizer());
    for (const char* name : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"})
      RETURN_IF_ERROR(WriteModelStates(absl::StrCat(tag_, "/", name)));
    std::error_code error;
    std::filesystem::recursive_directory_iterator entry(tag_, error);
    for (; !error && entry != std::filesystem::recursive_directory_iterator(); entry.increment(error)) {
      ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(entry->path()));
      RETURN_IF_ERROR(kind == PathKind::kDirectory ? SyncDirectory(entry->path()) : SyncFile(entry->path()));
    }
    if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat(tag_, ": cannot be listed"));
    return SyncDirectory(tag_);
  }

  // Under its name, now that it is whole. The old one is kept, under another name.
  absl::Status Show() {
    if (!replaces_) {
      RETURN_IF_ERROR(Rename(tag_, whole_));
    } else if (absl::Status exchanged = Exchange(); !exchanged.ok()) {
      if (!absl::IsUnimplemented(exchanged)) return exchanged;
      // A file system without exchanges, NFS for one: what names a checkpoint names none in between.
      if (::unlink(Latest().c_str()) != 0 && errno != ENOENT)
        return absl::ErrnoToStatus(errno, absl::StrCat("remove ", Latest()));
      if (absl::Status moved = Move(); !moved.ok()) {
        moved.Update(RestoreLatest());
        return moved;
      }
    }
    // What somebody has put into the old one while the new one was written stays, and so does the old one.
    absl::Status status = replaces_ ? CheckOldOne() : absl::OkStatus();
    if (status.ok()) status = SyncDirectory(options_.directory);
    if (!status.ok()) status.Update(Hide());
    return status;
  }
  absl::Status CheckOldOne() const {
    for (const std::string& place : {tag_, aside_}) {
      ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(place));
      RETURN_IF_ERROR(CheckOnlyCheckpoint(place, kind));
    }
    return absl::OkStatus();
  }
  absl::Status Move() const {
    RETURN_IF_ERROR(SyncDirectory(options_.directory));
    RETURN_IF_ERROR(Rename(whole_, aside_));
    absl::Status status = Rename(tag_, whole_);
    if (!status.ok()) status.Update(Rename(aside_, whole_));
    return status;
  }
  // kUnimplemented: not on this file system.
  absl::Status Exchange() const {
    if (::renameat2(AT_FDCWD, tag_.c_str(), AT_FDCWD, whole_.c_str(), RENAME_EXCHANGE) == 0)
      return absl::OkStatus();
    if (errno == EINVAL || errno == ENOSYS) return absl::UnimplementedError("");
    return absl::ErrnoToStatus(errno, absl::StrCat(whole_, ": cannot be made of ", tag_));
  }
  // All as it was before Show.
  absl::Status Hide() const {
    if (!replaces_) {
      RETURN_IF_ERROR(Rename(whole_, tag_));
    } else if (absl::Status exchanged = Exchange(); !exchanged.ok()) {
      if (!absl::IsUnimplemented(exchanged)) return exchanged;
      RETURN_IF_ERROR(Rename(whole_, tag_));
      RETURN_IF_ERROR(Rename(aside_, whole_));
      RETURN_IF_ERROR(RestoreLatest());
    }
    return SyncDirectory(options_.directory);
  }
  absl::Status RestoreLatest() const {
    return latest_.has_value() ? ReplaceFile(Latest(), *latest_) : absl::OkStatus();
  }

  std::string NameOf(const PublishedTensor& tensor) const {
    const auto named = options_.names.find(tensor.name);
    return named == options_.names.end() ? tensor.name : named->second;
  }

  absl::Status MakeStreams() {
    aio::EngineOptions engine_options;
    engine_options.log = [](std::string_view) {};
    ASSIGN_OR_RETURN(io_, aio::Engine::Create(std::move(engine_options)));
    const uint64_t chunk =
        std::clamp<uint64_t>(options_.memory_bytes / 128 / aio::kSectorBytes * aio::kSectorBytes,
                             4 * aio::kSectorBytes, aio::kMiB);
    aio::ArenaOptions arena_options;
    arena_options.lock = false;
    arena_options.bytes = 2 * kSmallBytes + kParameters * kKinds * kFileChunks * chunk;
    ASSIGN_OR_RETURN(arena_, aio::Arena::Create(arena_options));
    std::byte* memory = arena_->data();
    stream_ = std::make_unique<swap::WriteStream>(*io_, std::span(memory, 2 * kSmallBytes), kSmallBytes);
    memory += 2 * kSmallBytes;
    for (Files& files : files_) {
      for (size_t k = 0; k < kKinds; ++k, memory += kFileChunks * chunk)
        files.streams[k] =
            std::make_unique<swap::WriteStream>(*io_, std::span(memory, kFileChunks * chunk), chunk);
    }
    return absl::OkStatus();
  }

  // Elements whose masters and moments take `sixteenths` of the memory: two batches, a chunk of a tensor that
  // is turned, and what is on its way to the drive.
  int64_t Elements(uint64_t sixteenths) const {
    return std::max<int64_t>(
        4096, static_cast<int64_t>(options_.memory_bytes / 16 * sixteenths / kKinds / sizeof(float)));
  }
  int64_t ChunkElements() const { return Elements(1); }
  int64_t BatchElements() const { return Elements(6); }

  void AddParts(const PublishedTensor& tensor, std::vector<Part>* parts) const {
    if (tensor.elements() == 0) {
      parts->push_back({.tensor = &tensor});
    } else if (!tensor.transposed) {
      for (int64_t from = 0; from < tensor.elements(); from += ChunkElements())
        parts->push_back({.tensor = &tensor,
                          .from = from,
                          .elements = std::min(ChunkElements(), tensor.elements() - from)});
    } else {
      const int64_t wide = std::max<int64_t>(1, BatchElements() / tensor.rows);
      for (int64_t column = 0; column < tensor.columns; column += wide) {
        const int64_t width = std::min(wide, tensor.columns - column);
        parts->push_back({&tensor, column * tensor.rows, width * tensor.rows, column, width});
      }
    }
  }

  absl::Status WriteParameters() {
    std::vector<Part> parts;
    for (const PublishedTensor& tensor : layout_.tensors) AddParts(tensor, &parts);
    auto next = parts.cbegin();  // the reading thread's
    ReadAhead<Batch> batches(kBatches, [&](Batch* to) -> absl::StatusOr<bool> {
      to->parts.clear();
      for (int64_t filled = 0; next != parts.cend(); ++next) {
        if (!to->parts.empty() && filled + next->elements > BatchElements()) break;
        RETURN_IF_ERROR(ReadPart(*next, filled, &to->values));
        to->parts.push_back(*next);
        filled += next->elements;
      }
      return !to->parts.empty();
    });
    while (true) {
      ASSIGN_OR_RETURN(const Batch* const batch, batches.Next());
      if (batch == nullptr) break;
      int64_t at = 0;
      for (const Part& part : batch->parts) {
        if (part.begins()) RETURN_IF_ERROR(BeginParameter(*part.tensor));
        RETURN_IF_ERROR(Append(batch->values, at, part.elements));
        if (part.ends()) RETURN_IF_ERROR(EndParameter());
        at += part.elements;
      }
    }
    for (Files& files : files_) RETURN_IF_ERROR(files.Finish());
    return absl::OkStatus();
  }

  absl::Status BeginParameter(const PublishedTensor& tensor) {
    const std::string name = NameOf(tensor);
    if (name.empty() || name == ".." || absl::StrContains(name, "/"))
      return absl::InvalidArgumentError(absl::StrCat("names: \"", name, "\" is no name of a parameter"));
    const std::string directory = absl::StrCat(tag_, "/zero/", name);
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(directory));
    if (kind != PathKind::kMissing)
      return absl::InvalidArgumentError(
          absl::StrCat("names: two parameters are called \"", name, "\", or it is no name of one"));
    RETURN_IF_ERROR(MakeDirectory(directory));
    RETURN_IF_ERROR(
        WriteStep(directory + "/step.pt", options_.updates_of ? options_.updates_of(tensor) : run_.updates));
    TorchPickle pickle;
    pickle.BeginDict();
    pickle.Text("cat_dim");
    pickle.Int(0);
    pickle.Text("param");
    pickle.Tensor(swap::Dtype::kF32, tensor.published_shape());
    pickle.EndDict();
    now_ = (now_ + 1) % kParameters;
    Files& files = files_[now_];
    RETURN_IF_ERROR(files.Finish());
    for (size_t k = 0; k < kKinds; ++k) {
      ASSIGN_OR_RETURN(files.writers[k], TorchWriter::Create(absl::StrCat(directory, "/", kFiles[k]), pickle,
                                                             files.streams[k].get()));
    }
    return absl::OkStatus();
  }

  absl::Status EndParameter() {
    for (const std::unique_ptr<TorchWriter>& file : files_[now_].writers) RETURN_IF_ERROR(file->End());
    return absl::OkStatus();
  }

  absl::Status Append(const Buffers& values, int64_t first, int64_t n) {
    // In turns, so that all three are written meanwhile.
    for (int64_t at = 0; at < n; at += kTogether) {
      const auto count = static_cast<size_t>(std::min(kTogether, n - at));
      for (size_t k = 0; k < kKinds; ++k)
        RETURN_IF_ERROR(
            files_[now_].writers[k]->Append(std::as_bytes(std::span(values[k].data() + first + at, count))));
    }
    done_ += static_cast<uint64_t>(n) * kKinds * sizeof(float);
    if (options_.progress) options_.progress(done_, total_);
    return absl::OkStatus();
  }

  // On the reading thread: to values from `at` on.
  absl::Status ReadPart(const Part& part, int64_t at, Buffers* to) {
    for (std::vector<float>& values : *to) {
      values.reserve(static_cast<size_t>(BatchElements()));
      values.resize(std::max(values.size(), static_cast<size_t>(at + part.elements)));
    }
    if (part.elements == 0) return absl::OkStatus();
    if (!part.tensor->transposed) return Read(*part.tensor, part.from, part.elements, at, to);
    const int64_t rows = part.tensor->rows, columns = part.tensor->columns;
    const int64_t high = std::clamp<int64_t>(ChunkElements() / columns, 1, rows);
    for (std::vector<float>& values : chunk_)
      values.resize(std::max(values.size(), static_cast<size_t>(high * columns)));
    for (int64_t row = 0; row < rows; row += high) {
      const int64_t height = std::min(high, rows - row);
      RETURN_IF_ERROR(Read(*part.tensor, row * columns, height * columns, 0, &chunk_));
      for (size_t k = 0; k < kKinds; ++k)
        Transpose(chunk_[k].data() + part.column, columns, height, part.width, (*to)[k].data() + at + row,
                  rows);
    }
    return absl::OkStatus();
  }

  // Elements as they are kept, to values from `at` on.
  absl::Status Read(const PublishedTensor& tensor, int64_t from, int64_t n, int64_t at, Buffers* to) const {
    while (n > 0) {
      const TensorPlace place = PlaceOf(tensor, from);
      const int64_t count = std::min(n, place.elements);
      RETURN_IF_ERROR(read_(place.block, place.first, count, (*to)[0].data() + at, (*to)[1].data() + at,
                            (*to)[2].data() + at));
      at += count;
      from += count;
      n -= count;
    }
    return absl::OkStatus();
  }

  // The optimizer's count of updates, as the next loader wants it. Returns whether it is a tensor.
  bool Step(int64_t updates, TorchPickle* pickle) const {
    if (options_.step_is_tensor) {
      pickle->Tensor(swap::Dtype::kF32, {});
    } else {
      pickle->Int(updates);
    }
    return options_.step_is_tensor;
  }

  // `updates`: of the tensor of one that the pickle has; nullopt: it has none.
  absl::Status Finish(const std::string& path, const TorchPickle& pickle,
                      std::optional<int64_t> updates) const {
    ASSIGN_OR_RETURN(std::unique_ptr<TorchWriter> file, TorchWriter::Create(path, pickle, stream_.get()));
    const auto step = static_cast<float>(updates.value_or(0));
    if (updates.has_value()) RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(&step, 1))));
    return file->Finish();
  }

  absl::Status WriteStep(const std::string& path, int64_t updates) const {
    TorchPickle pickle;
    const bool tensor = Step(updates, &pickle);
    return Finish(path, pickle, tensor ? std::optional(updates) : std::nullopt);
  }

  // Each with the one flat tensor that it has there.
  static void Groups(nlohmann::json groups, TorchPickle* pickle) {
    int64_t number = 0;
    for (nlohmann::json& group : groups) group["params"] = nlohmann::json::array({number++});
    pickle->Text("param_groups");
    pickle->Json(groups);
  }

  // Stage 3 gives every group the options of the first: those in which they differ are left to its own
  // configuration. But for the rate where there is a scheduler: until that sets the rates, the first group's
  // is nearer than what the configuration begins with.
  nlohmann::json Common() const {
    nlohmann::json common = run_.groups[0];
    for (const nlohmann::json& group : run_.groups) {
      for (const auto& [key, value] : run_.groups[0].items()) {
        const bool scheduled = key == "lr" && options_.has_scheduler;
        if (!scheduled && group.value(key, nlohmann::json()) != value) common.erase(key);
      }
    }
    nlohmann::json groups = nlohmann::json::array();
    for (size_t i = 0; i < run_.groups.size(); ++i) groups.push_back(common);
    return groups;
  }

  // What stages 1 and 2 look for at the top, and stage 3 one level below.
  absl::Status WriteOptimizer() const {
    TorchPickle pickle;
    pickle.BeginDict();
    pickle.Text("ds_version");
    pickle.Text(run_.version);
    pickle.Text("overflow");
    pickle.Bool(false);
    if (run_.loss_scaler.is_object()) {
      const bool dynamic = zero::JsonField<bool>(run_.loss_scaler, "dynamic").value_or(false);
      pickle.Text("dynamic_loss_scale");
      pickle.Bool(dynamic);
      pickle.Text("loss_scaler");
      pickle.BeginObject("deepspeed.runtime.fp16.loss_scaler", dynamic ? "DynamicLossScaler" : "LossScaler");
      pickle.Json(run_.loss_scaler);
      pickle.EndObject();
    }
    Groups(run_.groups, &pickle);
    pickle.Text("optimizer_state_dict");
    pickle.BeginDict();
    Groups(Common(), &pickle);
    pickle.Text("state");
    pickle.BeginDict();
    pickle.Int(0);
    pickle.BeginDict();
    pickle.Text("step");
    const bool tensor = Step(run_.updates, &pickle);
    pickle.EndDict();
    pickle.EndDict();
    pickle.EndDict();
    pickle.EndDict();
    return Finish(tag_ + "/zero/optimizer_state.pt", pickle,
                  tensor ? std::optional(run_.updates) : std::nullopt);
  }

  absl::Status WriteModelStates(const std::string& path) const {
    TorchPickle pickle;
    nlohmann::json values = run_.client;
    values.update({{"module", nlohmann::json::object()},
                   {"optimizer", nullptr},
                   {"lr_scheduler", run_.lr_scheduler},
                   {"skipped_steps", run_.step - run_.updates},
                   {"global_steps", run_.step},
                   {"dp_world_size", run_.ranks},
                   {"mp_world_size", 1},
                   {"ds_config", run_.config},
                   {"ds_version", run_.version}});
    if (run_.samples > 0) values["global_samples"] = run_.samples;  // else it follows from the steps
    pickle.Json(values);
    return Finish(path, pickle, /*updates=*/std::nullopt);
  }

  std::string Latest() const { return options_.directory + "/latest_universal"; }

  const DeepSpeedProgress& run_;
  const ModelLayout& layout_;
  const ReadMoments& read_;
  const UniversalOptions& options_;
  const std::string whole_, tag_, aside_;
  DirectoryLock lock_;                 // of the directory
  bool replaces_ = false;              // a checkpoint has the name
  std::optional<std::string> latest_;  // what latest_universal was before
  uint64_t done_ = 0, total_ = 0;
  // Destroyed from the last to the first.
  std::unique_ptr<aio::Engine> io_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<swap::WriteStream> stream_;  // of the small files
  std::array<Files, kParameters> files_;
  size_t now_ = 0;  // those of the parameter that is written
  Buffers chunk_;   // the reading thread's, of a tensor that is turned
};

}  // namespace

nlohmann::json LossScalerOf(const nlohmann::json& ours) {
  if (!ours.is_object()) return nullptr;
  const auto field = [&ours]<typename T>(const char* name, T otherwise) {
    return zero::JsonField<T>(ours, name).value_or(otherwise);
  };
  const bool dynamic = field("dynamic", false);
  nlohmann::json theirs = {{"cur_scale", field("scale", 1.0)}, {"dynamic", dynamic}};
  if (!dynamic) return theirs;
  theirs.update({{"cur_iter", field("iteration", int64_t{0})},
                 {"last_overflow_iter", field("last_overflow", int64_t{-1})},
                 {"scale_factor", field("factor", 2.0)},
                 {"scale_window", field("window", int64_t{1000})},
                 {"min_scale", field("min_scale", 1.0)},
                 {"delayed_shift", field("hysteresis", int64_t{2})},
                 {"cur_hysteresis", field("hysteresis_left", int64_t{2})},
                 {"consecutive_hysteresis", field("consecutive_hysteresis", false)},
                 {"raise_error_at_min_scale", true},
                 {"dtype", nullptr}});
  return theirs;
}

absl::Status WriteUniversal(const DeepSpeedProgress& run, const ModelLayout& layout, const ReadMoments& read,
                            const UniversalOptions& options) {
  return UniversalWriter(run, layout, read, options).Run();
}

}  // namespace penstock::models
