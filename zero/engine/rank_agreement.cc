#include "zero/engine/rank_agreement.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "tiering/plan/placement.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr int64_t kExchangeProbeBytes = 4 << 20;
constexpr int64_t kMostBytes = int64_t{1} << 50;  // that a part of a model can have
constexpr int kMostThreads = 1 << 16;             // that a machine can have

// What another rank may say of a time or a rate.
bool IsAmount(double value) { return std::isfinite(value) && value >= 0; }

// What a rank receives in a second while all of them hand each other `bytes`, in `memory`, which has room for
// those of all; of the second of two exchanges, since the first one opens the windows of the connections. 0:
// too fast to tell.
absl::StatusOr<double> ProbeNetwork(Comm& comm, Channel channel, absl::StatusOr<std::byte*> memory,
                                    int64_t bytes) {
  absl::Status status = memory.status();
  double seconds = 0;
  for (int i = 0; i < 2; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    if (status.ok())
      status = comm.AllGather(channel, {"a measurement of the network"}, *memory, static_cast<size_t>(bytes));
    RETURN_IF_ERROR(status);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  return seconds > 0 ? static_cast<double>(bytes) * (comm.world() - 1) / seconds : 0;
}

// Rank 0's values, everywhere.
absl::Status TakeRankZeros(Comm& comm, const char* what, void* values, size_t bytes) {
  std::vector<std::byte> all(bytes * static_cast<size_t>(comm.world()));
  std::memcpy(all.data() + bytes * static_cast<size_t>(comm.rank()), values, bytes);
  RETURN_IF_ERROR(comm.AllGather(Channel::kSetup, {what}, all.data(), bytes));
  std::memcpy(values, all.data(), bytes);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<swap::Uuid> AgreeOnUuid(Comm& comm) {
  swap::Uuid uuid{};
  std::random_device random;
  std::generate(uuid.begin(), uuid.end(), [&] { return static_cast<uint8_t>(random()); });
  RETURN_IF_ERROR(TakeRankZeros(comm, "the run's number", uuid.data(), uuid.size()));
  return uuid;
}

absl::StatusOr<swap::Uuid> AgreeOnNewStore(Comm& comm, const swap::StoreOptions& options) {
  absl::Status mine;
  if (options.overwrite && options.overwrites_only.has_value())
    mine = swap::CheckSeen(options.directories, *options.overwrites_only);
  RETURN_IF_ERROR(AgreeOnStatus(comm, Channel::kSetup, mine));
  return AgreeOnUuid(comm);
}

namespace {

// A file in a directory, with a name of its own, which no cache of a shared file system has ever been asked
// for. It goes with this object, and so do the directories that were made for it, unless they are kept or
// something else is in them by then.
class Sign {
 public:
  explicit Sign(const std::string& directory) {
    std::error_code error;
    std::vector<std::string> missing;  // the deepest first
    for (std::string at = directory; !PathExists(at).value_or(true); at = DirectoryOf(at))
      missing.push_back(at);
    std::filesystem::create_directories(directory, error);
    if (error) {
      status_ = MakeIoError({.op = "make directory", .path = directory, .error = error.value()});
      return;
    }
    made_ = std::move(missing);
    path_ = absl::StrCat(directory, "/.seen-", absl::Hex(std::random_device()()));
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
      status_ = MakeIoError({.op = "create", .path = path_, .error = errno});
      path_.clear();
      return;
    }
    ::close(fd);
  }
  ~Sign() {
    if (!path_.empty()) (void)::unlink(path_.c_str());
    for (const std::string& directory : made_) {
      if (::rmdir(directory.c_str()) != 0) break;
    }
  }
  Sign(const Sign&) = delete;
  Sign& operator=(const Sign&) = delete;

  const std::string& path() const { return path_; }  // empty: there is none
  const absl::Status& status() const { return status_; }
  void KeepDirectories() { made_.clear(); }

 private:
  std::string path_;
  absl::Status status_;
  std::vector<std::string> made_;
};

}  // namespace

absl::Status AgreeOnDirectory(Comm& comm, const std::string& path) {
  std::optional<Sign> sign;
  if (comm.rank() == 0) sign.emplace(path);
  absl::Status mine = sign.has_value() ? sign->status() : absl::OkStatus();
  ASSIGN_OR_RETURN(
      std::vector<std::string> signs,
      comm.AllTexts(Channel::kSetup, {"the checkpoints' directory"}, sign.has_value() ? sign->path() : ""));
  if (comm.rank() > 0) {
    const absl::StatusOr<bool> seen = PathExists(signs.front());
    mine = seen.status();
    if (seen.ok() && !*seen) {
      mine = absl::FailedPreconditionError(
          absl::StrCat(path,
                       " is not what rank 0 has under this name: all ranks need one directory for "
                       "checkpoints, on a file system that they share"));
    }
  }
  absl::Status all = AgreeOnStatus(comm, Channel::kSetup, mine);
  if (all.ok() && sign.has_value()) sign->KeepDirectories();
  return all;
}

absl::StatusOr<int> LeaderAt(Comm& comm, const std::string& path) {
  Sign sign(path);
  absl::Status mine = sign.status();
  ASSIGN_OR_RETURN(const std::vector<std::string> signs,
                   comm.AllTexts(Channel::kSetup, {"the state's directory"}, sign.path()));
  int leader = comm.rank();
  for (int rank = 0; rank < leader && mine.ok(); ++rank) {
    const absl::StatusOr<bool> seen = PathExists(signs[static_cast<size_t>(rank)]);
    mine = seen.status();
    if (seen.value_or(false)) leader = rank;
  }
  RETURN_IF_ERROR(AgreeOnStatus(comm, Channel::kSetup, mine));
  sign.KeepDirectories();
  return leader;
}

absl::StatusOr<int64_t> AgreeOnBudget(Comm& comm, int64_t mine) {
  ASSIGN_OR_RETURN(std::vector<int64_t> budgets, AllNumbers(comm, "the budget", mine));
  int64_t least = 0;
  for (const int64_t budget : budgets) {
    if (budget > 0 && (least == 0 || budget < least)) least = budget;
  }
  return least;
}

absl::StatusOr<int64_t> AgreeOnDeviceBudget(Comm& comm, const Device& device, int64_t mine) {
  ASSIGN_OR_RETURN(std::vector<std::string> identities,
                   comm.AllTexts(Channel::kSetup, {"the device"}, device.identity()));
  const auto sharing = std::count(identities.begin(), identities.end(), device.identity());
  const int64_t share =
      device.identity().empty() ? device.capacity_bytes() : device.capacity_bytes() / sharing;
  return AgreeOnBudget(comm, mine > 0 ? mine : share);
}

absl::StatusOr<DeviceExchange> ConnectDevices(const std::shared_ptr<Comm>& comm, Device& device) {
  ASSIGN_OR_RETURN(std::vector<std::string> links,
                   comm->AllTexts(Channel::kSetup, {"the device's link"}, device.link()));
  ASSIGN_OR_RETURN(std::vector<std::string> identities,
                   comm->AllTexts(Channel::kSetup, {"the device"}, device.identity()));
  DeviceExchange exchange;
  std::string why;
  for (size_t k = 0; k < links.size() && why.empty(); ++k) {
    if (links[k].empty() || links[k] != links.front()) {
      why = absl::StrCat("the device of rank ", k, " cannot exchange with others");
    }
    const auto first = std::find(identities.begin(), identities.end(), identities[k]);
    const auto other = static_cast<size_t>(first - identities.begin());
    if (!identities[k].empty() && other != k) {
      why = absl::StrCat("ranks ", other, " and ", k, " share one device");
    }
  }
  if (!why.empty()) {
    exchange.how = absl::StrCat("through host memory: ", why);
    return exchange;
  }
  absl::StatusOr<std::shared_ptr<Comm>> connected = device.Connect(comm);
  if (!connected.ok()) {
    // Known to all; they can still go the other way, if they have each other.
    RETURN_IF_ERROR(comm->failure());
    exchange.how = absl::StrCat("through host memory: ", std::string(connected.status().message()));
    return exchange;
  }
  exchange.comm = std::move(*connected);
  exchange.how = absl::StrCat("between devices, over ", links.front());
  return exchange;
}

absl::Status AgreeOnGraph(Comm& comm, tiering::ModelGraph* graph) {
  std::vector<int64_t*> sizes = {&graph->batch_bytes, &graph->fixed_tensor_bytes};
  for (tiering::BlockShape& block : graph->blocks) sizes.push_back(&block.init_bytes);
  for (tiering::StageShape& stage : graph->stages) {
    sizes.insert(sizes.end(), {&stage.input_bytes, &stage.forward_peak_bytes, &stage.backward_peak_bytes,
                               &stage.input_scratch_bytes});
  }
  std::vector<int64_t> all(sizes.size() * static_cast<size_t>(comm.world()));
  int64_t* const mine = all.data() + sizes.size() * static_cast<size_t>(comm.rank());
  std::transform(sizes.begin(), sizes.end(), mine, [](const int64_t* size) { return *size; });
  if (absl::Status status =
          comm.AllGather(Channel::kSetup, {"the model's sizes"}, all.data(), sizes.size() * sizeof(int64_t));
      !status.ok())
    return status;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] < 0 || all[i] > kMostBytes) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", i / sizes.size(),
                                                     " has a model of impossible sizes: one of ", all[i],
                                                     " bytes; is it the same program?"));
    }
    int64_t& size = *sizes[i % sizes.size()];
    size = std::max(size, all[i]);
  }
  std::vector<double> seconds;
  for (const tiering::StageShape& stage : graph->stages) {
    seconds.push_back(stage.forward_seconds);
    seconds.push_back(stage.backward_seconds);
  }
  if (absl::Status status =
          TakeRankZeros(comm, "the model's times", seconds.data(), seconds.size() * sizeof(double));
      !status.ok())
    return status;
  if (!std::all_of(seconds.begin(), seconds.end(), IsAmount))
    return absl::InvalidArgumentError("rank 0 has measured impossible times; is it the same program?");
  auto agreed = seconds.begin();
  for (tiering::StageShape& stage : graph->stages) {
    stage.forward_seconds = *agreed++;
    stage.backward_seconds = *agreed++;
  }
  return absl::OkStatus();
}

