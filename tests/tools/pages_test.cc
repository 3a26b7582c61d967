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

#include "tools/pages/chart.h"
#include "tools/pages/plan_page.h"
#include "tools/pages/step_charts.h"
#include "tools/pages/trace_view.h"
#include "tools/penstock/verbs.h"

namespace penstock::tools {
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

// A trace as the program writes it: three steps of two blocks, whose weights share one slot.
std::string TraceText() {
  std::string text =
      "[\n"
      R"({"ph":"M","pid":1,"tid":0,"name":"thread_name","args":{"name":"read"}},)"
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

TEST_F(Pages, ABrowserShowsThemAtPhoneWidthWithoutAComplaint) {
  if (std::system("command -v chromium >/dev/null 2>&1") != 0) GTEST_SKIP() << "chromium is not installed";
  PageOf({Write("run.json", ReportOf("id", 50).dump()), Write("trace.json", TraceText()),
          Write("a-second-run-with-a-long-name-that-does-not-end-soon.json", ReportOf("id-2", 40).dump())});
  const std::string seen = Browse(dir_ + "/profile", "file://" + dir_ + "/page.html", "--dump-dom");
  EXPECT_THAT(seen, HasSubstr("side by side"));
  EXPECT_THAT(seen, HasSubstr("</svg>"));
  EXPECT_THAT(seen, Not(HasSubstr("CONSOLE"))) << seen;
  // A frame as wide as a phone: nothing sticks out of it.
  const std::string outer =
      Write("outer.html",
            "<iframe id=f src=page.html style='width:375px;height:800px;border:0'></iframe><p id=p>"
            "</p><script>f.onload=()=>{p.textContent='inside: '+(f.contentDocument."
            "documentElement.scrollWidth<=375)+' '+f.contentDocument.querySelectorAll('svg')"
            ".length+' pictures'}</script>");
  const std::string framed = Browse(dir_ + "/profile", "file://" + outer, "--dump-dom");
  EXPECT_THAT(framed, HasSubstr("inside: true")) << framed;
  EXPECT_THAT(framed, Not(HasSubstr(" 0 pictures")));
}

}  // namespace
}  // namespace penstock::tools
