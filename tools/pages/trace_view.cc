#include "tools/pages/trace_view.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/lines.h"
#include "base/status_macros.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();

struct Window {
  int64_t step = 0;
  double start = 0, end = 0;
  double keeps_from = -kForever, keeps_until = kForever;  // with its neighbours
};

// When each step's compute began and ended.
struct Span {
  double first_forward = kForever, last_backward = -kForever;
};
using Spans = std::map<int64_t, Span>;

void Note(const TraceEvent& event, Spans* spans) {
  if (event.name == "forward") {
    Span& span = (*spans)[event.step];
    span.first_forward = std::min(span.first_forward, event.start_seconds);
  } else if (event.name == "backward") {
    Span& span = (*spans)[event.step];
    span.last_backward = std::max(span.last_backward, event.end_seconds);
  }
}

// The step to be shown: of median length among those that have a step before and behind them; else the last
// one that is whole.
std::optional<Window> Choose(const Spans& spans) {
  std::vector<Window> whole, inner;
  for (auto it = spans.begin(); it != spans.end(); ++it) {
    if (it->second.last_backward < 0) continue;
    const bool follows = it != spans.begin() && std::prev(it)->second.last_backward > -kForever;
    Window window{.step = it->first,
                  .start = follows ? std::prev(it)->second.last_backward : it->second.first_forward,
                  .end = it->second.last_backward};
    if (!(window.end > window.start)) continue;
    const double length = window.end - window.start;
    window.keeps_from = window.start - 1.5 * length;
    window.keeps_until = window.end + 1.5 * length;
    whole.push_back(window);
    const bool goes_on = std::next(it) != spans.end() && std::next(it)->second.last_backward > -kForever;
    if (follows && goes_on) inner.push_back(window);
  }
  if (whole.empty()) return std::nullopt;
  if (inner.empty()) return whole.back();
  const auto median = inner.begin() + static_cast<std::ptrdiff_t>(inner.size() / 2);
  std::nth_element(inner.begin(), median, inner.end(),
                   [](const Window& a, const Window& b) { return a.end - a.start < b.end - b.start; });
  return *median;
}

void Keep(TraceEvent event, const Window& window, TraceView* view) {
  if (event.end_seconds < window.keeps_from || event.start_seconds > window.keeps_until) return;
  (event.lane == kWaitsTrack ? view->waits : view->events).push_back(std::move(event));
}

TraceView ViewOf(const Window& window) {
  TraceView view;
  view.step = window.step;
  view.start_seconds = window.start;
  view.end_seconds = window.end;
  return view;
}

std::vector<Place> PlacesIn(const nlohmann::json& args) {
  std::vector<Place> places;
  const auto it = args.find("places");
  if (it == args.end() || !it->is_array()) return places;
  for (const nlohmann::json& each : *it) {
    Place place;
    place.tier = zero::JsonField<std::string>(each, "tier").value_or("host");
    place.kind = zero::JsonField<std::string>(each, "kind").value_or("?");
    place.slot = static_cast<int>(zero::JsonField<int64_t>(each, "slot").value_or(0));
    place.bytes = std::max<int64_t>(0, zero::JsonField<int64_t>(each, "bytes").value_or(0));
    place.content = zero::JsonField<std::string>(each, "content").value_or("");
    places.push_back(std::move(place));
  }
  return places;
}

// Reads events, one a line as they are written, and joins the two halves of asynchronous ones.
class Reader {
 public:
  // Calls `take` with every event. How many lines were of a trace.
  absl::StatusOr<int64_t> Read(const std::string& path, const std::function<void(TraceEvent)>& take) {
    absl::StatusOr<LineReader> file = LineReader::Open(path);
    if (!file.ok())
      return absl::InvalidArgumentError(absl::StrCat(file.status().message(), ": give another file"));
    int64_t known = 0;
    std::string line;
    while (true) {
      ASSIGN_OR_RETURN(const bool more, file->Next(&line));
      if (!more) break;
      while (!line.empty() && (line.back() == ',' || line.back() == '\r')) line.pop_back();
      const nlohmann::json json = ParseJson(line, "").value_or(nlohmann::json());
      if (json.is_object() && Take(json, take)) ++known;
    }
    return known;
  }
  const std::string& run_id() const { return run_id_; }

 private:
  bool Take(const nlohmann::json& json, const std::function<void(TraceEvent)>& take) {
    const std::string phase = zero::JsonField<std::string>(json, "ph").value_or("");
    const int64_t track = zero::JsonField<int64_t>(json, "tid").value_or(-1);
    const nlohmann::json args = json.value("args", nlohmann::json::object());
    if (phase == "M") {
      if (json.value("name", nlohmann::json()) == "thread_name")
        lanes_[track] = zero::JsonField<std::string>(args, "name").value_or("");
      if (args.is_object()) run_id_ = zero::JsonField<std::string>(args, "run_id").value_or(run_id_);
      return true;
    }
    const std::optional<double> at = zero::JsonField<double>(json, "ts");
    if (!at.has_value()) return false;
    TraceEvent event;
    event.lane = lanes_[track];
    event.name = zero::JsonField<std::string>(json, "name").value_or("?");
    event.start_seconds = *at * 1e-6;
    if (args.is_object()) {
      event.step = zero::JsonField<int64_t>(args, "step").value_or(0);
      event.block = zero::JsonField<int64_t>(args, "block").value_or(-1);
      event.tile = zero::JsonField<int64_t>(args, "tile").value_or(-1);
      event.stage = zero::JsonField<int64_t>(args, "stage").value_or(-1);
      event.bytes = zero::JsonField<int64_t>(args, "bytes").value_or(0);
      event.places = PlacesIn(args);
    }
    const std::pair<std::string, int64_t> id{event.lane, zero::JsonField<int64_t>(json, "id").value_or(0)};
    if (phase == "X") {
      event.end_seconds = event.start_seconds + zero::JsonField<double>(json, "dur").value_or(0) * 1e-6;
      take(std::move(event));
    } else if (phase == "b") {
      begun_[id] = std::move(event);
    } else if (const auto begun = begun_.find(id); phase == "e" && begun != begun_.end()) {
      begun->second.end_seconds = event.start_seconds;
      take(std::move(begun->second));
      begun_.erase(begun);
    }
    return true;
  }

  std::string run_id_;
  std::map<int64_t, std::string> lanes_;
  std::map<std::pair<std::string, int64_t>, TraceEvent> begun_;
};

}  // namespace

TraceView StepOf(std::vector<TraceEvent> events) {
  Spans spans;
  for (const TraceEvent& event : events) Note(event, &spans);
  const std::optional<Window> window = Choose(spans);
  if (!window.has_value()) return {};
  TraceView view = ViewOf(*window);
  for (TraceEvent& event : events) Keep(std::move(event), *window, &view);
  return view;
}

absl::StatusOr<TraceView> ReadTrace(const std::string& path) {
  Spans spans;
  Reader reader;
  ASSIGN_OR_RETURN(const int64_t known,
                   reader.Read(path, [&](const TraceEvent& event) { Note(event, &spans); }));
  if (known == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": no event of a trace is in it: give a file that --trace wrote"));
  }
  const std::optional<Window> window = Choose(spans);
  TraceView view = window.has_value() ? ViewOf(*window) : TraceView();
  view.run_id = reader.run_id();
  if (!window.has_value()) return view;
  RETURN_IF_ERROR(
      Reader().Read(path, [&](TraceEvent event) { Keep(std::move(event), *window, &view); }).status());
  return view;
}

}  // namespace penstock::tools
