#include "tools/pages/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "tools/base/cli.h"

namespace penstock::tools {
namespace {

constexpr int kStallTrack = tiering::kLanes;  // beside those of the lanes

// Names of tiers, kinds and contents are our own and need no quoting.
std::string PlacesText(const std::vector<Place>& places) {
  std::string text;
  for (const Place& place : places) {
    absl::StrAppend(&text, text.empty() ? ",\"places\":[" : ",", "{\"tier\":\"", place.tier, "\",\"kind\":\"",
                    place.kind, "\",\"slot\":", place.slot, ",\"bytes\":", place.bytes, ",\"content\":\"",
                    place.content, "\"}");
  }
  return text.empty() ? text : text + "]";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trace>> Trace::Open(const std::string& path, const std::string& run_id) {
  // It is read while it grows, and after a kill. A pipe that nobody reads is an error and not waited for.
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("--trace ", path, ": open"));
  std::FILE* const file = ::fcntl(fd, F_SETFL, 0) == 0 ? ::fdopen(fd, "w") : nullptr;
  if (file == nullptr) {
    const absl::Status failed = absl::ErrnoToStatus(errno, absl::StrCat("--trace ", path, ": open"));
    ::close(fd);
    return failed;
  }
  return std::unique_ptr<Trace>(new Trace(path, file, run_id));
}

Trace::Trace(std::string path, std::FILE* file, const std::string& run_id)
    : path_(std::move(path)), file_(file) {
  std::fputs("[\n", file_);
  if (!run_id.empty()) {
    // What Perfetto shows as the process; the page's reader looks for the id.
    const nlohmann::json process = {{"ph", "M"},
                                    {"pid", 1},
                                    {"tid", 0},
                                    {"name", "process_name"},
                                    {"args", {{"name", "run " + run_id}, {"run_id", run_id}}}};
    const std::string line = process.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    std::fprintf(file_, "%s,\n", line.c_str());
  }
  for (int lane = 0; lane < tiering::kLanes; ++lane)
    Name(lane, tiering::LaneName(static_cast<tiering::Lane>(lane)));
  Name(kStallTrack, "compute waits for");
}

void Trace::Name(int track, std::string_view name) {
  std::fprintf(file_,
               R"({"ph":"M","pid":1,"tid":%d,"name":"thread_name","args":{"name":"%s"}},)"
               "\n",
               track, std::string(name).c_str());
}

double Trace::Since(double seconds) {
  if (zero_ < 0) zero_ = seconds;
  return (seconds - zero_) * 1e6;
}

Trace::~Trace() { (void)Close(); }

void Trace::Add(tiering::OpId id, const tiering::Op& op, double start_seconds, double end_seconds) {
  if (file_ == nullptr) return;
  const double start = Since(start_seconds), end = Since(end_seconds);
  const std::string name(tiering::OpKindName(op.kind));
  const std::string args = absl::StrCat("{\"step\":", op.step, ",\"block\":", op.block.value(),
                                        ",\"tile\":", op.tile.value(), ",\"stage\":", op.stage.value(),
                                        ",\"bytes\":", op.bytes, PlacesText(sizes_.PlacesOf(op)), "}");
  const int lane = static_cast<int>(op.lane);
  if (op.lane == tiering::Lane::kCompute || op.lane == tiering::Lane::kHost) {
    std::fprintf(file_,
                 R"({"ph":"X","pid":1,"tid":%d,"name":"%s","ts":%.3f,"dur":%.3f,"args":%s},)"
                 "\n",
                 lane, name.c_str(), start, end - start, args.c_str());
    return;
  }
  const std::string lane_name(tiering::LaneName(op.lane));
  std::fprintf(file_,
               R"({"ph":"b","cat":"%s","id":%lld,"pid":1,"tid":%d,"name":"%s","ts":%.3f,"args":%s},)"
               "\n",
               lane_name.c_str(), static_cast<long long>(id), lane, name.c_str(), start, args.c_str());
  std::fprintf(file_,
               R"({"ph":"e","cat":"%s","id":%lld,"pid":1,"tid":%d,"name":"%s","ts":%.3f},)"
               "\n",
               lane_name.c_str(), static_cast<long long>(id), lane, name.c_str(), end);
}

void Trace::AddStall(tiering::Stall cause, double start_seconds, double end_seconds) {
  if (file_ == nullptr) return;
  const double start = Since(start_seconds), end = Since(end_seconds);
  std::fprintf(file_,
               R"({"ph":"X","pid":1,"tid":%d,"name":"%s","ts":%.3f,"dur":%.3f},)"
               "\n",
               kStallTrack, std::string(tiering::StallName(cause)).c_str(), start, end - start);
}

absl::Status Trace::Close() {
  if (file_ == nullptr) return absl::OkStatus();
  // The last element has no comma; an empty object is valid and says nothing.
  std::fputs("{}\n]\n", file_);
  const bool failed = std::ferror(file_) != 0;
  const bool not_closed = std::fclose(file_) != 0;
  file_ = nullptr;
  if (failed || not_closed) return StreamError(absl::StrCat("--trace ", path_, ": write"));
  return absl::OkStatus();
}

}  // namespace penstock::tools
