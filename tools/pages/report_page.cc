#include "tools/pages/report_page.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/pages/chart.h"
#include "tools/pages/markup.h"
#include "tools/pages/step_charts.h"

namespace penstock::tools {
namespace {

using Value = std::function<double(const StepFigures&)>;

std::vector<double> Finite(const Run& run, const Value& value, bool first_too) {
  std::vector<double> values;
  for (size_t i = first_too ? 0 : 1; i < run.steps.size(); ++i) {
    const double each = value(run.steps[i]);
    if (std::isfinite(each)) values.push_back(each);
  }
  return values;
}

double Sum(const Run& run, const Value& value) {
  double sum = kMissing;
  for (const double each : Finite(run, value, /*first_too=*/true)) sum = std::isnan(sum) ? each : sum + each;
  return sum;
}

// Without the first step, which fills the pipeline, where there are others.
double Median(const Run& run, const Value& value) {
  std::vector<double> values = Finite(run, value, run.steps.size() < 2);
  if (values.empty()) return kMissing;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double SecondsOf(const StepFigures& step) { return step.seconds; }
double ReadOf(const StepFigures& step) { return step.nvme_read_bytes; }
double WrittenOf(const StepFigures& step) { return step.nvme_write_bytes; }
double RateOf(const StepFigures& step) { return step.seconds > 0 ? step.tokens / step.seconds : kMissing; }

// "A run.json": a letter tells runs apart where colour does not.
std::string NameOf(const std::vector<Run>& runs, size_t i) {
  if (runs.size() == 1) return runs[i].name;
  return absl::StrCat(std::string(1, static_cast<char>('A' + i % 26)), " ", runs[i].name);
}
std::string WhoseOf(const std::vector<Run>& runs, size_t i) {
  return runs.size() == 1 ? "" : NameOf(runs, i);
}

struct Row {
  const char* name;
  std::function<std::string(const Run&)> value;
};

std::string Number(const Run& run, const char* path, Unit unit) { return Format(run.Figure(path), unit); }

std::string Ratio(double value) { return std::isfinite(value) ? absl::StrFormat("%.2f", value) : "-"; }

// "4.21 -> 2.76"
std::string LossOf(const Run& run) {
  const std::vector<double> losses = Finite(
      run, [](const StepFigures& step) { return step.loss; }, /*first_too=*/true);
  return losses.empty() ? "-" : absl::StrFormat("%.4f to %.4f", losses.front(), losses.back());
}

std::string StepsOf(const Run& run) {
  if (run.steps.empty()) return "none";
  return absl::StrCat(run.steps.front().step, " to ", run.steps.back().step);
}

std::string StatusOf(const Run& run) {
  const std::string status = run.Text("status"), error = run.Text("error"), by = run.Text("stopped_by");
  if (run.report.empty()) return "no report: the log alone";
  return absl::StrCat(status.empty() ? "not known" : status,
                      by.empty() ? "" : absl::StrCat(", stopped by ", by),
                      error.empty() ? "" : absl::StrCat(": ", error));
}

// The mean of the steps that the report adds up, without the first one, as it does.
double MeanSeconds(const Run& run) {
  double sum = 0;
  int count = 0;
  for (const StepFigures& step : run.steps) {
    if (step.step <= run.first_reported_step || !std::isfinite(step.seconds)) continue;
    sum += step.seconds;
    ++count;
  }
  return count > 0 ? sum / count : kMissing;
}

// What its steps took at the least: the drive saturated, or the processor at work, all of the time.
double LowerBound(const Run& run) {
  const double ratio = run.Figure("overlap_ratio");
  return ratio > 0 ? MeanSeconds(run) / ratio : kMissing;
}

std::string Summary(const std::vector<Run>& runs) {
  const std::vector<Row> rows = {
      {"status", StatusOf},
      {"run", [](const Run& run) { return run.run_id.empty() ? "-" : run.run_id; }},
      {"parameters", [](const Run& run) { return Number(run, "params", Unit::kCount); }},
      {"precision", [](const Run& run) { return run.Text("dtype"); }},
      {"device", [](const Run& run) { return run.Text("device"); }},
      {"ranks", [](const Run& run) { return Number(run, "world_size", Unit::kPlain); }},
      {"steps", StepsOf},
      {"loss", LossOf},
      {"tokens/s, median", [](const Run& run) { return Format(Median(run, RateOf), Unit::kCount); }},
      {"seconds a step, median",
       [](const Run& run) { return Format(Median(run, SecondsOf), Unit::kSeconds); }},
      {"bound by", [](const Run& run) { return run.Text("bound_by"); }},
      {"step over its lower bound", [](const Run& run) { return Ratio(run.Figure("overlap_ratio")); }},
      {"budget of host memory",
       [](const Run& run) { return Number(run, "host_memory_budget_bytes", Unit::kBytes); }},
      {"managed memory, peak",
       [](const Run& run) { return Number(run, "peak_managed_bytes", Unit::kBytes); }},
      {"whole process, peak", [](const Run& run) { return Number(run, "peak_rss_bytes", Unit::kBytes); }},
      {"device memory, peak", [](const Run& run) { return Number(run, "peak_device_bytes", Unit::kBytes); }},
      {"state on the drive", [](const Run& run) { return Number(run, "state_bytes_nvme", Unit::kBytes); }},
      {"drive bytes per parameter and step",
       [](const Run& run) { return Ratio(run.Figure("nvme_bytes_per_param_per_step")); }},
  };
  std::vector<std::string> columns = {""};
  for (size_t i = 0; i < runs.size(); ++i) columns.push_back(NameOf(runs, i));
  std::vector<std::vector<std::string>> table;
  for (const Row& row : rows) {
    table.push_back({row.name});
    bool told = false;
    for (const Run& run : runs) {
      table.back().push_back(row.value(run));
      told = told ||
             (!table.back().back().empty() && table.back().back() != "-" && table.back().back() != "0 B");
    }
    if (!told) table.pop_back();
  }
  return Table("", columns, table);
}

std::string OverSteps(const std::vector<Run>& runs, ChartText text, const Value& value, bool log_scale,
                      bool from_zero) {
  text.x_label = "step";
  LineChart chart{.text = std::move(text), .series = {}, .from_zero = from_zero, .log_scale = log_scale};
  for (size_t i = 0; i < runs.size(); ++i) {
    Series line{.name = NameOf(runs, i), .style = static_cast<int>(i)};
    for (const StepFigures& step : runs[i].steps)
      line.points.push_back({static_cast<double>(step.step), value(step)});
    chart.series.push_back(std::move(line));
  }
  return Draw(chart);
}

std::string DrawLoss(const std::vector<Run>& runs) {
  LineChart chart{
      .text = {.title = "Loss", .lead = "Of each step; dots are the held-out text.", .x_label = "step"},
      .series = {},
      .log_scale = true};
  for (size_t i = 0; i < runs.size(); ++i) {
    Series line{.name = NameOf(runs, i), .style = static_cast<int>(i)};
    for (const StepFigures& step : runs[i].steps)
      line.points.push_back({static_cast<double>(step.step), step.loss});
    chart.series.push_back(std::move(line));
    if (runs[i].evaluations.empty()) continue;
    Series dots{.name = NameOf(runs, i) + ", held out", .style = static_cast<int>(i), .dots = true};
    for (const EvaluationFigures& evaluation : runs[i].evaluations)
      dots.points.push_back({static_cast<double>(evaluation.step), evaluation.loss});
    chart.series.push_back(std::move(dots));
  }
  return Draw(chart);
}

std::string Learning(const std::vector<Run>& runs) {
  return Section("Learning", "",
                 Grid({DrawLoss(runs),
                       OverSteps(
                           runs, {.title = "Learning rate", .lead = "Of each step."},
                           [](const StepFigures& step) { return step.lr; }, false, true),
                       OverSteps(
                           runs, {.title = "Norm of the gradients", .lead = "Before clipping."},
                           [](const StepFigures& step) { return step.grad_norm; }, true, false)}));
}

// The mean of each column of a picture: layers need one x for all, and few of them.
std::vector<StepFigures> Columns(const std::vector<StepFigures>& steps) {
  constexpr size_t kColumns = 160;
  if (steps.size() <= kColumns) return steps;
  std::vector<StepFigures> columns;
  for (size_t c = 0; c < kColumns; ++c) {
    const size_t begin = c * steps.size() / kColumns, end = (c + 1) * steps.size() / kColumns;
    StepFigures mean{.step = steps[begin].step, .seconds = 0, .stall_io_seconds = 0, .compute_seconds = 0};
    int count = 0;
    for (size_t i = begin; i < end; ++i) {
      if (!std::isfinite(steps[i].seconds)) continue;
      ++count;
      mean.seconds += steps[i].seconds;
      mean.stall_io_seconds += std::isfinite(steps[i].stall_io_seconds) ? steps[i].stall_io_seconds : 0;
      mean.compute_seconds += std::isfinite(steps[i].compute_seconds) ? steps[i].compute_seconds : 0;
    }
    mean.seconds /= std::max(1, count);
    mean.stall_io_seconds /= std::max(1, count);
    mean.compute_seconds /= std::max(1, count);
    columns.push_back(mean);
  }
  return columns;
}

std::string StepTimes(const std::vector<Run>& runs, size_t i) {
  LayerChart chart;
  chart.text = {.title = absl::StrCat("Step time by cause", runs.size() == 1 ? "" : ": ", WhoseOf(runs, i)),
                .lead =
                    "What forward and backward took, what they waited for the drive, and the rest: updates, "
                    "commits, data.",
                .x_label = "step",
                .y_unit = Unit::kSeconds};
  Series compute{.name = "forward and backward", .style = 0},
      stall{.name = "waits for the drive", .style = 1}, rest{.name = "the rest", .style = 7};
  for (const StepFigures& step : Columns(runs[i].steps)) {
    const auto x = static_cast<double>(step.step);
    compute.points.push_back({x, step.compute_seconds});
    stall.points.push_back({x, step.stall_io_seconds});
    const auto part = [](double value) { return std::isfinite(value) ? value : 0; };
    rest.points.push_back(
        {x, std::max(0.0, step.seconds - part(step.compute_seconds) - part(step.stall_io_seconds))});
  }
  chart.layers = {compute, stall, rest};
  return Draw(chart);
}

std::string Causes(const std::vector<Run>& runs) {
  BarChart chart;
  chart.text = {.title = "All of the time, by cause",
                .lead = "The compute lane computes, or waits for one of these.",
                .y_unit = Unit::kSeconds};
  for (size_t i = 0; i < runs.size(); ++i) {
    Bar bar{.name = NameOf(runs, i), .parts = {}};
    const int64_t first = runs[i].first_reported_step;
    bar.parts.push_back({"computes", Sum(runs[i], [first](const StepFigures& step) {
                           return step.step >= first ? step.compute_seconds : kMissing;
                         })});
    if (const auto it = runs[i].report.find("stall_seconds"); it != runs[i].report.end() && it->is_object()) {
      for (const auto& [cause, seconds] : it->items()) {
        if (seconds.is_number() && seconds.get<double>() > 0)
          bar.parts.push_back({cause, seconds.get<double>()});
      }
    }
    chart.bars.push_back(std::move(bar));
  }
  return Draw(chart);
}

std::string Predicted(const std::vector<Run>& runs) {
  std::vector<std::vector<std::string>> rows;
  BarChart chart;
  chart.text = {
      .title = "Predicted beside measured",
      .lead =
          "Seconds of a step: planned at the start, planned with what the first steps showed, measured "
          "(mean), and the least that drive or processor alone needed.",
      .y_unit = Unit::kSeconds};
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const std::string whose = runs.size() == 1 ? "" : absl::StrCat(NameOf(runs, i), ", ");
    const auto add = [&](const char* what, double seconds) {
      if (std::isfinite(seconds)) chart.bars.push_back({whose + what, {{"seconds", seconds}}});
    };
    add("predicted at the start", run.Figure("predicted_at_start_step_seconds"));
    add("predicted from its steps", run.Figure("predicted_step_seconds"));
    add("measured", MeanSeconds(run));
    add("lower bound", LowerBound(run));
  }
  return Draw(chart);
}

std::string Time(const std::vector<Run>& runs) {
  std::vector<std::string> figures = {
      OverSteps(runs, {.title = "Rate", .lead = "Tokens per second.", .y_unit = Unit::kCount}, RateOf, false,
                true),
      Causes(runs), Predicted(runs)};
  for (size_t i = 0; i < runs.size(); ++i) figures.push_back(StepTimes(runs, i));
  return Section("Time", "", Grid(figures));
}

std::string OneStep(const std::vector<Run>& runs) {
  std::string lanes;
  std::vector<std::string> memory;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].trace.has_value()) continue;
    lanes += absl::StrCat(DrawLanes(*runs[i].trace, WhoseOf(runs, i)), "<p></p>");
    const double arena = runs[i].Figure("peak_pinned_bytes");
    const std::optional<double> bound = arena > 0 ? std::optional<double>(arena) : std::nullopt;
    memory.push_back(DrawMemory(*runs[i].trace, "host", WhoseOf(runs, i), bound, "the pinned arena"));
    memory.push_back(DrawMemory(*runs[i].trace, "device", WhoseOf(runs, i), std::nullopt, ""));
  }
  if (lanes.empty())
    return Section("One step", "Give the file of --trace as well to see its lanes and its memory.", "");
  return Section("One step", "", lanes + Grid(memory));
}

