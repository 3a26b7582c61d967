#include "tools/penstock/train_options.h"

#include <CLI/CLI.hpp>

namespace penstock::tools {

void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further flags.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option(
      "--model", flags.model,
      "A preset (gpt-tiny, gpt-small, gpt-125m, gpt-350m, gpt-1b, ...), a config.json, or Hugging Face's "
      "directory of a model: its weights, config and tokenizer [gpt-small]");
  app.add_option("--lora-rank", flags.lora_rank,
                 "Train adapters of this rank beside the model's weights, which stay as they are (LoRA)");
  app.add_option("--lora-alpha", flags.lora_alpha,
                 "Adapters are scaled by this over their rank [8, as PEFT]");
  app.add_option("--lora-dropout", flags.lora_dropout, "Dropout of what goes into adapters [0]");
  app.add_option("--lora-targets", flags.lora_targets,
                 "Matrices that are adapted, with commas between, or all-linear [as PEFT: q_proj,v_proj; of "
                 "GPT-2 c_attn]");
  app.add_option("--vocabulary-tiles", flags.vocabulary_tiles,
                 "Embedding and head in so many blocks of rows, each as large as a layer, say; or auto: in "
                 "one, unless it is far larger than a layer [auto]");
  app.add_option(
         "--data", flags.data,
         "Text, or JSON (a line each, or one array) with text, prompt and completion, messages, "
         "conversations, or instruction and output, told by what is in it: tokens by the model's "
         "tokenizer, or the bytes of a text where there is none; or tokens, as nanoGPT's .bin; several are "
         "mixed")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--data-weights", flags.data_weights,
                 "One number for each --data, as 3,1: their shares of the sequences [by their tokens]")
      ->delimiter(',');
  app.add_option("--tokenizer", flags.tokenizer,
                 "A tokenizer.json or its directory [that of --model or --init-from, if it is a directory]");
  app.add_option("--chat-template", flags.chat_template,
                 "How messages become one text: chatml, llama3 or llama2");
  app.add_flag("--skip-broken-lines", flags.skip_broken_lines,
               "Pass over lines of .jsonl that cannot be used, and say how many [the first one is an error]");
  app.add_option("--eval-data", flags.eval_data, "Held-out text, in the same form");
  app.add_option("--eval-split", flags.eval_split,
                 "Hold out this share of each --data from its end, as 0.01, and evaluate on it [none]");
  app.add_option("--eval-every", flags.eval_every, "Evaluate after every so many steps [at the end]");
  app.add_option("--eval-windows", flags.eval_windows,
                 "Evaluate on so many sequences of the held-out text at the most [all of it]");
  app.add_option("--vocab", flags.vocab, "Vocabulary of .bin tokens [256 for text]");
  app.add_option("--config", flags.config, "DeepSpeed's JSON; flags win over it");
  app.add_option("--state-dir", flags.state_dirs,
                 "Where training state lives; several are striped [penstock-state]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--offload", flags.offload, "none, cpu or nvme [nvme]");
  app.add_option("--host-memory", flags.host_memory, "Hard budget, as 512MiB or 4GiB [half of what is free]");
  app.add_option("--device-memory", flags.device_memory, "Hard budget of the device [what is free on it]");
  app.add_option("--device", flags.device, "cpu or cuda [cpu]");
  app.add_option("--dtype", flags.dtype, "bf16, fp16, fp32 or auto [auto]");
  app.add_option("--steps", flags.steps, "Number of the last step, also on resume [100]");
  app.add_option("--batch", flags.batch, "Sequences in a micro-batch [2]");
  app.add_option("--accumulate", flags.accumulate, "Micro-batches in a step [1]");
  app.add_option("--seq", flags.seq,
                 "Tokens in a sequence [the model's context; of Llama and its kin 1024 at the most]");
  app.add_option("--lr", flags.lr, "Peak learning rate [3e-4]");
  app.add_option("--warmup", flags.warmup,
                 "Steps of linear warm-up before the cosine [a tenth of the steps, 100 at most]");
  app.add_option("--clip", flags.clip, "Bound of the global gradient norm, 0 for none [1.0]");
  app.add_option("--weight-decay", flags.weight_decay, "Weight decay [0.01 for AdamW]");
  app.add_option("--optimizer-states", flags.optimizer_states,
                 "What the optimizer's states are kept in: fp32, bf16 or 8bit [fp32]");
  app.add_option("--seed", flags.seed, "Of initial values, data order and dropout [1]");
  app.add_option("--threads", flags.threads, "Intra-op threads, recorded with the run [one per core]");
  app.add_flag(
      "--resume", flags.resume,
      "Continue the run in --state-dir; with --offload none or cpu, and where that directory is "
      "empty, from the newest checkpoint. Flags that were given another value (--lr, --warmup, --clip, "
      "--weight-decay, --batch, --accumulate, --seq, --data) change the run from the next step on, and "
      "so do changed keys of --config: that is told and recorded");
  app.add_flag("--overwrite", flags.overwrite,
               "Replace the run in --state-dir, and the checkpoints in --checkpoint-dir");
  app.add_option(
      "--init-from", flags.init_from,
      "Initial weights: safetensors in Hugging Face's layout, a file, an index or a directory; or an "
      "adapter of PEFT's, a directory, for the weights of --model");
  app.add_option("--checkpoint-dir", flags.checkpoint_dir,
                 "Where checkpoints are kept; with --offload none or cpu the last step always is "
                 "[checkpoints/ in --state-dir]");
  app.add_option("--checkpoint-every", flags.checkpoint_every,
                 "Keep a checkpoint after every so many steps, written while training goes on");
  app.add_option("--checkpoint-keep", flags.checkpoint_keep, "Keep only the newest so many [all]");
  if (plans) {
    app.add_flag("--json", flags.json, "Print JSON");
    return;
  }
  app.add_option("--rank-timeout", flags.rank_timeout,
                 "Seconds without a sign of life after which another rank counts as lost; ten times as many "
                 "for all to come, sixty times for one that lives and does not go on [30]");
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
  app.add_flag("--check", flags.check, "Only check the flags and the config");
  app.add_flag("--quiet", flags.quiet, "No progress");
}

}  // namespace penstock::tools
