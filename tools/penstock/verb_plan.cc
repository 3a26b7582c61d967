// `penstock plan`: what `penstock train` with the same flags would do, without doing it; and with --cluster,
// what many nodes would, on paper.
#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "models/families/family.h"
#include "run/settings.h"
#include "run/watch/wear_budget.h"
#include "tiering/advice/what_if.h"
#include "tools/base/cli.h"
#include "tools/base/progress.h"
#include "tools/base/verbs.h"
#include "tools/generate/plan_generate.h"
#include "tools/machine/cluster_flags.h"
#include "tools/pages/plan_page.h"
#include "tools/pages/plan_text.h"
#include "tools/pages/planned_model.h"
#include "tools/pages/trace.h"
#include "tools/penstock/generate_device.h"
#include "tools/penstock/plan_model.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/engine/engine.h"

namespace penstock::tools {
namespace {

struct PlanFlags {
  TrainOptions train;
  std::string machine, cluster;
  std::string trace, html;
  double terabytes_written = 600;
  bool no_probe = false;
};

absl::Status WriteTrace(const PlanFlags& flags, const zero::EnginePlan& plan,
                        const tiering::MachineModel& machine) {
  if (flags.trace.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(std::unique_ptr<Trace> trace, Trace::Open(flags.trace, /*run_id=*/""));
  trace->Planned(plan.plan);
  const auto simulated = tiering::Simulate(
      plan.graph, plan.plan, machine, /*steps=*/2,
      [&](tiering::OpId id, const tiering::Op& op, double start, double end) {
        trace->Add(id, op, start, end);
      },
      [&](tiering::Stall cause, double start, double end) { trace->AddStall(cause, start, end); });
  absl::Status status = simulated.status();
  status.Update(trace->Close());
  return status;
}

std::string VocabularyText(const models::LanguageModel& model) {
  if (model.tile_rows() == 0) return "";
  return absl::StrCat("vocabulary: ", models::VocabularyTiles(model), " tiles of ", model.tile_rows(),
                      " of its ", model.vocabulary(), " rows (--vocabulary-tiles)\n");
}

// What is drawn replaces nothing that it is drawn from.
absl::Status CheckOutputs(const PlanFlags& flags) {
  std::vector<std::string> inputs = FilesRead(flags.train);
  inputs.push_back(flags.machine);
  RETURN_IF_ERROR(CheckIsNoInput("--trace", flags.trace, inputs));
  inputs.push_back(flags.trace);
  RETURN_IF_ERROR(CheckIsNoInput("--html", flags.html, inputs));
  const auto given = [](const std::string& path) {
    return path.empty() ? std::nullopt : std::optional(path);
  };
  RETURN_IF_ERROR(CheckWritable("--trace", given(flags.trace)));
  return CheckWritable("--html", given(flags.html), /*replaced=*/true);
}

// What a training would be told of its budget of wear before its first step.
std::vector<std::string> WearLines(const TrainSettings& settings, const zero::EnginePlan& plan) {
  const bool goes_on = settings.resumes && settings.recorded.is_object();
  run::WearBudget::Future future;
  future.last_step = settings.steps;
  if (goes_on) {
    future.first_step = settings.recorded.value("last_step", int64_t{0});
    future.written_bytes = settings.recorded.value("written_bytes", 0.0) * settings.engine.world();
  } else if (plan.plan.on_nvme) {
    future.written_bytes = static_cast<double>(plan.state_bytes);  // with which it begins
  }
  std::vector<std::string> lines =
      run::WearBudget(settings.config.penstock.wear_budget_tb).Warnings(plan, settings.engine, future);
  for (std::string& line : lines) line = run::Spelt(line, run::Door::kCommandLine);
  return lines;
}

absl::Status Plan(const PlanFlags& flags, std::ostream& out, std::ostream& err) {
  RETURN_IF_ERROR(CheckOutputs(flags));
  ASSIGN_OR_RETURN(TrainSettings settings, ResolveTrainOptions(flags.train, /*needs_data=*/false));
  for (const auto* lines : {&settings.notes, &settings.decisions}) {
    for (const std::string& line : *lines) err << line << "\n" << std::flush;
  }
  zero::EngineOptions& options = settings.engine;
  options.storage.measures_drives = !flags.no_probe;
  zero::SetIntraOpThreads(options.intra_op_threads);
  absl::StatusOr<Machine> machine = Machine();
  options.hooks.machine = [&](int64_t state_bytes, const std::function<void()>& compute) {
    MachineRequest request = RequestFor(options, state_bytes, compute);
    request.probe_drive = !flags.no_probe;
    request.machine_file = flags.machine;
    machine = ProbeMachine(request);
    return machine.ok() ? machine->model : tiering::MachineModel();
  };
  Preparing preparing(/*quiet=*/false);
  options.hooks.preparing = [&](const std::string& what) { preparing.Show(what); };
  const absl::StatusOr<ModelPlan> made = PlanModel(settings, options);
  if (!made.ok()) return NameTilesThatFit(made.status(), settings, options);
  const ModelPlan& planned = *made;
  const zero::EnginePlan& plan = planned.plan;
  RETURN_IF_ERROR(machine.status());
  ASSIGN_OR_RETURN(tiering::Prediction prediction, tiering::Predict(plan.graph, plan.plan, machine->model));
  const PlanFacts facts{plan, options, *machine, prediction, flags.terabytes_written * 1e12};
  preparing.Show("asking what if");
  const std::vector<tiering::WhatIf> what_ifs = tiering::AskWhatIf(
      plan.graph, plan.options, prediction, static_cast<int>(options.storage.state_dirs.size()));
  preparing.Clear();
  // A plan may be for another machine: what would not fit here is told, and no error.
  const absl::StatusOr<std::string> process = ProcessMemoryText(plan, options, zero::FindHostMemory());
  const std::string of_process = process.ok() ? *process : std::string(process.status().message());
  nlohmann::json json = PlanJson(facts, what_ifs);
  json["compute_estimated"] = planned.narrower > 1;
  json["compute_measured_narrower"] = planned.narrower;
  json["vocabulary_tiles"] = models::VocabularyTiles(*settings.model);
  const std::vector<std::string> wear = WearLines(settings, plan);
  if (settings.config.penstock.wear_budget_tb.has_value()) json["wear_budget"] = wear;
  if (flags.train.json) {
    out << json.dump(2) << "\n" << std::flush;
  } else {
    out << PlanText(facts) << VocabularyText(*settings.model) << planned.EstimateText() << of_process << "\n"
        << PlanDetails(facts, what_ifs);
    for (const std::string& line : wear) out << line << "\n";
    out << std::flush;
  }
  RETURN_IF_ERROR(WriteTrace(flags, plan, machine->model));
  if (flags.html.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const TraceView step, SimulatedStep(plan, machine->model));
  const std::string title = absl::StrCat(flags.train.model.value_or("gpt-small"),
                                         planned.narrower > 1 ? " (compute estimated)" : "");
  return WriteWholeFile("--html", flags.html, PlanPage(title, json, step));
}

}  // namespace

int RunPlan(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  if (AsksForGeneration(argc, argv)) return RunPlanGenerate(OpenDeviceForGeneration, argc, argv, out, err);
  CLI::App app("Shows where everything would live, what would move, and what a step would take",
               "penstock plan");
  PlanFlags flags;
  DeclareTrainOptions(app, flags.train, /*plans=*/true);
  app.add_option("--tbw", flags.terabytes_written,
                 "Terabytes (10^12) that one drive is rated to be written [600]")
      ->check(CLI::Range(0.001, 1e9));
  app.add_option("--trace", flags.trace, "Write the predicted lanes for Perfetto or chrome://tracing");
  app.add_option("--html", flags.html, "Draw the plan as one page, which asks the network for nothing");
  app.add_option(
      "--machine", flags.machine,
      "JSON with figures of another machine, such as read_bytes_per_s; they stand above measured ones");
  app.add_flag("--no-probe", flags.no_probe,
               "Write nothing: without a profile stored by ds_nvme_tune the drive is assumed");
  app.add_option(
      "--cluster", flags.cluster,
      "JSON with nodes, GPUs, drives and a model: plans them on paper, without other flags but --json");
  app.footer("`penstock plan --generate DIR` plans generation, with flags of its own (--help).");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status =
      flags.cluster.empty() ? Plan(flags, out, err) : PlanCluster(flags.cluster, flags.train.json, out);
  return status.ok() ? kExitOk : Fail("penstock plan", status, err);
}

}  // namespace penstock::tools
