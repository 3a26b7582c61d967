// The flags and the sweep file of ds_nvme_tune, and the choice among what was measured.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/bytes.h"
#include "aio/io_error.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "tools/ds/ds_io_args.h"
#include "tools/ds/ds_io_tune.h"

namespace penstock::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kPointsMax = 100'000;

absl::Status RefuseKey(const std::string& key, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("sweep config: \"", aio::OneLine(key), "\": ", why));
}

// Sets one field of a point from one value of a list.
absl::Status Apply(const std::string& key, const Json& value, TunePoint& point) {
  const auto number = [&](uint64_t most, uint64_t& field) -> absl::Status {
    int64_t n = 0;
    if (value.is_number_integer()) {
      n = value.get<int64_t>();
    } else if (value.is_string()) {
      const auto parsed = aio::ParseBytes(value.get<std::string>());
      if (parsed.ok() && *parsed <= most) n = static_cast<int64_t>(*parsed);
    }
    if (n < 1 || static_cast<uint64_t>(n) > most) {
      return RefuseKey(key,
                       absl::StrCat(aio::OneLine(value.dump()), " is not a whole number from 1 to ", most));
    }
    field = static_cast<uint64_t>(n);
    return absl::OkStatus();
  };
  const auto flag = [&](bool& field) -> absl::Status {
    if (value.is_boolean()) {
      field = value.get<bool>();
    } else if (value == "true" || value == "false") {
      field = value == "true";
    } else {
      return RefuseKey(key, absl::StrCat(aio::OneLine(value.dump()), " is neither true nor false"));
    }
    return absl::OkStatus();
  };
  if (key == "block_size") {
    RETURN_IF_ERROR(number(64ull << 20, point.block_bytes));
    if (point.block_bytes % 4096 != 0)
      return RefuseKey(key, absl::StrCat(aio::OneLine(value.dump()), " is not a multiple of 4096"));
    return absl::OkStatus();
  }
  if (key == "queue_depth") return number(4096, point.queue_depth);
  if (key == "io_parallel" || key == "intra_op_parallelism" || key == "num_threads" ||
      key == "thread_count") {
    return number(1024, point.parallel);
  }
  if (key == "single_submit") return flag(point.single_submit);
  if (key == "sequential_requests") return flag(point.sequential);
  if (key == "overlap_events") {
    RETURN_IF_ERROR(flag(point.sequential));
    point.sequential = !point.sequential;
    return absl::OkStatus();
  }
  return RefuseKey(key,
                   "is not one of block_size, queue_depth, io_parallel, single_submit, sequential_requests");
}

}  // namespace

absl::StatusOr<TuneOptions> ParseTune(const std::vector<std::string>& arguments, std::string* help) {
  TuneOptions o;
  ArgumentTable table(
      "ds_nvme_tune",
      "Finds how many bytes in which blocks keep the drives below these directories busy, prints a plan in\n"
      "words and, last, the \"aio\" block of a config, and stores a profile that `penstock` reads.");
  table.List("--nvme_dir", &o.nvme_dirs, "DIR", "directories, one a drive");
  table.Require("--nvme_dir");
  table.Text("--sweep_config", &o.sweep_config, "FILE", "JSON: what to try instead of the built-in sweep");
  table.Switch("--no_read", &o.no_read, "do not measure reads");
  table.Switch("--no_write", &o.no_write, "do not measure writes");
  table.Size("--io_size", &o.io_bytes, &o.io_size_text, "bytes of each file (400M)");
  table.Switch("--gpu", &o.gpu, "to and from CUDA devices, the first for the first directory and so on");
  table.Switch("--gds", &o.gds, "with --gpu: straight to the device with cuFile");
  table.Switch("--flush_page_cache", &o.flush_page_cache, "drop the page cache before each run (root)");
  table.Text("--log_dir", &o.log_dir, "DIR", "logs of the runs (_aio_bench_logs)");
  table.Integer("--loops", &o.loops, 1, 1000,
                "rounds over the sweep (1; fewer than 2 are made 2 without --sweep_config)");
  table.Switch("--verbose", &o.verbose, "print every run");
  table.Text("--engine", &o.engine, "ENGINE", "aio_handle (the best there is), io_uring, libaio, threads");
  table.Text("--json", &o.json_path, "FILE", "write all points and the choice as JSON");
  table.Text("--profile", &o.profile_path, "FILE", "where to store the device profile");
  table.Switch("--no_profile", &o.no_profile, "store no device profile");
  RETURN_IF_ERROR(table.Parse(arguments));
  if (table.help_asked()) {
    *help = table.Help();
    return o;
  }
  if (o.no_read && o.no_write)
    return absl::InvalidArgumentError("--no_read and --no_write leave nothing to measure");
  for (size_t i = 0; i < o.nvme_dirs.size(); ++i) {
    if (std::find(o.nvme_dirs.begin(), o.nvme_dirs.begin() + static_cast<ptrdiff_t>(i), o.nvme_dirs[i]) !=
        o.nvme_dirs.begin() + static_cast<ptrdiff_t>(i)) {
      return absl::InvalidArgumentError(
          absl::StrCat("argument --nvme_dir: ", aio::OneLine(o.nvme_dirs[i]), " is named twice"));
    }
  }
  if (o.gds && !o.gpu) return absl::InvalidArgumentError("--gds needs --gpu");
  if (o.engine != "aio_handle" && o.engine != "io_uring" && o.engine != "libaio" && o.engine != "threads") {
    return absl::InvalidArgumentError(absl::StrCat("argument --engine: '", aio::OneLine(o.engine),
                                                   "' is none of aio_handle, io_uring, libaio, threads"));
  }
  if (o.io_bytes < (1ull << 20) || o.io_bytes > (1ull << 44)) {
    return absl::InvalidArgumentError("argument --io_size: must be from 1M to 16T");
  }
  return o;
}

