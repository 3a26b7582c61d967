#include "tools/pages/plan_page.h"

#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/pages/chart.h"
#include "tools/pages/markup.h"
#include "tools/pages/run_files.h"
#include "tools/pages/step_charts.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

using nlohmann::json;

std::string TextOf(const json& object, const char* key) {
  return zero::JsonField<std::string>(object, key).value_or("");
}
const json& ListOf(const json& object, const char* key) {
  static const json kEmpty = json::array();
  const auto it = object.find(key);
  return it != object.end() && it->is_array() ? *it : kEmpty;
}

std::string Facts(const json& plan) {
  struct Row {
    const char* name;
    const char* key;
    Unit unit;
  };
  std::vector<std::vector<std::string>> rows;
  for (const char* key :
       {"dtype", "optimizer", "optimizer_states", "offload", "order_of_update", "durability"}) {
    if (const std::string text = TextOf(plan, key); !text.empty()) {
      std::string name = key;
      for (char& c : name) c = c == '_' ? ' ' : c;
      rows.push_back({name, text});
    }
  }
  for (const Row& row :
       {Row{"parameters", "params", Unit::kCount}, Row{"blocks", "blocks", Unit::kCount},
        Row{"budget of host memory", "host_memory_budget_bytes", Unit::kBytes},
        Row{"host memory that the plan takes", "host_memory_bytes", Unit::kBytes},
        Row{"least host memory that works", "least_host_memory_bytes", Unit::kBytes},
        Row{"state, one version", "state_bytes_total", Unit::kBytes},
        Row{"on the drive, all versions", "state_bytes_nvme", Unit::kBytes},
        Row{"drive bytes per parameter and step", "nvme_bytes_per_param_per_step", Unit::kPlain},
        Row{"reads", "io_read_bandwidth_bytes_per_s", Unit::kBytesPerSecond},
        Row{"writes", "io_write_bandwidth_bytes_per_s", Unit::kBytesPerSecond},
        Row{"written in a day of training", "nvme_written_bytes_per_day", Unit::kBytes},
        Row{"days to the drive's rating", "days_to_rated_writes", Unit::kPlain}}) {
    const double value = NumberOf(plan, row.key);
    if (std::isfinite(value)) rows.push_back({row.name, Format(value, row.unit)});
  }
  return Table("", {"", "plan"}, rows);
}

std::string StepTimes(const json& plan) {
  BarChart chart;
  chart.text = {.title = "What a step takes",
                .lead = "The predicted step, and what each of its parts would take alone.",
                .y_unit = Unit::kSeconds};
  const auto add = [&](const char* name, const char* key) {
    const double seconds = NumberOf(plan, key);
    if (seconds > 0) chart.bars.push_back({name, {{"seconds", seconds}}});
  };
  add("predicted step", "predicted_step_seconds");
  add("predicted step, while clipped", "predicted_clipped_step_seconds");
  add("lower bound", "predicted_floor_seconds");
  add("compute", "predicted_compute_seconds");
  add("drive", "predicted_drive_seconds");
  add("updates", "predicted_update_seconds");
  add("copies to the device", "predicted_copy_in_seconds");
  add("copies from the device", "predicted_copy_out_seconds");
  return Draw(chart);
}

std::string Tiers(const json& plan) {
  BarChart memory, traffic;
  memory.text = {.title = "Where it lives",
                 .lead = "In host memory on its way, in host memory to stay, on the drive.",
                 .y_unit = Unit::kBytes};
  traffic.text = {
      .title = "What moves in a step", .lead = "Between drive and memory.", .y_unit = Unit::kBytes};
  for (const json& tier : ListOf(plan, "tiers")) {
    const std::string what = TextOf(tier, "what");
    memory.bars.push_back({what,
                           {{"in flight", NumberOf(tier, "host_in_flight_bytes")},
                            {"stays", NumberOf(tier, "host_resident_bytes")},
                            {"on the drive", NumberOf(tier, "nvme_bytes")}}});
    const double read = NumberOf(tier, "nvme_read_bytes_per_step");
    const double written = NumberOf(tier, "nvme_write_bytes_per_step");
    if (read > 0 || written > 0) traffic.bars.push_back({what, {{"read", read}, {"written", written}}});
  }
  BarChart host;
  host.text = {.title = "Host memory", .lead = "What the budget is spent on.", .y_unit = Unit::kBytes};
  for (const json& line : ListOf(plan, "host")) {
    const double bytes = NumberOf(line, "bytes");
    if (bytes > 0) host.bars.push_back({TextOf(line, "what"), {{"bytes", bytes}}});
  }
  std::vector<std::string> figures = {Draw(memory)};
  if (!host.bars.empty()) figures.push_back(Draw(host));
  figures.push_back(Draw(traffic));
  return Section("Where everything lives", "", Grid(figures));
}

std::string WhatIfs(const json& plan) {
  std::vector<std::vector<std::string>> rows;
  for (const json& asked : ListOf(plan, "what_if")) {
    const std::string error = TextOf(asked, "error");
    const double speedup = NumberOf(asked, "speedup");
    // A change of clipped steps alone is compared by those.
    const double clipped = NumberOf(asked, "predicted_clipped_step_seconds");
    const std::string step =
        Format(std::isfinite(clipped) ? clipped : NumberOf(asked, "predicted_step_seconds"), Unit::kSeconds);
    rows.push_back({TextOf(asked, "change"), std::isfinite(clipped) ? step + ", clipped" : step,
                    std::isfinite(speedup) ? absl::StrFormat("%.2f", speedup) : "-",
                    error.empty() ? TextOf(asked, "bound_by") : error,
                    Format(NumberOf(asked, "host_memory_bytes"), Unit::kBytes),
                    Format(NumberOf(asked, "nvme_write_bytes_per_step"), Unit::kBytes)});
  }
  if (rows.empty()) return "";
  return Section(
      "What if", "The same step after one change.",
      Table("", {"change", "step", "times as fast", "bound by", "host memory", "written a step"}, rows));
}

std::string Reasons(const json& plan) {
  std::string list = "<ul>";
  for (const json& reason : ListOf(plan, "reasons")) {
    if (reason.is_string()) absl::StrAppend(&list, "<li>", Escape(reason.get<std::string>()), "</li>\n");
  }
  return list == "<ul>" ? "" : Section("Why", "", list + "</ul>\n");
}

}  // namespace

std::string PlanPage(const std::string& model, const json& plan, const TraceView& step) {
  const double arena = NumberOf(plan, "pinned_memory_bytes");
  const std::optional<double> bound = arena > 0 ? std::optional<double>(arena) : std::nullopt;
  const std::string one_step = DrawLanes(step, "predicted") + "<p></p>" +
                               Grid({DrawMemory(step, "host", "predicted", bound, "the arena"),
                                     DrawMemory(step, "device", "predicted", std::nullopt, "")});
  return Page(absl::StrCat("Plan: ", model),
              absl::StrCat("A step takes ", Format(NumberOf(plan, "predicted_step_seconds"), Unit::kSeconds),
                           ", bound by ", TextOf(plan, "bound_by"), ". Nothing was trained."),
              absl::StrCat(Grid({Facts(plan), StepTimes(plan)}), Tiers(plan),
                           Section("One step, simulated", "", one_step), WhatIfs(plan), Reasons(plan)));
}

}  // namespace penstock::tools
