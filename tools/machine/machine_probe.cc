#include "tools/machine/machine_probe.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "kernels/cache.h"
#include "kernels/checksum.h"
#include "tools/base/size.h"
#include "zero/compute/machine_rates.h"
#include "zero/config/nearest_name.h"
#include "zero/engine/engine.h"
#include "zero/memory/thread_times.h"

namespace penstock::tools {
namespace {

// Bytes per second of checking what was read, from memory, on one core.
double MeasureVerifyRate(int64_t memory_bytes) {
  using Clock = std::chrono::steady_clock;
  size_t most = size_t{1} << 19;
  if (memory_bytes > 0) most = std::clamp<size_t>(static_cast<size_t>(memory_bytes) / 4 / 8, 4096, most);
  const std::vector<uint64_t> words(most, 1);
  const size_t bytes = words.size() * sizeof(words[0]);
  double best = 1e9;
  uint64_t sum = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    kernels::EvictFromCaches(words.data(), bytes);
    const auto begin = Clock::now();
    sum += kernels::Checksum(words.data(), bytes);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  if (sum == 1) return 1;  // the sums must not be optimised away
  return static_cast<double>(bytes) / std::max(best, 1e-9);
}

std::string Date(int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm utc{};
  gmtime_r(&time, &utc);
  return absl::StrFormat("%04d-%02d-%02d", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

void Add(const aio::DeviceProfile& one, aio::DeviceProfile* sum) {
  const double read = sum->read_bytes_per_s, write = sum->write_bytes_per_s, mixed = sum->mixed_bytes_per_s;
  const double read_us = sum->read_latency_us, write_us = sum->write_latency_us;
  const uint64_t saturating = sum->saturating_bytes_in_flight;
  const bool disturbed = sum->disturbed;
  *sum = one;
  sum->read_bytes_per_s += read;
  sum->write_bytes_per_s += write;
  sum->mixed_bytes_per_s += mixed;
  sum->saturating_bytes_in_flight = std::max(sum->saturating_bytes_in_flight, saturating);
  sum->read_latency_us = std::max(sum->read_latency_us, read_us);
  sum->write_latency_us = std::max(sum->write_latency_us, write_us);
  sum->disturbed |= disturbed;
}

// Smaller probes are shorter, and leave out what only long steps need.
constexpr int64_t kWholeProbe = int64_t{64} << 20;

// Of these directories, each on a device of its own, together. `compute_speed`: lowered to what the busy
// drives leave of it.
absl::StatusOr<aio::DeviceProfile> Probe(const std::vector<std::string>& directories,
                                         const MachineRequest& request, double* compute_speed) {
  aio::ProbeOptions options;
  options.directory = directories.front();
  options.also.assign(directories.begin() + 1, directories.end());
  options.file_bytes = static_cast<uint64_t>(request.file_bytes);
  options.budget_ms = request.file_bytes < kWholeProbe ? 250 : 800;
  const uint64_t most =
      static_cast<uint64_t>(request.memory_bytes > 0 ? request.memory_bytes / 4 : int64_t{1} << 40) /
      directories.size();
  std::erase_if(options.depths,
                [&](uint64_t depth) { return depth > std::min(most, options.file_bytes / 2); });
  if (options.depths.empty()) {
    return absl::ResourceExhaustedError("the budget is too small to probe the drive with");
  }
  if (request.compute && request.file_bytes >= kWholeProbe) {
    request.compute();
    bool disturbed = false;
    const double alone = zero::SecondsOfCompute(request.compute, request.compute_threads, &disturbed);
    // Beside other work there is no telling what the drive takes of it.
    if (!disturbed) {
      options.meanwhile = [&request, compute_speed, alone] {
        const double speed = alone / zero::SecondsOfCompute(request.compute, request.compute_threads);
        *compute_speed = std::min(*compute_speed, std::clamp(speed, 0.5, 1.0));
      };
    }
  }
  return aio::MeasureDevice(options);
}

// Of a transfer while the drive is busy (MachineModel::io_latency_seconds).
double BusyLatency(const aio::DeviceProfile& profile, size_t devices) {
  const double in_flight =
      profile.mixed_bytes_per_s > 0
          ? static_cast<double>(profile.saturating_bytes_in_flight * devices) / profile.mixed_bytes_per_s
          : 0;
  return std::max(profile.read_latency_us * 1e-6, in_flight);
}

// The same, each alone, added up.
absl::StatusOr<aio::DeviceProfile> ProbeEach(const std::vector<std::string>& directories,
                                             const MachineRequest& request, double* compute_speed) {
  aio::DeviceProfile sum;
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(const aio::DeviceProfile profile, Probe({directory}, request, compute_speed));
    Add(profile, &sum);
  }
  return sum;
}

// What ds_nvme_tune has stored of these directories, added up; kNotFound where one is missing.
absl::StatusOr<aio::DeviceProfile> Stored(const std::vector<std::string>& directories) {
  aio::DeviceProfile sum;
  for (const std::string& directory : directories) {
    ASSIGN_OR_RETURN(aio::DeviceProfile profile, aio::LoadProfile(directory));
    Add(profile, &sum);
  }
  return sum;
}

// All directories, or none: a sum of measured and assumed would be neither. Those on one device are one.
// Drives with unlike shares are measured apart: together they would all be as fast as the slowest.
void MeasureDrives(const MachineRequest& request, Machine* machine) {
  zero::StorageOptions storage;
  storage.state_dirs = request.directories;
  storage.state_dir_weights = request.weights;
  storage.measures_drives = request.probe_drive;
  const zero::Stripes stripes = zero::ChooseStripes(storage, request.memory_bytes);
  const bool apart = !stripes.bytes_per_s.empty() && !stripes.weights.empty();
  std::vector<std::string> directories;
  directories.reserve(request.directories.size());
  for (const std::string& directory : request.directories)
    directories.push_back(aio::NearestExisting(directory));
  directories = aio::OnePerDevice(directories);
  absl::StatusOr<aio::DeviceProfile> profile =
      request.stored_profile ? Stored(directories) : absl::NotFoundError("no stored profile wanted");
  bool stored = profile.ok();
  if (!stored && request.probe_drive) {
    profile = (apart ? ProbeEach : Probe)(directories, request, &machine->model.compute_beside_drive);
    if (profile.ok() && profile->disturbed) {
      // Placement is not decided by what happened to run beside the probe.
      absl::StatusOr<aio::DeviceProfile> quiet = Stored(directories);
      stored = quiet.ok();
      if (stored) profile = std::move(quiet);
    }
  }
  tiering::MachineModel& model = machine->model;
  if (!profile.ok()) {
    machine->drives = aio::DeviceProfile();
    machine->drives.read_bytes_per_s = model.read_bytes_per_s;
    machine->drives.write_bytes_per_s = model.write_bytes_per_s;
    machine->drives.mixed_bytes_per_s = 2 * model.mixed_rate(model.read_bytes_per_s);
    machine->drives.saturating_bytes_in_flight = 4 << 20;
    model.io_latency_seconds = BusyLatency(machine->drives, 1);
    machine->sources.push_back(
        absl::StrCat("drive: assumed, not measured: ", std::string(profile.status().message())));
    return;
  }
  if (apart) {
    profile->read_bytes_per_s *= stripes.reached;
    profile->write_bytes_per_s *= stripes.reached;
    profile->mixed_bytes_per_s *= stripes.reached;
  }
  machine->drives = *profile;
  machine->drive_measured = true;
  if (profile->read_bytes_per_s > 0) model.read_bytes_per_s = profile->read_bytes_per_s;
  if (profile->write_bytes_per_s > 0) model.write_bytes_per_s = profile->write_bytes_per_s;
  model.mixed_bytes_per_s = profile->mixed_bytes_per_s;
  model.io_latency_seconds = BusyLatency(*profile, directories.size());
  // A record, and the wait for it.
  if (profile->write_latency_us > 0) model.commit_seconds = 2 * profile->write_latency_us * 1e-6;
  if (stored) {
    machine->sources.push_back(
        absl::StrCat("drive: profile of ", Date(profile->measured_unix_s), ", stored by ds_nvme_tune",
                     profile->disturbed ? ", and disturbed by something else then" : ""));
    return;
  }
  machine->sources.push_back(
      absl::StrCat("drive: measured just now, beside the state directory",
                   profile->disturbed
                       ? "; something else used it meanwhile, so the best of several samples are taken: plan "
                         "again when the machine is quiet, or store a profile with ds_nvme_tune then"
                       : ""));
}

struct Field {
  const char* name;
  double tiering::MachineModel::*number;
  int tiering::MachineModel::*count;
};
constexpr Field kFields[] = {
    {"read_bytes_per_s", &tiering::MachineModel::read_bytes_per_s, nullptr},
    {"write_bytes_per_s", &tiering::MachineModel::write_bytes_per_s, nullptr},
    {"mixed_bytes_per_s", &tiering::MachineModel::mixed_bytes_per_s, nullptr},
    {"io_latency_seconds", &tiering::MachineModel::io_latency_seconds, nullptr},
    {"commit_seconds", &tiering::MachineModel::commit_seconds, nullptr},
    {"h2d_bytes_per_s", &tiering::MachineModel::h2d_bytes_per_s, nullptr},
    {"d2h_bytes_per_s", &tiering::MachineModel::d2h_bytes_per_s, nullptr},
    {"copy_latency_seconds", &tiering::MachineModel::copy_latency_seconds, nullptr},
    {"device_update_parameters_per_s", &tiering::MachineModel::device_update_parameters_per_s, nullptr},
    {"update_parameters_per_s", &tiering::MachineModel::update_parameters_per_s, nullptr},
    {"verify_bytes_per_s", &tiering::MachineModel::verify_bytes_per_s, nullptr},
    {"compute_beside_drive", &tiering::MachineModel::compute_beside_drive, nullptr},
    {"update_workers", nullptr, &tiering::MachineModel::update_workers},
    {"cores", nullptr, &tiering::MachineModel::cores},
    {"compute_threads", nullptr, &tiering::MachineModel::compute_threads},
};

// What fails here fails in training too, and is told there.
void MeasureDevice(const MachineRequest& request, Machine* machine) {
  machine->model.compute_threads = 0;  // of the processor: updates have it to themselves
  const absl::StatusOr<zero::CopyRates> rates = zero::MeasureCopyRates(*request.device);
  if (rates.ok()) {
    machine->model.h2d_bytes_per_s = rates->h2d_bytes_per_s;
    machine->model.d2h_bytes_per_s = rates->d2h_bytes_per_s;
  }
  // By LAMB no device updates.
  const absl::StatusOr<double> updates =
      zero::NeedsTensorNorms(request.optimizer)
          ? absl::StatusOr<double>(machine->model.device_update_parameters_per_s)
          : zero::MeasureUpdateRateThere(*request.device, request.format, request.optimizer);
  if (updates.ok()) machine->model.device_update_parameters_per_s = *updates;
  machine->sources.push_back(absl::StrCat(
      "copies to and from the device, and updates there: ", rates.ok() ? "measured just now" : "assumed: ",
      rates.ok() ? "" : std::string(rates.status().message())));
}

}  // namespace

absl::Status ApplyMachineJson(const nlohmann::json& json, tiering::MachineModel* model) {
  if (!json.is_object()) return absl::InvalidArgumentError("must be a JSON object of figures");
  for (const auto& [key, value] : json.items()) {
    const auto* field = std::find_if(std::begin(kFields), std::end(kFields),
                                     [&k = key](const Field& f) { return k == f.name; });
    if (field == std::end(kFields)) {
      std::vector<std::string_view> names;
      for (const Field& each : kFields) names.emplace_back(each.name);
      return absl::InvalidArgumentError(
          absl::StrCat("\"", key, "\" is no figure of a machine", zero::DidYouMean(key, names)));
    }
    const double least = field->number != nullptr ? 1e-12 : 0;
    if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= 1e18) ||
        (field->count != nullptr && (!value.is_number_integer() || value.get<double>() > 1e6))) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": ", value.dump(), " is no ",
                                                     field->count != nullptr ? "count" : "number above 0"));
    }
    if (field->number != nullptr) {
      model->*field->number = value.get<double>();
    } else {
      model->*field->count = value.get<int>();
    }
  }
  return absl::OkStatus();
}

