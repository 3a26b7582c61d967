#include "aio/profile.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

using Json = nlohmann::json;

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

constexpr int kAttempts = 2;
// Below this part of the best the median is disturbed.
constexpr double kUndisturbed = 0.6;

// One measurement of one device, or several together, from its own engine.
class Prober {
 public:
  Prober(const ProbeOptions& options, Engine& engine, std::vector<File*> files, std::byte* memory)
      : options_(options),
        engine_(engine),
        files_(std::move(files)),
        memory_(memory),
        written_left_(options.written_bytes_max),
        mixed_(options.depths.size()) {}

  absl::Status Run(DeviceProfile& profile);

 private:
  double Share(double share) const { return static_cast<double>(options_.budget_ms) * 1e-3 * share; }
  // `in_flight_bytes`: on each device.
  absl::StatusOr<LoadResult> Measure(LoadKind kind, uint64_t in_flight_bytes, double seconds,
                                     uint64_t bytes_max) {
    LoadOptions load;
    load.kind = kind;
    load.files = files_;
    load.file_bytes = filled_bytes_;
    load.block_bytes = options_.block_bytes;
    load.in_flight_bytes = std::max(in_flight_bytes, options_.block_bytes) * files_.size();
    load.seconds = seconds;
    load.bytes_max = bytes_max;
    return RunLoad(engine_, load, memory_);
  }
  absl::Status Sample(LoadKind kind, uint64_t in_flight_bytes, double seconds, uint64_t bytes_max,
                      std::vector<double>* rates);
  absl::Status Fill();
  absl::Status Latencies(DeviceProfile& profile);
  absl::Status TakeSamples();
  void Summarize(DeviceProfile& profile) const;
  absl::Status BesideLoad(uint64_t in_flight_bytes);

  const ProbeOptions& options_;
  Engine& engine_;
  const std::vector<File*> files_;
  std::byte* memory_;
  uint64_t filled_bytes_ = 0;
  uint64_t written_left_;
  std::vector<double> reads_, writes_;      // bytes per second, a sample each
  std::vector<std::vector<double>> mixed_;  // of each depth
};

// As much of the files as a quarter of the time allows, at least what the deepest queue goes round in.
absl::Status Prober::Fill() {
  filled_bytes_ = AlignDown(options_.file_bytes, options_.block_bytes);
  ASSIGN_OR_RETURN(const auto filled, Measure(LoadKind::kWrite, options_.depths.back(), Share(0.25),
                                              filled_bytes_ * files_.size()));
  filled_bytes_ =
      std::max(AlignDown(filled.bytes / files_.size(), options_.block_bytes), options_.block_bytes);
  return absl::OkStatus();
}

absl::Status Prober::Latencies(DeviceProfile& profile) {
  ASSIGN_OR_RETURN(const auto read,
                   Measure(LoadKind::kRead, options_.block_bytes, Share(0.04), 16 * options_.block_bytes));
  ASSIGN_OR_RETURN(const auto write,
                   Measure(LoadKind::kWrite, options_.block_bytes, Share(0.04), 16 * options_.block_bytes));
  profile.read_latency_us = static_cast<double>(read.latency.PercentileNs(0.5)) * 1e-3;
  profile.write_latency_us = static_cast<double>(write.latency.PercentileNs(0.5)) * 1e-3;
  return absl::OkStatus();
}

absl::Status Prober::Sample(LoadKind kind, uint64_t in_flight_bytes, double seconds, uint64_t bytes_max,
                            std::vector<double>* rates) {
  ASSIGN_OR_RETURN(const auto load, Measure(kind, in_flight_bytes, seconds, bytes_max));
  rates->push_back(load.bytes_per_s());
  const uint64_t written = kind == LoadKind::kRead    ? 0
                           : kind == LoadKind::kWrite ? load.bytes
                                                      : load.bytes / 2;
  written_left_ -= std::min(written_left_, written);
  return absl::OkStatus();
}

