// The `penstock` program from end to end: training, stopping, resuming, and what the other verbs make of the
// state.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "gmock/gmock.h"
#include "kernels/float16.h"
#include "kernels/split_master.h"
#include "swap/safetensors.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_cli_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;
using namespace testing_support;

void ExpectStep(const json& step) {
  for (const char* name : {"step", "tokens", "nvme_read_bytes", "nvme_write_bytes"}) {
    EXPECT_TRUE(step.contains(name) && step[name].is_number_integer()) << name << " in " << step;
  }
  for (const char* name : {"loss", "grad_norm", "lr", "loss_scale", "seconds", "stall_io_seconds",
                           "compute_seconds", "optimizer_seconds"}) {
    EXPECT_TRUE(step.contains(name) && step[name].is_number()) << name << " in " << step;
  }
  EXPECT_TRUE(step.contains("skipped") && step["skipped"].is_boolean()) << step;
}

void ExpectReport(const json& report, const std::string& status) {
  EXPECT_EQ(report.value("status", ""), status);
  for (const char* name : {"version", "dtype", "device", "io_backend", "bound_by"}) {
    EXPECT_TRUE(report.contains(name) && report[name].is_string()) << name;
  }
  EXPECT_TRUE(report.contains("error") && report["error"].is_null());
  for (const char* name : {"params", "blocks", "world_size", "seed", "host_memory_budget_bytes",
                           "device_memory_budget_bytes", "peak_rss_bytes", "peak_managed_bytes",
                           "peak_pinned_bytes", "state_bytes_total", "state_bytes_nvme"}) {
    EXPECT_TRUE(report.contains(name) && report[name].is_number_integer()) << name;
  }
  for (const char* name : {"io_read_bandwidth_bytes_per_s", "io_write_bandwidth_bytes_per_s",
                           "nvme_bytes_per_param_per_step", "io_saturated_seconds", "compute_union_seconds",
                           "overlap_ratio", "io_gbps_achieved", "predicted_step_seconds"}) {
    EXPECT_TRUE(report.contains(name) && report[name].is_number()) << name;
  }
  // How near a step can be to its bound, that of a clipped one by itself.
  if (report.contains("prediction_from")) {
    EXPECT_GT(report.value("predicted_floor_seconds", 0.0), 0);
    EXPECT_GE(report.value("predicted_clipped_floor_seconds", 0.0),
              report.value("predicted_floor_seconds", 0.0));
    EXPECT_TRUE(report.contains("floor_ratio"));
  }
  ASSERT_TRUE(report.contains("resumed_from_step"));
  EXPECT_TRUE(report["resumed_from_step"].is_null() || report["resumed_from_step"].is_number_integer());
  ASSERT_TRUE(report.contains("totals"));
  for (const char* name :
       {"nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes", "tokens", "io_errors_retried"}) {
    EXPECT_TRUE(report["totals"].contains(name) && report["totals"][name].is_number_integer()) << name;
  }
  EXPECT_TRUE(report["totals"].contains("seconds") && report["totals"]["seconds"].is_number());
  ASSERT_TRUE(report.contains("steps") && report["steps"].is_array());
  for (const json& step : report["steps"]) ExpectStep(step);
}

TEST_F(CliTest, BytesAreThoseThatTheKernelCountedAndWithinTheirBound) {
  // What the program itself is read for is counted too: once, before.
  const Ran warm = Run(Train(dir_ + "/warm", {"--steps", "2"}));
  ASSERT_EQ(warm.code, 0) << warm.err;
  if (warm.written_bytes == 0) GTEST_SKIP() << "the kernel counts no bytes of this file system";
  // With nothing kept in memory a step in fp32 reads weights twice (8 bytes) and the moments (8, or 2 of 8
  // bits and their scales), and writes all three (12 or 6); where every step is clipped, gradients go to the
  // drive and come back (8). What the budget keeps is less by as much as the planner's measurements of the
  // machine have it keep, so that only these bounds hold everywhere. The order is given, since it changes
  // them: tiles that wait for the next forward have their gradients on the drive.
  struct Case {
    const char *states, *clip;
    double most;
  };
  for (const auto& [states, clip, most] : {Case{"fp32", "0", 28}, {"8bit", "0", 16.1}, {"fp32", "1", 36}}) {
    const Arguments model = {"train", "--model", "gpt-small", "--data", text_, "--batch", "1", "--seq", "64"};
    const Arguments places = {"--state-dir", dir_ + "/state", "--report", dir_ + "/report"};
    const std::string order = dir_ + "/order.json";
    WriteFile(order, json{{"penstock", {{"order", *clip == '0' ? "in_backward" : "next_forward"}}}}.dump());
    const Arguments rest = {"--host-memory", "96MiB", "--overwrite", "--quiet",
                            "--steps",       "8",     "--config",    order};
    Ran ran;
    json report;
    double read = 0, written = 0;
    // A machine with little room for files may have read some of the program again.
    for (int attempt = 0; attempt < 3; ++attempt) {
      std::filesystem::remove_all(dir_ + "/state");  // what --overwrite reads of an earlier run is in no step
      ran = Run(model + places + rest + Arguments{"--optimizer-states", states, "--clip", clip});
      ASSERT_EQ(ran.code, 0) << ran.err;
      report = json::parse(ReadFile(dir_ + "/report"));
      read = report["totals"]["nvme_read_bytes"].get<double>();
      written = report["totals"]["nvme_write_bytes"].get<double>();
      if (static_cast<double>(ran.read_bytes) < 1.02 * read) break;
    }
    EXPECT_GT(read, 0);
    EXPECT_NEAR(static_cast<double>(ran.read_bytes), read, 0.02 * read);
    EXPECT_NEAR(static_cast<double>(ran.written_bytes), written, 0.02 * written);
    int64_t in_steps = 0;
    for (size_t i = 1; i < 8; ++i) {
      const json& step = report["steps"][i];
      in_steps += step["nvme_read_bytes"].get<int64_t>() + step["nvme_write_bytes"].get<int64_t>();
    }
    const double per_parameter = report["nvme_bytes_per_param_per_step"];
    EXPECT_NEAR(per_parameter, static_cast<double>(in_steps) / 7 / report["params"].get<double>(), 0.01);
    EXPECT_GT(per_parameter, 1);
    EXPECT_LT(per_parameter, most);
    EXPECT_LE(report["peak_managed_bytes"].get<int64_t>(), int64_t{96} << 20);
  }
}

