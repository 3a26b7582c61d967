// Ranks: the processes that train one model, for Python. Where they meet, torch.distributed's process group
// has told them (penstock/_engine/_ranks.py); from then on they are connected by sockets
// (zero/ranks/tcp_mesh.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine_options.h"
#include "errors.h"
#include "gil.h"
#include "owned.h"
#include "ranks.h"
#include "settings.h"
#include "zero/engine/change_ranks.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/handshake.h"
#include "zero/ranks/rank_environment.h"
#include "zero/ranks/sharded_state.h"
#include "zero/ranks/tcp_mesh.h"
#include "zero/ranks/tcp_store.h"

namespace nb = nanobind;

namespace penstock::python {

using zero::Channel;

class PyMeetingPlace {
 public:
  PyMeetingPlace(const std::string& address, const std::string& secret) {
    const zero::RankSecret known = ValueOrRaise(zero::RankSecret::Of(secret));
    const GilReleased released;
    store_ = MakeOwned(std::make_unique<std::shared_ptr<zero::TcpStore>>(std::make_shared<zero::TcpStore>(
        address, /*port=*/0, /*serves=*/true, std::chrono::seconds(30), known)));
  }
  int Port() const { return store_->get()->port(); }
  std::shared_ptr<zero::TcpStore> store() const { return store_->get(); }

