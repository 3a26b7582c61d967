#include "models/deepspeed_universal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "models/torch_writer.h"
#include "models/transpose.h"

namespace penstock::models {
namespace {

constexpr size_t kKinds = 3;
constexpr const char* kFiles[kKinds] = {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"};

using Buffers = std::array<std::vector<float>, kKinds>;

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::ErrnoToStatus(error.value(), absl::StrCat(path, ": cannot be made"));
}

// A file's bytes, or a directory's names, are on the drive.
absl::Status Sync(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int failed = fd < 0 || ::fsync(fd) != 0 ? errno : 0;
  if (fd >= 0) ::close(fd);
  // There are file systems that cannot sync directories.
  if (failed == 0 || (failed == EINVAL && std::filesystem::is_directory(path))) return absl::OkStatus();
  return absl::ErrnoToStatus(failed, absl::StrCat(path, ": fsync"));
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
    std::error_code error;
    RETURN_IF_ERROR(Clear());
    absl::Status status = WriteTag();
    if (!status.ok()) {
      std::filesystem::remove_all(tag_, error);
      return status;
    }
    RETURN_IF_ERROR(Show());
    return WriteLatest();
  }

 private:
  static bool IsThere(const std::string& path) {
    std::error_code error;
    return std::filesystem::symlink_status(path, error).type() != std::filesystem::file_type::not_found;
  }
  static bool IsDirectory(const std::string& path) {
    std::error_code error;
    return std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::directory;
  }
  static absl::Status Rename(const std::string& from, const std::string& to) {
    std::error_code error;
    std::filesystem::rename(from, to, error);
    if (!error) return absl::OkStatus();
    return absl::ErrnoToStatus(error.value(), absl::StrCat(to, ": cannot be made of ", from));
  }

  // What a killed one has left goes, or comes back; what may not be replaced is refused.
  absl::Status Clear() const {
    std::error_code error;
    if (!IsThere(whole_) && IsDirectory(aside_)) RETURN_IF_ERROR(Rename(aside_, whole_));
    if (IsThere(whole_) && !options_.overwrite)
      return absl::AlreadyExistsError(
          absl::StrCat(whole_, " is there already: use --overwrite to replace it"));
    if (IsThere(whole_) && (!IsDirectory(whole_) || !IsDirectory(whole_ + "/zero")))
      return absl::InvalidArgumentError(
          absl::StrCat(whole_, " is no universal checkpoint, and is not replaced"));
    std::filesystem::remove_all(aside_, error);
    std::filesystem::remove_all(tag_, error);
    return absl::OkStatus();
  }

