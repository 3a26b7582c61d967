// `penstock plan --generate DIR`: what `penstock generate` would do with a model, and what would make it
// faster.
#include "tools/generate/plan_generate.h"

#include <CLI/CLI.hpp>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "generate/generator.h"
#include "tools/base/cli.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"
#include "tools/generate/generate_flags.h"
#include "tools/generate/text_model.h"

namespace penstock::tools {
namespace {

constexpr const char* kPlanGenerateName = "penstock plan --generate";

struct PlanGenerateFlags {
  std::vector<std::string> dirs;
  std::string model;
  GenerateMemoryFlags memory;
  int64_t sequences = 1, prompt = 128, tokens = 128;
  bool json = false;
};

struct WhatIf {
  std::string change;
  absl::StatusOr<generate::GenerationPlan> plan;
};

absl::Status CheckFlags(const PlanGenerateFlags& flags) {
  for (const auto& [name, value] : {std::pair{"--sequences", flags.sequences},
                                    {"--prompt-tokens", flags.prompt},
                                    {"--tokens", flags.tokens}}) {
    if (value < 1 || value > int64_t{1} << 31)
      return absl::InvalidArgumentError(absl::StrCat(name, " ", value, ": must be 1 or more"));
  }
  return absl::OkStatus();
}

// Each changes one thing. Batches are asked for with as many texts.
std::vector<WhatIf> AskWhatIf(const generate::GenerationSizes& sizes,
                              const generate::GeneratorOptions& options, bool coded) {
  const generate::GenerationWish& wish = options.wish;
  std::vector<WhatIf> all;
  const auto ask = [&](const std::string& change, const generate::GenerationSizes& of,
                       const generate::GenerationWish& with) {
    all.push_back({change, generate::PlanGeneration(of, with)});
  };
  generate::GenerationWish other = wish;
  other.budget_bytes = 2 * wish.budget_bytes;
  ask("twice the memory", sizes, other);
  other = wish;
  other.budget_bytes = wish.budget_bytes / 2;
  ask("half of the memory", sizes, other);
  if (wish.device.has_value()) {
    other = wish;
    other.device->budget_bytes = 2 * wish.device->budget_bytes;
    ask("twice the device's memory", sizes, other);
  }
  other = wish;
  other.drive_bytes_per_second = 2 * wish.drive_bytes_per_second;
  ask("a drive of twice the speed", sizes, other);
  for (const int bits : {8, 4}) {
    if (coded) break;
    generate::GenerationSizes packed = sizes;
    other = wish;
    const absl::Status measured = generate::PlanAsPacked({.bits = bits}, options, &packed, &other);
    if (!measured.ok()) {
      all.push_back({absl::StrCat("packed in ", bits, " bit"), measured});
      continue;
    }
    ask(absl::StrCat("packed in ", bits, " bit"), packed, other);
  }
  for (const int64_t batch : {1, 8, 32, 128}) {
    other = wish;
    other.batch = batch;
    other.sequences = std::max(batch, wish.sequences);
    ask(absl::StrCat(batch, batch == 1 ? " text at once" : " texts at once"), sizes, other);
  }
  return all;
}

std::string TextOf(const WhatIf& what) {
  if (!what.plan.ok()) return absl::StrFormat("  %-28s %s\n", what.change, MessageOf(what.plan.status()));
  return absl::StrFormat("  %-28s %8.2f tokens/s, %.3f s a pass, bound by %s\n", what.change,
                         what.plan->tokens_per_second(), what.plan->pass_seconds,
                         generate::PassBoundName(what.plan->bound));
}

absl::Status Plan(const PlanGenerateFlags& flags, const OpenGenerateDevice& open_device, std::ostream& out,
                  std::ostream& err) {
  RETURN_IF_ERROR(CheckFlags(flags));
  ASSIGN_OR_RETURN(const TextModel model,
                   OpenTextModel(flags.dirs, std::nullopt, flags.model, kPlanGenerateName, err));
  const auto threads = static_cast<int>(flags.memory.threads.value_or(model.threads));
  generate::GeneratorOptions options;
  RETURN_IF_ERROR(ResolveGenerateMemory(flags.memory, threads, open_device, &options));
  options.wish.sequences = flags.sequences;
  options.wish.prompt = flags.prompt;
  options.wish.positions = flags.prompt + flags.tokens;
  if (options.wish.positions > model.window) {
    return absl::InvalidArgumentError(absl::StrCat("--prompt-tokens ", flags.prompt, " --tokens ",
                                                   flags.tokens, ": the model takes ", model.window,
                                                   ", prompt and text together"));
  }
  Preparing preparing(/*quiet=*/flags.json);
  preparing.Show("measuring drive and processor");
  ASSIGN_OR_RETURN(const generate::GenerationSizes sizes,
                   generate::Generator::Survey(*model.model, OpenWeightsOf(model), &options));
  preparing.Clear();
  ASSIGN_OR_RETURN(const generate::GenerationPlan plan, generate::PlanGeneration(sizes, options.wish));
  // Nothing packs what is coded already.
  const bool coded = model.packed.has_value() || sizes.scaled.has_value();
  const std::vector<WhatIf> what_ifs = AskWhatIf(sizes, options, coded);
  const int64_t parameters = model.model->Layout().parameters();
  if (flags.json) {
    nlohmann::ordered_json json = {{"version", 1},
                                   {"params", parameters},
                                   {"weights", WeightBits(model)},
                                   {"threads", threads},
                                   {"prompt_tokens", flags.prompt},
                                   {"tokens", flags.tokens},
                                   {"sequences", flags.sequences}};
    json.update(GenerationPlanJson(plan, options.wish));
    for (const WhatIf& what : what_ifs) {
      nlohmann::ordered_json& entry = json["what_if"].emplace_back();
      entry["change"] = what.change;
      entry["error"] = nullptr;
      if (!what.plan.ok()) entry["error"] = MessageOf(what.plan.status());
      if (what.plan.ok()) entry.update(GenerationPlanJson(*what.plan, options.wish));
    }
    out << json.dump(2) << "\n" << std::flush;
    return absl::OkStatus();
  }
  const std::string form = sizes.scaled.has_value() ? std::string(models::ScaledCodeName(*sizes.scaled))
                                                    : absl::StrCat(WeightBits(model), " bit");
  out << absl::StrFormat("%s: %.2f billion parameters in %s; texts of %d tokens after %d of prompt\n",
                         flags.dirs.front(), static_cast<double>(parameters) / 1e9, form, flags.tokens,
                         flags.prompt)
      << GenerationPlanText(plan, options.wish) << "what if\n";
  for (const WhatIf& what : what_ifs) out << TextOf(what);
  out << std::flush;
  return absl::OkStatus();
}

}  // namespace

bool AsksForGeneration(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--generate" || argument.substr(0, 11) == "--generate=") return true;
  }
  return false;
}

int RunPlanGenerate(const OpenGenerateDevice& open_device, int argc, const char* const* argv,
                    std::ostream& out, std::ostream& err) {
  CLI::App app("Shows what generating text with a model would take of memory, drive and time",
               kPlanGenerateName);
  PlanGenerateFlags flags;
  app.add_option("--generate", flags.dirs,
                 "Hugging Face directory, packed or not, state directory or checkpoint; all directories of a "
                 "striped run")
      ->required();
  DeclareGenerateMemory(app, flags.memory);
  DeclareFrozenWeights(app, flags.model);
  app.add_option("--sequences", flags.sequences, "Texts to be generated in all [1]");
  app.add_option("--prompt-tokens", flags.prompt, "Tokens of the longest prompt [128]");
  app.add_option("--tokens", flags.tokens, "Tokens of each text, at most [128]");
  app.add_flag("--json", flags.json, "Write the plan as JSON");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Plan(flags, open_device, out, err);
  return status.ok() ? kExitOk : Fail(kPlanGenerateName, status, err);
}

}  // namespace penstock::tools