nlohmann::json MachineJson(const tiering::MachineModel& model) {
  nlohmann::json json = nlohmann::json::object();
  for (const Field& field : kFields) {
    if (field.number != nullptr) {
      json[field.name] = model.*field.number;
    } else {
      json[field.name] = model.*field.count;
    }
  }
  json["mixed_bytes_per_s"] = 2 * model.mixed_rate(model.read_bytes_per_s);
  return json;
}

MachineRequest RequestFor(const zero::EngineOptions& options, int64_t state_bytes,
                          std::function<void()> compute) {
  MachineRequest request;
  if (options.storage.offload == zero::OffloadDevice::kNvme) request.directories = options.storage.state_dirs;
  request.weights = options.storage.state_dir_weights;
  request.memory_bytes = options.memory.host_memory_budget_bytes;
  request.file_bytes = std::clamp<int64_t>(state_bytes, int64_t{16} << 20, int64_t{128} << 20);
  request.format = zero::FormatOf(options);
  request.optimizer = options.optimizer.algorithm;
  request.update_workers = options.optimizer.workers;
  request.compute_threads = options.intra_op_threads;
  request.compute = std::move(compute);
  request.device = options.device;
  return request;
}

absl::StatusOr<Machine> ProbeMachine(const MachineRequest& request) {
  Machine machine;
  tiering::MachineModel& model = machine.model;
  model.update_workers = request.update_workers;
  model.cores = zero::DefaultIntraOpThreads();
  model.compute_threads = request.compute_threads;
  machine.drives.saturating_bytes_in_flight = 1;
  if (!request.directories.empty()) MeasureDrives(request, &machine);
  ASSIGN_OR_RETURN(model.update_parameters_per_s,
                   zero::MeasureUpdateRate(request.format, request.optimizer, request.memory_bytes,
                                           request.compute_threads));
  model.verify_bytes_per_s = MeasureVerifyRate(request.memory_bytes);
  std::string beside;
  if (model.compute_beside_drive < 1) {
    beside = absl::StrFormat("; beside a busy drive compute keeps %.0f%% of its speed",
                             100 * model.compute_beside_drive);
  }
  machine.sources.push_back(
      absl::StrCat("compute and updates: measured just now, one block of each kind", beside));
  if (request.device != nullptr && request.device->has_own_memory()) MeasureDevice(request, &machine);
  if (request.machine_file.empty()) return machine;
  const absl::StatusOr<nlohmann::json> parsed = ReadJsonObject(request.machine_file);
  if (!parsed.ok()) return absl::InvalidArgumentError(absl::StrCat("--machine ", parsed.status().message()));
  const nlohmann::json& json = *parsed;
  if (absl::Status status = ApplyMachineJson(json, &model); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--machine ", request.machine_file, ": ", std::string(status.message())));
  }
  std::string given;
  for (const auto& [key, value] : json.items()) absl::StrAppend(&given, given.empty() ? "" : ", ", key);
  if (!given.empty()) machine.sources.push_back(absl::StrCat("given by ", request.machine_file, ": ", given));
  machine.drives.read_bytes_per_s = model.read_bytes_per_s;
  machine.drives.write_bytes_per_s = model.write_bytes_per_s;
  machine.drives.mixed_bytes_per_s = 2 * model.mixed_rate(model.read_bytes_per_s);
  return machine;
}

}  // namespace penstock::tools
