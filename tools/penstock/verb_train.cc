// `penstock train`: its flags, and which of several ranks speaks.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "run/watch/run_metrics.h"
#include "tools/base/cli.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/penstock/plan_model.h"
#include "tools/penstock/ranks.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "tools/penstock/training.h"
#include "zero/engine/engine.h"
#include "zero/ranks/alike_ranks.h"
#include "zero/ranks/secret_file.h"

namespace penstock::tools {
namespace {

constexpr const char* kTrainName = "penstock train";

// The last of --check: whether it fits. Nothing is written, and no time is measured.
absl::Status CheckBudget(const TrainOptions& flags, TrainSettings settings, std::ostream& out) {
  const int64_t budget = settings.engine.memory.host_memory_budget_bytes;
  Preparing preparing(flags.quiet);
  const absl::StatusOr<zero::EnginePlan> plan =
      PlanMemory(std::move(settings), [&](const std::string& what) { preparing.Show(what); });
  preparing.Clear();
  RETURN_IF_ERROR(plan.status());
  out << "the flags and the config are right; host memory: the least that works is "
      << FormatBytes(plan->plan.least_host_memory_bytes)
      << (budget > 0 ? absl::StrCat(" of ", FormatBytes(budget), " given") : "") << "\n"
      << std::flush;
  return absl::OkStatus();
}

// `made`: what this process made to meet the other ranks.
absl::Status TrainAsRank(const TrainOptions& flags, std::ostream& out, std::vector<std::string>* made) {
  std::shared_ptr<zero::Comm> comm;
  if (!flags.check) {
    ASSIGN_OR_RETURN(std::shared_ptr<zero::Comm> connected, ConnectRanks(flags, made));
    comm = std::move(connected);
  } else {
    // What one of several ranks would be told, whether or not the others are there.
    ASSIGN_OR_RETURN(const zero::RankEnvironment environment, zero::ReadRankEnvironment());
    if (environment.world > 1) comm = zero::AlikeRanks(environment);
  }
  TrainOptions of_rank = flags;
  if (comm != nullptr && comm->rank() > 0) {
    // Rank 0 speaks for all.
    of_rank.quiet = true;
    of_rank.report.reset();
    of_rank.log.reset();
    of_rank.trace.reset();
  }
  if (comm != nullptr && flags.prometheus.has_value())
    of_rank.prometheus = run::PrometheusPath(*flags.prometheus, comm->rank(), comm->world());
  for (const absl::Status& status :
       {CheckWritable("--report", of_rank.report, /*replaced=*/true), CheckWritable("--log", of_rank.log),
        CheckWritable("--trace", of_rank.trace), CheckWritable("--prometheus", of_rank.prometheus),
        CheckDistinctFiles({{"--report", of_rank.report},
                            {"--log", of_rank.log},
                            {"--trace", of_rank.trace},
                            {"--prometheus", of_rank.prometheus}},
                           FilesRead(flags))}) {
    if (status.ok()) continue;
    if (comm != nullptr) comm->Abort(status);
    return status;
  }
  absl::StatusOr<TrainSettings> settings = ResolveTrainOptions(flags, /*needs_data=*/!flags.check, comm);
  if (!settings.ok() && comm != nullptr) comm->Abort(settings.status());
  RETURN_IF_ERROR(settings.status());
  if (flags.check) {
    for (const auto* lines : {&settings->notes, &settings->decisions}) {
      for (const std::string& line : *lines) out << line << "\n";
    }
    return CheckBudget(flags, *std::move(settings), out);
  }
  return RunTraining(std::move(of_rank), *std::move(settings), out);
}

absl::Status Train(const TrainOptions& flags, std::ostream& out) {
  std::vector<std::string> made;
  absl::Status status = TrainAsRank(flags, out, &made);
  if (!status.ok()) zero::RemoveSecret(made);
  return status;
}

}  // namespace

int RunTrain(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Trains a GPT whose state may be many times larger than memory", kTrainName);
  TrainOptions flags;
  DeclareTrainOptions(app, flags, /*plans=*/false);
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Train(flags, out);
  if (status.ok()) return kExitOk;
  const absl::StatusOr<zero::RankEnvironment> environment = zero::ReadRankEnvironment();
  const bool many = environment.ok() && environment->world > 1;
  return Fail(many ? absl::StrCat(kTrainName, " (rank ", environment->rank, ")") : std::string(kTrainName),
              status, err);
}

}  // namespace penstock::tools
