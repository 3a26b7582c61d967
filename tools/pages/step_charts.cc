#include "tools/pages/step_charts.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/pages/chart.h"

namespace penstock::tools {
namespace {

constexpr double kLanesWidth = 1000, kLanesLeft = 76, kLanesRight = 992;
constexpr double kRow = 17, kGap = 9;
constexpr size_t kMostRows = 6;  // of a lane; what overlaps more shares the last one

// What an operation is for: colour and name of the legend.
enum Purpose { kForward, kWrite, kRead, kBackward, kUpdate, kWait, kGradient, kOther };
constexpr std::array<const char*, 8> kPurposes = {"forward", "write",  "read",     "backward",
                                                  "update",  "a wait", "gradient", "other"};
Purpose PurposeOf(const std::string& name) {
  if (name == "forward") return kForward;
  if (name == "backward") return kBackward;
  if (absl::StartsWith(name, "update")) return kUpdate;
  if (absl::StartsWith(name, "read") || absl::StartsWith(name, "copy in") || name == "all-gather weights")
    return kRead;
  if (absl::StartsWith(name, "write") || absl::StartsWith(name, "copy out")) return kWrite;
  return absl::StrContains(name, "gradient") || name == "norm" ? kGradient : kOther;
}

// A rectangle of a row; several operations that would be thinner than can be seen are one.
struct Box {
  std::string name;
  double left = 0, right = 0;  // in the picture
  double seconds = 0;
  int64_t bytes = 0;
  int count = 0;
  const TraceEvent* first = nullptr;
};

struct LaneRows {
  std::string lane;
  std::vector<std::vector<Box>> rows = {};
  double busy_seconds = 0;  // the union of its operations' times
  double seconds = 0;
  int64_t bytes = 0, count = 0;
};

LaneRows RowsOf(const std::string& lane, std::vector<const TraceEvent*> events, const TraceView& view) {
  LaneRows rows{.lane = lane};
  std::sort(events.begin(), events.end(),
            [](const TraceEvent* a, const TraceEvent* b) { return a->start_seconds < b->start_seconds; });
  const double scale = (kLanesRight - kLanesLeft) / (view.end_seconds - view.start_seconds);
  double busy_until = view.start_seconds;
  for (const TraceEvent* event : events) {
    const double start = std::max(event->start_seconds, view.start_seconds);
    const double end = std::min(event->end_seconds, view.end_seconds);
    if (!(end > start)) continue;
    rows.busy_seconds += std::max(0.0, end - std::max(start, busy_until));
    busy_until = std::max(busy_until, end);
    rows.seconds += end - start;
    rows.bytes += event->bytes;
    ++rows.count;
    Box box{.name = event->name,
            .left = kLanesLeft + (start - view.start_seconds) * scale,
            .seconds = end - start,
            .bytes = event->bytes,
            .count = 1,
            .first = event};
    box.right = box.left + (end - start) * scale;
    size_t at = 0;
    while (at < rows.rows.size() && rows.rows[at].back().right > box.left + 0.05) ++at;
    if (at == rows.rows.size() && at < kMostRows) {
      rows.rows.emplace_back();
    } else if (at == rows.rows.size()) {
      --at;
    }
    std::vector<Box>& row = rows.rows[at];
    constexpr double kThin = 1.2;
    if (!row.empty() && row.back().name == box.name && box.left - row.back().right < kThin / 2 &&
        (box.right - box.left < kThin || at + 1 == kMostRows)) {
      Box& last = row.back();
      last.right = std::max(last.right, box.right);
      last.seconds += box.seconds;
      last.bytes += box.bytes;
      last.count += 1;
    } else {
      row.push_back(std::move(box));
    }
  }
  return rows;
}

std::string InWords(const Box& box) {
  std::string text = box.count > 1 ? absl::StrCat(box.count, " x ", box.name) : box.name;
  if (box.count == 1 && box.first->block >= 0) absl::StrAppend(&text, ", block ", box.first->block);
  if (box.count == 1 && box.first->tile >= 0) absl::StrAppend(&text, ", tile ", box.first->tile);
  if (box.bytes > 0) absl::StrAppend(&text, ", ", Format(static_cast<double>(box.bytes), Unit::kBytes));
  return absl::StrCat(text, ", ", Format(box.seconds, Unit::kSeconds));
}

std::string DrawRows(const LaneRows& lane, double* y) {
  std::string svg = absl::StrFormat("<text x=\"2\" y=\"%.0f\">%s</text>", *y + 12,
                                    Escape(lane.lane == kWaitsTrack ? "waits for" : lane.lane));
  for (const std::vector<Box>& row : lane.rows) {
    for (const Box& box : row) {
      const bool waits = lane.lane == kWaitsTrack;
      absl::StrAppendFormat(&svg,
                            "<rect class=\"f%d\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" "
                            "height=\"%.0f\"><title>%s</title></rect>\n",
                            static_cast<int>(waits ? kWait : PurposeOf(box.name)), box.left, *y,
                            std::max(0.4, box.right - box.left - 0.3), kRow - 2, Escape(InWords(box)));
      // As much of the name as there is room for.
      const size_t letters = static_cast<size_t>(std::max(0.0, (box.right - box.left - 4) / 7));
      const std::string label =
          box.name.size() <= letters ? box.name : box.name.substr(0, letters > 0 ? 1 : 0);
      if (!label.empty()) {
        absl::StrAppendFormat(&svg,
                              "<text class=\"in\" x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n",
                              (box.left + box.right) / 2, *y + 12, Escape(label));
      }
    }
    *y += kRow;
  }
  *y += kGap;
  return svg;
}

// In the order in which they are explained: compute and its waits first.
std::vector<LaneRows> LanesOf(const TraceView& view) {
  std::map<std::string, std::vector<const TraceEvent*>> lanes;
  for (const TraceEvent& event : view.events) lanes[event.lane].push_back(&event);
  for (const TraceEvent& event : view.waits) lanes[kWaitsTrack].push_back(&event);
  lanes.erase("host");  // decisions, which take no time
  std::vector<LaneRows> all;
  const auto take = [&](const std::string& name) {
    const auto it = lanes.find(name);
    if (it == lanes.end()) return;
    LaneRows rows = RowsOf(name, it->second, view);
    if (rows.count > 0) all.push_back(std::move(rows));
    lanes.erase(it);
  };
  for (const char* name : {"compute", kWaitsTrack, "read", "update", "write"}) take(name);
  while (!lanes.empty()) take(std::string(lanes.begin()->first));
  return all;
}

// From when to when a slot holds one content.
struct Tenure {
  double start = 0, end = 0;
  int64_t bytes = 0;
};

// Of a tier, by kind.
std::map<std::string, std::vector<Tenure>> TenuresOf(const TraceView& view, const std::string& tier) {
  struct Use {
    double start, end;
    const Place* place;
  };
  std::map<std::pair<std::string, int>, std::vector<Use>> slots;
  for (const TraceEvent& event : view.events) {
    for (const Place& place : event.places) {
      if (place.tier == tier)
        slots[{place.kind, place.slot}].push_back({event.start_seconds, event.end_seconds, &place});
    }
  }
  std::map<std::string, std::vector<Tenure>> tenures;
  for (auto& [slot, uses] : slots) {
    std::stable_sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.start < b.start; });
    std::vector<Tenure>& of_kind = tenures[slot.first];
    const std::string* content = nullptr;
    for (const Use& use : uses) {
      if (content == nullptr || *content != use.place->content)
        of_kind.push_back({use.start, use.end, use.place->bytes});
      of_kind.back().end = std::max(of_kind.back().end, use.end);
      content = &use.place->content;
    }
  }
  return tenures;
}

