#include "zero/engine/stripes.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/file.h"
#include "aio/profile.h"
#include "base/directory.h"
#include "base/status_macros.h"

namespace penstock::zero {
namespace {

constexpr double kCountsAsEqual = 1.25;
constexpr uint64_t kInFlight = uint64_t{8} << 20;

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// Of the bytes, from 0 to 1, that directory `i` of `count` gets.
double ShareOf(const std::vector<double>& weights, size_t i, size_t count) {
  return weights.empty() ? 1.0 / static_cast<double>(count) : weights[i] / Sum(weights);
}

// Of the drive that `directory` is on, from a stored profile or measured now.
absl::StatusOr<double> RateOf(const std::string& directory, const std::string& device, uint64_t most_memory) {
  const std::string cache = StripeCachePath();
  for (const std::string& path : {aio::DefaultProfilePath(), cache}) {
    const absl::StatusOr<aio::DeviceProfile> stored = aio::LoadProfile(directory, path);
    // What was measured of another drive that was mounted here does not count.
    if (stored.ok() && stored->device == device && stored->mixed_bytes_per_s > 0)
      return stored->mixed_bytes_per_s;
  }
  aio::ProbeOptions options;
  options.directory = directory;
  options.file_bytes = uint64_t{64} << 20;
  options.budget_ms = 1000;
  options.rounds = 1;
  options.written_bytes_max = uint64_t{512} << 20;
  options.depths = {std::max(options.block_bytes, std::min(kInFlight, most_memory))};
  ASSIGN_OR_RETURN(const aio::DeviceProfile profile, aio::MeasureDevice(options));
  if (profile.mixed_bytes_per_s <= 0)
    return absl::UnavailableError(absl::StrCat(directory, ": moved nothing while it was measured"));
  // Without a cache the next run measures again.
  if (!profile.disturbed) (void)aio::StoreProfile(profile, cache);
  return profile.mixed_bytes_per_s;
}

// Of each directory. Empty: all are on one drive.
absl::StatusOr<std::vector<double>> MeasureDirectories(const std::vector<std::string>& directories,
                                                       uint64_t most_memory) {
  std::map<std::string, std::vector<size_t>> of_device;
  std::vector<std::string> there;
  for (const std::string& directory : directories) {
    there.push_back(aio::NearestExisting(directory));
    ASSIGN_OR_RETURN(const std::string device, aio::DeviceOfPath(there.back()));
    of_device[device].push_back(there.size() - 1);
  }
  std::vector<double> rates;
  if (of_device.size() < 2) return rates;
  rates.resize(directories.size());
  for (const auto& [device, members] : of_device) {
    ASSIGN_OR_RETURN(const double rate, RateOf(there[members.front()], device, most_memory));
    for (const size_t each : members) rates[each] = rate / static_cast<double>(members.size());
  }
  return rates;
}

std::string Describe(const std::vector<std::string>& directories, const Stripes& stripes,
                     const std::string& why) {
  std::string line = "state directories: ";
  for (size_t i = 0; i < directories.size(); ++i) {
    absl::StrAppend(&line, i == 0 ? "" : ", ", directories[i],
                    absl::StrFormat(" %.0f%%", 100 * stripes.share(i, directories.size())));
    if (!stripes.bytes_per_s.empty())
      absl::StrAppend(&line, absl::StrFormat(" (%.2f GB/s)", stripes.bytes_per_s[i] / 1e9));
  }
  return absl::StrCat(line, " of the bytes: ", why);
}

}  // namespace

double Stripes::share(size_t directory, size_t directories) const {
  return ShareOf(weights, directory, directories);
}

std::string StripeCachePath() {
  return absl::StrCat(DirectoryOf(aio::DefaultProfilePath()), "/stripes.json");
}

std::vector<double> WeightsBySpeed(const std::vector<double>& bytes_per_s) {
  if (bytes_per_s.size() < 2) return {};
  const auto [slowest, fastest] = std::minmax_element(bytes_per_s.begin(), bytes_per_s.end());
  if (*slowest <= 0 || *fastest <= kCountsAsEqual * *slowest) return {};
  return bytes_per_s;
}

double ReachedOf(const std::vector<double>& bytes_per_s, const std::vector<double>& weights) {
  if (bytes_per_s.empty()) return 1;
  double together = 0;  // bytes per second: what the slowest for its share allows
  for (size_t i = 0; i < bytes_per_s.size(); ++i) {
    const double allowed = bytes_per_s[i] / ShareOf(weights, i, bytes_per_s.size());
    together = i == 0 ? allowed : std::min(together, allowed);
  }
  return together / Sum(bytes_per_s);
}

Stripes ChooseStripes(const StorageOptions& storage, int64_t memory_bytes) {
  Stripes stripes;
  const std::vector<std::string>& directories = storage.state_dirs;
  stripes.weights = storage.state_dir_weights;
  if (directories.size() < 2) {
    stripes.weights.clear();
    return stripes;
  }
  const uint64_t most = memory_bytes > 0 ? static_cast<uint64_t>(memory_bytes) / 4 : UINT64_MAX;
  absl::StatusOr<std::vector<double>> rates = absl::UnavailableError("nothing is to be measured");
  if (storage.measures_drives) rates = MeasureDirectories(directories, most);
  if (rates.ok()) stripes.bytes_per_s = *rates;
  std::string why;
  if (!storage.state_dir_weights.empty()) {
    why = "by the weights that were given";
  } else if (!rates.ok()) {
    why = absl::StrCat("equal shares, because a drive could not be measured (",
                       std::string(rates.status().message()), "); `state_dir` DIR=WEIGHT gives others");
  } else if (stripes.bytes_per_s.empty()) {
    why = "equal shares of one drive";
  } else {
    stripes.weights = WeightsBySpeed(stripes.bytes_per_s);
    why = stripes.weights.empty() ? "equal shares, since the drives are about as fast"
                                  : "by measured speed; DIR=WEIGHT in place of DIR gives other shares";
  }
  stripes.reached = ReachedOf(stripes.bytes_per_s, stripes.weights);
  stripes.line = Describe(directories, stripes, why);
  return stripes;
}

}  // namespace penstock::zero