absl::Status Prober::TakeSamples() {
  const uint64_t rounds = static_cast<uint64_t>(options_.rounds), count = options_.depths.size();
  const uint64_t deep = std::min<uint64_t>(options_.depths.back(), 16 * kMiB);
  const double seconds = Share(0.11) / options_.rounds;
  const double mixed_seconds = Share(0.45) / static_cast<double>(count) / options_.rounds;
  // A quarter of the bytes that may be written goes into writes, half into the mix, of which half is written.
  const uint64_t most = std::max(written_left_ / 4 / rounds, options_.block_bytes);
  const uint64_t mixed_most = std::max(written_left_ / count / rounds, 2 * options_.block_bytes);
  for (uint64_t round = 0; round < rounds; ++round) {
    absl::Status status = Sample(LoadKind::kRead, deep, seconds, UINT64_MAX, &reads_);
    if (status.ok()) status = Sample(LoadKind::kWrite, deep, seconds, most, &writes_);
    for (size_t i = 0; i < count && status.ok(); ++i) {
      status = Sample(LoadKind::kMixed, options_.depths[i], mixed_seconds, mixed_most, &mixed_[i]);
    }
    RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

void Prober::Summarize(DeviceProfile& profile) const {
  const SampledRate read = RateOf(reads_), write = RateOf(writes_);
  profile.disturbed = read.disturbed || write.disturbed;
  profile.read_bytes_per_s = read.bytes_per_s;
  profile.write_bytes_per_s = write.bytes_per_s;
  profile.depths.clear();
  for (size_t i = 0; i < mixed_.size(); ++i) {
    const SampledRate mixed = RateOf(mixed_[i]);
    profile.disturbed |= mixed.disturbed;
    profile.depths.push_back({options_.depths[i], mixed.bytes_per_s, 0, 0});
  }
  const DepthPoint saturation = SaturatingBytes(profile.depths);
  profile.saturating_bytes_in_flight = saturation.in_flight_bytes;
  profile.mixed_bytes_per_s = saturation.mixed_bytes_per_s;
}

absl::Status Prober::Run(DeviceProfile& profile) {
  RETURN_IF_ERROR(Fill());
  RETURN_IF_ERROR(Latencies(profile));
  for (int attempt = 0; attempt == 0 || (attempt < kAttempts && profile.disturbed); ++attempt) {
    RETURN_IF_ERROR(TakeSamples());
    Summarize(profile);
  }
  if (!options_.meanwhile) return absl::OkStatus();
  return BesideLoad(profile.saturating_bytes_in_flight);
}

absl::Status Prober::BesideLoad(uint64_t in_flight_bytes) {
  constexpr double kSlice = 0.02;  // it takes so long to end
  std::atomic<bool> over{false};
  absl::Status status;
  std::thread load([&] {
    uint64_t left = 2 * options_.written_bytes_max;  // half of a mix is written
    while (!over.load(std::memory_order_relaxed) && left > 0) {
      const auto part = Measure(LoadKind::kMixed, in_flight_bytes, kSlice, left);
      if (!part.ok()) {
        status = part.status();
        return;
      }
      left -= std::min(left, part->bytes);
    }
  });
  options_.meanwhile();
  over.store(true, std::memory_order_relaxed);
  load.join();
  return status;
}

}  // namespace

SampledRate RateOf(std::vector<double> samples) {
  if (samples.empty()) return {};
  const double best = *std::max_element(samples.begin(), samples.end());
  const double median = Median(std::move(samples));
  const bool disturbed = median < kUndisturbed * best;
  return {disturbed ? best : median, disturbed};
}

std::vector<std::string> OnePerDevice(const std::vector<std::string>& directories) {
  std::vector<std::string> firsts;
  std::vector<dev_t> devices;
  for (const std::string& directory : directories) {
    struct stat info {};
    // What cannot be asked is kept: whoever uses it says why.
    if (stat(directory.c_str(), &info) == 0) {
      if (std::find(devices.begin(), devices.end(), info.st_dev) != devices.end()) continue;
      devices.push_back(info.st_dev);
    }
    firsts.push_back(directory);
  }
  return firsts;
}

DepthPoint SaturatingBytes(const std::vector<DepthPoint>& depths) {
  DepthPoint saturation;
  double sum = 0;
  for (size_t i = depths.size(); i-- > 0;) {
    sum += depths[i].mixed_bytes_per_s;
    const double plateau = sum / static_cast<double>(depths.size() - i);
    if (depths[i].mixed_bytes_per_s >= 0.95 * plateau)
      saturation = {depths[i].in_flight_bytes, plateau, 0, 0};
  }
  return saturation;
}

absl::StatusOr<DeviceProfile> MeasureDevice(const ProbeOptions& options) {
  if (options.depths.empty() || !std::is_sorted(options.depths.begin(), options.depths.end()) ||
      options.rounds < 1 || options.budget_ms < 1 || options.block_bytes == 0 ||
      options.file_bytes < options.block_bytes) {
    return absl::InvalidArgumentError(
        "device probe: needs rising depths, a round, a budget, and a file of at least one block");
  }
  std::vector<std::string> directories = {options.directory};
  directories.insert(directories.end(), options.also.begin(), options.also.end());
  directories = OnePerDevice(directories);
  const uint64_t memory_bytes = std::max(options.depths.back(), options.block_bytes) * directories.size();
  std::unique_ptr<Arena> own;
  Arena* arena = options.arena;
  if (arena == nullptr) {
    ArenaOptions arena_options;
    arena_options.bytes = memory_bytes;
    ASSIGN_OR_RETURN(auto made, Arena::Create(arena_options));
    own = std::move(made);
    arena = own.get();
  }
  ASSIGN_OR_RETURN(const auto memory, arena->Allocate(memory_bytes));

  EngineOptions engine_options;
  engine_options.backend = options.backend;
  engine_options.block_bytes = options.block_bytes;
  engine_options.max_read_bytes_in_flight = memory_bytes;
  engine_options.max_write_bytes_in_flight = memory_bytes;
  engine_options.arenas = {arena};
  engine_options.log = [](std::string_view) {};  // the engine of the run says the same
  ASSIGN_OR_RETURN(const auto engine, Engine::Create(std::move(engine_options)));

  std::vector<std::unique_ptr<File>> open;
  std::vector<File*> files;
  for (const std::string& directory : directories) {
    FileOptions file_options;
    file_options.path = absl::StrCat(directory, "/.penstock-measure");
    file_options.nameless = true;
    file_options.size = options.file_bytes;
    ASSIGN_OR_RETURN(auto file, File::Open(file_options));
    open.push_back(std::move(file));
    files.push_back(open.back().get());
  }
  ASSIGN_OR_RETURN(const auto space, QueryFileSystem(options.directory));

  DeviceProfile profile;
  profile.directory = options.directory;
  profile.device = files.front()->device_name();
  profile.file_system = space.type;
  profile.backend = engine->backend_name();
  profile.block_bytes = options.block_bytes;
  profile.measured_unix_s = static_cast<int64_t>(time(nullptr));
  Prober prober(options, *engine, std::move(files), memory.data());
  RETURN_IF_ERROR(prober.Run(profile));
  profile.cpu_ms_per_gib = engine->stats().CpuMsPerGiB();
  return profile;
}

namespace {

Json ToJson(const DeviceProfile& profile) {
  Json depths = Json::array();
  for (const DepthPoint& point : profile.depths) {
    depths.push_back({{"in_flight_bytes", point.in_flight_bytes},
                      {"mixed_bytes_per_s", point.mixed_bytes_per_s},
                      {"read_bytes_per_s", point.read_bytes_per_s},
                      {"write_bytes_per_s", point.write_bytes_per_s}});
  }
  return {{"directory", profile.directory},
          {"device", profile.device},
          {"file_system", profile.file_system},
          {"backend", profile.backend},
          {"block_bytes", profile.block_bytes},
          {"read_bytes_per_s", profile.read_bytes_per_s},
          {"write_bytes_per_s", profile.write_bytes_per_s},
          {"mixed_bytes_per_s", profile.mixed_bytes_per_s},
          {"knee_bytes", profile.saturating_bytes_in_flight},
          {"read_latency_us", profile.read_latency_us},
          {"write_latency_us", profile.write_latency_us},
          {"cpu_ms_per_gib", profile.cpu_ms_per_gib},
          {"measured_unix_s", profile.measured_unix_s},
          {"disturbed", profile.disturbed},
          {"depths", depths}};
}

// Reads one field if it is there and of the right kind; says which is not.
template <typename T>
absl::Status Take(const Json& json, const char* name, T& value) {
  const auto field = json.find(name);
  if (field == json.end())
    return absl::InvalidArgumentError(absl::StrCat("device profile: \"", name, "\" is missing"));
  if constexpr (std::is_same_v<T, std::string>) {
    if (!field->is_string())
      return absl::InvalidArgumentError(absl::StrCat("device profile: \"", name, "\" is no text"));
    value = field->template get<T>();
  } else {
    if (!field->is_number() || field->template get<double>() < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("device profile: \"", name, "\" is no number from 0 on"));
    }
    if (field->template get<double>() >= static_cast<double>(std::numeric_limits<int64_t>::max())) {
      if constexpr (std::is_integral_v<T>) {
        return absl::InvalidArgumentError(absl::StrCat("device profile: \"", name, "\" is too large"));
      }
    }
    value = field->template get<T>();
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceProfile> FromJson(const Json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("device profile: not a JSON object");
  DeviceProfile profile;
  for (const absl::Status& status :
       {Take(json, "directory", profile.directory), Take(json, "device", profile.device),
        Take(json, "file_system", profile.file_system), Take(json, "backend", profile.backend),
        Take(json, "block_bytes", profile.block_bytes),
        Take(json, "read_bytes_per_s", profile.read_bytes_per_s),
        Take(json, "write_bytes_per_s", profile.write_bytes_per_s),
        Take(json, "mixed_bytes_per_s", profile.mixed_bytes_per_s),
        Take(json, "knee_bytes", profile.saturating_bytes_in_flight),
        Take(json, "read_latency_us", profile.read_latency_us),
        Take(json, "write_latency_us", profile.write_latency_us),
        Take(json, "cpu_ms_per_gib", profile.cpu_ms_per_gib),
        Take(json, "measured_unix_s", profile.measured_unix_s)}) {
    RETURN_IF_ERROR(status);
  }
  const auto disturbed = json.find("disturbed");  // those of older programs lack it
  profile.disturbed = disturbed != json.end() && disturbed->is_boolean() && disturbed->get<bool>();
  const auto depths = json.find("depths");
  if (depths == json.end() || !depths->is_array()) return profile;
  for (const Json& entry : *depths) {
    DepthPoint point;
    for (const absl::Status& status : {Take(entry, "in_flight_bytes", point.in_flight_bytes),
                                       Take(entry, "mixed_bytes_per_s", point.mixed_bytes_per_s),
                                       Take(entry, "read_bytes_per_s", point.read_bytes_per_s),
                                       Take(entry, "write_bytes_per_s", point.write_bytes_per_s)}) {
      RETURN_IF_ERROR(status);
    }
    profile.depths.push_back(point);
  }
  return profile;
}

// {"profiles": [...]}; an empty list where there is no file yet, or an empty one.
absl::StatusOr<Json> ReadStore(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (absl::IsNotFound(text.status()) || (text.ok() && text->empty()))
    return Json{{"profiles", Json::array()}};
  if (!text.ok() && !absl::IsInvalidArgument(text.status())) return text.status();
  if (text.ok()) {
    absl::StatusOr<Json> store = ParseJsonObject(*text, path);
    if (store.ok() && store->contains("profiles") && (*store)["profiles"].is_array()) return store;
  }
  return absl::DataLossError(absl::StrCat(
      path, ": not a file of device profiles; move it away and measure again, or give another file"));
}

std::string Canonical(const std::string& directory) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(directory, error);
  return error ? directory : path.string();
}

// A directory's name may be any bytes; JSON's text may not.
std::string Dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string ProfileToJson(const DeviceProfile& profile) { return Dump(ToJson(profile)); }

absl::StatusOr<DeviceProfile> ProfileFromJson(std::string_view text) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, "device profile"));
  return FromJson(json);
}

