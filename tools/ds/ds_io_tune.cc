#include "tools/ds/ds_io_tune.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "aio/bytes.h"
#include "aio/clock.h"
#include "aio/io_error.h"
#include "aio/profile.h"
#include "base/atomic_file.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "tools/ds/ds_io_gpu.h"
#include "tools/ds/ds_io_transfer.h"

namespace penstock::tools {
namespace {

using aio::FormatBytes;
using aio::kMiB;

constexpr double kSecondsARun = 0.15;  // of the built-in sweep; less if io_size is moved before
constexpr double kNoGain =
    1.02;  // two depths that bring less than this over the best end a block size's sweep
constexpr uint64_t kBlocks[] = {1 * kMiB, 4 * kMiB, 8 * kMiB};
constexpr uint64_t kInFlight[] = {1 * kMiB,  2 * kMiB,  4 * kMiB,  8 * kMiB,
                                  16 * kMiB, 32 * kMiB, 64 * kMiB, 128 * kMiB};

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// A point with all the speeds that its rounds gave.
struct Trial {
  TunePoint point;
  std::vector<double> reads, writes, mixes;

  void Settle() {
    point.read_bytes_per_s = Median(reads);
    point.write_bytes_per_s = Median(writes);
    point.mixed_bytes_per_s = Median(mixes);
  }
};

class Tuner {
 public:
  Tuner(const TuneOptions& options, std::FILE* err) : options_(options), err_(err) {}
  ~Tuner() {
    for (const std::string& path : paths_) unlink(path.c_str());
  }

  absl::Status Run(const std::vector<TunePoint>& sweep);
  const std::vector<TunePoint>& points() const { return points_; }
  const std::string& backend() const { return backend_; }

 private:
  absl::Status SetUp(uint64_t memory_bytes);
  absl::Status UseEngine(const TunePoint& point);
  absl::Status BuiltIn();
  absl::Status GivenPoints(const std::vector<TunePoint>& sweep);
  absl::Status Measure(Trial& trial, bool whole_file);
  absl::StatusOr<double> MeasureLoad(const TunePoint& point, aio::LoadKind kind);
  absl::StatusOr<double> MeasureWhole(const TunePoint& point, bool read);
  absl::Status Log(const TunePoint& point, bool read, double bytes_per_s);
  // The part of the arena that device number i copies to and from: a whole file.
  std::span<std::byte> HostOfGpu(size_t i) const {
    const uint64_t stride = aio::AlignUp(options_.io_bytes, aio::kHugePageBytes);
    return {arena_->data() + i * stride, stride};
  }
  void FlushPageCache();
  void Progress(const TunePoint& point);

