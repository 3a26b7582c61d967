#include "tools/penstock/train_options.h"

#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "zero/config/config.h"

namespace penstock::tools {

void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further flags.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option(
      "--model", flags.model,
      "A preset (gpt-tiny, gpt-small, gpt-125m, gpt-350m, gpt-1b, ...), a config.json, or Hugging Face's "
      "directory of a model: its weights, config and tokenizer [gpt-small]");
  app.add_option("--lora-rank", flags.lora_rank,
                 "Train LoRA adapters of this rank; the model's own weights are frozen");
  app.add_option("--lora-alpha", flags.lora_alpha,
                 "LoRA scale: adapters are multiplied by alpha / rank [8, as in PEFT]");
  app.add_option("--lora-dropout", flags.lora_dropout, "Dropout probability of the adapters' inputs [0]");
  app.add_option("--lora-targets", flags.lora_targets,
                 "Comma-separated names of the adapted matrices, or all-linear [as in PEFT: q_proj,v_proj; "
                 "c_attn for GPT-2]");
  app.add_option("--vocabulary-tiles", flags.vocabulary_tiles,
                 "Number of row blocks that embedding and head are split into; auto splits them only if they "
                 "are far larger than a layer [auto]");
  app.add_option("--data", flags.data,
                 "Training data: text, JSON or JSON lines (text; prompt and completion; messages; "
                 "conversations; instruction and output), or nanoGPT's .bin tokens. The form is detected "
                 "from the content. Text becomes tokens by the model's tokenizer, or bytes if there is none. "
                 "Repeat the flag to mix several files")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--data-weights", flags.data_weights,
                 "Sampling weights of the --data files, such as 3,1 [proportional to their tokens]")
      ->delimiter(',');
  app.add_option(
      "--tokenizer", flags.tokenizer,
      "tokenizer.json or its directory [the one in --model or --init-from, if that is a directory]");
  app.add_option("--chat-template", flags.chat_template,
                 "Format that turns messages into text: chatml, llama3 or llama2");
  app.add_flag("--skip-broken-lines", flags.skip_broken_lines,
               "Skip unusable lines of .jsonl files and print their number [the first one is an error]");
  app.add_option("--eval-data", flags.eval_data, "Held-out data, in any form of --data");
  app.add_option(
      "--eval-split", flags.eval_split,
      "Fraction of each --data file, taken from its end, that is held out for evaluation, such as 0.01 [0]");
  app.add_option("--eval-every", flags.eval_every, "Steps between evaluations [one at the end]");
  app.add_option("--eval-windows", flags.eval_windows, "Maximum number of sequences in an evaluation [all]");
  app.add_option("--vocab", flags.vocab, "Vocabulary size of .bin tokens [256 for text]");
  app.add_option("--config", flags.config, "DeepSpeed's JSON; flags win over it");
  app.add_option("--state-dir", flags.state_dirs,
                 "Directory of the training state. Several directories share its bytes: in proportion to the "
                 "measured speed of their drives, or to the weights of DIR=WEIGHT [penstock-state]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.parse_complete_callback([&flags] {
    absl::StatusOr<zero::StateDirectories> parsed = zero::ParseStateDirectories(flags.state_dirs);
    if (!parsed.ok()) throw CLI::ValidationError("--state-dir", std::string(parsed.status().message()));
    flags.state_dirs = std::move(parsed->paths);
    flags.state_dir_weights = std::move(parsed->weights);
  });
  app.add_option(
      "--offload", flags.offload,
      "Where weights and optimizer state live: none (on the computing device), cpu or nvme [nvme]");
  app.add_option("--host-memory", flags.host_memory,
                 "Hard host memory budget, such as 512MiB or 4GiB [half of the free memory]");
  app.add_option("--device-memory", flags.device_memory,
                 "Hard device memory budget [the free memory of the device]");
  app.add_option("--device", flags.device, "Device for forward and backward: cpu or cuda [cpu]");
  app.add_option("--dtype", flags.dtype, "Type of weights and activations: bf16, fp16, fp32 or auto [auto]");
  app.add_option("--steps", flags.steps, "Number of the last step, counted from the start of the run [100]");
  app.add_option("--batch", flags.batch, "Sequences in a micro-batch of one rank [2]");
  app.add_option("--accumulate", flags.accumulate, "Micro-batches in a step [1]");
  app.add_option("--seq", flags.seq,
                 "Tokens in a sequence [the model's context, at most 1024 for Llama-like models]");
  app.add_option("--lr", flags.lr, "Peak learning rate [3e-4]");
  app.add_option("--warmup", flags.warmup,
                 "Steps of linear warm-up before the cosine [a tenth of the steps, 100 at most]");
  app.add_option("--clip", flags.clip, "Maximum global gradient norm; 0 disables clipping [1.0]");
  app.add_option("--weight-decay", flags.weight_decay, "Weight decay [0.01 for AdamW]");
  app.add_option("--optimizer-states", flags.optimizer_states,
                 "Type of the optimizer's moments: fp32, bf16 or 8bit [fp32]");
  app.add_option("--seed", flags.seed, "Seed of initial values, data order and dropout [1]");
  app.add_option("--threads", flags.threads, "Intra-op threads, recorded with the run [one per core]");
  app.add_flag(
      "--resume", flags.resume,
      "Continue the run in --state-dir; with --offload none or cpu, and where that directory is "
      "empty, from the newest checkpoint. Flags that were given another value (--lr, --warmup, --clip, "
      "--weight-decay, --batch, --accumulate, --seq, --data) change the run from the next step on, and "
      "so do changed keys of --config: a line says so, and the run records it");
  app.add_flag("--overwrite", flags.overwrite,
               "Replace the run in --state-dir, and the checkpoints in --checkpoint-dir");
  app.add_option(
      "--init-from", flags.init_from,
      "Initial weights: safetensors in Hugging Face's layout, a file, an index or a directory; or an "
      "adapter of PEFT's, a directory, for the weights of --model");
  app.add_option("--checkpoint-dir", flags.checkpoint_dir,
                 "Directory of checkpoints; with --offload none or cpu it always receives the last step "
                 "[checkpoints/ in --state-dir]");
  app.add_option("--checkpoint-every", flags.checkpoint_every,
                 "Steps between checkpoints, which are written beside training");
  app.add_option("--checkpoint-keep", flags.checkpoint_keep, "Number of newest checkpoints to keep [all]");
  if (plans) {
    app.add_flag("--json", flags.json, "Print JSON");
    return;
  }
  app.add_option(
      "--rank-timeout", flags.rank_timeout,
      "Heartbeat timeout of other ranks in seconds; 10 times as long for the rendezvous, 60 times for a "
      "rank that answers but makes no progress [30]");
  app.footer(
      "Several processes train together where the environment says so: RANK, WORLD_SIZE, LOCAL_RANK, "
      "MASTER_ADDR and "
      "MASTER_PORT as torchrun sets them, or what mpirun and srun set. Each has --batch sequences, and its "
      "part of the "
      "state in rank-K/ of --state-dir; rank 0 writes report, log and progress. They know each other by the "
      "secret in PENSTOCK_RANKS_SECRET, or in the file .penstock.ranks-secret of a --state-dir that all of "
      "them see.");
  app.add_option("--report", flags.report, "Write the run's report, a JSON file");
  app.add_option("--log", flags.log, "Append a JSON line for every committed step and every evaluation");
  app.add_option("--prometheus", flags.prometheus,
                 "Replace this file, FILE.prom, with the figures of each committed step, for node_exporter");
  app.add_option("--trace", flags.trace, "Write a trace for Perfetto or chrome://tracing");
  app.add_flag("--check", flags.check, "Validate flags and config, then exit");
  app.add_flag("--quiet", flags.quiet, "Print no progress");
}

}  // namespace penstock::tools
