// Optimizers whose states live on a drive, for Python: parameters, gradients and states by address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
#include "gil.h"
#include "hyperparameters.h"
#include "optim/drive_optimizer.h"
#include "owned.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

template <class T>
T* Pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

class PyDriveOptimizer {
 public:
  PyDriveOptimizer(const std::string& directory, uint64_t host_memory, double drive_share, int threads,
                   const std::string& backend)
      : log_(std::make_shared<Log>()) {
    optim::DriveOptimizerOptions options;
    options.directory = directory;
    options.host_memory_budget_bytes = host_memory;
    options.drive_share = drive_share;
    options.threads = threads;
    options.backend = ValueOrRaise(aio::ParseBackend(backend));
    options.log = [log = log_](std::string_view line) {
      const std::lock_guard<std::mutex> lock(log->mutex);
      if (log->lines.size() < 1000) log->lines.emplace_back(line);
    };
    absl::StatusOr<std::unique_ptr<optim::DriveOptimizer>> made;
    {
      const GilReleased released;
      made = optim::DriveOptimizer::Create(std::move(options));
    }
    optimizer_ = MakeOwned(ValueOrRaise(std::move(made), {.path = directory}));
  }

  // (elements, element type, has m, has v, initial v) of each; the number of the first.
  int Add(const std::vector<std::tuple<uint64_t, std::string, bool, bool, float>>& parameters) {
    optimizer_->CheckHere();
    std::vector<optim::Parameter> given;
    given.reserve(parameters.size());
    for (const auto& [n, type, has_m, has_v, initial_v] : parameters) {
      given.push_back(
          {.n = n, .type = DTypeOf(type), .has_m = has_m, .has_v = has_v, .initial_v = initial_v});
    }
    absl::StatusOr<int> first = 0;
    {
      const GilReleased released;
      first = optimizer_->get().Add(given);
    }
    const int number = ValueOrRaise(std::move(first), {.path = Failed().path});
    updates_.resize(updates_.size() + given.size());
    return number;
  }

  // groups: hyperparameters; updates: (parameter, its address, gradient's address and type, group, scale of
  // the gradient). Updates are counted here, where no KeyboardInterrupt comes between a step and its count.
  void Step(const std::string& name, const std::vector<std::vector<double>>& groups,
            const std::vector<std::tuple<int, uint64_t, uint64_t, std::string, size_t, double>>& updates) {
    optimizer_->CheckHere();
    std::vector<Hyperparameters> options;
    options.reserve(groups.size());
    for (const std::vector<double>& group : groups) options.push_back(MakeHyperparameters(name, group));
    std::vector<optim::Update> given;
    given.reserve(updates.size());
    for (const auto& [parameter, values, gradient, type, group, scale] : updates) {
      given.push_back({.parameter = parameter,
                       .values = Pointer<void>(values),
                       .gradient = Pointer<const void>(gradient),
                       .gradient_type = DTypeOf(type),
                       .options = options.at(group),
                       .update = updates_.at(static_cast<size_t>(parameter)) + 1,
                       .gradient_scale = scale});
    }
    absl::Status status;
    {
      const GilReleased released;
      status = optimizer_->get().Step(given);
    }
    Check(status);
    for (const optim::Update& update : given) ++updates_[static_cast<size_t>(update.parameter)];
  }

  // (parameter, addresses of master, m and v, 0 for none, updates so far).
  void SetStates(const std::vector<std::tuple<int, uint64_t, uint64_t, uint64_t, int64_t>>& states) {
    optimizer_->CheckHere();
    std::vector<optim::StateValues> given;
    given.reserve(states.size());
    for (const auto& [parameter, master, m, v, updates] : states) {
      given.push_back({.parameter = parameter,
                       .master = Pointer<const float>(master),
                       .m = Pointer<const float>(m),
                       .v = Pointer<const float>(v)});
    }
    absl::Status status;
    {
      const GilReleased released;
      status = optimizer_->get().SetStates(given);
    }
    Check(status);
    for (const auto& state : states) updates_[static_cast<size_t>(std::get<0>(state))] = std::get<4>(state);
  }