  const TuneOptions& options_;
  std::FILE* const err_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> engine_;
  TunePoint engine_for_;
  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<aio::File>> files_;
  std::vector<std::unique_ptr<GpuBuffer>> gpus_;  // one a file; empty: host memory only
  std::vector<TunePoint> points_;
  std::string backend_;
  int64_t start_ns_ = aio::SteadyClock::Get().NowNs();
  size_t runs_done_ = 0;
  size_t runs_expected_ = 0;
  bool flush_told_ = false;
};

absl::Status Tuner::UseEngine(const TunePoint& point) {
  if (engine_ != nullptr && engine_for_.block_bytes == point.block_bytes &&
      engine_for_.in_flight_bytes() == point.in_flight_bytes()) {
    return absl::OkStatus();
  }
  engine_.reset();
  TransferShape shape;
  shape.block_bytes = point.block_bytes;
  shape.queue_depth = point.queue_depth * point.parallel;
  ASSIGN_OR_RETURN(const auto backend,
                   aio::ParseBackend(options_.engine == "aio_handle" ? "auto" : options_.engine));
  ASSIGN_OR_RETURN(auto engine, MakeEngine(backend, shape, *arena_));
  engine_ = std::move(engine);
  engine_for_ = point;
  backend_ = engine_->backend_name();
  return absl::OkStatus();
}

absl::Status Tuner::SetUp(uint64_t memory_bytes) {
  std::error_code error;
  std::filesystem::create_directories(options_.log_dir, error);
  for (const char* op : {"read", "write"}) {
    if (!error)
      std::filesystem::create_directories(absl::StrCat(options_.log_dir, "/_aio_bench_", op, "_logs"), error);
  }
  if (error) return absl::UnavailableError(absl::StrCat("create ", options_.log_dir, ": ", error.message()));
  aio::ArenaOptions arena_options;
  arena_options.bytes = memory_bytes;
  ASSIGN_OR_RETURN(auto arena, aio::Arena::Create(arena_options));
  arena_ = std::move(arena);
  for (const std::string& note : arena_->notes())
    std::fprintf(err_, "ds_nvme_tune: note: %s\n", note.c_str());
  RETURN_IF_ERROR(UseEngine(TunePoint()));
  for (const std::string& directory : options_.nvme_dirs) {
    std::fprintf(err_, "ds_nvme_tune: writing %s of test data in %s\n",
                 FormatBytes(options_.io_bytes).c_str(), directory.c_str());
    paths_.push_back(absl::StrCat(directory, "/.ds_nvme_tune-", getpid()));
    ASSIGN_OR_RETURN(auto file, OpenDataFile(paths_.back(), options_.io_bytes, true, *engine_,
                                             {arena_->data(), aio::AlignDown(arena_->bytes(), kMiB)}));
    files_.push_back(std::move(file));
  }
  for (size_t i = 0; options_.gpu && i < files_.size(); ++i) {
    ASSIGN_OR_RETURN(
        auto gpu,
        GpuBuffer::Make(static_cast<int>(i), options_.gds ? GpuPath::kGds : GpuPath::kBounce, HostOfGpu(i)));
    gpus_.push_back(std::move(gpu));
  }
  return absl::OkStatus();
}

void Tuner::FlushPageCache() {
  if (!options_.flush_page_cache) return;
  sync();
  const int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
  const bool ok = fd >= 0 && write(fd, "1\n", 2) == 2;
  if (fd >= 0) close(fd);
  if (ok || std::exchange(flush_told_, true)) return;
  std::fprintf(err_,
               "ds_nvme_tune: note: the page cache cannot be dropped without root; direct I/O does not use "
               "it anyway\n");
}

absl::StatusOr<double> Tuner::MeasureLoad(const TunePoint& point, aio::LoadKind kind) {
  FlushPageCache();
  aio::LoadOptions load;
  load.kind = kind;
  for (const auto& file : files_) load.files.push_back(file.get());
  load.block_bytes = point.block_bytes;
  load.file_bytes = options_.io_bytes;
  load.in_flight_bytes = point.in_flight_bytes() * files_.size();
  load.seconds = kSecondsARun;
  load.bytes_max = options_.io_bytes * files_.size();
  ASSIGN_OR_RETURN(const auto result, aio::RunLoad(*engine_, load, arena_->data()));
  return result.bytes_per_s();
}

// A whole file a directory, one directory after another per loop, in exactly the shape that was asked for.
absl::StatusOr<double> Tuner::MeasureWhole(const TunePoint& point, bool read) {
  FlushPageCache();
  TransferShape shape;
  shape.bytes = options_.io_bytes;
  shape.block_bytes = point.block_bytes;
  shape.queue_depth = point.queue_depth * point.parallel;
  shape.single_submit = point.single_submit;
  shape.sequential = point.sequential;
  std::vector<Transfer> transfers;
  if (gpus_.empty()) {
    const uint64_t bytes = arena_->bytes() / point.block_bytes * point.block_bytes;
    transfers.emplace_back(shape, std::span<std::byte>(arena_->data(), bytes));
  }
  for (size_t i = 0; i < gpus_.size(); ++i) transfers.emplace_back(shape, HostOfGpu(i));
  const int64_t start = aio::SteadyClock::Get().NowNs();
  for (int64_t loop = 0; loop < options_.loops; ++loop) {
    for (size_t i = 0; i < files_.size(); ++i) {
      aio::File& file = *files_[i];
      RETURN_IF_ERROR(gpus_.empty()
                          ? transfers[0].Run(*engine_, file, read)
                          : gpus_[i]->Run(transfers[i], shape, point.parallel, *engine_, file, read));
    }
  }
  const double seconds = static_cast<double>(aio::SteadyClock::Get().NowNs() - start) * 1e-9;
  return static_cast<double>(options_.io_bytes) * static_cast<double>(files_.size()) *
         static_cast<double>(options_.loops) / seconds;
}

// One file a run, named and filled as the original's, so that what parses those goes on working.
absl::Status Tuner::Log(const TunePoint& point, bool read, double bytes_per_s) {
  const char* const op = read ? "read" : "write";
  const std::string size = point.block_bytes % kMiB == 0 ? absl::StrCat(point.block_bytes / kMiB, "M")
                                                         : absl::StrCat(point.block_bytes / 1024, "K");
  const std::string path =
      absl::StrFormat("%s/_aio_bench_%s_logs/%s_%s_%s_ftd%d_d%d_bs%s_p%d.txt", options_.log_dir, op, op,
                      point.single_submit ? "single" : "block", point.sequential ? "sequential" : "overlap",
                      files_.size(), point.queue_depth, size, point.parallel);
  const char* const name = read ? "Read" : "Write";
  const double gib = static_cast<double>(options_.io_bytes) * static_cast<double>(files_.size()) /
                     static_cast<double>(1ull << 30);
  const double speed = bytes_per_s / static_cast<double>(1ull << 30);
  std::string text;
  for (const char* what : {"Task", "E2E"}) {
    absl::StrAppendFormat(&text, "%s %s Latency = %.9g sec\n%s %s Speed = %.9g GB/sec\n", what, name,
                          gib / speed, what, name, speed);
  }
  return ReplaceFile(path, text, {.durable = false});
}

absl::Status Tuner::Measure(Trial& trial, bool whole_file) {
  whole_file |= !gpus_.empty();
  RETURN_IF_ERROR(UseEngine(trial.point));
  for (const bool read : {true, false}) {
    if (read ? options_.no_read : options_.no_write) continue;
    ASSIGN_OR_RETURN(const auto speed, whole_file ? MeasureWhole(trial.point, read)
                                                  : MeasureLoad(trial.point, read ? aio::LoadKind::kRead
                                                                                  : aio::LoadKind::kWrite));
    (read ? trial.reads : trial.writes).push_back(speed);
    RETURN_IF_ERROR(Log(trial.point, read, speed));
  }
  if (!options_.no_read && !options_.no_write && !whole_file) {
    ASSIGN_OR_RETURN(const auto speed, MeasureLoad(trial.point, aio::LoadKind::kMixed));
    trial.mixes.push_back(speed);
  }
  trial.Settle();
  ++runs_done_;
  Progress(trial.point);
  return absl::OkStatus();
}

void Tuner::Progress(const TunePoint& point) {
  const double seconds = static_cast<double>(aio::SteadyClock::Get().NowNs() - start_ns_) * 1e-9;
  const double left = seconds / static_cast<double>(runs_done_) *
                      static_cast<double>(runs_expected_ - std::min(runs_expected_, runs_done_));
  if (options_.verbose || isatty(fileno(err_)) != 0) {
    std::fprintf(
        err_,
        "[%zu/%zu] blocks of %s, %llu deep: read %.2f, write %.2f, mixed %.2f GB/s; at most %.0f s left\n",
        runs_done_, runs_expected_, FormatBytes(point.block_bytes).c_str(),
        static_cast<unsigned long long>(point.queue_depth) * point.parallel, point.read_bytes_per_s * 1e-9,
        point.write_bytes_per_s * 1e-9, point.mixed_bytes_per_s * 1e-9, left);
  }
}

absl::Status Tuner::GivenPoints(const std::vector<TunePoint>& sweep) {
  runs_expected_ = sweep.size();
  for (const TunePoint& point : sweep) {
    Trial trial;
    trial.point = point;
    RETURN_IF_ERROR(Measure(trial, true));
    points_.push_back(trial.point);
  }
  return absl::OkStatus();
}

// For every block size the depths rise until two in a row bring nothing more. The rounds go over all of it
// again, since disks drift; the first one decides how far.
absl::Status Tuner::BuiltIn() {
  const auto rounds = static_cast<size_t>(std::max<int64_t>(2, options_.loops));
  runs_expected_ = std::size(kBlocks) * std::size(kInFlight) * rounds;
  std::vector<Trial> trials;
  for (const uint64_t block : kBlocks) {
    if (block > options_.io_bytes) continue;
    double best = 0;
    int without_gain = 0;
    for (const uint64_t in_flight : kInFlight) {
      if (in_flight < block || in_flight > options_.io_bytes || without_gain == 2) {
        runs_expected_ -= rounds;
        continue;
      }
      Trial trial;
      trial.point.block_bytes = block;
      trial.point.queue_depth = in_flight / block;
      RETURN_IF_ERROR(Measure(trial, false));
      without_gain = trial.point.score() < best * kNoGain ? without_gain + 1 : 0;
      best = std::max(best, trial.point.score());
      trials.push_back(std::move(trial));
    }
  }
  for (size_t round = 1; round < rounds; ++round) {
    for (Trial& trial : trials) {
      RETURN_IF_ERROR(Measure(trial, false));
    }
  }
  for (const Trial& trial : trials) points_.push_back(trial.point);
  return absl::OkStatus();
}

absl::Status Tuner::Run(const std::vector<TunePoint>& sweep) {
  uint64_t deepest = kInFlight[std::size(kInFlight) - 1];
  for (const TunePoint& point : sweep)
    deepest = std::max(deepest, std::min(point.in_flight_bytes(), options_.io_bytes));
  uint64_t block = 1;
  for (const TunePoint& point : sweep) block = std::max(block, point.block_bytes);
  uint64_t memory = std::max(deepest * options_.nvme_dirs.size(), block);
  if (options_.gpu)
    memory =
        std::max(memory, aio::AlignUp(options_.io_bytes, aio::kHugePageBytes) * options_.nvme_dirs.size());
  RETURN_IF_ERROR(SetUp(memory));
  return sweep.empty() ? BuiltIn() : GivenPoints(sweep);
}

// What is worth doing and why, a sentence a line.
std::string Plan(const std::vector<TunePoint>& points, const TunePoint& saturation, const TunePoint& advice,
                 const std::string& backend, size_t drives) {
  const auto most =
      std::max_element(points.begin(), points.end(),
                       [](const TunePoint& a, const TunePoint& b) { return a.score() < b.score(); });
  std::string text = absl::StrFormat(
      "%s in flight saturate a drive (%d blocks of %s, %s): %.2f of the %.2f 10^9 bytes/s that were the "
      "best%s.\n",
      FormatBytes(saturation.in_flight_bytes()), saturation.queue_depth * saturation.parallel,
      FormatBytes(saturation.block_bytes), backend, saturation.score() * 1e-9, most->score() * 1e-9,
      saturation.mixed_bytes_per_s != 0 ? ", reading and writing at once" : "");
  if (saturation.mixed_bytes_per_s != 0) {
    const double share = saturation.mixed_bytes_per_s / 2 / std::max(1.0, saturation.read_bytes_per_s) +
                         saturation.mixed_bytes_per_s / 2 / std::max(1.0, saturation.write_bytes_per_s);
    absl::StrAppend(
        &text, absl::StrFormat(
                   "There it reads %.2f or writes %.2f alone; both at once, as a training step does, "
                   "get %.0f%% of what the two shares would add up to.\n",
                   saturation.read_bytes_per_s * 1e-9, saturation.write_bytes_per_s * 1e-9, share * 100));
  }
  absl::StrAppend(
      &text, absl::StrFormat("Plan: %d blocks of %s in flight a drive (%s); more would only add latency and "
                             "pinned memory.\n",
                             advice.queue_depth * advice.parallel, FormatBytes(advice.block_bytes),
                             FormatBytes(advice.in_flight_bytes())));
  if (drives > 1) absl::StrAppend(&text, "All ", drives, " directories were busy at the same time.\n");
  return text;
}

std::string PointsJson(const std::vector<TunePoint>& points, const TunePoint& chosen,
                       const std::string& backend) {
  const auto to_json = [](const TunePoint& p) {
    return nlohmann::json{{"block_size", p.block_bytes},
                          {"queue_depth", p.queue_depth},
                          {"intra_op_parallelism", p.parallel},
                          {"single_submit", p.single_submit},
                          {"overlap_events", !p.sequential},
                          {"in_flight_bytes", p.in_flight_bytes()},
                          {"read_gbps", p.read_bytes_per_s * 1e-9},
                          {"write_gbps", p.write_bytes_per_s * 1e-9},
                          {"mixed_gbps", p.mixed_bytes_per_s * 1e-9}};
  };
  nlohmann::json json{{"engine", backend}, {"chosen", to_json(chosen)}, {"points", nlohmann::json::array()}};
  for (const TunePoint& point : points) json["points"].push_back(to_json(point));
  return json.dump(2) + "\n";
}

std::string ProfilePath(const TuneOptions& options) {
  return options.profile_path.empty() ? aio::DefaultProfilePath() : options.profile_path;
}

// Before the run, and after it, which has made files: no result takes the place of what else is there.
absl::Status CheckJson(const TuneOptions& options) {
  if (options.json_path.empty()) return absl::OkStatus();
  return CheckIsOwnJson("--json", options.json_path, {"engine", "chosen", "points"});
}

// That what is written at the end takes no other file's place.
absl::Status CheckOutputs(const TuneOptions& options) {
  const std::optional<std::string> json = options.json_path, profile = options.profile_path;
  RETURN_IF_ERROR(CheckDistinctFiles({{"--json", json}, {"--profile", profile}}, {options.sweep_config}));
  RETURN_IF_ERROR(CheckJson(options));
  if (options.no_profile) return absl::OkStatus();
  absl::Status store = aio::CheckProfileStore(ProfilePath(options));
  if (store.ok() || options.profile_path.empty()) return store;
  // What a flag names is the flag's mistake.
  return absl::Status(absl::IsDataLoss(store) ? absl::StatusCode::kInvalidArgument : store.code(),
                      absl::StrCat("--profile: ", store.message()));
}

absl::Status StoreProfiles(const TuneOptions& options, std::FILE* err) {
  for (const std::string& directory : options.nvme_dirs) {
    aio::ProbeOptions probe;
    probe.directory = directory;
    probe.budget_ms = 2500;
    probe.rounds = 5;
    probe.file_bytes = 256 * kMiB;
    probe.written_bytes_max = 4ull << 30;
    probe.depths = {1 * kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB};
    ASSIGN_OR_RETURN(const auto profile, aio::MeasureDevice(probe));
    const std::string path = ProfilePath(options);
    RETURN_IF_ERROR(aio::StoreProfile(profile, path));
    std::fprintf(
        err, "ds_nvme_tune: profile of %s stored in %s: %s in flight saturate it%s\n", directory.c_str(),
        path.c_str(), FormatBytes(profile.saturating_bytes_in_flight).c_str(),
        profile.disturbed ? "; something else used it meanwhile: run this again on a quiet machine" : "");
  }
  return absl::OkStatus();
}

int Fail(std::FILE* err, int code, const absl::Status& status) {
  std::fprintf(err, "ds_nvme_tune: error: %s\n", std::string(status.message()).c_str());
  return code;
}

}  // namespace

int TuneMain(const std::vector<std::string>& arguments, std::FILE* out, std::FILE* err) {
  std::string help;
  const auto options = ParseTune(arguments, &help);
  if (!options.ok()) return Fail(err, 2, options.status());
  if (!help.empty()) {
    std::fputs(help.c_str(), out);
    return 0;
  }
  std::vector<TunePoint> sweep;
  if (!options->sweep_config.empty()) {
    const absl::StatusOr<std::string> text = ReadSmallFile(options->sweep_config);
    if (!text.ok())
      return Fail(err, 2,
                  absl::InvalidArgumentError(absl::StrCat("sweep config: ", text.status().message())));
    auto points = ReadSweep(*text);
    if (!points.ok()) return Fail(err, 2, points.status());
    sweep = *std::move(points);
  }
  if (const absl::Status outputs = CheckOutputs(*options); !outputs.ok())
    return Fail(err, absl::IsInvalidArgument(outputs) ? 2 : 1, outputs);
  std::vector<std::string> quoted;
  for (const std::string& directory : options->nvme_dirs) quoted.push_back(absl::StrCat("'", directory, "'"));
  std::fprintf(out, "Running DeepNVMe performance tuning on [%s]\n", absl::StrJoin(quoted, ", ").c_str());
  std::fflush(out);
  std::vector<TunePoint> points;
  std::string backend;
  {
    Tuner tuner(*options, err);
    if (absl::Status status = tuner.Run(sweep); !status.ok()) return Fail(err, 1, status);
    points = tuner.points();
    backend = tuner.backend();
  }
  const TunePoint& chosen = Choose(points);
  double read = 0, write = 0;
  for (const TunePoint& point : points) {
    read = std::max(read, point.read_bytes_per_s);
    write = std::max(write, point.write_bytes_per_s);
  }
  const double gib = static_cast<double>(1ull << 30);
  // A sweep that was given is a choice among its points; the built-in one has measured a curve.
  const TunePoint advice = sweep.empty() ? Recommend(chosen) : chosen;
  std::fputs(Plan(points, chosen, advice, backend, options->nvme_dirs.size()).c_str(), out);
  std::fprintf(out, "Best performance (GB/sec): read = %5.2f, write = %5.2f\n", read / gib, write / gib);
  std::fputs(AioBlock(advice).c_str(), out);
  std::fflush(out);
  // What was measured is said before anything else can fail.
  if (!options->json_path.empty()) {
    absl::Status written = CheckJson(*options);
    if (written.ok())
      written = WriteWholeFile("--json", options->json_path, PointsJson(points, chosen, backend));
    if (!written.ok()) return Fail(err, 1, written);
  }
  if (!options->no_profile) {
    if (absl::Status status = StoreProfiles(*options, err); !status.ok()) return Fail(err, 1, status);
  }
  return 0;
}

}  // namespace penstock::tools
