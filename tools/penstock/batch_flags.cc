#include "tools/penstock/batch_flags.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/elasticity.h"
#include "tools/base/flag_check.h"

namespace penstock::tools {
namespace {

// A run that goes on with another number of ranks: its steps have as many sequences as before, unless the
// flags say what each rank does.
absl::Status SpreadBatch(const run::BatchRequest& request, const nlohmann::json& run,
                         TrainSettings* settings) {
  const int64_t world = settings->engine.world(), before = run.value("ranks", int64_t{1});
  const int64_t batch = run.value("batch", kDefaultBatch), accumulate = run.value("accumulate", int64_t{1});
  const int64_t sequences = before * batch * accumulate;
  settings->batch = request.micro_batch.value_or(batch);
  settings->accumulate = request.accumulation.value_or(accumulate);
  if (!request.accumulation.has_value() && sequences % (world * settings->batch) == 0) {
    settings->accumulate = sequences / (world * settings->batch);
  } else if (!request.micro_batch.has_value() && sequences % (world * settings->accumulate) == 0) {
    settings->batch = sequences / (world * settings->accumulate);
  }
  const int64_t now = world * settings->batch * settings->accumulate;
  const bool told = request.micro_batch.has_value() && request.accumulation.has_value();
  if (now != sequences && !told) {
    return WrongFlag(
        absl::StrCat("a step of this run has ", sequences, " sequences (", before, " ranks, --batch ", batch,
                     ", --accumulate ", accumulate, "), which ", world,
                     " ranks cannot share evenly that way: say --batch and --accumulate of each"));
  }
  settings->notes.push_back(absl::StrCat(
      "made by ", before, before == 1 ? " rank" : " ranks", ", goes on with ", world, ": --batch ",
      settings->batch, " --accumulate ", settings->accumulate, " of each",
      now == sequences ? ", the same sequences in every step"
                       : absl::StrCat("; a step has ", now, " sequences from here on, not ", sequences)));
  settings->engine.resume.run_changes.update(
      {{"ranks", world}, {"batch", settings->batch}, {"accumulate", settings->accumulate}});
  return absl::OkStatus();
}

}  // namespace

absl::Status ResolveElasticity(const TrainOptions& flags, int64_t world, bool starts, run::Config* config,
                               std::vector<std::string>* notes) {
  if (!config->elasticity.on()) return absl::OkStatus();
  if (flags.batch.has_value() || flags.accumulate.has_value()) {
    return WrongFlag(
        absl::StrCat(flags.batch.has_value() ? "--batch" : "--accumulate",
                     ": elasticity of --config chooses it; leave it out, or set elasticity.enabled "
                     "to false"));
  }
  ASSIGN_OR_RETURN(const run::ElasticBatch batch, run::ComputeElasticBatch(config->elasticity));
  // What only looks may be another number of processes than will train.
  const int64_t ranks = !starts && !batch.Allows(world) ? batch.ranks.front() : world;
  ASSIGN_OR_RETURN(const int64_t micro, run::ElasticMicroBatch(config->elasticity, batch, ranks));
  const bool here = ranks == world;
  config->train_batch_size = here ? std::optional(batch.train_batch) : std::nullopt;
  config->micro_batch_per_rank = micro;
  config->gradient_accumulation_steps = batch.train_batch / ranks / micro;
  notes->push_back(absl::StrCat("elasticity: ", batch.train_batch, " sequences a step, for ",
                                batch.RanksText(), " ranks; each of ", ranks,
                                here ? "" : absl::StrCat(" (", world, " cannot share it)"), " has --batch ",
                                micro, " --accumulate ", *config->gradient_accumulation_steps));
  return absl::OkStatus();
}

absl::Status ResolveBatchSizes(const TrainOptions& flags, const run::Config& config,
                               const run::RecordedOptions& recorded, const nlohmann::json& run,
                               run::Changes* changes, TrainSettings* settings) {
  run::BatchRequest request;
  request.train_batch = config.train_batch_size;
  request.micro_batch = config.micro_batch_per_rank;
  request.accumulation = config.gradient_accumulation_steps;
  // Flags win: with both of them the file's product has nothing left to say.
  if (flags.batch.has_value() && flags.accumulate.has_value()) request.train_batch.reset();
  if (settings->resumes && run.value("ranks", int64_t{1}) != settings->engine.world())
    return SpreadBatch(request, run, settings);
  // Without a key that was there, all three are as in a file that never had it.
  if (settings->resumes &&
      (recorded.Removed("train_batch") || recorded.Removed("batch") || recorded.Removed("accumulate"))) {
    ASSIGN_OR_RETURN(const run::BatchSizes sizes,
                     run::ResolveBatch(request, settings->engine.world(), kDefaultBatch));
    settings->batch = sizes.micro_batch;
    settings->accumulate = sizes.accumulation;
    const auto change = [&](const char* name, int64_t before, int64_t now) {
      if (before == now) return;
      changes->run[name] = now;
      changes->Tell(name, absl::StrCat(before), absl::StrCat(now), "batch sizes that --config has lost");
    };
    change("batch", run.value("batch", kDefaultBatch), settings->batch);
    change("accumulate", run.value("accumulate", int64_t{1}), settings->accumulate);
    return absl::OkStatus();
  }
  // What the product of a step was is in the record: the file's is of matter where it is another.
  const int64_t before = run.is_null() ? 0
                                       : run.value("batch", kDefaultBatch) *
                                             run.value("accumulate", int64_t{1}) * settings->engine.world();
  const bool derives = !settings->resumes || recorded.ConfigChanges("train_batch", before);
  if (!derives) request.train_batch.reset();
  if (settings->resumes && request.train_batch.has_value() && !request.micro_batch.has_value() &&
      !request.accumulation.has_value()) {
    const int64_t batch = run.value("batch", kDefaultBatch);
    if (*request.train_batch % (batch * settings->engine.world()) == 0) request.micro_batch = batch;
  }
  ASSIGN_OR_RETURN(run::BatchSizes sizes,
                   run::ResolveBatch(request, settings->engine.world(),
                                     settings->resumes ? run.value("batch", kDefaultBatch) : kDefaultBatch));
  if (settings->resumes && derives && request.train_batch.has_value()) {
    settings->batch = sizes.micro_batch;
    settings->accumulate = sizes.accumulation;
    changes->run.update({{"batch", settings->batch}, {"accumulate", settings->accumulate}});
    changes->Tell("train_batch", absl::StrCat(before),
                  absl::StrCat(sizes.train_batch, ", --batch ", settings->batch, " --accumulate ",
                               settings->accumulate),
                  "train_batch_size in --config");
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(settings->batch, recorded.Of("batch", request.micro_batch, sizes.micro_batch));
  ASSIGN_OR_RETURN(settings->accumulate, recorded.Of("accumulate", request.accumulation, sizes.accumulation));
  return absl::OkStatus();
}

}  // namespace penstock::tools
