// `penstock plan`: what `penstock train` with the same words would do, without doing it; and with --cluster,
// what many nodes would, on paper.
#include <CLI/CLI.hpp>

#include "tiering/advice/what_if.h"
#include "tools/base/cli.h"
#include "tools/penstock/cluster_flags.h"
#include "tools/penstock/plan_text.h"
#include "tools/penstock/trace.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/verbs.h"
#include "zero/engine/engine_state.h"
#include "zero/memory/threads.h"

namespace penstock::tools {
namespace {

struct PlanWords {
  TrainWords train;
  std::string machine, cluster;
  std::string trace;
  double terabytes_written = 600;
  bool no_probe = false;
};

absl::Status Plan(const PlanWords& words, std::ostream& out, std::ostream& err) {
  absl::StatusOr<TrainSettings> settings = ResolveTrainWords(words.train, /*needs_data=*/false);
  if (!settings.ok()) return settings.status();
  for (const std::string& note : settings->notes) err << note << std::endl;
  zero::EngineOptions& options = settings->engine;
  zero::SetIntraOpThreads(options.intra_op_threads);
  absl::StatusOr<Machine> machine = Machine();
  options.machine = [&](int64_t state_bytes, const std::function<void()>& compute) {
    MachineRequest request = RequestFor(options, state_bytes, compute);
    request.probe_drive = !words.no_probe;
    request.machine_file = words.machine;
    machine = ProbeMachine(request);
    return machine.ok() ? machine->model : tiering::MachineModel();
  };
  absl::StatusOr<zero::EnginePlan> plan = zero::Engine::MakePlan(MakeGpt(settings->model), options);
  if (!plan.ok()) return plan.status();
  if (!machine.ok()) return machine.status();
  absl::StatusOr<tiering::Prediction> prediction = tiering::Predict(plan->graph, plan->plan, machine->model);
  if (!prediction.ok()) return prediction.status();
  const PlanFacts facts{*plan, options, *machine, *prediction, words.terabytes_written * 1e12};
  const std::vector<tiering::WhatIf> what_ifs = tiering::AskWhatIf(
      plan->graph, plan->options, *prediction, static_cast<int>(options.state_dirs.size()));
  if (words.train.json) {
    out << PlanJson(facts, what_ifs).dump(2) << std::endl;
  } else {
    out << PlanText(facts) << PlanDetails(facts, what_ifs) << std::flush;
  }
  if (words.trace.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<Trace>> trace = Trace::Open(words.trace);
  if (!trace.ok()) return trace.status();
  const auto simulated = tiering::Simulate(
      plan->graph, plan->plan, machine->model, /*steps=*/2,
      [&](tiering::OpId id, const tiering::Op& op, double start, double end) {
        (*trace)->Add(id, op, start, end);
      },
      [&](tiering::Stall cause, double start, double end) { (*trace)->AddStall(cause, start, end); });
  absl::Status status = simulated.status();
  status.Update((*trace)->Close());
  return status;
}

}  // namespace

int RunPlan(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Shows where everything would live, what would move, and what a step would take",
               "penstock plan");
  PlanWords words;
  DeclareTrainWords(app, words.train, /*plans=*/true);
  app.add_option("--tbw", words.terabytes_written,
                 "Terabytes (10^12) that one drive is rated to be written [600]")
      ->check(CLI::Range(0.001, 1e9));
  app.add_option("--trace", words.trace, "Write the predicted lanes for Perfetto or chrome://tracing");
  app.add_option(
      "--machine", words.machine,
      "JSON with figures of another machine, such as read_bytes_per_s; they stand above measured ones");
  app.add_flag("--no-probe", words.no_probe,
               "Write nothing: without a profile stored by ds_nvme_tune the drive is assumed");
  app.add_option(
      "--cluster", words.cluster,
      "JSON with nodes, GPUs, drives and a model: plans them on paper, without other flags but --json");
  if (const auto code = ParseWords(app, argc, argv, out, err)) return *code;
  const absl::Status status =
      words.cluster.empty() ? Plan(words, out, err) : PlanCluster(words.cluster, words.train.json, out);
  return status.ok() ? kExitOk : Fail("penstock plan", status, err);
}

}  // namespace penstock::tools
