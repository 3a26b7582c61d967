// What lies in state directories and checkpoints, for Python, without a model or an engine: the fp32 masters
// of what Penstock or DeepSpeed wrote, by address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "base/status_macros.h"
#include "deepspeed_checkpoint.h"
#include "errors.h"
#include "gil.h"
#include "models/deepspeed/checkpoint.h"
#include "owned.h"
#include "swap/checkpoint_files.h"
#include "swap/safetensors.h"
#include "swap/store.h"
#include "tools/state/state_reader.h"
#include "zero/compute/tile_format.h"
#include "zero/config/json_field.h"
#include "zero/engine/state_identity.h"
#include "zero/ranks/sharded_state.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

std::string Dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// A run or checkpoint of any number of ranks, read tile by tile.
class StateMasters {
 public:
  static absl::StatusOr<std::unique_ptr<StateMasters>> Open(const std::vector<std::string>& directories) {
    auto made = std::make_unique<StateMasters>();
    ASSIGN_OR_RETURN(made->found_, tools::FindState(directories));
    const std::string& name = made->found_.name();
    const absl::Status free = tools::CheckNotTrained(made->found_);
    if (absl::IsFailedPrecondition(free)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name, " is in use by a training: close its engine, or read what engine.save_checkpoint writes"));
    }
    RETURN_IF_ERROR(free);
    made->identity_ = zero::WholeIdentity(made->found_.inspections.front().shape.identity);
    if (zero::JsonField<bool>(made->identity_, "frozen_elsewhere").value_or(false)) {
      return absl::FailedPreconditionError(
          absl::StrCat(name,
                       " has what trains alone, beside weights that lie elsewhere (base_weights): load it "
                       "(resume=True, or engine.load_checkpoint) and take model.state_dict(), or save the "
                       "adapters with model.save_pretrained"));
    }
    ASSIGN_OR_RETURN(const tiering::Precision precision, zero::PrecisionOf(made->identity_, name));
    ASSIGN_OR_RETURN(made->block_elements_, zero::BlockElementsOf(made->identity_, name));
    const auto weights = zero::ParseDType(precision.name);
    if (!weights.has_value())
      return absl::FailedPreconditionError(absl::StrCat(name, " does not say what its tiles hold"));
    made->format_.weights = *weights;
    aio::ArenaOptions options;
    options.lock = false;
    options.bytes = kTiles * zero::ShardedState::MemoryBytes(made->found_.inspections);
    ASSIGN_OR_RETURN(made->arena_, aio::Arena::Create(options));
    aio::EngineOptions io_options;
    io_options.log = [](std::string_view) {};
    ASSIGN_OR_RETURN(made->io_, aio::Engine::Create(std::move(io_options)));
    ASSIGN_OR_RETURN(
        made->state_,
        zero::ShardedState::Open(*made->io_, made->found_.parts, made->found_.inspections,
                                 made->block_elements_, precision, {made->arena_->data(), options.bytes}));
    made->segments_.resize(*weights == kernels::DType::kFp32 ? 1 : 2);
    for (std::vector<float>& segment : made->segments_) {
      segment.resize(kPiece);
      made->places_.push_back(segment.data());
    }
    return made;
  }

  const std::string& path() const { return found_.name(); }
  const nlohmann::json& identity() const { return identity_; }
  const swap::Recovered& recovered() const { return state_->recovered(); }

  absl::Status Read(int block, int64_t first, int64_t elements, float* to) {
    const auto blocks = static_cast<int>(block_elements_.size());
    const bool there = block >= 0 && block < blocks && first >= 0 && elements >= 0 &&
                       elements <= block_elements_[static_cast<size_t>(block)] - first;
    if (!there)
      return absl::InvalidArgumentError(absl::StrCat(path(), ": block ", block, " has no elements ", first,
                                                     " to ", first, " + ", elements));
    for (int64_t done = 0; done < elements; done += kPiece) {
      zero::TileMemory tile;
      tile.elements = std::min(kPiece, elements - done);
      RETURN_IF_ERROR(state_->Read(tiering::BlockIndex(block), first + done, tile.elements, places_));
      tile.weights = places_[0];
      tile.state.assign(places_.begin() + 1, places_.end());
      zero::ReadMasters(format_, tile, to + done);
    }
    return absl::OkStatus();
  }

 private:
  static constexpr uint64_t kTiles = 4;       // on their way at once
  static constexpr int64_t kPiece = 1 << 18;  // elements

  // Destroyed from the last to the first.
  tools::FoundState found_;
  nlohmann::json identity_;
  std::vector<int64_t> block_elements_;
  zero::TileFormat format_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> io_;
  std::unique_ptr<zero::ShardedState> state_;
  std::vector<std::vector<float>> segments_;  // those of a tile that masters are made of
  std::vector<void*> places_;
};

class PyStateMasters {
 public:
  explicit PyStateMasters(const std::vector<std::string>& directories)
      : masters_(MakeOwned(Opened(directories))) {}

