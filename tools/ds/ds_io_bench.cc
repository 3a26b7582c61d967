#include "tools/ds/ds_io_bench.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "aio/bytes.h"
#include "aio/clock.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "tools/ds/ds_io_gpu.h"
#include "tools/ds/ds_io_transfer.h"

namespace penstock::tools {
namespace {

using aio::FormatBytes;

constexpr uint64_t kMemoryMax = 1ull << 30;  // of one process; longer files go round in it

// What a process tells the others. In shared memory, followed by the seconds of all loops.
struct ProcessReport {
  std::atomic<bool> failed{false};
  int code = 0;  // absl::StatusCode
  char message[1024] = {};
  char backend[32] = {};
  uint64_t errors = 0;
  double cpu_seconds = 0;
  uint64_t device_read_bytes = 0;
  aio::Histogram latency;
};

// Memory shared by all processes, with the meeting point before and after every loop.
class Shared {
 public:
  static absl::StatusOr<std::unique_ptr<Shared>> Make(size_t processes, size_t loops) {
    std::unique_ptr<Shared> shared(new Shared());
    shared->processes_ = processes;
    shared->loops_ = loops;
    shared->bytes_ =
        sizeof(pthread_barrier_t) + 64 + processes * (sizeof(ProcessReport) + 2 * loops * sizeof(double));
    void* const memory =
        mmap(nullptr, shared->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("mmap of shared memory: ", aio::ErrnoText(errno)));
    }
    shared->memory_ = static_cast<std::byte*>(memory);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(shared->barrier(), &attributes, static_cast<unsigned>(processes));
    pthread_barrierattr_destroy(&attributes);
    for (size_t i = 0; i < processes; ++i) new (&shared->report(i)) ProcessReport();
    return shared;
  }
  ~Shared() { munmap(memory_, bytes_); }

  void Meet() { pthread_barrier_wait(barrier()); }
  ProcessReport& report(size_t i) { return *(reinterpret_cast<ProcessReport*>(memory_ + kHead) + i); }
  // Of one process: task seconds of all loops, then end-to-end seconds.
  double* seconds(size_t i) {
    return reinterpret_cast<double*>(memory_ + kHead + processes_ * sizeof(ProcessReport)) + i * 2 * loops_;
  }
  bool AnyFailed() {
    for (size_t i = 0; i < processes_; ++i) {
      if (report(i).failed.load()) return true;
    }
    return false;
  }