  // (parameter, its address, byte offsets of master, m and v in the file, below 0 for none).
  void CopyStates(const std::vector<std::tuple<int, uint64_t, int64_t, int64_t, int64_t>>& states,
                  int descriptor) {
    optimizer_->CheckHere();
    std::vector<optim::StatePlaces> given;
    given.reserve(states.size());
    for (const auto& [parameter, values, master, m, v] : states) {
      given.push_back(
          {.parameter = parameter, .values = Pointer<const void>(values), .master = master, .m = m, .v = v});
    }
    absl::Status status;
    {
      const GilReleased released;
      status = optimizer_->get().CopyStates(given, descriptor);
    }
    Check(status);
  }

  const std::vector<int64_t>& Updates() const { return updates_; }
  bool Broken() const { return !optimizer_->get().broken().ok(); }
  std::string Backend() const { return optimizer_->get().backend_name(); }
  int Descriptor() const { return optimizer_->get().descriptor(); }
  bool Here() const { return optimizer_->here(); }
  nb::dict Stats() const {
    const optim::DriveOptimizerStats stats = optimizer_->get().stats();
    nb::dict out;
    out["drive_bytes"] = stats.drive_bytes;
    out["resident_bytes"] = stats.resident_bytes;
    out["ring_bytes"] = stats.ring_bytes;
    out["tiles"] = stats.tiles;
    out["read_bytes"] = stats.read_bytes;
    out["written_bytes"] = stats.written_bytes;
    return out;
  }
  std::vector<std::string> TakeLog() {
    const std::lock_guard<std::mutex> lock(log_->mutex);
    return std::exchange(log_->lines, {});
  }

 private:
  // Lines of the engine, kept until Python asks for them: no thread of the engine may call Python.
  struct Log {
    std::mutex mutex;
    std::vector<std::string> lines;
  };

  Place Failed() const {
    const optim::FailedTransfer& failed = optimizer_->get().failed_transfer();
    return {.path = failed.path, .transfer = failed.any, .offset = failed.offset, .length = failed.bytes};
  }
  void Check(const absl::Status& status) const {
    if (status.code() == absl::StatusCode::kFailedPrecondition && Broken() &&
        !optimizer_->get().failed_transfer().any) {
      throw std::runtime_error(MessageOf(status));
    }
    RaiseUnlessOk(status, Failed());
  }

  std::shared_ptr<Log> log_;
  std::shared_ptr<Owned<optim::DriveOptimizer>> optimizer_;
  std::vector<int64_t> updates_;  // of each parameter
};

}  // namespace

void BindOptim(nb::module_& module) {
  nb::class_<PyDriveOptimizer>(module, "DriveOptimizer", nb::is_weak_referenceable(),
                               "States of parameters in a file without a name, updated in a ring of buffers.")
      .def(nb::init<const std::string&, uint64_t, double, int, const std::string&>(), nb::arg("directory"),
           nb::arg("host_memory"), nb::arg("drive_share") = -1.0, nb::arg("threads") = 1,
           nb::arg("backend") = "auto")
      .def("add", &PyDriveOptimizer::Add, nb::arg("parameters"))
      .def("step", &PyDriveOptimizer::Step, nb::arg("name"), nb::arg("groups"), nb::arg("updates"))
      .def("set_states", &PyDriveOptimizer::SetStates, nb::arg("states"))
      .def("copy_states", &PyDriveOptimizer::CopyStates, nb::arg("states"), nb::arg("descriptor"))
      .def("updates", &PyDriveOptimizer::Updates, "How many updates each parameter has had.")
      .def("stats", &PyDriveOptimizer::Stats)
      .def("take_log", &PyDriveOptimizer::TakeLog, "What the engine had to say since the last call.")
      .def("fileno", &PyDriveOptimizer::Descriptor)
      .def_prop_ro("broken", &PyDriveOptimizer::Broken)
      .def_prop_ro("backend", &PyDriveOptimizer::Backend)
      .def_prop_ro("here", &PyDriveOptimizer::Here, "False in a forked child, where it must not be used.");
}

}  // namespace penstock::python
