// `penstock`: a verb, then its own arguments.
#include <cxxabi.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <typeinfo>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/program.h"
#include "base/status_macros.h"
#include "models/families/family.h"
#include "models/families/lora.h"
#include "tools/base/cli.h"
#include "tools/base/file_limit.h"
#include "tools/base/verbs.h"
#include "tools/base/version.h"
#include "tools/machine/verb_env.h"
#include "tools/machine/verb_estimate.h"
#include "tools/pages/verb_settings.h"
#include "tools/penstock/lora_flags.h"
#include "tools/penstock/vocabulary_flags.h"
#include "zero/config/nearest_name.h"

namespace penstock::tools {
namespace {

// Waiting threads must sleep: updates and I/O need the cores. libgomp reads that from the environment, once,
// in its constructor, which runs before ours; and what is set before it, in .preinit_array, glibc throws away
// when it sets up its own. So the program begins anew with the variable, before any constructor has run.
void PreferSleepingThreads(int, char** argv, char** environment) {
  constexpr char kPolicy[] = "OMP_WAIT_POLICY=";
  std::vector<char*> variables;
  for (char** each = environment; *each != nullptr; ++each) {
    if (std::strncmp(*each, kPolicy, sizeof(kPolicy) - 1) == 0) return;
    variables.push_back(*each);
  }
  char passive[] = "OMP_WAIT_POLICY=passive";
  variables.push_back(passive);
  variables.push_back(nullptr);
  (void)execve("/proc/self/exe", argv, variables.data());  // without it everything works, but slower
}
__attribute__((section(".preinit_array"),
               used)) void (*const prefer_sleeping_threads)(int, char**, char**) = PreferSleepingThreads;

// Memory may end where nobody can catch it: in the constructors of libraries, or on their threads. Nothing is
// allocated here.
std::terminate_handler other_ends = nullptr;
[[noreturn]] void EndOfMemory() {
  const std::type_info* const thrown = abi::__cxa_current_exception_type();
  if (thrown == nullptr ||
      (*thrown != typeid(std::bad_alloc) && *thrown != typeid(std::bad_array_new_length))) {
    if (other_ends != nullptr) other_ends();  // a mistake of ours: it says which, and leaves a core
    std::abort();
  }
  (void)!write(STDERR_FILENO, "penstock", 8);
  (void)!write(STDERR_FILENO, kNoMemory.data(), kNoMemory.size());
  _exit(kExitFailed);
}
void TellEndOfMemory(int, char**, char**) { other_ends = std::set_terminate(EndOfMemory); }
__attribute__((section(".preinit_array"), used)) void (*const tell_end_of_memory)(int, char**,
                                                                                  char**) = TellEndOfMemory;

int Estimate(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  const auto size = [](const std::string& name, const AdapterWish& wish) -> absl::StatusOr<ModelSize> {
    ASSIGN_OR_RETURN(std::shared_ptr<const models::LanguageModel> model, models::OpenModel(name));
    if (wish.rank > 0) {
      TrainOptions flags;
      flags.lora_rank = wish.rank;
      if (!wish.targets.empty()) flags.lora_targets = wish.targets;
      ASSIGN_OR_RETURN(model, Adapted(std::move(model), flags, std::nullopt));
    }
    const models::ModelLayout layout = model->Layout();
    ASSIGN_OR_RETURN(model, InTiles(std::move(model), TrainOptions()));
    return ModelSize{.params = layout.parameters(),
                     .largest_layer_params = layout.largest_block_parameters(),
                     .frozen_params = wish.rank > 0 ? models::WithoutAdapters(layout).parameters() : 0,
                     .largest_block_params = model->Layout().largest_block_parameters(),
                     .vocabulary_tiles = models::VocabularyTiles(*model)};
  };
  return RunEstimate(argc, argv, out, err, size);
}

struct Verb {
  const char* name;
  const char* what;
  int (*run)(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
};

constexpr Verb kVerbs[] = {
    {"train", "train a model whose state may be many times larger than memory", RunTrain},
    {"plan", "show where everything would live and what a step would take", RunPlan},
    {"report", "draw trainings from report, log and trace as one page", RunReport},
    {"estimate", "DeepSpeed-compatible memory estimates, and the NVMe tier beyond them", Estimate},
    {"generate", "generate text with a model larger than memory", RunGenerate},
    {"pack", "code a model's weights in 8 or 4 bit for generate", RunPack},
    {"sample", "generate text from a state directory or checkpoint", RunSample},
    {"export", "stream weights out to safetensors", RunExport},
    {"zero_to_fp32", "export, by DeepSpeed's name; of its checkpoints too", RunExport},
    {"export-checkpoint", "write a universal checkpoint that DeepSpeed goes on from", RunExportCheckpoint},
    {"import-checkpoint", "go on with a run of DeepSpeed's: ZeRO-1, 2, 3 or universal", RunImportCheckpoint},
    {"inspect", "what a state directory or checkpoint holds", RunInspect},
    {"verify", "read a state directory or checkpoint back and check every checksum", RunVerify},
    {"settings", "what can be set, in the JSON, by flag or from Python", RunSettings},
    {"env", "what this machine offers, and what its lack costs", RunEnv},
};

void Help(std::ostream& out) {
  out << "penstock " << kVersion
      << ": trains models larger than GPU and host memory\n\nusage: penstock VERB [arguments]\n\n";
  for (const Verb& verb : kVerbs)
    out << "  " << verb.name << std::string(19 - std::strlen(verb.name), ' ') << verb.what << "\n";
  out << "\npenstock VERB --help tells a verb's arguments; penstock --version the version.\n";
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    Help(std::cerr);
    return kExitWrong;
  }
  const std::string verb_name = argv[1];
  if (verb_name == "--help" || verb_name == "-h" || verb_name == "help") {
    Help(std::cout);
    return kExitOk;
  }
  if (verb_name == "--version") {
    std::cout << "penstock " << kVersion << "\n" << std::flush;
    return kExitOk;
  }
  std::vector<std::string_view> names;
  for (const Verb& verb : kVerbs) {
    if (verb_name == verb.name) return verb.run(argc - 1, argv + 1, std::cout, std::cerr);
    names.emplace_back(verb.name);
  }
  std::cerr << "penstock: unknown verb \"" << OneLine(verb_name) << "\"" << zero::DidYouMean(verb_name, names)
            << "; see penstock --help"
            << "\n"
            << std::flush;
  return kExitWrong;
}

}  // namespace
}  // namespace penstock::tools

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  penstock::tools::AllowManyFiles();
  std::signal(SIGPIPE, SIG_IGN);  // who reads along may go; the training stays
  std::string arguments;
  for (int i = 1; i < argc; ++i) absl::StrAppend(&arguments, i == 1 ? "" : " ", argv[i]);
  return penstock::tools::OrBug([&] { return penstock::tools::Main(argc, argv); },
                                std::string("penstock ") + penstock::tools::kVersion, arguments, std::cerr);
}