namespace {

// What a rank has measured of its host, or takes for it.
struct SeenMachine {
  tiering::MachineModel machine;
  int64_t measured = 0;
};
static_assert(std::is_trivially_copyable_v<SeenMachine>);

bool IsPossible(const tiering::MachineModel& machine) {
  const auto count = [](int value) { return value >= 0 && value <= kMostThreads; };
  return machine.moves() && IsAmount(machine.mixed_bytes_per_s) && IsAmount(machine.io_latency_seconds) &&
         IsAmount(machine.commit_seconds) && IsAmount(machine.copy_latency_seconds) &&
         IsAmount(machine.network_latency_seconds) && count(machine.update_workers) && count(machine.cores) &&
         count(machine.compute_threads);
}

// Rank 0's, with the rates of the slowest host in each respect: a step waits for it.
tiering::MachineModel SlowestOf(const std::vector<SeenMachine>& seen) {
  tiering::MachineModel all = seen.front().machine;
  const auto less = [](double* value, double other) { *value = std::min(*value, other); };
  const auto more = [](double* value, double other) { *value = std::max(*value, other); };
  for (const auto& [each, measured] : seen) {
    if (measured == 0) continue;
    const double mixed = std::min(2 * all.mixed_rate(HUGE_VAL), 2 * each.mixed_rate(HUGE_VAL));
    less(&all.read_bytes_per_s, each.read_bytes_per_s);
    less(&all.write_bytes_per_s, each.write_bytes_per_s);
    all.mixed_bytes_per_s = mixed;
    more(&all.io_latency_seconds, each.io_latency_seconds);
    more(&all.commit_seconds, each.commit_seconds);
    less(&all.h2d_bytes_per_s, each.h2d_bytes_per_s);
    less(&all.d2h_bytes_per_s, each.d2h_bytes_per_s);
    less(&all.device_update_parameters_per_s, each.device_update_parameters_per_s);
    less(&all.update_parameters_per_s, each.update_parameters_per_s);
    less(&all.verify_bytes_per_s, each.verify_bytes_per_s);
    less(&all.compute_beside_drive, each.compute_beside_drive);
  }
  return all;
}

// Of hosts whose drives differ by half or more; else empty.
std::string DescribeUnlikeDrives(const std::vector<SeenMachine>& seen) {
  const auto rate = [&](size_t k) { return 2 * seen[k].machine.mixed_rate(HUGE_VAL); };
  size_t slowest = seen.size(), fastest = seen.size();
  for (size_t k = 0; k < seen.size(); ++k) {
    if (seen[k].measured == 0) continue;
    if (slowest == seen.size() || rate(k) < rate(slowest)) slowest = k;
    if (fastest == seen.size() || rate(k) > rate(fastest)) fastest = k;
  }
  if (slowest == seen.size() || rate(fastest) < 1.5 * rate(slowest)) return "";
  return absl::StrFormat(
      "unlike drives: rank %d reads and writes %.2f GB/s at once, rank %d %.2f GB/s: every step waits for "
      "the "
      "slower one, and it is planned for",
      slowest, rate(slowest) * 1e-9, fastest, rate(fastest) * 1e-9);
}

}  // namespace

