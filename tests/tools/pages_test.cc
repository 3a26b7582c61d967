// The pages of `penstock report` and `penstock plan`: what stands in them, what must not, and that a browser
// shows them without a complaint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tools/base/verbs.h"
#include "tools/pages/chart.h"
#include "tools/pages/markup.h"
#include "tools/pages/plan_page.h"
#include "tools/pages/step_charts.h"
#include "tools/pages/trace_view.h"

namespace penstock::tools::pages_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

struct Result {
  int code = -1;
  std::string err;
};

Result RunVerb(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "report");
  std::vector<const char*> argv;
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  Result result;
  result.code = RunReport(static_cast<int>(argv.size()), argv.data(), out, err);
  result.err = err.str();
  EXPECT_EQ(out.str(), "");
  return result;
}

class Pages : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/penstock-pages-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    dir_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(dir_ + "/" + name, std::ios::binary) << text;
    return dir_ + "/" + name;
  }
  std::string PageOf(std::vector<std::string> files) const {
    const std::string html = dir_ + "/page.html";
    files.insert(files.end(), {"--html", html});
    const Result result = RunVerb(files);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    std::ostringstream text;
    text << std::ifstream(html, std::ios::binary).rdbuf();
    return text.str();
  }

  std::string dir_;
};

json StepEntry(int step) {
  return {{"step", step},
          {"loss", 4.0 / std::sqrt(step)},
          {"grad_norm", 1.5},
          {"lr", 3e-4},
          {"tokens", 256},
          {"seconds", 0.5 + 0.1 * (step % 3)},
          {"stall_io_seconds", 0.2},
          {"compute_seconds", 0.25},
          {"nvme_read_bytes", 1 << 28},
          {"nvme_write_bytes", 1 << 27}};
}

json ReportOf(const std::string& run_id, int steps) {
  json report = {
      {"version", "1"},
      {"status", "ok"},
      {"error", nullptr},
      {"run_id", run_id},
      {"params", 86'039'040},
      {"dtype", "bf16"},
      {"bound_by", "write"},
      {"host_memory_budget_bytes", 232 << 20},
      {"peak_managed_bytes", 231 << 20},
      {"peak_pinned_bytes", 200 << 20},
      {"state_bytes_nvme", 2'000'000'000},
      {"predicted_at_start_step_seconds", 0.73},
      {"predicted_step_seconds", 0.61},
      {"overlap_ratio", 1.2},
      {"io_saturated_seconds", 0.5 * (steps - 1)},
      {"compute_union_seconds", 0.4 * (steps - 1)},
      {"stall_seconds", {{"read", 1.25}, {"write", 2.5}, {"commit", 0}}},
      {"evaluations", json::array({{{"step", steps}, {"loss", 1.5}, {"windows", 3}, {"seconds", 1}}})},
      {"steps", json::array()}};
  for (int step = 1; step <= steps; ++step) report["steps"].push_back(StepEntry(step));
  return report;
}

// A trace as the program writes it: three steps of two blocks, whose weights share one slot. Before runs
// named themselves there was no `run_id`.
std::string TraceText(const std::string& run_id = "") {
  const json process = {{"ph", "M"},
                        {"pid", 1},
                        {"tid", 0},
                        {"name", "process_name"},
                        {"args", {{"name", "run " + run_id}, {"run_id", run_id}}}};
  std::string text = run_id.empty() ? "[\n" : "[\n" + process.dump() + ",\n";
  text += R"({"ph":"M","pid":1,"tid":0,"name":"thread_name","args":{"name":"read"}},)"
          "\n"
          R"({"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"compute"}},)"
          "\n"
          R"({"ph":"M","pid":1,"tid":10,"name":"thread_name","args":{"name":"compute waits for"}},)"
          "\n";
  int id = 0;
  const auto add = [&](int step, const char* name, int block, double start, double end) {
    const bool reads = std::string(name) == "read weights";
    const json args = {{"step", step},
                       {"block", block},
                       {"bytes", reads ? 1 << 20 : 0},
                       {"places", json::array({{{"tier", "host"},
                                                {"kind", "weights"},
                                                {"slot", 0},
                                                {"bytes", 1 << 20},
                                                {"content", std::to_string(block)}}})}};
    json event = {{"pid", 1}, {"tid", reads ? 0 : 2}, {"name", name}, {"ts", start * 1e6}, {"args", args}};
    if (!reads) {
      event["ph"] = "X";
      event["dur"] = (end - start) * 1e6;
      text += event.dump() + ",\n";
      return;
    }
    event["ph"] = "b";
    event["id"] = ++id;
    event["cat"] = "read";
    text += event.dump() + ",\n";
    event["ph"] = "e";
    event["ts"] = end * 1e6;
    event.erase("args");
    text += event.dump() + ",\n";
  };
  for (int step = 1; step <= 3; ++step) {
    const double at = step - 1;
    add(step, "read weights", 0, at + 0.00, at + 0.10);
    add(step, "forward", 0, at + 0.10, at + 0.20);
    add(step, "read weights", 1, at + 0.20, at + 0.30);
    text += R"({"ph":"X","pid":1,"tid":10,"name":"read","ts":)" + std::to_string((at + 0.2) * 1e6) +
            R"(,"dur":100000},)" + "\n";
    add(step, "forward", 1, at + 0.30, at + 0.40);
    add(step, "backward", 1, at + 0.40, at + 0.60);
    add(step, "read weights", 0, at + 0.60, at + 0.70);
    add(step, "backward", 0, at + 0.70, at + 0.90);
  }
  return text + "{}\n]\n";
}