 private:
  std::shared_ptr<Owned<std::shared_ptr<zero::TcpStore>>> store_;
};

constexpr size_t kPiece = 256 << 10;

PyRanks::PyRanks(int rank, int world, int local_rank, int local_world, const std::string& address, int port,
                 const std::string& session, const std::string& secret, double patience_seconds,
                 const PyMeetingPlace* place) {
  zero::RankEnvironment environment;
  environment.rank = rank;
  environment.world = world;
  environment.local_rank = local_rank;
  environment.local_world = local_world;
  environment.master_address = address;
  environment.master_port = port;
  environment.session = session;
  zero::WatchOver options;
  options.secret = secret;
  options.comm.patience_seconds = patience_seconds;
  options.comm.meeting_seconds = 10 * patience_seconds;
  options.secret_way = "give PENSTOCK_RANKS_SECRET to all of them, the same one, or to none";
  if (place != nullptr) options.store = place->store();
  absl::StatusOr<std::unique_ptr<zero::Comm>> comm;
  {
    const GilReleased released;
    comm = zero::ConnectTcp(environment, options);
  }
  auto connected = std::make_unique<ConnectedRanks>();
  connected->comm = ValueOrRaise(std::move(comm));
  held_ = MakeOwned(std::move(connected));
}

std::vector<std::string> PyRanks::Texts(const std::string& what, const std::string& mine) const {
  const HeldRanks held = this->held();
  absl::StatusOr<std::vector<std::string>> texts;
  {
    const GilReleased released;
    texts = held->get().comm->AllTexts(Channel::kSetup, {.name = what.c_str()}, mine);
  }
  return ValueOrRaise(std::move(texts));
}
void PyRanks::Agree(const std::string& json) const {
  const HeldRanks held = this->held();
  const nlohmann::json mine = ParseJson(json);
  absl::Status status;
  {
    const GilReleased released;
    status = zero::AgreeOnOptions(*held->get().comm, mine);
  }
  RaiseUnlessOk(status);
}
void PyRanks::Share(uint64_t address, uint64_t bytes, int from) const {
  const HeldRanks held = this->held();
  absl::Status status;
  {
    const GilReleased released;
    zero::Comm& comm = *held->get().comm;
    auto* const at = reinterpret_cast<std::byte*>(address);
    std::vector<std::byte> pieces(kPiece * static_cast<size_t>(comm.world()));
    for (uint64_t done = 0; done < bytes && status.ok(); done += kPiece) {
      const auto n = static_cast<size_t>(std::min<uint64_t>(kPiece, bytes - done));
      std::byte* const mine = pieces.data() + static_cast<size_t>(comm.rank()) * n;
      if (comm.rank() == from) std::memcpy(mine, at + done, n);
      status = comm.AllGather(Channel::kSetup, {.name = "a rank's values"}, pieces.data(), n);
      if (status.ok() && comm.rank() != from)
        std::memcpy(at + done, pieces.data() + static_cast<size_t>(from) * n, n);
    }
  }
  RaiseUnlessOk(status);
}
void PyRanks::Abort(const std::string& why) const {
  if (held_ == nullptr || !held_->here()) return;
  const HeldRanks held = held_;
  const GilReleased released;
  held->get().comm->Abort(absl::CancelledError(why));
}
HeldRanks PyRanks::held() const {
  if (held_ == nullptr) throw std::runtime_error("these ranks were closed");
  held_->CheckHere();
  return held_;
}

namespace {

int64_t RanksOf(const std::vector<std::string>& directories) {
  return ValueOrRaise(zero::RanksIn(directories), {.path = directories.empty() ? "" : directories.front()});
}

zero::Comm* CommOf(const HeldRanks& held) { return held == nullptr ? nullptr : held->get().comm.get(); }

void FinishChange(const std::vector<std::string>& directories, const PyRanks* ranks) {
  const HeldRanks held = ranks == nullptr ? nullptr : ranks->held();
  absl::Status status;
  {
    const GilReleased released;
    status = zero::FinishChangeOfRanks(CommOf(held), directories);
  }
  RaiseUnlessOk(status, {.path = directories.empty() ? "" : directories.front()});
}

std::pair<int64_t, bool> ChangeRanks(const PySettings& settings, const PyRanks* ranks,
                                     const std::string& checkpoint) {
  const HeldRanks held = ranks == nullptr ? nullptr : ranks->held();
  const std::vector<std::string>& directories = settings.resolved().directories.paths;
  absl::StatusOr<zero::OtherRanks> other;
  absl::Status status;
  {
    const GilReleased released;
    other = zero::FindOtherRanks(CommOf(held), directories, checkpoint);
    if (other.ok() && !other->from.empty()) {
      zero::EngineOptions options;
      TakeStorage(settings.resolved(), &options);
      options.storage.checkpoints.on_demand = true;
      if (held != nullptr) options.comm = held->get().comm;
      status = zero::ChangeRanks(other->from, directories, std::move(options));
    }
  }
  const zero::OtherRanks found = ValueOrRaise(std::move(other), {.path = directories.front()});
  RaiseUnlessOk(status, {.path = directories.front()});
  return {found.from.empty() ? 0 : found.ranks, !found.from.empty() && found.from != directories};
}

}  // namespace

void BindRanks(nb::module_& module) {
  module.def(
      "rank_directories",
      [](const std::vector<std::string>& directories, int rank) {
        return zero::RankDirectories(directories, rank);
      },
      nb::arg("directories"), nb::arg("rank"), "Where a rank keeps its part of what all ranks keep there.");
  module.def(
      "ranks_of", &RanksOf, nb::arg("directories"),
      "Of how many ranks the run in state directories is, damaged or not; 0: there is none. OSError: that "
      "cannot be read.");
  module.def("finish_change_of_ranks", &FinishChange, nb::arg("directories"), nb::arg("ranks").none(),
             "Before a run is looked for: finishes a change_ranks that a kill has cut short when it counted "
             "already. All ranks call it.");
  module.def("change_ranks", &ChangeRanks, nb::arg("settings"), nb::arg("ranks").none(),
             nb::arg("checkpoint"),
             "Makes the run in the state directories one of as many ranks as there are, and returns of how "
             "many it was, 0 where nothing had to be changed, and whether it is made of the checkpoint, "
             "since parts of it are gone. checkpoint: the newest one; empty: none is known. OSError: parts "
             "are gone, and there is no checkpoint. All ranks call it.");
  nb::class_<PyMeetingPlace>(module, "MeetingPlace", "Where ranks meet; the first of them makes it.")
      .def(nb::init<const std::string&, const std::string&>(), nb::arg("address"), nb::arg("secret"))
      .def_prop_ro("port", &PyMeetingPlace::Port);
  nb::class_<PyRanks>(module, "Ranks", nb::is_weak_referenceable(),
                      "The processes that train one model, connected. All of them make the same calls.")
      .def(nb::init<int, int, int, int, const std::string&, int, const std::string&, const std::string&,
                    double, const PyMeetingPlace*>(),
           nb::arg("rank"), nb::arg("world"), nb::arg("local_rank"), nb::arg("local_world"),
           nb::arg("address"), nb::arg("port"), nb::arg("session"), nb::arg("secret"),
           nb::arg("patience_seconds"), nb::arg("place").none())
      .def("texts", &PyRanks::Texts, nb::arg("what"), nb::arg("mine"))
      .def("agree", &PyRanks::Agree, nb::arg("json"))
      .def("share", &PyRanks::Share, nb::arg("address"), nb::arg("bytes"), nb::arg("source"))
      .def("abort", &PyRanks::Abort, nb::arg("why"))
      .def("failure", &PyRanks::Failure)
      .def_prop_ro("name", &PyRanks::Name)
      .def("close", &PyRanks::Close);
}

}  // namespace penstock::python
