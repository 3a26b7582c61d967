#include "tools/penstock/train_options.h"

#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "run/config.h"
#include "run/settings.h"

namespace penstock::tools {

void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further flags.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto option = [&app](const char* name, auto& to) {
    return app.add_option(name, to, run::HelpOf(name));
  };
  const auto flag = [&app](const char* name, bool& to) { return app.add_flag(name, to, run::HelpOf(name)); };
  option("--model", flags.model);
  option("--lora-rank", flags.lora_rank);
  option("--lora-alpha", flags.lora_alpha);
  option("--lora-dropout", flags.lora_dropout);
  option("--lora-targets", flags.lora_targets);
  option("--vocabulary-tiles", flags.vocabulary_tiles);
  option("--data", flags.data)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  option("--data-weights", flags.data_weights)->delimiter(',');
  option("--tokenizer", flags.tokenizer);
  option("--chat-template", flags.chat_template);
  flag("--skip-broken-lines", flags.skip_broken_lines);
  option("--eval-data", flags.eval_data);
  option("--eval-split", flags.eval_split);
  option("--eval-every", flags.eval_every);
  option("--eval-windows", flags.eval_windows);
  option("--vocab", flags.vocab);
  option("--config", flags.config);
  option("--state-dir", flags.state_dirs)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.parse_complete_callback([&flags] {
    absl::StatusOr<run::StateDirectories> parsed = run::ParseStateDirectories(flags.state_dirs);
    if (!parsed.ok()) throw CLI::ValidationError("--state-dir", std::string(parsed.status().message()));
    flags.state_dirs = std::move(parsed->paths);
    flags.state_dir_weights = std::move(parsed->weights);
  });
  option("--offload", flags.offload);
  option("--host-memory", flags.host_memory);
  option("--device-memory", flags.device_memory);
  option("--device", flags.device);
  option("--dtype", flags.dtype);
  option("--steps", flags.steps);
  option("--batch", flags.batch);
  option("--accumulate", flags.accumulate);
  option("--seq", flags.seq);
  option("--lr", flags.lr);
  option("--warmup", flags.warmup);
  option("--clip", flags.clip);
  option("--weight-decay", flags.weight_decay);
  option("--optimizer-states", flags.optimizer_states);
  option("--seed", flags.seed);
  option("--threads", flags.threads);
  flag("--resume", flags.resume);
  flag("--overwrite", flags.overwrite);
  option("--init-from", flags.init_from);
  option("--checkpoint-dir", flags.checkpoint_dir);
  option("--checkpoint-every", flags.checkpoint_every);
  option("--checkpoint-keep", flags.checkpoint_keep);
  if (plans) {
    flag("--json", flags.json);
    return;
  }
  option("--rank-timeout", flags.rank_timeout);
  app.footer(
      "Several processes train together where the environment says so: RANK, WORLD_SIZE, LOCAL_RANK, "
      "MASTER_ADDR and "
      "MASTER_PORT as torchrun sets them, or what mpirun and srun set. Each has --batch sequences, and its "
      "part of the "
      "state in rank-K/ of --state-dir; rank 0 writes report, log and progress. They know each other by the "
      "secret in PENSTOCK_RANKS_SECRET, or in the file .penstock.ranks-secret of a --state-dir that all of "
      "them see.");
  option("--report", flags.report);
  option("--log", flags.log);
  option("--prometheus", flags.prometheus);
  option("--trace", flags.trace);
  flag("--check", flags.check);
  flag("--quiet", flags.quiet);
}

}  // namespace penstock::tools