  absl::Status WriteTag() {
    RETURN_IF_ERROR(MakeDirectory(tag_ + "/zero"));
    for (const PublishedTensor& tensor : layout_.tensors) RETURN_IF_ERROR(WriteParameter(tensor));
    RETURN_IF_ERROR(WriteOptimizer());
    for (const char* name : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"})
      RETURN_IF_ERROR(WriteModelStates(absl::StrCat(tag_, "/", name)));
    std::error_code error;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tag_, error))
      RETURN_IF_ERROR(Sync(entry.path()));
    if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat(tag_, ": cannot be listed"));
    return Sync(tag_);
  }

  // Under its name, now that it is whole. The old one goes when the new one has it.
  absl::Status Show() const {
    std::error_code error;
    const bool replaces = IsThere(whole_);
    if (replaces) RETURN_IF_ERROR(Rename(whole_, aside_));
    absl::Status status = Rename(tag_, whole_);
    if (!status.ok()) {
      if (replaces) Rename(aside_, whole_).IgnoreError();
      return status;
    }
    RETURN_IF_ERROR(Sync(options_.directory));
    std::filesystem::remove_all(aside_, error);
    return absl::OkStatus();
  }

  std::string NameOf(const PublishedTensor& tensor) const {
    const auto named = options_.names.find(tensor.name);
    return named == options_.names.end() ? tensor.name : named->second;
  }

  absl::Status WriteParameter(const PublishedTensor& tensor) {
    const std::string name = NameOf(tensor);
    if (name.empty() || name == ".." || absl::StrContains(name, "/"))
      return absl::InvalidArgumentError(absl::StrCat("--names: \"", name, "\" is no name of a parameter"));
    const std::string directory = absl::StrCat(tag_, "/zero/", name);
    RETURN_IF_ERROR(MakeDirectory(directory));
    TorchPickle pickle;
    pickle.BeginDict();
    pickle.Text("cat_dim");
    pickle.Int(0);
    pickle.Text("param");
    pickle.Tensor(swap::Dtype::kF32, tensor.published_shape());
    pickle.EndDict();
    std::array<std::unique_ptr<TorchWriter>, kKinds> files;
    for (size_t k = 0; k < kKinds; ++k) {
      ASSIGN_OR_RETURN(files[k], TorchWriter::Create(absl::StrCat(directory, "/", kFiles[k]), pickle));
    }
    RETURN_IF_ERROR(tensor.transposed ? WriteTurned(tensor, files) : WritePlain(tensor, files));
    for (const std::unique_ptr<TorchWriter>& file : files) RETURN_IF_ERROR(file->Finish());
    return WriteStep(directory + "/step.pt");
  }

  absl::Status Append(std::span<const std::unique_ptr<TorchWriter>> files, const Buffers& values, int64_t n) {
    for (size_t k = 0; k < kKinds; ++k)
      RETURN_IF_ERROR(
          files[k]->Append(0, std::as_bytes(std::span(values[k].data(), static_cast<size_t>(n)))));
    done_ += static_cast<uint64_t>(n) * kKinds * sizeof(float);
    if (options_.progress) options_.progress(done_, total_);
    return absl::OkStatus();
  }

  absl::Status Read(const PublishedTensor& tensor, int64_t from, int64_t n) {
    for (std::vector<float>& values : chunk_) values.resize(std::max(values.size(), static_cast<size_t>(n)));
    for (int64_t at = 0; at < n;) {
      const TensorPlace place = PlaceOf(tensor, from + at);
      const int64_t count = std::min(n - at, place.elements);
      RETURN_IF_ERROR(read_(place.block, place.first, count, chunk_[0].data() + at, chunk_[1].data() + at,
                            chunk_[2].data() + at));
      at += count;
    }
    return absl::OkStatus();
  }

  // An eighth of the memory for what is read, the rest for strips.
  int64_t ChunkElements() const {
    return std::max<int64_t>(4096, static_cast<int64_t>(options_.memory_bytes / 8 / kKinds / sizeof(float)));
  }

  absl::Status WritePlain(const PublishedTensor& tensor,
                          std::span<const std::unique_ptr<TorchWriter>> files) {
    for (int64_t from = 0; from < tensor.elements();) {
      const int64_t n = std::min(ChunkElements(), tensor.elements() - from);
      RETURN_IF_ERROR(Read(tensor, from, n));
      RETURN_IF_ERROR(Append(files, chunk_, n));
      from += n;
    }
    return absl::OkStatus();
  }

  // Kept as [rows, columns], published as [columns, rows]: so many of its columns at once as there is room
  // for.
  absl::Status WriteTurned(const PublishedTensor& tensor,
                           std::span<const std::unique_ptr<TorchWriter>> files) {
    const int64_t rows = tensor.rows, columns = tensor.columns;
    const int64_t wide = std::clamp<int64_t>(7 * ChunkElements() / rows, 1, columns);
    const int64_t high = std::max<int64_t>(1, ChunkElements() / columns);
    for (int64_t first = 0; first < columns; first += wide) {
      const int64_t width = std::min(wide, columns - first);
      for (std::vector<float>& values : strip_) values.resize(static_cast<size_t>(width * rows));
      for (int64_t row = 0; row < rows; row += high) {
        const int64_t height = std::min(high, rows - row);
        RETURN_IF_ERROR(Read(tensor, row * columns, height * columns));
        for (size_t k = 0; k < kKinds; ++k)
          Transpose(chunk_[k].data() + first, columns, height, width, strip_[k].data() + row, rows);
      }
      RETURN_IF_ERROR(Append(files, strip_, width * rows));
    }
    return absl::OkStatus();
  }

  // The optimizer's count of updates, as the next loader wants it. Returns whether it is a tensor.
  bool Step(TorchPickle* pickle) const {
    if (options_.step_is_tensor) {
      pickle->Tensor(swap::Dtype::kF32, {});
    } else {
      pickle->Int(run_.updates);
    }
    return options_.step_is_tensor;
  }

  absl::Status Finish(const std::string& path, const TorchPickle& pickle, bool has_step) const {
    ASSIGN_OR_RETURN(std::unique_ptr<TorchWriter> file, TorchWriter::Create(path, pickle));
    const auto step = static_cast<float>(run_.updates);
    if (has_step) RETURN_IF_ERROR(file->Append(0, std::as_bytes(std::span(&step, 1))));
    return file->Finish();
  }

  absl::Status WriteStep(const std::string& path) const {
    TorchPickle pickle;
    const bool tensor = Step(&pickle);
    return Finish(path, pickle, tensor);
  }

  // Each with the one flat tensor that it has there.
  static void Groups(nlohmann::json groups, TorchPickle* pickle) {
    int64_t number = 0;
    for (nlohmann::json& group : groups) group["params"] = nlohmann::json::array({number++});
    pickle->Text("param_groups");
    pickle->Json(groups);
  }

  // Stage 3 gives every group the options of the first: those in which they differ, rates too, are left to
  // its own configuration.
  nlohmann::json Common() const {
    nlohmann::json common = run_.groups[0];
    for (const nlohmann::json& group : run_.groups) {
      for (const auto& [key, value] : run_.groups[0].items()) {
        if (group.value(key, nlohmann::json()) != value) common.erase(key);
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
      const bool dynamic = run_.loss_scaler.value("dynamic", false);
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
    const bool tensor = Step(&pickle);
    pickle.EndDict();
    pickle.EndDict();
    pickle.EndDict();
    pickle.EndDict();
    return Finish(tag_ + "/zero/optimizer_state.pt", pickle, tensor);
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
    return Finish(path, pickle, /*has_step=*/false);
  }

  absl::Status WriteLatest() const {
    const std::string path = options_.directory + "/latest_universal",
                      part = options_.directory + "/.latest_universal.partial";
    std::ofstream file(part, std::ios::trunc);
    file << options_.tag;
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
    absl::Status status = Sync(part);
    if (status.ok()) status = Rename(part, path);
    std::error_code error;
    if (!status.ok()) std::filesystem::remove(part, error);
    return status.ok() ? Sync(options_.directory) : status;
  }

  const DeepSpeedProgress& run_;
  const ModelLayout& layout_;
  const ReadMoments& read_;
  const UniversalOptions& options_;
  const std::string whole_, tag_, aside_;
  uint64_t done_ = 0, total_ = 0;
  Buffers chunk_, strip_;
};

}  // namespace

nlohmann::json LossScalerOf(const nlohmann::json& ours) {
  if (!ours.is_object()) return nullptr;
  const bool dynamic = ours.value("dynamic", false);
  nlohmann::json theirs = {{"cur_scale", ours.value("scale", 1.0)}, {"dynamic", dynamic}};
  if (!dynamic) return theirs;
  theirs.update({{"cur_iter", ours.value("iteration", 0)},
                 {"last_overflow_iter", ours.value("last_overflow", -1)},
                 {"scale_factor", ours.value("factor", 2.0)},
                 {"scale_window", ours.value("window", 1000)},
                 {"min_scale", ours.value("min_scale", 1.0)},
                 {"delayed_shift", ours.value("hysteresis", 2)},
                 {"cur_hysteresis", ours.value("hysteresis_left", 2)},
                 {"consecutive_hysteresis", ours.value("consecutive_hysteresis", false)},
                 {"raise_error_at_min_scale", true},
                 {"dtype", nullptr}});
  return theirs;
}

absl::Status WriteUniversal(const DeepSpeedProgress& run, const ModelLayout& layout, const ReadMoments& read,
                            const UniversalOptions& options) {
  return UniversalWriter(run, layout, read, options).Run();
}

}  // namespace penstock::models
