// What trainings leave for people, for Python: pages, DeepSpeed's monitors, whose run a directory holds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "engine_options.h"
#include "errors.h"
#include "run/watch/monitors.h"
#include "run/watch/written_count.h"
#include "settings.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tools/base/process_start.h"
#include "tools/pages/report_page.h"
#include "tools/pages/run_files.h"
#include "zero/ranks/sharded_state.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

// csv_monitor and tensorboard of a configuration.
class PyMonitors {
 public:
  PyMonitors(const PySettings& settings, const std::string& run_id, bool resumes,
             const std::vector<std::string>& replaces, bool scales_loss)
      : monitors_(Open(settings, run_id, resumes, replaces, scales_loss)) {}
  PyMonitors(const PyMonitors&) = delete;
  PyMonitors& operator=(const PyMonitors&) = delete;
  void Begin(int64_t samples) { RaiseUnlessOk(monitors_.Begin(samples)); }
  void Append(const std::string& entry) { RaiseUnlessOk(monitors_.Append(ParseJson(entry))); }

 private:
  static run::Monitors Open(const PySettings& settings, const std::string& run_id, bool resumes,
                            const std::vector<std::string>& replaces, bool scales_loss) {
    const run::MonitorOwner owner{.run_id = run_id,
                                  .resumes = resumes,
                                  .replaces = std::set<std::string>(replaces.begin(), replaces.end())};
    return ValueOrRaise(run::Monitors::Open(settings.resolved().config, owner, scales_loss));
  }
  run::Monitors monitors_;
};

// Of the last commit's record; "null" where that does not say it.
std::string RecordOf(const std::vector<std::string>& directories, const std::string& what) {
  const auto parts = ValueOrRaise(zero::FindShards(directories));  // of ranks, where they are several
  const auto found = ValueOrRaise(swap::Inspect(parts.front()));
  const auto payload = ValueOrRaise(
      penstock::ParseJsonObject(found.record.payload, absl::StrCat(directories.front(), ": its record")));
  return payload.contains(what) ? payload[what].dump() : "null";
}

// Of several ranks, the last one that all of them have.
int64_t CommittedStepOf(const std::vector<std::string>& directories) {
  int64_t step = std::numeric_limits<int64_t>::max();
  for (const auto& part : ValueOrRaise(zero::FindShards(directories)))
    step = std::min(step, static_cast<int64_t>(ValueOrRaise(swap::Inspect(part)).record.step));
  return step;
}

}  // namespace

void BindWatch(nb::module_& module) {
  module.def(
      "report_page",
      [](const std::vector<std::string>& files, double rated_bytes_written) {
        return tools::ReportPage(ValueOrRaise(tools::ReadRuns(files)), rated_bytes_written);
      },
      nb::arg("files"), nb::arg("rated_bytes_written") = 600e12,
      "Reports and logs as one page of HTML. rated_bytes_written: of one drive.");
  module.def(
      "record_of", &RecordOf, nb::arg("directories"), nb::arg("what") = "run",
      "What the run in state directories or a checkpoint was made with, as JSON; with `step` what its last "
      "commit says. null where it does not say so. OSError, ValueError: there is no run, or none that can be "
      "read.");
  module.def(
      "committed_step_of", &CommittedStepOf, nb::arg("directories"),
      "The step of the last commit of the run in state directories, or of a checkpoint. OSError, ValueError: "
      "there is none, or none that can be read.");
  module.def(
      "checkpoints_in",
      [](const std::string& directory) {
        std::vector<std::string> names;
        for (const swap::CheckpointEntry& entry :
             ValueOrRaise(swap::ListCheckpoints(directory), {.path = directory}))
          names.push_back(entry.name);
        return names;
      },
      nb::arg("directory"),
      "The names of Penstock's checkpoints in a directory, oldest first. OSError: it cannot be listed.");
  module.def("process_start_ns", &tools::ProcessStartNs,
             "When this process was started, in nanoseconds since the epoch; None: the kernel does not say.");
  nb::class_<run::WrittenCount>(
      module, "WrittenCount",
      "What a run has written to its drives, in a file beside its state, for what is killed before a commit.")
      .def_static(
          "read",
          [](const std::string& directory, const std::string& recorded) {
            return ValueOrRaise(run::WrittenCount::Read(directory, ParseJson(recorded)), {.path = directory});
          },
          nb::arg("directory"), nb::arg("recorded"),
          "Of a run that goes on, or starts over where `recorded` is null. OSError: the file cannot be read.")
      .def(nb::init<const std::string&>(), nb::arg("directory"), "Of a new run.")
      .def_prop_ro("before", &run::WrittenCount::before)
      .def(
          "save",
          [](run::WrittenCount& count, const std::string& run_id, int64_t bytes) {
            RaiseUnlessOk(count.Save(run_id, bytes));
          },
          nb::arg("run_id"), nb::arg("bytes"))
      .def(
          "revert", [](const run::WrittenCount& count) { RaiseUnlessOk(count.Revert()); },
          "The file is what the first `save` found.");
  nb::class_<PyMonitors>(module, "Monitors", "csv_monitor and tensorboard of a DeepSpeed configuration.")
      .def(nb::init<const PySettings&, const std::string&, bool, const std::vector<std::string>&, bool>(),
           nb::arg("settings"), nb::arg("run_id"), nb::arg("resumes"), nb::arg("replaces"),
           nb::arg("scales_loss"))
      .def("begin", &PyMonitors::Begin, nb::arg("samples"))
      .def("append", &PyMonitors::Append, nb::arg("entry"));
}

}  // namespace penstock::python