TEST_F(Pages, AReportIsDrawnWithItsNumbers) {
  const std::string page = PageOf({Write("run.json", ReportOf("id-1", 20).dump())});
  EXPECT_THAT(page, HasSubstr("<title>Training: run.json</title>"));
  for (const char* text : {"86.04M", "231 MiB", "4.0000 to 0.8944", "Loss", "Learning rate",
                           "Step time by cause", "Predicted beside measured", "730 ms", "610 ms",
                           "lower bound", "held out", "1.25 s", "2.5 s", "Wear", "600 TB"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
}

TEST_F(Pages, APageAsksNobodyForAnythingAndRunsNothing) {
  const std::string page =
      PageOf({Write("run.json", ReportOf("id-1", 5).dump()), Write("trace.json", TraceText())});
  for (const char* text : {"<script", "http://", "https://", "url(", "@import", "javascript:"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST_F(Pages, HostileNamesAreText) {
  json report = ReportOf("\"><script>alert(1)</script>", 3);
  report["error"] = "</td><img src=x onerror=alert(2)>";
  report["dtype"] = "<b>&'\"";
  report["stall_seconds"] = {{"<svg/onload=alert(3)>", 2.0}};
  const std::string page = PageOf({Write("<i>'\"&\xff.json", report.dump())});
  for (const char* text : {"<script", "<img", "<b>", "<i>", "<svg/onload"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)"));
  EXPECT_THAT(page, HasSubstr("&lt;i&gt;&#39;&quot;&amp;\xef\xbf\xbd.json"));
}

TEST_F(Pages, ValuesThatAreMissingOrNoNumbersAreGaps) {
  json report = ReportOf("id", 6);
  report["steps"][1]["loss"] = nullptr;
  report["steps"][2].erase("seconds");
  report["steps"][3]["loss"] = "what";
  report["steps"][4]["seconds"] = 0;
  report["predicted_step_seconds"] = nullptr;
  report["stall_seconds"] = "none";
  report["params"] = -1e300;
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  EXPECT_THAT(page, Not(HasSubstr("inf\"")));
  EXPECT_THAT(page, HasSubstr("4.0000 to 1.6330"));
}

TEST_F(Pages, ARunWithoutStepsSaysSo) {
  json report = ReportOf("id", 0);
  report["status"] = "failed";
  report["error"] = "the disk is full";
  report["evaluations"] = json::array();
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_THAT(page, HasSubstr("failed: the disk is full"));
  EXPECT_THAT(page, HasSubstr("There is nothing to draw"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
}

TEST_F(Pages, TenThousandStepsStaySmallAndKeepTheirPeak) {
  json report = ReportOf("id", 10'000);
  report["steps"][5000]["grad_norm"] = 777;
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_LT(page.size(), 250'000u);
  EXPECT_GT(page.size(), 20'000u);
  // A single step stands out of a column of forty.
  const std::string chart = page.substr(page.find("Norm of the gradients"));
  EXPECT_THAT(chart.substr(0, chart.find("</svg>")), HasSubstr(" 10.0L"));
}

TEST_F(Pages, SeveralRunsStandSideBySideUnderLettersAndTheirDirectories) {
  std::filesystem::create_directories(dir_ + "/a");
  std::filesystem::create_directories(dir_ + "/b");
  const std::string page = PageOf(
      {Write("a/run.json", ReportOf("id-1", 5).dump()), Write("b/run.json", ReportOf("id-2", 9).dump())});
  EXPECT_THAT(page, HasSubstr("2 trainings side by side"));
  EXPECT_THAT(page, HasSubstr("A a/run.json"));
  EXPECT_THAT(page, HasSubstr("B b/run.json"));
  EXPECT_THAT(page, HasSubstr("class=\"plot s0\""));
  EXPECT_THAT(page, HasSubstr("class=\"plot s1\""));
}

TEST_F(Pages, ALogJoinsItsReportOrIsARunOfItsOwn) {
  std::string log;
  for (int step = 1; step <= 12; ++step) {
    json entry = StepEntry(step);
    entry["run_id"] = "id-1";
    log += entry.dump() + "\n";
  }
  const std::string path = Write("run.jsonl", log + "{\"step\": 13, \"lo");
  EXPECT_THAT(PageOf({path}), HasSubstr("no report: the log alone"));
  const std::string joined = PageOf({path, Write("run.json", ReportOf("id-1", 5).dump())});
  EXPECT_THAT(joined, HasSubstr("Training: run.json"));
  EXPECT_THAT(joined, HasSubstr("1 to 12"));
  EXPECT_THAT(PageOf({path, Write("run.json", ReportOf("id-2", 5).dump())}), HasSubstr("2 trainings"));
}

TEST_F(Pages, ATraceGivesTheLanesAndTheMemoryOfItsMiddleStep) {
  const std::string page =
      PageOf({Write("run.json", ReportOf("id", 5).dump()), Write("trace.json", TraceText())});
  EXPECT_THAT(page, HasSubstr("The lanes of step 2"));
  EXPECT_THAT(page, HasSubstr("read weights, block 1, 1 MiB, 100 ms"));
  EXPECT_THAT(page, HasSubstr("Host memory in use over step 2"));
  EXPECT_THAT(page, HasSubstr("waits for"));
}

TEST_F(Pages, ATraceIsOfTheRunThatItNamesOrOfNone) {
  const std::string first = Write("first.json", ReportOf("id-1", 5).dump());
  const std::string second = Write("second.json", ReportOf("id-2", 5).dump());
  const std::string trace = Write("trace.json", TraceText("id-1"));
  EXPECT_THAT(PageOf({first, second, trace}), HasSubstr("The lanes of step 2: A first.json"));
  EXPECT_THAT(PageOf({trace, second, first}), HasSubstr("The lanes of step 2: B first.json"));
  const Result other = RunVerb({second, trace, "--html", dir_ + "/other.html"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr(trace + ": it is the trace of run id-1, and no report or log here is of"));
  const Result two =
      RunVerb({first, trace, Write("again.json", TraceText("id-1")), "--html", dir_ + "/two.html"});
  EXPECT_EQ(two.code, 2);
  EXPECT_THAT(two.err, HasSubstr("its run has another trace already"));
}

TEST_F(Pages, ALogAloneHasItsTrace) {
  json line = StepEntry(1);
  const std::string nameless = Write("nameless.jsonl", line.dump() + "\n");
  line["run_id"] = "id-1";
  const std::string log = Write("run.jsonl", line.dump() + "\n");
  for (const std::string& trace : {Write("trace.json", TraceText("id-1")), Write("old.json", TraceText())}) {
    const std::string page = PageOf({log, trace});
    EXPECT_THAT(page, HasSubstr("no report: the log alone"));
    EXPECT_THAT(page, HasSubstr("The lanes of step 2"));
  }
  EXPECT_THAT(PageOf({nameless, Write("old.json", TraceText())}), HasSubstr("The lanes of step 2"));
}

TEST(TraceViews, AStepGoesFromOneLastBackwardToTheNext) {
  std::vector<TraceEvent> events;
  for (int64_t step = 1; step <= 3; ++step) {
    const auto at = static_cast<double>(step);
    events.push_back(
        {.lane = "compute", .name = "forward", .start_seconds = at, .end_seconds = at + 0.3, .step = step});
    events.push_back({.lane = "compute",
                      .name = "backward",
                      .start_seconds = at + 0.3,
                      .end_seconds = at + 0.8,
                      .step = step});
  }
  const TraceView view = StepOf(events);
  EXPECT_EQ(view.step, 2);
  EXPECT_DOUBLE_EQ(view.start_seconds, 1.8);
  EXPECT_DOUBLE_EQ(view.end_seconds, 2.8);
  EXPECT_EQ(StepOf({}).step, 0);
  EXPECT_THAT(DrawLanes(StepOf({}), ""), HasSubstr("no complete training step"));
}

TEST(Charts, TicksAreRoundInTheirUnit) {
  EXPECT_EQ(Ticks(0, 10, 5, Unit::kPlain), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(Ticks(0, 0x1p30 * 2.5, 3, Unit::kBytes), (std::vector<double>{0, 0x1p30, 0x1p31}));
  EXPECT_TRUE(Ticks(1, 1, 5, Unit::kPlain).empty());
  EXPECT_TRUE(Ticks(0, std::nan(""), 5, Unit::kPlain).empty());
}

TEST(PlanPages, APlanIsDrawnAndWhatIsMissingLeftOut) {
  const json plan = {
      {"predicted_step_seconds", 0.7},
      {"bound_by", "read"},
      {"params", 1e9},
      {"reasons", {"weights <stay>"}},
      {"tiers", {{{"what", "weights"}, {"host_in_flight_bytes", 1 << 20}, {"nvme_bytes", 1 << 30}}}},
      {"what_if",
       {{{"change", "twice the memory"}, {"error", "too little"}},
        {{"change", "prefer: time"},
         {"predicted_step_seconds", 0.7},
         {"predicted_clipped_step_seconds", 0.9}}}}};
  const std::string page = PlanPage("gpt-<x>", plan, TraceView());
  for (const char* text :
       {"Plan: gpt-&lt;x&gt;", "A step takes 700 ms, bound by read", "weights &lt;stay&gt;",
        "twice the memory", "too little", "1 GiB", "prefer: time", "900 ms, clipped"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  EXPECT_THAT(PlanPage("m", json::object(), TraceView()), HasSubstr("There is nothing to draw"));
}

TEST(Charts, TheLastOfTheLayersIsDrawnAsWell) {
  LayerChart chart{.text = {.title = "t"}, .layers = {{.name = "a", .points = {{1, 2}, {2, 4}}}}};
  EXPECT_THAT(Draw(chart), HasSubstr("d=\"M66.0 102.0H235.0L235.0 10.0H404.0"));
  chart.layers[0].points = {{7, 2}};
  EXPECT_THAT(Draw(chart), HasSubstr("d=\"M66.0 10.0H404.0"));
}

TEST(Charts, StepsAreWholeAndWhatIsNothingHasNoNegativeAxis) {
  const LineChart chart{.text = {.title = "t", .x_label = "step", .y_unit = Unit::kBytes, .whole_x = true},
                        .series = {{.name = "a", .points = {{1, 0}, {2, 0}}}}};
  const std::string drawn = Draw(chart);
  EXPECT_THAT(drawn, Not(HasSubstr("1.5")));
  EXPECT_THAT(drawn, Not(HasSubstr("-1 B")));
}

TEST(Markups, WhatPeopleCountHasNoExponent) {
  EXPECT_EQ(Plain(1412.3, 3), "1412");
  EXPECT_EQ(Plain(999.7, 3), "1000");
  EXPECT_EQ(Plain(3.14159, 3), "3.14");
  EXPECT_EQ(Plain(1e308, 4), "1e+308");
  EXPECT_EQ(Format(123456, Unit::kPlain), "123456");
}

TEST_F(Pages, WearIsAllThatWasWrittenAndSaysWhatOfThatWereSteps) {
  json report = ReportOf("id", 4);
  report["resumed_from_step"] = nullptr;
  report["totals"] = {{"steps", 4},
                      {"seconds", 86400},
                      {"nvme_write_bytes", int64_t{3} << 40},
                      {"step_nvme_read_bytes", int64_t{5} << 40},
                      {"step_nvme_write_bytes", int64_t{2} << 40}};
  const auto wear = [&](std::vector<std::string> files) {
    const std::string page = PageOf(std::move(files));
    const size_t begin = page.find("Wear, of one drive");
    return page.substr(begin, page.find("</table>", begin) - begin);
  };
  const auto row = [](const char* read, const char* steps, const char* all, const char* day, const char* days,
                      const char* used) {
    std::string html;
    for (const char* cell : {read, steps, all, day, days, used}) html += std::string("<td>") + cell + "</td>";
    return html;
  };
  EXPECT_THAT(wear({Write("run.json", report.dump())}),
              HasSubstr(row("5 TiB", "2 TiB", "3 TiB", "2 TiB", "273 days", "0.55%")));
  // What processes before it wrote is the run's, and a log tells what of it were steps.
  report["resumed_from_step"] = 2;
  report["totals"]["run_nvme_write_bytes"] = int64_t{6} << 40;
  report["totals"]["steps"] = 2;
  report["steps"].erase(report["steps"].begin(), report["steps"].begin() + 2);
  std::string log;
  for (int step = 1; step <= 4; ++step) {
    json entry = StepEntry(step);
    entry["run_id"] = "id";
    entry["nvme_write_bytes"] = int64_t{1} << 40;
    entry["nvme_read_bytes"] = entry["seconds"] = 0;
    log += entry.dump() + "\n";
  }
  EXPECT_THAT(wear({Write("run.json", report.dump()), Write("run.jsonl", log)}),
              HasSubstr(row("5 TiB", "4 TiB", "6 TiB", "4 TiB", "136 days", "1.1%")));
}

TEST_F(Pages, AReportThatKeepsItsLastStepsAloneSaysSoAndSumsAll) {
  json report = ReportOf("id", 12);
  report["resumed_from_step"] = nullptr;
  report["steps"].erase(report["steps"].begin(), report["steps"].begin() + 2);
  const std::string old = PageOf({Write("old.json", report.dump())});
  EXPECT_THAT(old, HasSubstr("of 12 steps the last 10 are here"));
  EXPECT_THAT(old, HasSubstr("old.json computed longer: that is known of its last 10 steps alone"));
  report["totals"] = {{"steps", 12}, {"skipped_steps", 2}, {"compute_seconds", 77.5}};
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_THAT(page, HasSubstr("of 12 steps the last 10 are here"));
  EXPECT_THAT(page, HasSubstr("computes: 1.292 min"));
  EXPECT_THAT(page, HasSubstr("<td>2 of 12</td>"));
  EXPECT_THAT(page, Not(HasSubstr("computed longer")));
  // The log has the rest.
  std::string log;
  for (int step = 1; step <= 12; ++step) {
    json entry = StepEntry(step);
    entry["run_id"] = "id";
    log += entry.dump() + "\n";
  }
  EXPECT_THAT(PageOf({Write("run.json", report.dump()), Write("run.jsonl", log)}),
              Not(HasSubstr("are here")));
}

TEST_F(Pages, ARunThatDivergedLooksLikeOne) {
  json report = ReportOf("id", 11);
  for (int i = 1; i < 11; ++i) {
    report["steps"][i]["skipped"] = true;
    report["steps"][i]["loss"] = nullptr;
  }
  report["steps"][0]["redone"] = true;
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_THAT(page, HasSubstr("4.0000 to 4.0000, not finite from step 2 on"));
  EXPECT_THAT(page, HasSubstr("<td>10 of 11</td>"));
  EXPECT_THAT(page, HasSubstr("<td>1 of 11</td>"));
  EXPECT_THAT(page, HasSubstr("class=\"bad\">run.json: the loss is not finite from step 2 on"));
  EXPECT_THAT(page, HasSubstr("10 of 11 steps were skipped"));
  const std::string healthy = PageOf({Write("run.json", ReportOf("id", 11).dump())});
  for (const char* text : {"class=\"bad\"", "skipped", "not finite"})
    EXPECT_THAT(healthy, Not(HasSubstr(text)));
}

TEST_F(Pages, TheMedianOfAnEvenNumberIsTheMeanOfItsMiddles) {
  json report = ReportOf("id", 3);
  report["steps"][1]["seconds"] = 2;
  report["steps"][2]["seconds"] = 4;
  EXPECT_THAT(PageOf({Write("run.json", report.dump())}), HasSubstr("median</th><td>3 s</td>"));
}

TEST_F(Pages, NoPageReplacesWhatItIsDrawnFrom) {
  const std::string report = Write("run.json", ReportOf("id", 2).dump());
  const std::string log = Write("run.jsonl", StepEntry(1).dump() + "\n");
  std::filesystem::create_symlink(report, dir_ + "/other-name");
  std::filesystem::create_hard_link(log, dir_ + "/second-name");
  for (const std::string& html : {report, log, dir_ + "/other-name", dir_ + "/second-name"}) {
    const Result result = RunVerb({report, log, "--html", html});
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr("--html " + html + ": this would replace "));
    EXPECT_THAT(result.err, HasSubstr("that is read: give another name"));
  }
  EXPECT_EQ(json::parse(std::ifstream(report))["run_id"], "id");
}

TEST_F(Pages, WhatNobodyCountedHasNoRow) {
  json report = ReportOf("id", 3);
  for (json& step : report["steps"]) step["tokens"] = step["nvme_read_bytes"] = step["nvme_write_bytes"] = 0;
  const std::string page = PageOf({Write("run.json", report.dump())});
  for (const char* text : {"tokens/s", "Tokens per second", "Read from the drive", "Wear", "-1 B"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
}

TEST_F(Pages, AHugeLossIsWrittenShortAndDrawn) {
  json report = ReportOf("id", 3);
  for (json& step : report["steps"]) step["loss"] = 1.7e308;
  report["steps"][1]["loss"] = -1.7e308;
  const std::string page = PageOf({Write("run.json", report.dump())});
  EXPECT_THAT(page, HasSubstr("1.7e+308 to 1.7e+308"));
  EXPECT_THAT(page, Not(HasSubstr("0000000000")));
  const std::string chart = page.substr(page.find("<figcaption>Loss"));
  const std::string drawn = chart.substr(0, chart.find("</figure>"));
  EXPECT_THAT(drawn, HasSubstr("class=\"plot s0\" d=\"M66.0 10.0L235.0 194.0L404.0 10.0\""));
  EXPECT_THAT(drawn, Not(HasSubstr("nan")));
}

TEST_F(Pages, MoreRunsThanLettersHaveTwo) {
  std::vector<std::string> files;
  for (int i = 0; i < 28; ++i) {
    const std::string id = std::to_string(i);
    files.push_back(Write("run-" + id + ".json", ReportOf("id-" + id, 2).dump()));
  }
  const std::string page = PageOf(files);
  for (const char* name : {"A run-0.json", "Z run-25.json", "AA run-26.json", "AB run-27.json"})
    EXPECT_THAT(page, HasSubstr(std::string(">") + name + "<"));
}

TEST_F(Pages, FlopsStandBesideWhatAProductReaches) {
  json report = ReportOf("id", 3);
  report["model_flops_per_step"] = 2.5e12;
  report["model_flops_per_second"] = 4e10;
  EXPECT_THAT(PageOf({Write("run.json", report.dump())}), Not(HasSubstr("MFU")));
  report["product_flops_per_second"] = 1e11;
  report["mfu"] = 0.4;
  const std::string page = PageOf({Write("run.json", report.dump())});
  for (const char* text : {"2.5TFLOP<", "40GFLOP/s<", "40.0% of 100GFLOP/s", "(MFU)"})
    EXPECT_THAT(page, HasSubstr(text));
  report["product_flops_per_second"] = 1e10;
  report["mfu"] = nullptr;
  EXPECT_THAT(PageOf({Write("run.json", report.dump())}),
              HasSubstr("none: the product that it is held against was disturbed (10GFLOP/s)"));
}

TEST_F(Pages, WrongFilesAreNamedWithTheWayOut) {
  const std::string html = dir_ + "/page.html";
  const std::string trace = Write("trace.json", TraceText());
  for (const std::string& wrong :
       {dir_ + "/none.json", dir_, Write("empty", ""), Write("text", "hello\nyou\n"),
        Write("other.json", "{\"a\": 1}"), Write("bad.jsonl", "{\"step\": 1}\nx\n{}\n"), trace}) {
    const Result result = RunVerb({wrong, "--html", html});
    EXPECT_EQ(result.code, 2) << wrong;
    EXPECT_THAT(result.err, HasSubstr(wrong));
    EXPECT_THAT(result.err, HasSubstr("--report, --log or --trace"));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_FALSE(std::filesystem::exists(html));
  }
  const std::string report = Write("run.json", ReportOf("id", 2).dump());
  EXPECT_EQ(RunVerb({report}).code, 2);
  EXPECT_EQ(RunVerb({"--html", html}).code, 2);
  const Result nowhere = RunVerb({report, "--html", dir_ + "/none/page.html"});
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("none/page.html"));
}

TEST_F(Pages, AFullDiskLeavesTheOldPage) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const Result result = RunVerb({Write("run.json", ReportOf("id", 2).dump()), "--html", "/dev/full"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("No space left"));
}

// What Chromium prints, with its complaints.
std::string Browse(const std::string& profile, const std::string& url, const std::string& flags) {
  const std::string command =
      "timeout 120 chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
      "--user-data-dir='" +
      profile + "' --enable-logging=stderr --allow-file-access-from-files --virtual-time-budget=5000 " +
      flags + " '" + url + "' 2>&1";
  std::FILE* const pipe = popen(command.c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n = 0; pipe != nullptr && (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    text.append(buffer, n);
  if (pipe != nullptr) pclose(pipe);
  return text;
}

// Where PENSTOCK_SCREENSHOTS names a directory, pictures stay there for somebody to look at.
std::string ScreenshotsIn(const std::string& otherwise) {
  const char* const named = std::getenv("PENSTOCK_SCREENSHOTS");
  return named == nullptr ? otherwise : named;
}

bool HasBrowser() { return std::system("command -v chromium >/dev/null 2>&1") == 0; }

// What a canvas counts in a picture, without a library that reads PNG: how many colours, how dark it is on
// average.
constexpr char kLook[] = R"(<canvas id=c></canvas><p id=p></p><img id=i src=SHOT><script>
onload=()=>{c.width=i.naturalWidth;c.height=i.naturalHeight;const g=c.getContext('2d');g.drawImage(i,0,0);
const d=g.getImageData(0,0,c.width,c.height).data,s=new Set();let sum=0;
for(let k=0;k<d.length;k+=4){s.add(d[k]<<16|d[k+1]<<8|d[k+2]);sum+=(d[k]+d[k+1]+d[k+2])/3}
p.textContent=c.width+' wide, '+s.size+' colours, light '+Math.round(sum/(d.length/4))}</script>)";

struct Picture {
  int width = 0, colours = 0, light = -1;
};

class BrowsedPages : public Pages {
 protected:
  void SetUp() override {
    Pages::SetUp();
    if (!HasBrowser()) GTEST_SKIP() << "chromium is not installed: no page is looked at";
  }
  // A screenshot of `page` in such a window. No script of a page runs, and none complains.
  Picture Look(const std::string& page, const std::string& name, const std::string& flags) {
    const std::string shot = ScreenshotsIn(dir_) + "/" + name + ".png";
    const std::string said = Browse(dir_ + "/profile", "file://" + dir_ + "/" + page,
                                    "--hide-scrollbars --screenshot='" + shot + "' " + flags);
    EXPECT_THAT(said, Not(HasSubstr("CONSOLE"))) << said;
    std::ostringstream bytes;
    bytes << std::ifstream(shot, std::ios::binary).rdbuf();
    EXPECT_EQ(bytes.str().substr(1, 3), "PNG") << said;
    std::string html = kLook;
    html.replace(html.find("SHOT"), 4, "'file://" + shot + "'");
    const std::string told = Browse(dir_ + "/profile", "file://" + Write("look.html", html), "--dump-dom");
    Picture picture;
    const size_t at = told.find("<p id=\"p\">");
    const int read = at == std::string::npos
                         ? 0
                         : std::sscanf(told.c_str() + at, "<p id=\"p\">%d wide, %d colours, light %d",
                                       &picture.width, &picture.colours, &picture.light);
    EXPECT_EQ(read, 3) << told;
    return picture;
  }
  // `page` in a frame as wide as a phone: nothing sticks out of it.
  void ExpectItFitsAPhone(const std::string& page) {
    const std::string outer = Write(
        "outer.html", "<iframe id=f src=" + page +
                          " style='width:375px;height:800px;border:0'></iframe><p id=p>"
                          "</p><script>f.onload=()=>{p.textContent='inside: '+(f.contentDocument."
                          "documentElement.scrollWidth<=375)+' '+f.contentDocument.querySelectorAll('svg')"
                          ".length+' pictures'}</script>");
    const std::string framed = Browse(dir_ + "/profile", "file://" + outer, "--dump-dom");
    EXPECT_THAT(framed, HasSubstr("inside: true")) << framed;
    EXPECT_THAT(framed, Not(HasSubstr(" 0 pictures")));
  }
  // On a desk and a phone, by day and by night.
  void ExpectItIsSeen(const std::string& page, const std::string& name) {
    const std::string dark = "--blink-settings=preferredColorScheme=0 ";
    const Picture desk = Look(page, name + "-desk", "--window-size=1280,2200");
    const Picture night = Look(page, name + "-desk-dark", dark + "--window-size=1280,2200");
    const Picture phone = Look(page, name + "-phone", "--window-size=420,900");
    const Picture phone_night = Look(page, name + "-phone-dark", dark + "--window-size=420,900");
    for (const Picture& picture : {desk, night, phone, phone_night})
      EXPECT_GT(picture.colours, 20) << name << ", " << picture.width << " wide: is it blank?";
    EXPECT_EQ(desk.width, 1280);
    EXPECT_EQ(phone.width, 420);
    for (const Picture& picture : {desk, phone}) EXPECT_GT(picture.light, 180) << name;
    for (const Picture& picture : {night, phone_night}) EXPECT_LT(picture.light, 80) << name;
  }
};

TEST_F(BrowsedPages, AReportIsSeenByDayAndNightOnDeskAndPhone) {
  json report = ReportOf("id", 50);
  report["error"] = std::string(3000, 'x');
  report["status"] = "failed";
  PageOf({Write("run.json", report.dump()), Write("trace.json", TraceText()),
          Write(std::string(200, 'n') + ".json", ReportOf(std::string(500, 'i'), 40).dump())});
  const std::string seen = Browse(dir_ + "/profile", "file://" + dir_ + "/page.html", "--dump-dom");
  EXPECT_THAT(seen, HasSubstr("side by side"));
  EXPECT_THAT(seen, HasSubstr("</svg>"));
  EXPECT_THAT(seen, Not(HasSubstr("CONSOLE"))) << seen;
  ExpectItFitsAPhone("page.html");
  ExpectItIsSeen("page.html", "report");
  // What is long is broken: the summary's columns stay in view.
  const std::string outer = Write(
      "wide.html",
      "<iframe id=f src=page.html style='width:1280px;height:800px;border:0'></iframe><p id=p></p><script>"
      "f.onload=()=>{const t=f.contentDocument.querySelector('table');p.textContent="
      "'table: '+(t.scrollWidth<=t.parentElement.clientWidth)}</script>");
  EXPECT_THAT(Browse(dir_ + "/profile", "file://" + outer, "--dump-dom"), HasSubstr("table: true"));
}

TEST_F(BrowsedPages, APlanIsSeenByDayAndNightOnDeskAndPhone) {
  const json plan = {
      {"predicted_step_seconds", 0.7},
      {"predicted_compute_seconds", 0.4},
      {"predicted_drive_seconds", 0.65},
      {"bound_by", "read"},
      {"params", 1e9},
      {"dtype", "bf16"},
      {"reasons", {"weights stay in memory: they are read twice a step"}},
      {"host",
       {{{"what", "weights in flight"}, {"bytes", 1 << 26}}, {{"what", "gradients"}, {"bytes", 1 << 25}}}},
      {"tiers",
       {{{"what", "weights"},
         {"host_in_flight_bytes", 1 << 26},
         {"host_resident_bytes", 1 << 27},
         {"nvme_bytes", 1 << 30},
         {"nvme_read_bytes_per_step", 1 << 29},
         {"nvme_write_bytes_per_step", 1 << 28}}}},
      {"what_if", {{{"change", "twice the memory"}, {"predicted_step_seconds", 0.5}, {"speedup", 1.4}}}}};
  const absl::StatusOr<TraceView> step = ReadTrace(Write("trace.json", TraceText()));
  ASSERT_TRUE(step.ok()) << step.status();
  Write("plan.html", PlanPage("gpt-350m", plan, *step));
  ExpectItFitsAPhone("plan.html");
  ExpectItIsSeen("plan.html", "plan");
}

}  // namespace
}  // namespace penstock::tools::pages_test
