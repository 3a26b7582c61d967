// What a device can do, measured: bandwidth read, written and mixed, and the fewest bytes in flight
// that reach (nearly) all of it. Measured once by ds_nvme_tune and stored, or in a fraction of a second when
// a run starts.
//
//   ProbeOptions options;  options.directory = "/nvme/state";
//   absl::StatusOr<DeviceProfile> profile = MeasureDevice(options);
//   engine->set_saturating_bytes_in_flight(profile->saturating_bytes_in_flight);
//   engine->RaiseCapsToSaturation();
#ifndef PENSTOCK_AIO_PROFILE_H_
#define PENSTOCK_AIO_PROFILE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"

namespace penstock::aio {

struct DepthPoint {
  uint64_t in_flight_bytes = 0;
  double mixed_bytes_per_s = 0;
  double read_bytes_per_s = 0;  // 0 where only the mix was measured
  double write_bytes_per_s = 0;
};

// GB here and everywhere: 10^9 bytes.
struct DeviceProfile {
  std::string directory;
  std::string device;       // "vda"
  std::string file_system;  // "ext4"
  std::string backend;      // "io_uring"
  uint64_t block_bytes = 0;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double mixed_bytes_per_s = 0;  // reads and writes at once, in equal bytes, both counted: saturated
  uint64_t saturating_bytes_in_flight = 0;  // reads and writes together; the least that reaches 95% of that
  double read_latency_us = 0;               // of one block alone on the device, median
  double write_latency_us = 0;
  double cpu_ms_per_gib = 0;
  int64_t measured_unix_s = 0;
  // Something else had the drive or the processor meanwhile: samples of one rate differ widely, and the best
  // stand here, which may be less than what the drive can do.
  bool disturbed = false;
  std::vector<DepthPoint> depths;
};

// What several samples of one rate say: their median; where the best is far above it, the best, because what
// disturbs only takes away.
struct SampledRate {
  double bytes_per_s = 0;
  bool disturbed = false;
};
SampledRate RateOf(std::vector<double> samples);

struct ProbeOptions {
  std::string directory;  // where the probe file is made, which has no name
  // More of them: one of each device is loaded at the same time, evenly, as striping over them does. Rates
  // are those of all together, saturating bytes are of one device, names and latencies are those of the
  // first.
  std::vector<std::string> also;
  Arena* arena = nullptr;  // where the buffers are taken from for the time being; null: an arena of its own
  BackendKind backend = BackendKind::kAuto;
  uint64_t file_bytes = 128 * kMiB;  // on each device; less is used where the device is too slow to write as
                                     // much in its share of time
  uint64_t block_bytes = 1 * kMiB;
  int64_t budget_ms = 700;                  // about how long it takes, all parts together
  uint64_t written_bytes_max = 768 * kMiB;  // drives wear
  int rounds = 3;                           // of the sweep over the depths
  std::vector<uint64_t> depths = {2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB,
                                  32 * kMiB};  // bytes in flight, rising
  // Runs on the caller's thread when everything is measured, while another keeps the mix in flight at
  // saturation: for finding out what a busy drive costs others. After `written_bytes_max` the drive is idle
  // again.
  std::function<void()> meanwhile;
};

// Writes the file once in full (not timed: allocation is not what a run pays), then times reads, writes and
// the mix, in several rounds, and once more where the samples say that something disturbs. What saturates
// (SaturatingBytes) is found by going over the depths in several rounds, since disks drift, and taking the
// median of each. Errors: those of File::Open (no space, no direct I/O here), and of any transfer;
// kResourceExhausted if the arena has no room.
absl::StatusOr<DeviceProfile> MeasureDevice(const ProbeOptions& options);

// The first directory of each device among these.
std::vector<std::string> OnePerDevice(const std::vector<std::string>& directories);

// Of depths that rise: the least which lacks less than 5% of what it and the deeper ones do on average, with
// that average as its rate of the mix. Not of the greatest: of some noisy rates that is above what the device
// does, and as often as not it is the deepest's.
DepthPoint SaturatingBytes(const std::vector<DepthPoint>& depths);

// The same of an engine and files that are there already, for those who sweep by themselves: keeps
// `in_flight_bytes` in blocks in flight for `seconds` or until `bytes_max` are moved, going round in each
// file's first `file_bytes`. Reads, writes, or each block of each file read and written in turn.
enum class LoadKind : uint8_t { kRead, kWrite, kMixed };
struct LoadOptions {
  LoadKind kind = LoadKind::kRead;
  std::vector<File*> files;
  uint64_t file_bytes = 0;
  uint64_t block_bytes = 1 * kMiB;
  uint64_t in_flight_bytes = 16 * kMiB;
  double seconds = 0.1;
  uint64_t bytes_max = UINT64_MAX;
};
struct LoadResult {
  uint64_t bytes = 0;  // read and written
  double seconds = 0;  // from the first submission to the last completion
  Histogram latency;   // of the blocks
  double bytes_per_s() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};
// `memory`: in_flight_bytes of it are used, one block each.
absl::StatusOr<LoadResult> RunLoad(Engine& engine, const LoadOptions& options, std::byte* memory);

// JSON, one object or, in a stored file, {"profiles": [ ... ]} with one entry a directory.
std::string ProfileToJson(const DeviceProfile& profile);
absl::StatusOr<DeviceProfile> ProfileFromJson(std::string_view text);

// Where profiles are kept when nothing else is said: $XDG_CACHE_HOME/penstock/devices.json, else
// ~/.cache/penstock/...
std::string DefaultProfilePath();
// Adds or replaces the entry of profile.directory; the file is replaced atomically, and of several processes
// that store at once none loses another's entry. What cannot be read is an error and stays as it is;
// kDataLoss: the file holds something else than profiles.
absl::Status StoreProfile(const DeviceProfile& profile, const std::string& path = DefaultProfilePath());
// Whether StoreProfile could add to what `path` holds: errors as its own. Nothing is changed.
absl::Status CheckProfileStore(const std::string& path);
// The entry of `directory`, or, failing that, one measured on the same device. kNotFound if there is neither.
absl::StatusOr<DeviceProfile> LoadProfile(const std::string& directory,
                                          const std::string& path = DefaultProfilePath());

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_PROFILE_H_