constexpr int kHeldColumns = 240;

// The most that was held at once in each column of the picture.
std::vector<Point> HeldOver(const std::vector<Tenure>& tenures, const TraceView& view) {
  std::vector<std::pair<double, int64_t>> changes;
  for (const Tenure& tenure : tenures) {
    changes.emplace_back(tenure.start, tenure.bytes);
    changes.emplace_back(tenure.end, -tenure.bytes);
  }
  // What ends makes room before what begins at the same moment.
  std::sort(changes.begin(), changes.end());
  std::vector<Point> points;
  const double width = (view.end_seconds - view.start_seconds) / kHeldColumns;
  int64_t held = 0;
  size_t next = 0;
  const auto pass = [&](double until) {
    int64_t most = held;
    for (; next < changes.size() && changes[next].first <= until; ++next) {
      held += changes[next].second;
      most = std::max(most, held);
    }
    return most;
  };
  pass(view.start_seconds);  // what was before the step is not shown
  for (int column = 0; column < kHeldColumns; ++column) {
    const int64_t most = pass(view.start_seconds + width * (column + 1));
    points.push_back({width * column, static_cast<double>(most)});
  }
  return points;
}

}  // namespace

std::string DrawLanes(const TraceView& view, const std::string& whose) {
  const ChartText text{
      .title = absl::StrCat("The lanes of step ", view.step, whose.empty() ? "" : ": ", whose),
      .lead =
          "From one step's last backward to the next one's. What overlaps stands in rows; "
          "the picture scrolls."};
  if (view.step == 0) {
    return Figure({.title = absl::StrCat("The lanes of a step", whose.empty() ? "" : ": ", whose)},
                  "<p class=\"dim\">The trace holds no complete training step.</p>\n", "");
  }
  const std::vector<LaneRows> lanes = LanesOf(view);
  std::string svg;
  double y = 4;
  std::vector<std::vector<std::string>> table;
  const double length = view.end_seconds - view.start_seconds;
  for (const LaneRows& lane : lanes) {
    svg += DrawRows(lane, &y);
    table.push_back({lane.lane, Format(static_cast<double>(lane.count), Unit::kCount),
                     Format(lane.busy_seconds, Unit::kSeconds),
                     absl::StrFormat("%.0f%%", 100 * lane.busy_seconds / length),
                     lane.bytes > 0 ? Format(static_cast<double>(lane.bytes), Unit::kBytes) : ""});
  }
  for (const double tick : Ticks(0, length, 8, Unit::kSeconds)) {
    const double x = kLanesLeft + tick / length * (kLanesRight - kLanesLeft);
    absl::StrAppendFormat(&svg,
                          "<path class=\"axis\" d=\"M%.1f %.0fv5\"/><text x=\"%.1f\" y=\"%.0f\" "
                          "text-anchor=\"%s\">%s</text>\n",
                          x, y, std::min(x, kLanesWidth - 2), y + 18, x > kLanesRight - 24 ? "end" : "middle",
                          Escape(FormatTick(tick, length, Unit::kSeconds)));
  }
  y += 24;
  std::string key = "<ul class=\"key\">";
  for (size_t i = 0; i < kPurposes.size(); ++i)
    key += KeyEntry(kPurposes[i], static_cast<int>(i), Mark::kArea);
  const std::string picture = absl::StrFormat(
      "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"%s, scrolls\"><svg class=\"wide\" "
      "viewBox=\"0 "
      "0 %.0f %.0f\" role=\"img\" aria-label=\"%s; as numbers below\">\n%s</svg></div>\n",
      Escape(text.title), kLanesWidth, y, Escape(text.title), svg);
  return Figure(
      text, picture,
      absl::StrCat(key, "</ul>\n",
                   Numbers(Table("", {"lane", "operations", "busy", "of the step", "moved"}, table))));
}

std::string DrawMemory(const TraceView& view, const std::string& tier, const std::string& whose,
                       std::optional<double> bound, const std::string& bound_name) {
  const std::map<std::string, std::vector<Tenure>> tenures = TenuresOf(view, tier);
  if (tenures.empty() || view.step == 0) return "";
  LayerChart chart;
  chart.text = {
      .title = absl::StrCat(tier == "host" ? "Host" : "Device", " memory in use over step ", view.step,
                            whose.empty() ? "" : ": ", whose),
      .lead = absl::StrCat("What the plan's slots hold, from the first operation on a content to the last.",
                           bound.has_value() ? absl::StrCat(" The dashed line: ", bound_name, ".") : ""),
      .x_label = "time in the step",
      .x_unit = Unit::kSeconds,
      .y_unit = Unit::kBytes};
  int style = 0;
  for (const char* kind : {"weights", "optimizer state", "gradients", "fp32 sums"}) {
    const auto it = tenures.find(kind);
    if (it != tenures.end()) chart.layers.push_back({kind, style, HeldOver(it->second, view)});
    ++style;
  }
  chart.bound = bound;
  chart.bound_name = bound_name;
  return Draw(chart);
}

}  // namespace penstock::tools