// The function that a config.json asks for is that of the run, of its resumption and of its export; with
// dropout.
TEST_F(CliTest, AModelsFunctionIsKeptFromTrainingToExport) {
  const std::string state = dir_ + "/state", model = dir_ + "/model.json", published = dir_ + "/published";
  const json config = {{"model_type", "gpt2"},
                       {"n_layer", 2},
                       {"n_embd", 32},
                       {"n_head", 2},
                       {"n_positions", 300},
                       {"vocab_size", 256},
                       {"n_inner", 40},
                       {"activation_function", "relu"},
                       {"layer_norm_epsilon", 0.01},
                       {"scale_attn_by_inverse_layer_idx", true},
                       {"attn_pdrop", 0.2}};
  WriteFile(model, config.dump());
  const Arguments arguments = {"train",   "--data",    text_, "--state-dir", state,
                               "--quiet", "--threads", "1",   "--dtype",     "fp32"};
  const Arguments made = arguments + Arguments{"--model", model, "--batch", "1"};
  ASSERT_EQ(Run(made + Arguments{"--steps", "2", "--log", dir_ + "/log"}).code, 0);
  const Ran other = Run(arguments + Arguments{"--steps", "4", "--resume", "--model", "gpt-tiny"});
  EXPECT_EQ(other.code, 2);
  const Ran ran = Run(arguments + Arguments{"--steps", "4", "--resume", "--log", dir_ + "/log"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  Arguments whole = made + Arguments{"--steps", "4", "--lr", "3e-4", "--log", dir_ + "/whole"};
  *std::find(whole.begin(), whole.end(), state) = dir_ + "/other";
  const Ran again = Run(whole);
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(Losses(dir_ + "/log").front(), Losses(dir_ + "/whole").front()) << "dropout goes by the seed";
  std::filesystem::create_directory(published);
  ASSERT_EQ(Run({"export", state, published, "--quiet"}).code, 0);
  const json out = json::parse(ReadFile(published + "/config.json"));
  for (const auto& [key, value] : config.items()) EXPECT_EQ(out[key], value) << key;
  EXPECT_EQ(out["embd_pdrop"], 0.1) << "transformers' default";
  EXPECT_EQ(Run({"sample", state, "--tokens", "3"}).code, 0);
  WriteFile(
      model,
      R"({"model_type": "mamba", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 8, "vocab_size": 256})");
  const Ran refused = Run(made + Arguments{"--overwrite"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("model_type is \"mamba\", none of gpt2, llama, mistral, qwen2, qwen3, "
                                     "smollm3, granite, olmo2, phi3, gemma2, "
                                     "gemma3, gemma3_text"));
}

// A flag wins over the config: --lr is the rate that a scheduler goes by, and takes the place of one that
// names rates of its own.
TEST_F(CliTest, ARateByFlagBesideTheConfigsScheduler) {
  const auto rates = [&](const std::string& name, const std::string& config, Arguments more) {
    WriteFile(dir_ + "/" + name + ".json", config);
    const std::string log = dir_ + "/" + name + ".log";
    const Ran ran =
        Run(Train(dir_ + "/" + name, {"--offload", "none", "--steps", "6", "--seq", "16", "--config",
                                      dir_ + "/" + name + ".json", "--overwrite", "--log", log}) +
            more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    std::vector<double> all;
    for (const std::string& line : Lines(ReadFile(log))) all.push_back(json::parse(line)["lr"]);
    return all;
  };
  const auto config = [](double lr, const std::string& scheduler) {
    return R"({"optimizer": {"type": "AdamW", "params": {"lr": )" + std::to_string(lr) +
           R"(}}, "scheduler": )" + scheduler + "}";
  };
  const std::string named =
      R"({"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 4, "warmup_type": "linear"}})";
  EXPECT_THAT(rates("named", config(0.001, named), {}),
              testing::ElementsAreArray({0.0, 0.0, 0.0005, 0.001, 0.0015, 0.002}));
  const std::vector<double> own = rates("own", config(0.001, named), {"--lr", "0.004", "--warmup", "0"});
  const std::vector<double> flag = rates("flag", config(0.001, named), {"--lr", "0.004"});
  ASSERT_EQ(own.size(), 6u);
  EXPECT_EQ(flag, own) << "a cosine of its own";
  EXPECT_EQ(own.back(), 0.0004);
  for (const std::string scheduler :
       {R"({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}})",
        R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}})"}) {
    const std::vector<double> by_config = rates("config", config(0.004, scheduler), {});
    ASSERT_EQ(by_config.size(), 6u);
    EXPECT_GT(by_config[4], 0.001);
    EXPECT_EQ(rates("both", config(0.001, scheduler), {"--lr", "0.004"}), by_config);
    for (const char* name : {"config", "both"}) std::filesystem::remove(dir_ + "/" + name + ".log");
  }
}