absl::Status AgreeOnMachine(Comm& comm, const DeviceExchange& devices, Device& device,
                            int64_t host_memory_budget_bytes, bool measured, tiering::MachineModel* machine,
                            std::string* unlike) {
  const bool there = devices.comm != nullptr;
  // Within the budget of where it is.
  const int64_t budget = there ? devices.budget_bytes : host_memory_budget_bytes;
  const int64_t bytes = budget > 0 ? std::clamp<int64_t>(budget / 4 / comm.world(), 4096, kExchangeProbeBytes)
                                   : kExchangeProbeBytes;
  HostBuffer host;
  absl::StatusOr<std::byte*> memory = nullptr;
  if (there) {
    memory = device.AllocateArena(bytes * comm.world());  // the plan's slots take its place
  } else {
    absl::StatusOr<HostBuffer> taken =
        HostBuffer::Of(bytes * comm.world(), "memory to measure the network with");
    if (taken.ok()) {
      host = *std::move(taken);
      memory = host.data();
    } else {
      memory = taken.status();
    }
  }
  ASSIGN_OR_RETURN(const double rate,
                   there ? ProbeNetwork(*devices.comm, Channel::kAllGather, std::move(memory), bytes)
                         : ProbeNetwork(comm, Channel::kSetup, std::move(memory), bytes));
  if (rate > 0) machine->network_bytes_per_s = rate;
  std::vector<SeenMachine> seen(static_cast<size_t>(comm.world()));
  SeenMachine& mine = seen[static_cast<size_t>(comm.rank())];
  std::memset(static_cast<void*>(&mine), 0, sizeof(mine));  // gaps too: it is sent
  mine.machine = *machine;
  mine.measured = measured ? 1 : 0;
  RETURN_IF_ERROR(comm.AllGather(Channel::kSetup, {"the machine"}, seen.data(), sizeof(mine)));
  for (size_t k = 0; k < seen.size(); ++k) {
    if (IsPossible(seen[k].machine)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", k, " has measured an impossible machine; is it the same program?"));
  }
  *machine = SlowestOf(seen);
  *unlike = DescribeUnlikeDrives(seen);
  return absl::OkStatus();
}

absl::Status AgreeOnPlan(Comm& comm, const tiering::Plan& plan) {
  std::vector<int64_t> numbers = tiering::PlacementNumbers(plan);
  uint64_t replay_rate = 0;
  std::memcpy(&replay_rate, &plan.worthwhile_replay_rate, sizeof(replay_rate));
  numbers.push_back(static_cast<int64_t>(replay_rate));
  const uint64_t digest = kernels::Checksum(numbers.data(), numbers.size() * sizeof(int64_t));
  ASSIGN_OR_RETURN(std::vector<int64_t> digests, AllNumbers(comm, "the plan", static_cast<int64_t>(digest)));
  for (size_t k = 1; k < digests.size(); ++k) {
    if (digests[k] == digests.front()) continue;
    return absl::InternalError(
        absl::StrCat("rank ", k, " and rank 0 have planned differently: are they one program?"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
