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

// Without the first step, which fills the pipeline, where there are others. Of an even number, the mean of
// the two in the middle.
double Median(const Run& run, const Value& value) {
  std::vector<double> values = Finite(run, value, run.steps.size() < 2);
  if (values.empty()) return kMissing;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Whether there is anything to draw but zeros.
bool Any(const std::vector<Run>& runs, const Value& value) {
  for (const Run& run : runs) {
    for (const double each : Finite(run, value, /*first_too=*/true)) {
      if (each != 0) return true;
    }
  }
  return false;
}

double SecondsOf(const StepFigures& step) { return step.seconds; }
double ReadOf(const StepFigures& step) { return step.nvme_read_bytes; }
double WrittenOf(const StepFigures& step) { return step.nvme_write_bytes; }
double SkippedOf(const StepFigures& step) { return step.skipped ? 1 : 0; }
double RedoneOf(const StepFigures& step) { return step.redone ? 1 : 0; }
// Where nobody counted tokens there is no rate.
double RateOf(const StepFigures& step) {
  return step.seconds > 0 && step.tokens > 0 ? step.tokens / step.seconds : kMissing;
}

// A figure of all steps: the report's total of its process, and of other processes what the log says. Without
// that total, of the steps that there are.
double InAll(const Run& run, const char* total, const Value& value) {
  const double of_process = run.Figure(total);
  if (!std::isfinite(of_process)) return Sum(run, value);
  const double others =
      Sum(run, [&](const StepFigures& step) { return run.OfProcess(step.step) ? kMissing : value(step); });
  return of_process + (std::isfinite(others) ? others : 0);
}

// Of the report's process: steps that it made, and those of them that are here to be drawn.
double MadeSteps(const Run& run) {
  if (const double made = run.Figure("totals.steps"); std::isfinite(made)) return made;
  return run.report.empty() || run.last_reported_step == 0
             ? 0
             : static_cast<double>(run.last_reported_step - run.FirstOfProcess() + 1);
}
double KeptSteps(const Run& run) {
  return static_cast<double>(std::count_if(
      run.steps.begin(), run.steps.end(), [&](const StepFigures& step) { return run.OfProcess(step.step); }));
}
bool IsCut(const Run& run) { return KeptSteps(run) < MadeSteps(run); }

// A, B, ... Z, AA, AB, ...
std::string Letters(size_t i) {
  std::string letters(1, static_cast<char>('A' + i % 26));
  for (i /= 26; i > 0; i = (i - 1) / 26) letters.insert(0, 1, static_cast<char>('A' + (i - 1) % 26));
  return letters;
}

// "A run.json": letters tell runs apart where colour does not.
std::string NameOf(const std::vector<Run>& runs, size_t i) {
  if (runs.size() == 1) return runs[i].name;
  return absl::StrCat(Letters(i), " ", runs[i].name);
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

std::string LossText(double loss) {
  return std::fabs(loss) < 1e6 ? absl::StrFormat("%.4f", loss) : absl::StrFormat("%.4g", loss);
}

// The first of the steps from which on no loss was finite; the run's end: its last one is, or is not known.
size_t DivergesAt(const Run& run) {
  size_t from = run.steps.size();
  while (from > 0 && run.steps[from - 1].loss_not_finite) --from;
  return from;
}

// "4.2100 to 2.7600"
std::string LossOf(const Run& run) {
  const std::vector<double> losses = Finite(
      run, [](const StepFigures& step) { return step.loss; }, /*first_too=*/true);
  const auto not_finite = std::count_if(run.steps.begin(), run.steps.end(),
                                        [](const StepFigures& step) { return step.loss_not_finite; });
  std::string text = losses.empty() ? not_finite > 0 ? "not finite" : "-"
                                    : absl::StrCat(LossText(losses.front()), " to ", LossText(losses.back()));
  if (losses.empty() || not_finite == 0) return text;
  if (const size_t from = DivergesAt(run); from < run.steps.size())
    return absl::StrCat(text, ", not finite from step ", run.steps[from].step, " on");
  return absl::StrCat(text, ", not finite in ", not_finite, not_finite == 1 ? " step" : " steps");
}

std::string Of(double some, double all) {
  return some > 0 ? absl::StrCat(Plain(some, 6), " of ", Plain(all, 6)) : "0";
}
double AllSteps(const Run& run) {
  return InAll(run, "totals.steps", [](const StepFigures&) { return 1; });
}
std::string SkippedSteps(const Run& run) {
  return Of(InAll(run, "totals.skipped_steps", SkippedOf), AllSteps(run));
}
std::string RedoneSteps(const Run& run) {
  return IsCut(run) ? Of(run.Figure("redone_steps"), MadeSteps(run))
                    : Of(Sum(run, RedoneOf), static_cast<double>(run.steps.size()));
}

std::string FlopsOf(const Run& run, const char* key, const char* unit) {
  const double flops = run.Figure(key);
  return flops > 0 ? absl::StrCat(Format(flops, Unit::kCount), unit) : "-";
}

// The share of what a product of matrices reaches there.
std::string ShareOfProduct(const Run& run) {
  const double product = run.Figure("product_flops_per_second"), share = run.Figure("mfu");
  if (!(product > 0)) return "-";
  const std::string rate = Format(product, Unit::kCount) + "FLOP/s";
  if (share > 0) return absl::StrFormat("%.1f%% of %s", 100 * share, rate);
  if (!(run.Figure("model_flops_per_second") > 0)) return "-";
  return absl::StrCat("none: the product that it is held against was disturbed (", rate, ")");
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
  const int64_t first = run.report.empty() && !run.steps.empty() ? run.steps[0].step : run.FirstOfProcess();
  for (const StepFigures& step : run.steps) {
    if (step.step == first || !std::isfinite(step.seconds)) continue;
    if (!run.report.empty() && !run.OfProcess(step.step)) continue;
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

// What is wrong with a run, and what of it cannot be seen here: nobody shall have to find it in a picture.
std::string Notes(const std::vector<Run>& runs) {
  std::string html;
  const auto add = [&](size_t i, const char* style, const std::string& text) {
    absl::StrAppend(&html, "<p class=\"", style, "\">", Escape(NameOf(runs, i)), ": ", Escape(text),
                    "</p>\n");
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (const size_t from = DivergesAt(run); from < run.steps.size())
      add(i, "bad", absl::StrCat("the loss is not finite from step ", run.steps[from].step, " on"));
    const double skipped = InAll(run, "totals.skipped_steps", SkippedOf), all = AllSteps(run);
    if (skipped > all / 2) {
      add(i, "bad",
          absl::StrCat(Of(skipped, all),
                       " steps were skipped, since their gradients were not finite: nothing "
                       "was learnt from them"));
    }
    if (IsCut(run)) {
      add(i, "dim",
          absl::StrFormat(
              "of %.0f steps the last %.0f are here, and pictures, medians and the loss are of those "
              "alone; the file of --log has all of them",
              MadeSteps(run), KeptSteps(run)));
    }
  }
  return html;
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
      {"steps skipped, gradients not finite", SkippedSteps},
      {"steps with updates made again", RedoneSteps},
      {"tokens/s, median", [](const Run& run) { return Format(Median(run, RateOf), Unit::kCount); }},
      {"seconds a step, median",
       [](const Run& run) { return Format(Median(run, SecondsOf), Unit::kSeconds); }},
      {"bound by", [](const Run& run) { return run.Text("bound_by"); }},
      {"step over its lower bound", [](const Run& run) { return Ratio(run.Figure("overlap_ratio")); }},
      {"computed in a step", [](const Run& run) { return FlopsOf(run, "model_flops_per_step", "FLOP"); }},
      {"computed in a second",
       [](const Run& run) { return FlopsOf(run, "model_flops_per_second", "FLOP/s"); }},
      {"of what a product reaches (MFU)", ShareOfProduct},
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
      const std::string& cell = table.back().back();
      told = told || (!cell.empty() && cell != "-" && cell != "0 B" && cell != "0");
    }
    if (!told) table.pop_back();
  }
  return Table("", columns, table);
}

std::string OverSteps(const std::vector<Run>& runs, ChartText text, const Value& value, bool log_scale,
                      bool from_zero) {
  text.x_label = "step";
  text.whole_x = true;
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
  LineChart chart{.text = {.title = "Loss",
                           .lead = "Of each step; dots are the held-out text.",
                           .x_label = "step",
                           .whole_x = true},
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
                .y_unit = Unit::kSeconds,
                .whole_x = true};
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
    const Run& run = runs[i];
    Bar bar{.name = NameOf(runs, i), .parts = {}};
    // The process's own, as its waits are: the log may have steps of other ones.
    double computes = run.Figure("totals.compute_seconds");
    if (!std::isfinite(computes)) {
      computes = Sum(run, [&](const StepFigures& step) {
        return run.report.empty() || run.OfProcess(step.step) ? step.compute_seconds : kMissing;
      });
      if (IsCut(run)) {
        absl::StrAppendFormat(&chart.text.lead,
                              " %s computed longer: that is known of its last %.0f steps alone.",
                              NameOf(runs, i), KeptSteps(run));
      }
    }
    bar.parts.push_back({"computes", computes});
    if (const auto it = run.report.find("stall_seconds"); it != run.report.end() && it->is_object()) {
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
  std::vector<std::string> figures;
  if (Any(runs, RateOf)) {
    figures.push_back(OverSteps(runs, {.title = "Rate", .lead = "Tokens per second.", .y_unit = Unit::kCount},
                                RateOf, false, true));
  }
  figures.insert(figures.end(), {Causes(runs), Predicted(runs)});
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

// All that was written for the run, as far as is known.
double Written(const Run& run) {
  const double steps = InAll(run, "totals.step_nvme_write_bytes", WrittenOf);
  // With what the log has of other processes: before this one, unless the run's own count has them, and
  // behind.
  const double by_run = run.Figure("totals.run_nvme_write_bytes");
  const double by_process = run.Figure("totals.nvme_write_bytes");
  if (!std::isfinite(by_run) && !std::isfinite(by_process)) return steps;
  const double others = Sum(run, [&](const StepFigures& step) {
    const bool counted =
        std::isfinite(by_run) ? step.step <= run.last_reported_step : run.OfProcess(step.step);
    return counted ? kMissing : step.nvme_write_bytes;
  });
  return (std::isfinite(by_run) ? by_run : by_process) + (std::isfinite(others) ? others : 0);
}

std::string Wear(const std::vector<Run>& runs, double rated) {
  std::vector<std::vector<std::string>> rows;
  bool any = false;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const double in_steps = InAll(run, "totals.step_nvme_write_bytes", WrittenOf), written = Written(run);
    const double seconds = InAll(run, "totals.seconds", SecondsOf);
    const double per_day = seconds > 0 ? in_steps / seconds * 86400 : kMissing;
    any = any || written > 0;
    rows.push_back({NameOf(runs, i), Format(InAll(run, "totals.step_nvme_read_bytes", ReadOf), Unit::kBytes),
                    Format(in_steps, Unit::kBytes), Format(written, Unit::kBytes),
                    Format(per_day, Unit::kBytes), per_day > 0 ? Plain(rated / per_day, 3) + " days" : "-",
                    std::isfinite(written) ? Plain(100 * written / rated, 2) + "%" : "-"});
  }
  if (!any) return "";
  return Table(absl::StrFormat(
                   "Wear, of one drive that is rated for %.0f TB written (--tbw). All that is written uses "
                   "it up: steps, and beside them the first state, checkpoints and the probe",
                   rated * 1e-12),
               {"run", "read in steps", "written in steps", "written in all", "in a day of steps",
                "days to the rating", "of the rating used"},
               rows);
}

std::string Bytes(const std::vector<Run>& runs, double rated) {
  std::vector<std::string> figures = {Memory(runs)};
  if (Any(runs, ReadOf)) {
    figures.push_back(
        OverSteps(runs, {.title = "Read from the drive", .lead = "In each step.", .y_unit = Unit::kBytes},
                  ReadOf, false, true));
  }
  if (Any(runs, WrittenOf)) {
    figures.push_back(
        OverSteps(runs, {.title = "Written to the drive", .lead = "In each step.", .y_unit = Unit::kBytes},
                  WrittenOf, false, true));
  }
  return Section("Memory and bytes", "", Grid(figures) + Wear(runs, rated));
}

}  // namespace

std::string ReportPage(const std::vector<Run>& runs, double rated_bytes_written) {
  const std::string title = runs.size() == 1 ? absl::StrCat("Training: ", runs[0].name)
                                             : absl::StrCat(runs.size(), " trainings side by side");
  return Page(title, "Drawn from report, log and trace. Every picture has its numbers below it.",
              absl::StrCat(Section("What was trained", "", Notes(runs) + Summary(runs)), Learning(runs),
                           Time(runs), OneStep(runs), Bytes(runs, rated_bytes_written)));
}

}  // namespace penstock::tools