double TunePoint::score() const {
  return mixed_bytes_per_s != 0 ? mixed_bytes_per_s : read_bytes_per_s + write_bytes_per_s;
}

absl::StatusOr<std::vector<TunePoint>> ReadSweep(const std::string& json_text) {
  // Within bounds first, then once more with its keys in their order.
  RETURN_IF_ERROR(ParseJson(json_text, "sweep config").status());
  const Json json = Json::parse(json_text, nullptr, false);
  if (!json.is_object() || json.empty()) {
    return absl::InvalidArgumentError(
        "sweep config: not a JSON object of option names to lists, like {\"block_size\": [\"1M\", \"8M\"], "
        "\"queue_depth\": [32]}");
  }
  std::vector<TunePoint> points(1);
  for (const auto& [key, values] : json.items()) {
    if (!values.is_array() || values.empty()) return RefuseKey(key, "is not a list of values");
    if (points.size() * values.size() > kPointsMax)
      return RefuseKey(key, "makes more than 100000 combinations");
    std::vector<TunePoint> product;
    for (const TunePoint& point : points) {
      for (const Json& value : values) {
        product.push_back(point);
        RETURN_IF_ERROR(Apply(key, value, product.back()));
      }
    }
    points = std::move(product);
  }
  for (const TunePoint& point : points) {
    if (point.queue_depth * point.parallel > 4096) {
      return absl::InvalidArgumentError(
          "sweep config: queue_depth times io_parallel is more than 4096 blocks in flight");
    }
    if (point.in_flight_bytes() > (16ull << 30)) {
      return absl::InvalidArgumentError(
          "sweep config: block_size times queue_depth times io_parallel is more than 16 GiB in flight");
    }
  }
  return points;
}

const TunePoint& Choose(const std::vector<TunePoint>& points) {
  const TunePoint* best = &points[0];
  for (const TunePoint& point : points) {
    if (point.score() > best->score()) best = &point;
  }
  const TunePoint* chosen = best;
  for (const TunePoint& point : points) {
    if (point.score() < 0.95 * best->score()) continue;
    const bool leaner = point.in_flight_bytes() < chosen->in_flight_bytes();
    const bool same = point.in_flight_bytes() == chosen->in_flight_bytes();
    if (leaner || (same && point.block_bytes > chosen->block_bytes) ||
        (same && point.block_bytes == chosen->block_bytes && point.score() > chosen->score())) {
      chosen = &point;
    }
  }
  return *chosen;
}

TunePoint Recommend(const TunePoint& saturation) {
  TunePoint point = saturation;
  const uint64_t in_flight = 2 * saturation.in_flight_bytes();
  while (in_flight / point.block_bytes < 4 && point.block_bytes % (2ull << 20) == 0) point.block_bytes /= 2;
  point.parallel = 1;
  point.queue_depth = std::max<uint64_t>(4, in_flight / point.block_bytes);
  return point;
}

std::string AioBlock(const TunePoint& point) {
  return absl::StrFormat(
      "{\n   \"aio\": {\n      \"single_submit\": %s,\n      \"overlap_events\": %s,\n      "
      "\"intra_op_parallelism\": %d,\n"
      "      \"queue_depth\": %d,\n      \"block_size\": %d\n   }\n}\n",
      point.single_submit ? "true" : "false", point.sequential ? "false" : "true", point.parallel,
      point.queue_depth, point.block_bytes);
}

}  // namespace penstock::tools