TEST_F(CliTest, TrainsLogsReportsAndGoesOnToALaterStep) {
  const std::string state = dir_ + "/state", log = dir_ + "/log", report = dir_ + "/report";
  Ran ran = Run(Train(state, {"--steps", "12", "--log", log, "--report", report}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  json first = json::parse(ReadFile(report));
  ExpectReport(first, "ok");
  EXPECT_TRUE(first["resumed_from_step"].is_null());
  EXPECT_EQ(first["steps"].size(), 12u);
  EXPECT_LT(first["steps"][11]["loss"].get<double>(), first["steps"][0]["loss"].get<double>());
  EXPECT_EQ(Inspect(state)["step"], 12);

  ran = Run({"train", "--data", text_, "--state-dir", state, "--resume", "--steps", "20", "--quiet", "--log",
             log, "--report", report});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json second = json::parse(ReadFile(report));
  ExpectReport(second, "ok");
  EXPECT_EQ(second["resumed_from_step"], 12);
  const std::vector<std::string> lines = Lines(ReadFile(log));
  ASSERT_EQ(lines.size(), 20u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const json step = json::parse(lines[i]);
    ExpectStep(step);
    EXPECT_EQ(step["step"], i + 1);
    const json& reported = i < 12 ? first["steps"][i] : second["steps"][i - 12];
    EXPECT_EQ(step["loss"], reported["loss"]);
  }
  // Nothing is left to do, and that is no error.
  ran = Run({"train", "--data", text_, "--state-dir", state, "--resume", "--steps", "5", "--quiet"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Inspect(state)["step"], 20);
}

// Holds the waits of a trace against the gaps between the operations of its compute lane, piece by piece;
// returns their seconds by cause.
std::map<std::string, double> ExpectEveryGapNamed(const std::string& trace_file) {
  std::map<int, std::string> tracks;
  struct Event {
    std::string name;
    double start, end;
  };
  std::vector<Event> computes, waits;
  for (const json& event : json::parse(ReadFile(trace_file))) {
    if (!event.contains("ph")) continue;
    if (event["ph"] == "M") tracks[event["tid"]] = event["args"]["name"];
    if (event["ph"] != "X") continue;
    const double start = event["ts"];
    const Event read{event["name"], start, start + event["dur"].get<double>()};
    if (tracks[event["tid"]] == "compute") computes.push_back(read);
    if (tracks[event["tid"]] == "compute waits for") waits.push_back(read);
  }
  EXPECT_GT(computes.size(), 10u);
  constexpr double kRounding = 0.01;  // microseconds
  size_t wait = 0;
  while (wait < waits.size() && waits[wait].start < computes.front().start) ++wait;
  double busy = 0, waited = 0;
  for (size_t i = 0; i + 1 < computes.size(); ++i) {
    busy += computes[i].end - computes[i].start;
    double explained_until = computes[i].end;
    for (; wait < waits.size() && waits[wait].start < computes[i + 1].start; ++wait) {
      EXPECT_NEAR(waits[wait].start, explained_until, kRounding);
      explained_until = waits[wait].end;
      waited += waits[wait].end - waits[wait].start;
    }
    EXPECT_NEAR(explained_until, computes[i + 1].start, kRounding) << "after operation " << i;
  }
  EXPECT_NEAR(busy + waited, computes.back().start - computes.front().start, 1);
  std::map<std::string, double> by_cause;
  for (const Event& event : waits) by_cause[event.name] += (event.end - event.start) * 1e-6;
  return by_cause;
}

TEST_F(CliTest, ATraceHasNoGapThatTheReportDoesNotExplain) {
  const std::string report_file = dir_ + "/report", trace_file = dir_ + "/trace.json";
  const Ran ran = Run(Train(dir_ + "/state", {"--steps", "10", "--eval-data", text_, "--eval-every", "4",
                                              "--checkpoint-dir", dir_ + "/kept", "--checkpoint-every", "3",
                                              "--report", report_file, "--trace", trace_file}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::map<std::string, double> by_cause = ExpectEveryGapNamed(trace_file);
  const json report = json::parse(ReadFile(report_file));
  for (const auto& [cause, seconds] : report["stall_seconds"].items()) {
    EXPECT_NEAR(by_cause[cause], seconds.get<double>(), 1e-4) << cause;
    by_cause.erase(cause);
  }
  EXPECT_TRUE(by_cause.empty()) << "the trace names what the report does not: " << by_cause.begin()->first;
}

TEST_F(CliTest, NorHasAPredictedOne) {
  const std::string trace_file = dir_ + "/plan.json";
  const Ran ran = Run({"plan", "--model", "gpt-tiny", "--state-dir", dir_ + "/state", "--host-memory",
                       "24MiB", "--no-probe", "--trace", trace_file});
  ASSERT_EQ(ran.code, 0) << ran.err;
  ExpectEveryGapNamed(trace_file);
}

TEST_F(CliTest, ATermSignalStopsInGoodOrderAndResumingLosesNoBit) {
  const Arguments steps = {"--steps", "40"};
  const std::string whole_log = dir_ + "/whole.log", log = dir_ + "/log", report = dir_ + "/report";
  Program stopped(dir_, Train(dir_ + "/state", steps + Arguments{"--log", log, "--report", report}));
  ASSERT_TRUE(WaitForLines(log, 3));
  stopped.Signal(SIGTERM);
  Ran ran = stopped.Wait();
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json told = json::parse(ReadFile(report));
  ExpectReport(told, "ok");
  const size_t done = told["steps"].size();
  ASSERT_LT(done, 40u) << "it was over before the signal came";
  EXPECT_EQ(Inspect(dir_ + "/state")["step"], done) << "what was trained is committed";
  EXPECT_EQ(Losses(log).size(), done);

  const std::vector<Ran> both =
      RunAll({{"train", "--data", text_, "--state-dir", dir_ + "/state", "--resume", "--quiet", "--log", log},
              Train(dir_ + "/whole", steps + Arguments{"--log", whole_log})});
  ASSERT_EQ(both[0].code, 0) << both[0].err;
  ASSERT_EQ(both[1].code, 0) << both[1].err;
  const std::vector<std::string> losses = Losses(log);
  EXPECT_EQ(losses.size(), 40u);
  EXPECT_EQ(losses, Losses(whole_log));
}

TEST_F(CliTest, ACheckpointOutlivesItsStateDirectoryAndGoesOnWithTheSameBits) {
  const Arguments steps = {"--steps", "8"};
  const std::string kept = dir_ + "/kept", log = dir_ + "/log", whole_log = dir_ + "/whole.log";
  ASSERT_EQ(Run(Train(dir_ + "/whole", steps + Arguments{"--log", whole_log})).code, 0);
  Ran ran =
      Run(Train(dir_ + "/state", steps + Arguments{"--checkpoint-dir", kept, "--checkpoint-every", "3"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* name : {"step-00000003", "step-00000006"}) {
    EXPECT_EQ(Run({"verify", kept + "/" + name, "--quiet"}).code, 0) << name;
  }
  std::filesystem::remove_all(dir_ + "/state");
  ran = Run({"train", "--data", text_, "--state-dir", dir_ + "/state", "--resume", "--checkpoint-dir", kept,
             "--quiet", "--log", log});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Inspect(dir_ + "/state")["step"], 8);
  // The commit's own line, then what is left of the run.
  std::vector<std::string> expected = Losses(whole_log);
  expected.erase(expected.begin(), expected.begin() + 5);
  EXPECT_EQ(Losses(log), expected);
}

// Where gradients go to the drive and come back, what was restored has a place for them, too.
TEST_F(CliTest, ACheckpointGoesOnInTheLeastMemory) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept";
  const Arguments shape = {"--model",     "gpt-small", "--data",           text_,  "--batch",   "1",
                           "--seq",       "16",        "--dtype",          "bf16", "--threads", "1",
                           "--state-dir", state,       "--checkpoint-dir", kept};
  const Ran planned = Run(Arguments{"plan", "--json"} + shape);
  ASSERT_EQ(planned.code, 0) << planned.err;
  const std::string least = json::parse(planned.out)["least_host_memory_bytes"].dump();
  const Arguments train = Arguments{"train", "--quiet"} + shape + Arguments{"--host-memory", least};
  ASSERT_EQ(Run(train + Arguments{"--steps", "4", "--log", dir_ + "/whole"}).code, 0);
  std::filesystem::remove_all(state);
  ASSERT_EQ(Run(train + Arguments{"--steps", "4", "--checkpoint-every", "3"}).code, 0);
  std::filesystem::remove_all(state);
  const Ran ran = Run(train + Arguments{"--resume", "--log", dir_ + "/log"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<std::string> losses = Losses(dir_ + "/log");
  ASSERT_EQ(losses.size(), 2u);  // the commit's own line, and one more
  EXPECT_EQ(losses.back(), Losses(dir_ + "/whole").back());
}

TEST_F(CliTest, ResumingNothingStartsOver) {
  std::filesystem::create_directory(dir_ + "/state");
  const std::vector<Ran> both = RunAll({Train(dir_ + "/state", {"--steps", "2", "--resume"}),
                                        Train(dir_ + "/nowhere", {"--steps", "2", "--resume"})});
  for (const Ran& ran : both) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Inspect(dir_ + "/state")["step"], 2);
  EXPECT_EQ(Inspect(dir_ + "/nowhere")["step"], 2);
}

TEST_F(CliTest, PlanTellsWithoutDoing) {
  const std::string state = dir_ + "/state";
  // The program itself, which measures the drive.
  const Ran ran =
      Program(dir_, {"plan", "--model", "gpt-tiny", "--state-dir", state, "--threads", "1", "--json"},
              {"env"})
          .Wait();
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json plan = json::parse(ran.out);
  EXPECT_GT(plan["least_host_memory_bytes"].get<int64_t>(), 0);
  EXPECT_GT(plan["nvme_bytes_per_param_per_step"].get<double>(), 0);
  EXPECT_GT(plan["predicted_step_seconds"].get<double>(), 0);
  EXPECT_THAT(plan["bound_by"].get<std::string>(),
              testing::AnyOf("read", "write", "compute", "optimizer", "copy", "network"));
  // What a busy drive has in flight takes its time: at least the shallowest depth that is probed, 2 MiB (or
  // half of it, where the mix that is told is held down by one direction).
  const json& machine = plan["machine"];
  EXPECT_GE(machine["io_latency_seconds"].get<double>() * machine["mixed_bytes_per_s"].get<double>(), 1 << 20)
      << machine;
  EXPECT_FALSE(std::filesystem::exists(state + "/penstock.store"));
}

TEST_F(CliTest, InspectAndVerifyAndAFlippedBit) {
  const std::string state = dir_ + "/state";
  ASSERT_EQ(Run(Train(state, {"--steps", "3", "--seed", "7"})).code, 0);
  const Ran shown = Run({"inspect", state});
  EXPECT_EQ(shown.code, 0);
  for (const char* text : {"step      3 (3 updates", "n_layer 4", "fp32  seed 7", "2 kept of each tile"}) {
    EXPECT_THAT(shown.out, HasSubstr(text));
  }
  const json told = Inspect(state);
  EXPECT_EQ(told["model"]["n_embd"], 64);
  EXPECT_EQ(told["run"]["seed"], 7);
  EXPECT_EQ(told["last_step"]["step"], 3);
  EXPECT_EQ(told["versions"], 2);
  int64_t bytes = 0, elements = 0, of_blocks = 0;
  for (const json& tile : told["tiles"]) {
    EXPECT_EQ(tile["version"], 4000);  // 1000 is the initial one
    EXPECT_EQ(tile["segments"].size(), 3u);
    elements += tile["elements"].get<int64_t>();
    for (const json& segment : tile["segments"]) bytes += segment["bytes"].get<int64_t>();
  }
  for (const json& block : told["block_elements"]) of_blocks += block.get<int64_t>();
  EXPECT_EQ(bytes, told["state_bytes"].get<int64_t>());
  EXPECT_EQ(elements, of_blocks);

  const Ran whole = Run({"verify", state});
  EXPECT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("whole"));
  const json& segment = told["tiles"][1]["segments"][2];
  const int64_t at = segment["offset"].get<int64_t>() + segment["bytes"].get<int64_t>() / 2;
  const auto flip = [&] {
    std::fstream file(state + "/penstock.store", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(at);
    file.put(byte);
    ASSERT_TRUE(file.good());
  };
  flip();
  const Ran damaged = Run({"verify", state});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.out, HasSubstr("tile 1 segment 2 version 4000"));
  EXPECT_THAT(damaged.out, HasSubstr("offset " + segment["offset"].dump()));
  EXPECT_EQ(Lines(damaged.err).size(), 1u) << damaged.err;
  const Ran as_json = Run({"verify", state, "--json"});
  EXPECT_EQ(as_json.code, 1);
  const json report = json::parse(as_json.out);
  EXPECT_EQ(report["whole"], false);
  ASSERT_EQ(report["damaged"].size(), 1u);
  EXPECT_EQ(report["damaged"][0]["offset"], segment["offset"]);
  flip();
  EXPECT_EQ(Run({"verify", state}).code, 0);
}

TEST_F(CliTest, StripedStateIsReadAsOne) {
  const Arguments dirs = {dir_ + "/a", dir_ + "/b"};
  const Ran ran = Run(Train(dirs[0], {"--state-dir", dirs[1], "--steps", "2"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<Ran> read = RunAll({Arguments{"verify"} + dirs,
                                        Arguments{"inspect", "--json"} + dirs,
                                        {"verify", dirs[0]},
                                        Arguments{"export"} + dirs + Arguments{dir_ + "/out.safetensors"}});
  EXPECT_EQ(read[0].code, 0) << read[0].err;
  EXPECT_EQ(json::parse(read[1].out)["files"].size(), 2u);
  EXPECT_EQ(read[2].code, 1) << "half of a run";
  EXPECT_THAT(read[2].err, HasSubstr(dirs[1]));
  EXPECT_EQ(read[3].code, 0) << read[3].err;
}

TEST_F(CliTest, ExportsWhatTheStateHolds) {
  const std::string state = dir_ + "/state";
  ASSERT_EQ(Run(Train(state, {"--steps", "2"})).code, 0);
  const Arguments to = {"export", state};
  std::filesystem::create_directory(dir_ + "/published");
  const std::vector<Ran> ran =
      RunAll({to + Arguments{dir_ + "/fp32"}, to + Arguments{dir_ + "/bf16", "--dtype", "bf16"},
              to + Arguments{dir_ + "/strips", "--host-memory", "2MiB"},
              to + Arguments{dir_ + "/published", "--quiet"},
              to + Arguments{dir_ + "/none", "--host-memory", "64KiB"}});
  for (size_t i = 0; i < 4; ++i) ASSERT_EQ(ran[i].code, 0) << ran[i].err;
  EXPECT_EQ(ran[4].code, 2);
  EXPECT_THAT(ran[4].err, HasSubstr("at least"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/none"));
  const Ran again = Run(to + Arguments{dir_ + "/fp32"});
  EXPECT_EQ(again.code, 2) << "a file that is there is not replaced";
  EXPECT_TRUE(ReadFile(dir_ + "/fp32") == ReadFile(dir_ + "/strips"));
  EXPECT_TRUE(ReadFile(dir_ + "/fp32") == ReadFile(dir_ + "/published/model.safetensors"));
  const json config = json::parse(ReadFile(dir_ + "/published/config.json"));
  EXPECT_EQ(config["model_type"], "gpt2");
  EXPECT_EQ(config["n_embd"], 64);
  EXPECT_EQ(config["activation_function"], "gelu");

  auto fp32 = swap::SafetensorsReader::Open(dir_ + "/fp32");
  ASSERT_TRUE(fp32.ok()) << fp32.status();
  EXPECT_EQ((*fp32)->tensors().size(), 4u + 4 * 12);
  EXPECT_EQ((*fp32)->metadata().at("format"), "pt");
  const RawWeights raw(Inspect(state));
  const std::vector<float> wte = Tensor<float>(**fp32, "transformer.wte.weight", {256, 64});
  const std::vector<float> ln = Tensor<float>(**fp32, "transformer.ln_f.weight", {64});
  // [64, 192]: turned. Two norms of 64 come before it.
  const std::vector<float> qkv = Tensor<float>(**fp32, "transformer.h.0.attn.c_attn.weight", {64, 192});
  const std::vector<float> down = Tensor<float>(**fp32, "transformer.h.3.mlp.c_proj.weight", {256, 64});
  const int64_t down_at = 2 * 64 + 3 * 64 * 64 + 192 + 64 * 64 + 64 + 2 * 64 + 4 * 64 * 64 + 256;
  ASSERT_EQ(wte.size() + ln.size() + qkv.size() + down.size(), 256u * 64 + 64 + 64 * 192 + 256 * 64);
  for (int64_t i = 0; i < 64; ++i) {
    const auto n = static_cast<size_t>(i);
    EXPECT_EQ(wte[n * 64 + 3], raw.Fp32(0, i * 64 + 3));
    EXPECT_EQ(ln[n], raw.Fp32(0, 256 * 64 + 128 * 64 + i));
    EXPECT_EQ(qkv[n * 192 + 150], raw.Fp32(1, 2 * 64 + 150 * 64 + i));
    EXPECT_EQ(qkv[n * 192 + 2], raw.Fp32(1, 2 * 64 + 2 * 64 + i));
    EXPECT_EQ(down[(n * 3 + 5) * 64 + 7], raw.Fp32(4, down_at + 7 * 256 + i * 3 + 5));
  }
  auto bf16 = swap::SafetensorsReader::Open(dir_ + "/bf16");
  ASSERT_TRUE(bf16.ok()) << bf16.status();
  const std::vector<uint16_t> half =
      Tensor<uint16_t>(**bf16, "transformer.h.0.attn.c_attn.weight", {64, 192});
  ASSERT_EQ(half.size(), qkv.size());
  for (size_t i = 0; i < half.size(); ++i) ASSERT_EQ(half[i], kernels::FloatToBf16(qkv[i])) << i;
}

TEST_F(CliTest, ExportJoinsSplitMastersExactly) {
  const std::string state = dir_ + "/state";
  const Ran trained =
      Run({"train", "--model", "gpt-tiny", "--dtype", "bf16", "--threads", "1", "--quiet", "--data", text_,
           "--state-dir", state, "--steps", "2", "--batch", "1", "--seq", "16"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::vector<Ran> ran =
      RunAll({{"export", state, dir_ + "/fp32"}, {"export", state, dir_ + "/bf16", "--dtype", "bf16"}});
  ASSERT_EQ(ran[0].code, 0) << ran[0].err;
  ASSERT_EQ(ran[1].code, 0) << ran[1].err;
  auto fp32 = swap::SafetensorsReader::Open(dir_ + "/fp32");
  auto bf16 = swap::SafetensorsReader::Open(dir_ + "/bf16");
  ASSERT_TRUE(fp32.ok() && bf16.ok());
  const RawWeights raw(Inspect(state));
  int with_remainder = 0;
  const std::vector<float> full = Tensor<float>(**fp32, "transformer.h.1.mlp.c_fc.weight", {64, 256});
  const std::vector<uint16_t> half = Tensor<uint16_t>(**bf16, "transformer.h.1.mlp.c_fc.weight", {64, 256});
  ASSERT_EQ(full.size(), half.size());
  for (size_t i = 0; i < full.size(); ++i) {
    ASSERT_EQ(half[i], kernels::SplitOne(full[i]).master_high) << i;
    with_remainder += kernels::SplitOne(full[i]).master_low != 0 ? 1 : 0;
  }
  EXPECT_GT(with_remainder, 1000) << "masters are finer than what forward sees";
  const int64_t at = 2 * 64 + 3 * 64 * 64 + 192 + 64 * 64 + 64 + 2 * 64;  // stored [256, 64]
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(full[static_cast<size_t>(i) * 256 + 9], raw.Joined(2, at + 9 * 64 + i));
  }
}

TEST_F(CliTest, WeightsThatWereExportedAreWhereARunStartsFrom) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    SCOPED_TRACE(dtype);
    const std::string state = dir_ + "/state-" + dtype, published = dir_ + "/published-" + dtype;
    std::filesystem::create_directory(published);
    ASSERT_EQ(Run(Train(state, {"--steps", "2", "--dtype", dtype})).code, 0);
    ASSERT_EQ(Run({"export", state, published, "--quiet"}).code, 0);
    // A step that changes nothing; the model is that of config.json.
    const Arguments arguments = {
        "train", "--data", text_,     "--init-from", published, "--steps",        "1",
        "--lr",  "0",      "--quiet", "--threads",   "1",       "--weight-decay", "0"};
    const std::vector<Ran> ran =
        RunAll({arguments + Arguments{"--state-dir", dir_ + "/a-" + dtype, "--dtype", "fp32"},
                arguments + Arguments{"--state-dir", dir_ + "/b-" + dtype, "--dtype", "bf16", "--host-memory",
                                      "24MiB"}});
    ASSERT_EQ(ran[0].code, 0) << ran[0].err;
    ASSERT_EQ(ran[1].code, 0) << ran[1].err;
    for (const std::string again : {"/a-", "/b-"}) {
      ASSERT_EQ(Run({"export", dir_ + again + dtype, dir_ + again + dtype + ".safetensors"}).code, 0);
      EXPECT_TRUE(TensorBytes(dir_ + again + dtype + ".safetensors") ==
                  TensorBytes(published + "/model.safetensors"))
          << again;
    }
  }
  // bf16 weights are a part of the masters: what they say comes back exactly.
  ASSERT_EQ(Run({"export", dir_ + "/state-bf16", dir_ + "/half", "--dtype", "bf16"}).code, 0);
  const Ran ran =
      Run({"train", "--data", text_, "--init-from", dir_ + "/half", "--steps", "1", "--lr", "0", "--quiet",
           "--weight-decay", "0", "--dtype", "bf16", "--threads", "1", "--state-dir", dir_ + "/c"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(Run({"export", dir_ + "/c", dir_ + "/half-again", "--dtype", "bf16"}).code, 0);
  EXPECT_TRUE(TensorBytes(dir_ + "/half") == TensorBytes(dir_ + "/half-again"));

  const Ran other = Run({"train", "--data", text_, "--init-from", dir_ + "/half", "--model", "gpt-small",
                         "--state-dir", dir_ + "/d", "--quiet"});
  EXPECT_EQ(other.code, 2);
  EXPECT_EQ(Lines(other.err).size(), 1u) << other.err;
  EXPECT_THAT(other.err, HasSubstr("in this model"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/d"));
}

TEST_F(CliTest, WithoutADriveARunGoesOnFromItsNewestCheckpoint) {
  const Arguments steps = {"--steps", "9"};
  const std::string kept = dir_ + "/kept", log = dir_ + "/log", whole_log = dir_ + "/whole.log";
  ASSERT_EQ(Run(Train(dir_ + "/whole", steps + Arguments{"--log", whole_log})).code, 0);
  const Arguments in_memory = Arguments{"--offload",          "cpu", "--checkpoint-dir",  kept,
                                        "--checkpoint-every", "2",   "--checkpoint-keep", "2"};
  // Its last step is kept, though none was due.
  Ran ran = Run(Train("unused", Arguments{"--steps", "5", "--log", log} + in_memory));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/unused"));
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kept))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre("latest", "step-00000004", "step-00000005"));
  EXPECT_EQ(Losses(log).size(), 5u);
  EXPECT_THAT(Run(Train("unused", steps + in_memory)).err,
              HasSubstr("holds checkpoints, the newest of step 5"));
  ran = Run(Train(
      "unused", steps + Arguments{"--resume", "--log", log, "--offload", "none", "--checkpoint-dir", kept}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  // Its schedule was that of a run of 5 steps.
  EXPECT_EQ(Losses(log).size(), 9u);

  std::filesystem::remove_all(kept);
  std::filesystem::remove(log);
  Program stopped(dir_, Train("unused", Arguments{"--steps", "40", "--log", log} + in_memory));
  ASSERT_TRUE(WaitForLines(log, 7));
  stopped.Signal(SIGKILL);
  stopped.Wait();
  const Ran cpu = Run(Train("unused", Arguments{"--resume", "--steps", "12", "--log", log} + in_memory));
  ASSERT_EQ(cpu.code, 0) << cpu.err;
  ASSERT_EQ(
      Run(Train(dir_ + "/long", Arguments{"--steps", "40"} + Arguments{"--log", dir_ + "/long.log"})).code,
      0);
  std::vector<std::string> long_losses = Losses(dir_ + "/long.log");
  const std::vector<std::string> losses = Losses(log);
  ASSERT_GE(losses.size(), 12u);
  long_losses.resize(losses.size());
  EXPECT_EQ(losses, long_losses);

  // Without a word where: only where such a run was.
  const Arguments somewhere = {"train",   "--model", "gpt-tiny", "--data",  text_,
                               "--quiet", "--seq",   "32",       "--resume"};
  const Arguments two = {"--offload", "none", "--steps", "2"};
  ran = Run(somewhere + two);
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("--checkpoint-dir"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/penstock-state"));
  std::filesystem::create_directories(dir_ + "/penstock-state/checkpoints");  // of one that was killed
  ran = Run(somewhere + two);
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("no checkpoint in penstock-state/checkpoints: starting over"));
  EXPECT_EQ(Inspect(dir_ + "/penstock-state")["step"], 2);
  ran = Run(somewhere + Arguments{"--offload", "cpu", "--steps", "3"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, testing::Not(HasSubstr("starting over")));
  EXPECT_EQ(Inspect(dir_ + "/penstock-state")["step"], 3);
}

TEST_F(CliTest, ATermSignalDuringACheckpointFinishesIt) {
  const std::string kept = dir_ + "/kept", log = dir_ + "/log", state = dir_ + "/state";
  const Arguments steps = {"--steps", "60"};
  Program stopped(
      dir_, Train(state, steps + Arguments{"--batch", "4", "--seq", "64", "--log", log, "--checkpoint-dir",
                                           kept, "--checkpoint-every", "24"}));
  ASSERT_TRUE(WaitForFile(kept + "/.step-00000024.partial")) << "it is on its way";
  stopped.Signal(SIGTERM);
  const Ran ran = stopped.Wait();
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kept))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre("latest", "step-00000024"));
  EXPECT_EQ(Inspect(state)["step"], Losses(log).size());

  // From the checkpoint on two directories, and from the state at another path: the same bits.
  std::filesystem::rename(state, dir_ + "/moved");
  const Arguments resume = {"train", "--data", text_, "--resume", "--quiet", "--steps", "32", "--log"};
  const std::vector<Ran> both =
      RunAll({resume + Arguments{dir_ + "/a.log", "--state-dir", dir_ + "/moved"},
              resume + Arguments{dir_ + "/b.log", "--state-dir", dir_ + "/x", "--state-dir", dir_ + "/y",
                                 "--checkpoint-dir", kept}});
  ASSERT_EQ(both[0].code, 0) << both[0].err;
  ASSERT_EQ(both[1].code, 0) << both[1].err;
  std::vector<std::string> whole = Losses(log);
  const std::vector<std::string> moved = Losses(dir_ + "/a.log"), restored = Losses(dir_ + "/b.log");
  whole.insert(whole.end(), moved.begin() + 1, moved.end());  // whose first line is that of the last commit
  ASSERT_GE(whole.size(), 32u);
  EXPECT_EQ(restored, std::vector<std::string>(whole.begin() + 23, whole.begin() + 32));
}

TEST_F(CliTest, SamplesTheSameTextInAnyMemory) {
  const std::string state = dir_ + "/state";
  ASSERT_EQ(Run(Train(state, {"--steps", "12", "--seq", "64", "--lr", "3e-3"})).code, 0);
  const Arguments arguments = {"sample", state, "--prompt", "water ", "--tokens", "24", "--threads", "1"};
  const Ran refused = Run(arguments + Arguments{"--host-memory", "1KiB"});
  EXPECT_EQ(refused.code, 2);
  std::smatch found;
  ASSERT_TRUE(
      std::regex_search(refused.err, found, std::regex("least that works here is .*\\(([0-9]+) bytes")))
      << refused.err;
  const std::vector<Ran> ran = RunAll({arguments,
                                       arguments + Arguments{"--host-memory", found[1]},
                                       arguments + Arguments{"--seed", "2"},
                                       arguments + Arguments{"--temperature", "0"},
                                       arguments + Arguments{"--top-k", "1", "--seed", "9"},
                                       arguments + Arguments{"--samples", "2"},
                                       {"sample", "--state-dir", state, "--threads", "1"},
                                       {"sample", "--state-dir", state, "--tokens", "90", "--threads", "1"}});
  for (size_t i = 0; i < ran.size(); ++i) {
    EXPECT_EQ(ran[i].code, 0) << ran[i].err;
    EXPECT_EQ(ran[i].err,
              i < 7
                  ? ""
                  : "penstock sample: a text ends after 63 tokens: the run was trained on sequences of 64\n");
  }
  EXPECT_THAT(ran[0].out, StartsWith("water "));
  EXPECT_EQ(ran[0].out.size(), 6u + 24 + 1);
  EXPECT_EQ(ran[0].out, ran[1].out) << "memory changes nothing";
  EXPECT_NE(ran[0].out, ran[2].out);
  EXPECT_EQ(ran[3].out, ran[4].out) << "the likeliest token, whatever the seed";
  EXPECT_EQ(ran[5].out, ran[0].out + ran[2].out) << "samples have seeds one after the other";
  EXPECT_EQ(ran[6].out.size(), 1u + 63 + 1) << "to the end of what the run was trained on";
  EXPECT_EQ(ran[7].out, ran[6].out);
  const Ran long_prompt = Run({"sample", state, "--prompt", std::string(64, 'a')});
  EXPECT_EQ(long_prompt.code, 2);
  EXPECT_THAT(long_prompt.err, HasSubstr("it has 64 tokens: the run was trained on sequences of 64"));
}

// Scores of attention take no memory that grows with the text, so keys and values alone make a difference.
TEST_F(CliTest, SamplesAtEveryLengthInTheLeastMemoryOfTheLongest) {
  const std::string state = dir_ + "/state", model = dir_ + "/model.json";
  WriteFile(model, R"({"n_layer": 2, "n_embd": 64, "n_head": 16, "n_positions": 512, "vocab_size": 256})");
  const Arguments made = {"train", "--model", model, "--data", text_, "--state-dir", state, "--quiet"};
  ASSERT_EQ(Run(made + Arguments{"--steps", "2", "--batch", "1"}).code, 0);
  const auto arguments = [&](const std::string& tokens) {
    return Arguments{"sample",   state,  "--prompt",  std::string(250, 'a'),
                     "--tokens", tokens, "--threads", "1"};
  };
  const auto least = [&](const std::string& tokens) {
    const std::string err = Run(arguments(tokens) + Arguments{"--host-memory", "1KiB"}).err;
    std::smatch found;
    EXPECT_TRUE(std::regex_search(err, found, std::regex("least that works( here)? is .*?([0-9]+) bytes")))
        << err;
    return found.empty() ? int64_t{0} : std::stoll(found[2]);
  };
  EXPECT_GE(least("6"), least("2"));
  EXPECT_GE(least("12"), least("6"));
  const Ran ran = Run(arguments("12") + Arguments{"--host-memory", std::to_string(least("12"))});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out.size(), 250u + 12 + 1);
}

}  // namespace
}  // namespace penstock::tools::penstock_cli_test