std::string Memory(const std::vector<Run>& runs) {
  BarChart chart;
  chart.text = {.title = "Where the state and its peaks are",
                .lead = "Each memory for itself.",
                .y_unit = Unit::kBytes};
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string whose = runs.size() == 1 ? "" : absl::StrCat(NameOf(runs, i), ", ");
    const auto add = [&](const char* what, const char* key) {
      const double bytes = runs[i].Figure(key);
      if (bytes > 0) chart.bars.push_back({whose + what, {{"bytes", bytes}}});
    };
    add("host, managed at its peak", "peak_managed_bytes");
    add("host, budget", "host_memory_budget_bytes");
    add("device, peak", "peak_device_bytes");
    add("device, budget", "device_memory_budget_bytes");
    add("drive, all versions", "state_bytes_nvme");
  }
  return Draw(chart);
}

std::string Wear(const std::vector<Run>& runs, double rated) {
  std::vector<std::vector<std::string>> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    const double written = Sum(runs[i], WrittenOf), seconds = Sum(runs[i], SecondsOf);
    const double per_day = seconds > 0 ? written / seconds * 86400 : kMissing;
    rows.push_back({NameOf(runs, i), Format(Sum(runs[i], ReadOf), Unit::kBytes),
                    Format(written, Unit::kBytes), Format(per_day, Unit::kBytes),
                    per_day > 0 ? absl::StrFormat("%.3g days", rated / per_day) : "-",
                    std::isfinite(written) ? absl::StrFormat("%.2g%%", 100 * written / rated) : "-"});
  }
  return Table(
      absl::StrFormat("Wear, of one drive that is rated for %.0f TB written (--tbw)", rated * 1e-12),
      {"run", "read", "written", "written in a day of it", "days to the rating", "of the rating used"}, rows);
}

std::string Bytes(const std::vector<Run>& runs, double rated) {
  return Section(
      "Memory and bytes", "",
      Grid(
          {Memory(runs),
           OverSteps(runs, {.title = "Read from the drive", .lead = "In each step.", .y_unit = Unit::kBytes},
                     ReadOf, false, true),
           OverSteps(runs, {.title = "Written to the drive", .lead = "In each step.", .y_unit = Unit::kBytes},
                     WrittenOf, false, true)}) +
          Wear(runs, rated));
}

}  // namespace

std::string ReportPage(const std::vector<Run>& runs, double rated_bytes_written) {
  const std::string title = runs.size() == 1 ? absl::StrCat("Training: ", runs[0].name)
                                             : absl::StrCat(runs.size(), " trainings side by side");
  return Page(title, "Drawn from report, log and trace. Every picture has its numbers below it.",
              absl::StrCat(Section("What was trained", "", Summary(runs)), Learning(runs), Time(runs),
                           OneStep(runs), Bytes(runs, rated_bytes_written)));
}

}  // namespace penstock::tools
