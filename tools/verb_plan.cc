// `penstock plan`: what `penstock train` with the same words would do, without doing it.
#include <CLI/CLI.hpp>

#include "tools/cli.h"
#include "tools/plan_text.h"
#include "tools/train_words.h"
#include "tools/verbs.h"
#include "zero/threads.h"

namespace penstock::tools {
namespace {

absl::Status Plan(const TrainWords& words, std::ostream& out, std::ostream& err) {
  absl::StatusOr<TrainSettings> settings = ResolveTrainWords(words, /*needs_data=*/false);
  if (!settings.ok()) return settings.status();
  for (const std::string& note : settings->notes) err << note << std::endl;
  const zero::EngineOptions& options = settings->engine;
  zero::SetIntraOpThreads(options.intra_op_threads);
  absl::StatusOr<zero::EnginePlan> plan = zero::Engine::MakePlan(MakeGpt(settings->model), options);
  if (!plan.ok()) return plan.status();
  const MeasuredDrives drives =
      MeasureDrives(options.state_dirs, options.host_memory_bytes, int64_t{128} << 20);
  absl::StatusOr<tiering::Prediction> prediction = Predict(*plan, options, drives.profile);
  if (!prediction.ok()) return prediction.status();
  if (words.json) {
    out << PlanJson(*plan, options, *prediction, drives).dump(2) << std::endl;
  } else {
    out << PlanText(*plan, options, *prediction, drives) << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace

int RunPlan(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Shows where everything would live, what would move, and what a step would take",
               "penstock plan");
  TrainWords words;
  DeclareTrainWords(app, words, /*plans=*/true);
  if (const auto code = ParseWords(app, argc, argv, out, err)) return *code;
  const absl::Status status = Plan(words, out, err);
  return status.ok() ? kExitOk : Fail("penstock plan", status, err);
}

}  // namespace penstock::tools