 private:
  static constexpr size_t kHead = (sizeof(pthread_barrier_t) + 63) / 64 * 64;
  Shared() = default;
  pthread_barrier_t* barrier() { return reinterpret_cast<pthread_barrier_t*>(memory_); }

  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  size_t processes_ = 0;
  size_t loops_ = 0;
};

double CpuSeconds(const rusage& usage) {
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// One process of the run.
class Worker {
 public:
  Worker(const DsIoOptions& options, size_t id, std::string folder, Shared& shared, std::FILE* out)
      : options_(options), id_(id), folder_(std::move(folder)), shared_(shared), out_(out) {}

  // Meets the others as often as it must even if it fails, so that they never wait in vain.
  void Run();

 private:
  absl::Status SetUp();
  absl::Status OneLoop(int64_t loop);
  absl::Status Validate(aio::File& file, int64_t loop);
  std::string PathOf(int64_t loop) const {
    return absl::StrCat(folder_, "/_aio_", options_.read ? "read" : "write", "_", options_.io_bytes, ".pt.",
                        id_, "_", options_.different_file_each_iteration ? loop : 0);
  }
  void Say(const std::string& line) const {
    if (id_ == 0) std::fprintf(out_, "tid 0: %s\n", line.c_str());
  }
  void Fail(const absl::Status& status);

  const DsIoOptions& options_;
  const size_t id_;
  const std::string folder_;
  Shared& shared_;
  std::FILE* const out_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> engine_;
  TransferShape shape_;
  std::unique_ptr<Transfer> transfer_;
  std::vector<std::unique_ptr<aio::File>> files_;
  std::span<std::byte> memory_;
  std::unique_ptr<GpuBuffer> gpu_;  // null: host memory only
};

void Worker::Fail(const absl::Status& status) {
  ProcessReport& report = shared_.report(id_);
  if (report.failed) return;
  report.code = static_cast<int>(status.code());
  const std::string text(status.message());
  std::memcpy(report.message, text.data(), std::min(text.size(), sizeof(report.message) - 1));
  report.failed = true;
}

absl::Status Worker::SetUp() {
  TransferShape& shape = shape_;
  shape.bytes = options_.io_bytes;
  shape.block_bytes = options_.block_bytes;
  shape.queue_depth = static_cast<uint64_t>(options_.queue_depth) * options_.Parallel();
  shape.single_submit = options_.single_submit;
  shape.sequential = options_.sequential_requests;

  aio::ArenaOptions arena_options;
  // What is compared or copied to a device must be kept; what is only moved may share its place. Whole
  // blocks, so that none is split.
  const uint64_t wanted =
      options_.validate || options_.gpu ? options_.io_bytes : std::min(options_.io_bytes, kMemoryMax);
  arena_options.bytes = aio::AlignUp(std::max(wanted, options_.block_bytes), options_.block_bytes);
  ASSIGN_OR_RETURN(auto arena, aio::Arena::Create(arena_options));
  arena_ = std::move(arena);
  memory_ = {arena_->data(), arena_options.bytes};
  for (const std::string& note : arena_->notes()) Say(note);

  if (options_.gpu) {
    ASSIGN_OR_RETURN(const auto device, GpuNumber(options_.Mapping()[id_].first));
    const GpuPath path = options_.use_gds              ? GpuPath::kGds
                         : options_.slow_bounce_buffer ? GpuPath::kSlowBounce
                                                       : GpuPath::kBounce;
    ASSIGN_OR_RETURN(auto gpu, GpuBuffer::Make(device, path, memory_));
    gpu_ = std::move(gpu);
  }

  const std::string name = options_.engine == "aio_handle" ? "auto" : options_.engine;
  ASSIGN_OR_RETURN(const auto backend, aio::ParseBackend(name));
  ASSIGN_OR_RETURN(auto engine, MakeEngine(backend, shape, *arena_));
  engine_ = std::move(engine);
  const std::string backend_name = engine_->backend_name();
  std::strncpy(shared_.report(id_).backend, backend_name.c_str(), sizeof(ProcessReport::backend) - 1);
  Say(absl::StrCat("engine ", backend_name, ", ", FormatBytes(shape.queue_depth * shape.block_bytes),
                   " in flight, memory on ", std::string(aio::PageKindName(arena_->page_kind())), " pages"));
  transfer_ = std::make_unique<Transfer>(shape, memory_);

  const int64_t loops = options_.warmup_loops + options_.loops;
  for (int64_t i = 0; i < (options_.different_file_each_iteration ? loops : 1); ++i) {
    const std::string path = PathOf(i);
    if (!options_.read) unlink(path.c_str());
    ASSIGN_OR_RETURN(auto file, OpenDataFile(path, options_.io_bytes, options_.read, *engine_, memory_));
    files_.push_back(std::move(file));
    Say(absl::StrCat(options_.read ? "reads " : "writes ", path));
  }
  if (!options_.read) FillRandom(memory_, id_ + 1);
  if (!options_.read && gpu_ != nullptr) return gpu_->CopyToDevice(options_.io_bytes);
  return absl::OkStatus();
}

absl::Status Worker::OneLoop(int64_t loop) {
  aio::File& file = *files_[static_cast<size_t>(loop) % files_.size()];
  if (gpu_ != nullptr) {
    return gpu_->Run(*transfer_, shape_, options_.Parallel(), *engine_, file, options_.read);
  }
  return transfer_->Run(*engine_, file, options_.read);
}

// What the file holds, read by another way, must be what is in memory.
absl::Status Worker::Validate(aio::File& file, int64_t loop) {
  if (gpu_ != nullptr) {
    std::memset(memory_.data(), 0, memory_.size());
    RETURN_IF_ERROR(gpu_->CopyToHost(options_.io_bytes));
  }
  const int fd = open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return aio::MakeIoError({.op = "open", .path = file.path(), .error = errno});
  std::vector<std::byte> there(std::min<uint64_t>(options_.io_bytes, 4ull << 20));
  uint64_t at = 0;
  absl::Status status;
  while (at < options_.io_bytes && status.ok()) {
    const ssize_t got = pread(fd, there.data(), std::min<uint64_t>(there.size(), options_.io_bytes - at),
                              static_cast<off_t>(at));
    if (got <= 0) {
      status = aio::MakeIoError({.op = "read",
                                 .path = file.path(),
                                 .offset = at,
                                 .bytes = there.size(),
                                 .error = got == 0 ? ENODATA : errno});
    } else if (std::memcmp(there.data(), memory_.data() + at, static_cast<size_t>(got)) != 0) {
      status = absl::DataLossError(absl::StrCat("validate ", file.path(), ": memory and file differ within ",
                                                got, " bytes from offset ", at));
    } else {
      at += static_cast<uint64_t>(got);
    }
  }
  close(fd);
  if (status.ok()) Say(absl::StrCat("loop ", loop, ": validated, ", at, " bytes are the same"));
  return status;
}

void Worker::Run() {
  if (absl::Status status = SetUp(); !status.ok()) Fail(status);
  const int64_t loops = options_.warmup_loops + options_.loops;
  double* const task = shared_.seconds(id_);
  double* const e2e = task + loops;
  rusage before{}, after{};
  aio::Histogram earlier;
  const size_t op = static_cast<size_t>(options_.read ? aio::Op::kRead : aio::Op::kWrite);
  const int64_t first_measured = options_.include_warmup_time ? 0 : options_.warmup_loops;
  double cpu_seconds = 0;
  uint64_t read_bytes = 0;
  for (int64_t loop = 0; loop < loops; ++loop) {
    shared_.Meet();
    const bool go = !shared_.AnyFailed();
    shared_.Meet();  // all have looked before anyone can fail
    const aio::SteadyClock& clock = aio::SteadyClock::Get();
    if (go && loop == first_measured)
      earlier = engine_->stats().devices.empty() ? aio::Histogram() : engine_->stats().devices[0].service[op];
    getrusage(RUSAGE_SELF, &before);
    const int64_t start = clock.NowNs();
    if (go) {
      if (absl::Status status = OneLoop(loop); !status.ok()) Fail(status);
    }
    task[loop] = static_cast<double>(clock.NowNs() - start) * 1e-9;
    getrusage(RUSAGE_SELF, &after);
    shared_.Meet();
    e2e[loop] = static_cast<double>(clock.NowNs() - start) * 1e-9;
    if (!go) continue;
    if (loop >= first_measured) {
      cpu_seconds += CpuSeconds(after) - CpuSeconds(before);
      read_bytes += static_cast<uint64_t>(after.ru_inblock - before.ru_inblock) * 512;
    }
    Say(absl::StrCat(loop < options_.warmup_loops ? "warmup " : "loop ", loop, ": ", task[loop], " sec"));
    if (options_.validate && !shared_.report(id_).failed) {
      if (absl::Status status = Validate(*files_[static_cast<size_t>(loop) % files_.size()], loop);
          !status.ok())
        Fail(status);
    }
  }
  ProcessReport& report = shared_.report(id_);
  report.cpu_seconds = cpu_seconds;
  report.device_read_bytes = read_bytes;
  if (transfer_ != nullptr) report.errors = transfer_->errors();
  if (engine_ != nullptr && !engine_->stats().devices.empty()) {
    report.latency = engine_->stats().devices[0].service[op];
    report.latency.Subtract(earlier);
  }
  std::vector<std::string> seconds;
  for (int64_t i = first_measured; i < loops; ++i) seconds.push_back(absl::StrCat(task[i]));
  if (!report.failed) Say(absl::StrCat("task_latency_sec = [", absl::StrJoin(seconds, ", "), "]"));
}

// A number as Python prints it: the shortest text that reads back as the same.
std::string Shortest(double value) {
  char buffer[64];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return error == std::errc() ? std::string(buffer, end) : absl::StrCat(value);
}

}  // namespace

absl::StatusOr<DsIoResult> RunDsIo(const DsIoOptions& options, std::FILE* out, std::FILE* err) {
  const auto mapping = options.Mapping();
  const auto loops = static_cast<size_t>(options.warmup_loops + options.loops);
  ASSIGN_OR_RETURN(auto shared, Shared::Make(mapping.size(), loops));
  std::fflush(out);
  std::fflush(err);
  std::vector<pid_t> children;
  for (size_t i = 0; i < mapping.size(); ++i) {
    const pid_t child = fork();
    if (child == 0) {
      Worker(options, i, mapping[i].second, *shared, out).Run();
      std::fflush(out);
      _exit(0);
    }
    if (child < 0) {
      const int error = errno;
      for (const pid_t other : children) kill(other, SIGKILL);
      for (const pid_t other : children) waitpid(other, nullptr, 0);
      return absl::ResourceExhaustedError(absl::StrCat("fork of process ", i, ": ", aio::ErrnoText(error)));
    }
    children.push_back(child);
  }
  absl::Status died;
  for (size_t left = children.size(); left != 0; --left) {
    int status = 0;
    const pid_t child = waitpid(-1, &status, 0);
    if (child < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    const auto id = std::find(children.begin(), children.end(), child) - children.begin();
    if (died.ok()) {
      died = absl::AbortedError(WIFSIGNALED(status)
                                    ? absl::StrCat("process ", id, " was ended by signal ", WTERMSIG(status))
                                    : absl::StrCat("process ", id, " ended with ", WEXITSTATUS(status)));
    }
    for (const pid_t other : children) {  // they would wait for it for ever
      if (other != child) kill(other, SIGKILL);
    }
  }
  for (size_t i = 0; i < mapping.size(); ++i) {
    const ProcessReport& report = shared->report(i);
    if (report.failed) return absl::Status(static_cast<absl::StatusCode>(report.code), report.message);
  }
  RETURN_IF_ERROR(died);

  DsIoResult result;
  const size_t first = options.include_warmup_time ? 0 : static_cast<size_t>(options.warmup_loops);
  result.bytes = mapping.size() * (loops - first) * options.io_bytes;
  result.task_seconds.assign(loops - first, 0);
  result.e2e_seconds.assign(loops - first, 0);
  for (size_t i = 0; i < mapping.size(); ++i) {
    const ProcessReport& report = shared->report(i);
    const double* const task = shared->seconds(i);
    const double* const e2e = task + loops;
    result.task_latency_s = std::max(result.task_latency_s, std::accumulate(task + first, task + loops, 0.0));
    result.e2e_latency_s = std::max(result.e2e_latency_s, std::accumulate(e2e + first, e2e + loops, 0.0));
    for (size_t loop = first; loop < loops; ++loop) {
      result.task_seconds[loop - first] = std::max(result.task_seconds[loop - first], task[loop]);
      result.e2e_seconds[loop - first] = std::max(result.e2e_seconds[loop - first], e2e[loop]);
    }
    result.cpu_seconds += report.cpu_seconds;
    result.errors += report.errors;
    result.device_read_bytes += report.device_read_bytes;
    result.block_latency.Merge(report.latency);
    result.backend = report.backend;
  }
  if (options.read && result.device_read_bytes < result.bytes / 10 * 9) {
    std::fprintf(err,
                 "ds_io: warning: the kernel counts %s read from a device, %s were asked for: the rest came "
                 "from a cache or a "
                 "hole, so these are not the speeds of a drive\n",
                 FormatBytes(result.device_read_bytes).c_str(), FormatBytes(result.bytes).c_str());
  }
  return result;
}

std::string ResultLines(const DsIoOptions& options, const DsIoResult& result) {
  const char* const op = options.read ? "Read" : "Write";
  const double gib = static_cast<double>(result.bytes) / static_cast<double>(1ull << 30);
  return absl::StrCat("Task ", op, " Latency = ", Shortest(result.task_latency_s), " sec\n",  //
                      "Task ", op, " Speed = ", Shortest(gib / result.task_latency_s), " GB/sec\n", "E2E ",
                      op, " Latency = ", Shortest(result.e2e_latency_s), " sec\n",  //
                      "E2E ", op, " Speed = ", Shortest(gib / result.e2e_latency_s), " GB/sec\n");
}

std::string ResultJson(const DsIoOptions& options, const DsIoResult& result) {
  std::vector<double> gbps;
  gbps.reserve(result.e2e_seconds.size());
  for (const double seconds : result.e2e_seconds) {
    gbps.push_back(static_cast<double>(result.bytes) / static_cast<double>(result.e2e_seconds.size()) /
                   seconds * 1e-9);
  }
  std::sort(gbps.begin(), gbps.end());
  const size_t n = gbps.size();
  const double median = n == 0 ? 0 : n % 2 == 1 ? gbps[n / 2] : (gbps[n / 2 - 1] + gbps[n / 2]) / 2;
  const auto us = [&](double share) {
    return static_cast<double>(result.block_latency.PercentileNs(share)) * 1e-3;
  };
  const nlohmann::json json = {{"op", options.read ? "read" : "write"},
                               {"engine", result.backend.empty() ? options.engine : result.backend},
                               {"bytes", result.bytes},
                               {"block_size", options.block_bytes},
                               {"queue_depth", options.queue_depth},
                               {"threads", options.Parallel()},
                               {"processes", options.Mapping().size()},
                               {"loops", options.loops},
                               {"io_size", options.io_bytes},
                               {"seconds", result.e2e_seconds},
                               {"gbps_median", median},
                               {"gbps_min", n == 0 ? 0 : gbps.front()},
                               {"gbps_max", n == 0 ? 0 : gbps.back()},
                               {"latency_us", {{"p50", us(0.5)}, {"p99", us(0.99)}, {"p999", us(0.999)}}},
                               {"cpu_seconds", result.cpu_seconds},
                               {"device_read_bytes", result.device_read_bytes},
                               {"errors", result.errors}};
  return json.dump(2) + "\n";
}

namespace {

std::string PythonString(const std::string& text) { return absl::StrCat("'", text, "'"); }
const char* PythonBool(bool value) { return value ? "True" : "False"; }

// The flags as the original's `args = Namespace(...)` line has them.
std::string Namespace(const DsIoOptions& o) {
  std::vector<std::string> mapping;
  mapping.reserve(o.folder_to_device_mapping.size());
  for (const std::string& entry : o.folder_to_device_mapping) mapping.push_back(PythonString(entry));
  return absl::StrCat(
      "Namespace(folder=", o.folder.empty() ? "None" : PythonString(o.folder), ", folder_to_device_mapping=[",
      absl::StrJoin(mapping, ", "), "], io_size=", PythonString(o.io_size_text),
      ", fast_io_size=", PythonString(o.fast_io_size_text), ", read=", PythonBool(o.read),
      ", multi_process=", o.processes, ", block_size=", PythonString(o.block_size_text),
      ", queue_depth=", o.queue_depth, ", single_submit=", PythonBool(o.single_submit),
      ", sequential_requests=", PythonBool(o.sequential_requests), ", validate=", PythonBool(o.validate),
      ", engine=", PythonString(o.engine), ", loops=", o.loops,
      ", io_parallel=", o.io_parallel == 0 ? "None" : absl::StrCat(o.io_parallel),
      ", gpu=", PythonBool(o.gpu), ", use_gds=", PythonBool(o.use_gds),
      ", slow_bounce_buffer=", PythonBool(o.slow_bounce_buffer),
      ", torch_legacy_save=", PythonBool(o.torch_legacy_save),
      ", use_accelerator_pin_memory=", PythonBool(o.use_accelerator_pin_memory),
      ", warmup_loops=", o.warmup_loops, ", include_warmup_time=", PythonBool(o.include_warmup_time),
      ", different_file_each_iteration=", PythonBool(o.different_file_each_iteration), ")");
}

// Before the run, and after it, which has made files: no result takes the place of what else is there.
absl::Status CheckJson(const DsIoOptions& options) {
  if (options.json_path.empty()) return absl::OkStatus();
  return CheckIsOwnJson("--json", options.json_path, {"op", "engine", "gbps_median"});
}

}  // namespace

int DsIoMain(const std::vector<std::string>& arguments, std::FILE* out, std::FILE* err) {
  std::string help;
  const auto options = ParseDsIo(arguments, &help);
  if (!options.ok()) {
    std::fprintf(err, "ds_io: error: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  if (!help.empty()) {
    std::fputs(help.c_str(), out);
    return 0;
  }
  if (const absl::Status own = CheckJson(*options); !own.ok()) {
    std::fprintf(err, "ds_io: error: %s\n", std::string(own.message()).c_str());
    return absl::IsInvalidArgument(own) ? 2 : 1;
  }
  const auto mapping = options->Mapping();
  std::fprintf(out, "Testing DeepNVMe frontend of Penstock\nargs = %s\n", Namespace(*options).c_str());
  std::fprintf(out, "Successful validation of command line arguments\n");
  std::fprintf(out, "Configuring %zu %s to folder mapping\n", mapping.size(),
               options->gpu ? "gpu" : "process");
  for (size_t i = 0; i < mapping.size(); ++i) {
    std::fprintf(out, "[%zu]: process %s <----> %s\n", i, mapping[i].first.c_str(),
                 mapping[i].second.c_str());
  }
  if (options->torch_legacy_save)
    std::fprintf(err, "ds_io: note: --torch_legacy_save has no effect on this engine\n");
  const auto result = RunDsIo(*options, out, err);
  // Before anything else can fail: what was measured is said.
  if (result.ok()) std::fputs(ResultLines(*options, *result).c_str(), out);
  std::fflush(out);
  if (!options->json_path.empty()) {
    DsIoResult failed;
    failed.errors = 1;
    absl::Status written = CheckJson(*options);
    if (written.ok()) {
      written =
          WriteWholeFile("--json", options->json_path, ResultJson(*options, result.ok() ? *result : failed));
    }
    if (!written.ok()) {
      std::fprintf(err, "ds_io: error: %s\n", std::string(written.message()).c_str());
      return 1;
    }
  }
  if (!result.ok()) {
    std::fprintf(err, "ds_io: error: %s\n", std::string(result.status().message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace penstock::tools