std::string DefaultProfilePath() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return absl::StrCat(cache, "/penstock/devices.json");
  const char* home = std::getenv("HOME");
  return absl::StrCat(home != nullptr && *home != '\0' ? home : ".", "/.cache/penstock/devices.json");
}

absl::Status CheckProfileStore(const std::string& path) { return ReadStore(path).status(); }

absl::Status StoreProfile(const DeviceProfile& profile, const std::string& path) {
  constexpr std::chrono::minutes kPatience{1};  // a store is read and written in milliseconds
  const std::string parent = DirectoryOf(path);
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (error) return absl::UnavailableError(absl::StrCat("create ", parent, ": ", error.message()));
  // From the reading to the replacement: of two that store at once, both entries stay.
  DirectoryLock lock;
  ASSIGN_OR_RETURN(const bool locked, lock.Take(parent, kPatience));
  if (!locked) {
    return absl::UnavailableError(absl::StrCat(
        parent, ": locked by another process for a minute: store the profile in another directory"));
  }
  ASSIGN_OR_RETURN(Json json, ReadStore(path));
  Json entry = ToJson(profile);
  entry["directory"] = Canonical(profile.directory);
  Json kept = Json::array();
  for (const Json& other : json["profiles"]) {
    if (!other.is_object() || other.value("directory", Json()) != entry["directory"]) kept.push_back(other);
  }
  kept.push_back(entry);
  json["profiles"] = kept;
  return ReplaceFile(path, Dump(json) + "\n");
}

absl::StatusOr<DeviceProfile> LoadProfile(const std::string& directory, const std::string& path) {
  ASSIGN_OR_RETURN(auto store, ReadStore(path));
  const std::string wanted = Canonical(directory);
  const auto device = DeviceOfPath(directory);
  absl::StatusOr<DeviceProfile> same_device = absl::NotFoundError(absl::StrCat(
      "no measured profile of ", wanted, " in ", path, "; `ds_nvme_tune --nvme_dir ", wanted, "` makes one"));
  for (const Json& entry : store["profiles"]) {
    auto profile = FromJson(entry);
    if (!profile.ok()) continue;
    if (profile->directory == wanted) return profile;
    if (device.ok() && profile->device == *device) same_device = *std::move(profile);
  }
  return same_device;
}

}  // namespace penstock::aio
