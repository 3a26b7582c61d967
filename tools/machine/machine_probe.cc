#include "tools/machine/machine_probe.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cache.h"
#include "kernels/checksum.h"
#include "tools/base/size.h"
#include "zero/engine/engine_state.h"
#include "zero/compute/measure.h"
#include "zero/config/nearest_name.h"

namespace penstock::tools {
namespace {

int Cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// Bytes per second of checking what was read, from memory, on one core.
double MeasureVerifyRate() {
  using Clock = std::chrono::steady_clock;
  const std::vector<uint64_t> words(size_t{1} << 19, 1);
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
  const uint64_t knee = sum->knee_bytes;
  *sum = one;
  sum->read_bytes_per_s += read;
  sum->write_bytes_per_s += write;
  sum->mixed_bytes_per_s += mixed;
  sum->knee_bytes = std::max(sum->knee_bytes, knee);
}

// Smaller probes are shorter, and leave out what only long steps need.
constexpr int64_t kWholeProbe = int64_t{64} << 20;

// `compute_speed`: lowered to what the busy drive leaves of it.
absl::StatusOr<aio::DeviceProfile> Probe(const std::string& directory, const MachineRequest& request,
                                         double* compute_speed) {
  aio::ProbeOptions options;
  options.directory = directory;
  options.file_bytes = static_cast<uint64_t>(request.file_bytes);
  options.budget_ms = request.file_bytes < kWholeProbe ? 250 : 800;
  const auto most =
      static_cast<uint64_t>(request.memory_bytes > 0 ? request.memory_bytes / 4 : int64_t{1} << 40);
  std::erase_if(options.depths,
                [&](uint64_t depth) { return depth > std::min(most, options.file_bytes / 2); });
  if (options.depths.empty()) {
    return absl::ResourceExhaustedError("the budget is too small to probe the drive with");
  }
  if (request.compute && request.file_bytes >= kWholeProbe) {
    request.compute();
    options.meanwhile = [&request, compute_speed, alone = zero::SecondsOfCompute(request.compute)] {
      const double speed = alone / zero::SecondsOfCompute(request.compute);
      *compute_speed = std::min(*compute_speed, std::clamp(speed, 0.5, 1.0));
    };
  }
  return aio::MeasureDevice(options);
}

// Of a transfer while the drive is busy (MachineModel::io_latency_seconds).
double BusyLatency(const aio::DeviceProfile& profile) {
  const double in_flight =
      profile.mixed_bytes_per_s > 0 ? static_cast<double>(profile.knee_bytes) / profile.mixed_bytes_per_s : 0;
  return std::max(profile.read_latency_us * 1e-6, in_flight);
}

// All directories, or none: a sum of measured and assumed would be neither.
void MeasureDrives(const MachineRequest& request, Machine* machine) {
  aio::DeviceProfile sum;
  double latency_seconds = 0;  // of the slowest
  int stored = 0;
  std::string dates;
  for (const std::string& directory : request.directories) {
    const std::string existing = aio::NearestExisting(directory);
    absl::StatusOr<aio::DeviceProfile> profile =
        request.stored_profile ? aio::LoadProfile(existing) : absl::NotFoundError("no stored profile wanted");
    if (profile.ok()) {
      ++stored;
      dates = Date(profile->measured_unix_s);
    } else if (request.probe_drive) {
      profile = Probe(existing, request, &machine->model.compute_beside_drive);
    }
    if (!profile.ok()) {
      machine->drives = aio::DeviceProfile();
      machine->drives.read_bytes_per_s = machine->model.read_bytes_per_s;
      machine->drives.write_bytes_per_s = machine->model.write_bytes_per_s;
      machine->drives.mixed_bytes_per_s = 2 * machine->model.mixed_rate(machine->model.read_bytes_per_s);
      machine->drives.knee_bytes = 4 << 20;
      machine->model.io_latency_seconds = BusyLatency(machine->drives);
      machine->sources.push_back(
          absl::StrCat("drive: assumed, not measured: ", std::string(profile.status().message())));
      return;
    }
    Add(*profile, &sum);
    latency_seconds = std::max(latency_seconds, BusyLatency(*profile));
  }
  machine->drives = sum;
  machine->drive_measured = true;
  tiering::MachineModel& model = machine->model;
  if (sum.read_bytes_per_s > 0) model.read_bytes_per_s = sum.read_bytes_per_s;
  if (sum.write_bytes_per_s > 0) model.write_bytes_per_s = sum.write_bytes_per_s;
  model.mixed_bytes_per_s = sum.mixed_bytes_per_s;
  model.io_latency_seconds = latency_seconds;
  // A record, and the wait for it.
  if (sum.write_latency_us > 0) model.commit_seconds = 2 * sum.write_latency_us * 1e-6;
  machine->sources.push_back(stored == static_cast<int>(request.directories.size())
                                 ? absl::StrCat("drive: profile of ", dates, ", stored by ds_nvme_tune")
                                 : "drive: measured just now, beside the state directory");
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
  const absl::StatusOr<double> updates =
      zero::MeasureUpdateRateThere(*request.device, request.format, request.optimizer);
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
  if (options.offload == zero::OffloadDevice::kNvme) request.directories = options.state_dirs;
  request.memory_bytes = options.host_memory_bytes;
  request.file_bytes = std::clamp<int64_t>(state_bytes, int64_t{16} << 20, int64_t{128} << 20);
  if (const auto format = zero::FormatOf(options); format.ok()) request.format = *format;
  request.optimizer = options.optimizer;
  request.update_workers = options.update_workers;
  request.compute_threads = options.intra_op_threads;
  request.compute = std::move(compute);
  request.device = options.device;
  return request;
}

absl::StatusOr<Machine> ProbeMachine(const MachineRequest& request) {
  Machine machine;
  tiering::MachineModel& model = machine.model;
  model.update_workers = request.update_workers;
  model.cores = Cores();
  model.compute_threads = request.compute_threads;
  machine.drives.knee_bytes = 1;
  if (!request.directories.empty()) MeasureDrives(request, &machine);
  model.update_parameters_per_s = zero::MeasureUpdateRate(request.format, request.optimizer);
  model.verify_bytes_per_s = MeasureVerifyRate();
  std::string beside;
  if (model.compute_beside_drive < 1) {
    beside = absl::StrFormat("; beside a busy drive compute keeps %.0f%% of its speed",
                             100 * model.compute_beside_drive);
  }
  machine.sources.push_back(
      absl::StrCat("compute and updates: measured just now, one block of each kind", beside));
  if (request.device != nullptr && request.device->apart()) MeasureDevice(request, &machine);
  if (request.machine_file.empty()) return machine;
  std::ifstream file(request.machine_file);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    return absl::InvalidArgumentError(absl::StrCat("--machine ", request.machine_file, ": cannot be read"));
  }
  const nlohmann::json json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat("--machine ", request.machine_file, ": is not JSON"));
  }
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
