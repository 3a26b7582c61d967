// The programs that need no LibTorch, for the wheel's console scripts: each takes the arguments after its
// name and returns the exit code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "tools/base/cli.h"
#include "tools/base/verbs.h"
#include "tools/ds/ds_io_bench.h"
#include "tools/ds/ds_io_tune.h"
#include "tools/generate/generate_flags.h"
#include "tools/generate/plan_generate.h"
#include "tools/machine/verb_env.h"
#include "tools/machine/verb_estimate.h"
#include "tools/pages/verb_settings.h"
#include "zero/config/nearest_name.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

struct Verb {
  const char* name;
  const char* what;
  int (*run)(int argc, const char* const* argv, std::ostream& out, std::ostream& err);
};

int Generate(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  return tools::RunGenerateWith(/*open_device=*/nullptr, argc, argv, out, err);
}

// Of a generation; a training's wants LibTorch.
int Plan(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  if (tools::AsksForGeneration(argc, argv))
    return tools::RunPlanGenerate(/*open_device=*/nullptr, argc, argv, out, err);
  err << "penstock plan: --generate DIR plans `penstock generate`; a training's plan needs LibTorch, which "
      << "the Python package does not carry: call penstock.plan from Python, or build penstock from source "
      << "(make build)\n";
  return tools::kExitWrong;
}

int Estimate(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  return tools::RunEstimate(argc, argv, out, err);
}

constexpr Verb kVerbs[] = {
    {"generate", "generate text with a model larger than memory", Generate},
    {"pack", "code a model's weights in 8 or 4 bit for generate", tools::RunPack},
    {"plan", "--generate DIR: what generate would take of memory, drive and time", Plan},
    {"sample", "generate text from a state directory or checkpoint", tools::RunSample},
    {"report", "draw trainings from report, log and trace as one page", tools::RunReport},
    {"estimate", "DeepSpeed-compatible memory estimates, and the NVMe tier beyond them", Estimate},
    {"inspect", "what a state directory or checkpoint holds", tools::RunInspect},
    {"verify", "read a state directory or checkpoint back and check every checksum", tools::RunVerify},
    {"settings", "what can be set, in the JSON, by flag or from Python", tools::RunSettings},
    {"env", "what this machine offers, and what its lack costs", tools::RunEnv},
};
// Verbs of the program that is built with LibTorch.
constexpr std::string_view kElsewhere[] = {"train", "export", "export-checkpoint", "import-checkpoint"};

void Help(std::ostream& out) {
  out << "penstock " << PENSTOCK_VERSION << ", of the Python package\n\nusage: penstock VERB [arguments]\n\n";
  for (const Verb& verb : kVerbs)
    out << "  " << verb.name << std::string(14 - std::string_view(verb.name).size(), ' ') << verb.what
        << "\n";
  out << "  zero_to_fp32  fp32 weights of a checkpoint, of penstock.initialize's engine or of DeepSpeed's\n";
  out << "\nWith LibTorch, built from source, there are also:";
  for (const std::string_view name : kElsewhere) out << " " << name;
  out << "\n";
}

int Penstock(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    Help(std::cerr);
    return tools::kExitWrong;
  }
  const std::string& verb_name = arguments.front();
  if (verb_name == "--help" || verb_name == "-h" || verb_name == "help") {
    Help(std::cout);
    return tools::kExitOk;
  }
  if (verb_name == "--version") {
    std::cout << "penstock " << PENSTOCK_VERSION << "\n";
    return tools::kExitOk;
  }
  std::vector<const char*> argv;
  for (const std::string& each : arguments) argv.push_back(each.c_str());
  std::vector<std::string_view> names;
  for (const Verb& verb : kVerbs) {
    if (verb_name == verb.name)
      return verb.run(static_cast<int>(argv.size()), argv.data(), std::cout, std::cerr);
    names.emplace_back(verb.name);
  }
  if (std::count(std::begin(kElsewhere), std::end(kElsewhere), verb_name) > 0) {
    std::cerr << "penstock: " << verb_name
              << " needs LibTorch, which the Python package does not carry: build penstock from source (make "
                 "build); from Python, penstock.initialize trains\n";
    return tools::kExitWrong;
  }
  std::cerr << "penstock: unknown verb \"" << tools::OneLine(verb_name) << "\""
            << zero::DidYouMean(verb_name, names) << "; see penstock --help\n";
  return tools::kExitWrong;
}

// The streams that C++ writes are not Python's: what is in them is out before Python goes on.
int Flushed(int code) {
  std::cout.flush();
  std::cerr.flush();
  return std::fflush(stdout) == 0 && std::cout.good() ? code : std::max(code, tools::kExitFailed);
}

}  // namespace

void BindPrograms(nb::module_& module) {
  module.def(
      "run_ds_io",
      [](const std::vector<std::string>& arguments) {
        return Flushed(tools::DsIoMain(arguments, stdout, stderr));
      },
      nb::arg("arguments"));
  module.def(
      "run_ds_nvme_tune",
      [](const std::vector<std::string>& arguments) {
        return Flushed(tools::TuneMain(arguments, stdout, stderr));
      },
      nb::arg("arguments"));
  module.def(
      "run_penstock",
      [](const std::vector<std::string>& arguments) {
        std::string joined;
        for (const std::string& argument : arguments) joined += (joined.empty() ? "" : " ") + argument;
        return Flushed(tools::OrBug([&] { return Penstock(arguments); },
                                    std::string("penstock ") + PENSTOCK_VERSION, joined, std::cerr));
      },
      nb::arg("arguments"));
}

}  // namespace penstock::python