  std::string Path() const { return Get().path(); }
  std::string Identity() const { return Dump(Get().identity()); }
  std::string Payload() const { return Dump(tools::ParseOrNull(Get().recovered().payload)); }
  void Read(int block, int64_t first, int64_t elements, uint64_t address) {
    StateMasters& masters = Get();
    absl::Status status;
    {
      const GilReleased released;
      status = masters.Read(block, first, elements, reinterpret_cast<float*>(address));
    }
    RaiseUnlessOk(status, {.path = masters.path()});
  }

 private:
  static std::unique_ptr<StateMasters> Opened(const std::vector<std::string>& directories) {
    absl::StatusOr<std::unique_ptr<StateMasters>> opened;
    {
      const GilReleased released;
      opened = StateMasters::Open(directories);
    }
    return ValueOrRaise(std::move(opened), {.path = directories.empty() ? "" : directories.front()});
  }
  StateMasters& Get() const {
    masters_->CheckHere();
    return masters_->get();
  }
  std::shared_ptr<Owned<StateMasters>> masters_;
};

class PyDeepSpeedMasters {
 public:
  explicit PyDeepSpeedMasters(const std::string& path)
      : path_(path),
        checkpoint_(ValueOrRaise(models::DeepSpeedCheckpoint::OpenWeights(path), {.path = path})) {}

  std::string Said() const {
    nlohmann::json weights = nlohmann::json::array(), frozen = nlohmann::json::array();
    nlohmann::json tied = nlohmann::json::object();
    std::vector<std::string> unread = checkpoint_->progress().unread;
    for (size_t number = 0; number < checkpoint_->weights().size(); ++number) {
      const models::DeepSpeedCheckpoint::Weight& weight = checkpoint_->weights()[number];
      if (!weight.tied_to.empty()) {
        tied[weight.name] = weight.tied_to;
        continue;
      }
      if (weight.frozen) frozen.push_back(weight.name);
      const char* const dtype = weight.other.has_value() ? TorchName(weight.other->dtype) : "float32";
      if (dtype == nullptr) {
        unread.push_back(absl::StrCat(weight.name, " (of no type of torch's)"));
        continue;
      }
      weights.push_back({number, weight.name, weight.sizes, dtype});
    }
    return Dump({{"directory", checkpoint_->directory()},
                 {"weights", std::move(weights)},
                 {"tied", std::move(tied)},
                 {"frozen", std::move(frozen)},
                 {"unread", std::move(unread)}});
  }
  void Read(size_t number, uint64_t address) {
    const models::DeepSpeedCheckpoint::Weight& weight = checkpoint_->weights().at(number);
    absl::Status status;
    {
      const GilReleased released;
      if (weight.other.has_value()) {
        const auto bytes =
            static_cast<size_t>(weight.other->elements) * swap::DtypeBytes(weight.other->dtype);
        status = checkpoint_->ReadModuleBuffer(*weight.other, {reinterpret_cast<std::byte*>(address), bytes});
      } else {
        status = weight.values.Read(0, weight.values.elements(), reinterpret_cast<float*>(address), &buffer_);
      }
    }
    RaiseUnlessOk(status, {.path = path_});
  }
  void Check() const {
    absl::Status status;
    {
      const GilReleased released;
      status = checkpoint_->CheckRead();
    }
    RaiseUnlessOk(status, {.path = path_});
  }

 private:
  const std::string path_;
  const std::unique_ptr<models::DeepSpeedCheckpoint> checkpoint_;
  models::ReadBuffer buffer_;
};

}  // namespace

void BindState(nb::module_& module) {
  nb::class_<PyStateMasters>(
      module, "StateMasters",
      "The fp32 masters of a state directory or checkpoint. OSError: there is none, or "
      "a training has it.")
      .def(nb::init<const std::vector<std::string>&>(), nb::arg("directories"))
      .def_prop_ro("path", &PyStateMasters::Path)
      .def_prop_ro("identity", &PyStateMasters::Identity, "JSON: what the state is made of.")
      .def_prop_ro("payload", &PyStateMasters::Payload, "JSON: what its last commit says.")
      .def("read", &PyStateMasters::Read, nb::arg("block"), nb::arg("first"), nb::arg("elements"),
           nb::arg("address"));
  nb::class_<PyDeepSpeedMasters>(module, "DeepSpeedMasters",
                                 "The weights of a checkpoint of DeepSpeed's, in fp32, and its buffers.")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def_prop_ro("said", &PyDeepSpeedMasters::Said,
                   "JSON: its directory, weights as [number, name, sizes, type], names that are frozen, what "
                   "is unread.")
      .def("read", &PyDeepSpeedMasters::Read, nb::arg("number"), nb::arg("address"))
      .def("check", &PyDeepSpeedMasters::Check,
           "Checks the checksums of all of which something was read; raises where they do not match.");
  module.def(
      "check_outside_stores",
      [](const std::string& directory) {
        RaiseUnlessOk(swap::CheckOutsideStores(directory), {.path = directory});
      },
      nb::arg("directory"),
      "ValueError: the directory, which need not be there, holds a state or checkpoint, or lies in a "
      "checkpoint.");
}

}  // namespace penstock::python
