// A store on a simulated disk in virtual time, and a training without arithmetic that runs on it until
// something ends it: the ground of the fault campaign. One seed is one sequence of events.
#ifndef PENSTOCK_TESTS_SWAP_SIM_WORLD_H_
#define PENSTOCK_TESTS_SWAP_SIM_WORLD_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "aio/engine.h"
#include "aio/sim_disk.h"
#include "swap/store.h"
#include "tests/swap/fake_model.h"

namespace penstock::swap {

class SimWorld {
 public:
  SimWorld(uint64_t seed, Sync sync, uint32_t directories = 2, uint32_t slots = 2)
      : seed_(seed), layout_(SmallLayout(4, 1500)) {
    options_.slots = slots;
    aio::SimDiskOptions disk_options;
    disk_options.seed = seed;
    disk_options.clock = &clock_;
    disk_options.volatile_cache = sync == Sync::kPower;
    disk_ = std::make_unique<aio::SimDisk>(disk_options);
    options_.sync = sync;
    options_.lock_patience_ms = 0;
    for (uint32_t d = 0; d < directories; ++d) options_.directories.push_back(absl::StrCat("/sim/", d));
    StartEngine();
  }
  ~SimWorld() { StopEngine(); }

  // What the k-th of the following transfers' starts or ends does: called for every event of the engine. True
  // ends the run as if the process had been killed.
  std::function<bool(uint64_t event)> at_event;

  // Creates, writes step 0 and commits it. Fault-free unless something was placed before.
  absl::Status Create() {
    auto store = Store::Create(*engine_, options_, layout_, "{}");
    if (!store.ok()) return store.status();
    store_ = *std::move(store);
    FakeModel model(layout_, seed_);
    model.Initialize();
    for (uint32_t t = 0; t < model.tiles(); ++t) {
      if (absl::Status s = Write(model, {t}, 1); !s.ok()) return s;
    }
    return Commit(0, 0);
  }

  // Steps up to `last`. On an error, and when at_event says so, it stops where it is.
  absl::Status RunTo(uint64_t last) {
    FakeModel model(layout_, seed_);
    for (uint64_t step = store_->committed_step() + 1; step <= last; ++step) {
      for (uint32_t t = 0; t < model.tiles(); ++t) {
        if (absl::Status s = Read(model, t); !s.ok()) return s;
      }
      if (store_->committed_updates() != store_->committed_step()) return absl::InternalError("updates");
      model.UpdateAll(step);
      if (options_.slots == 1) {
        if (absl::Status s = Mark(); !s.ok()) return s;
      }
      std::vector<uint32_t> tiles;
      for (uint32_t t = 0; t < model.tiles(); ++t) tiles.push_back(t);
      if (absl::Status s = Write(model, tiles, step + 1); !s.ok()) return s;
      if (absl::Status s = Commit(step, step); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  // The process dies and the disk keeps its power: what was started is carried out, what was not synced is
  // still there, and may be lost by a later crash of the disk.
  void EndProcess() {
    disk_->EndProcess();
    process_ended_ = true;
  }

  // The start of the next process, after EndProcess or a crash of the disk; without either the disk crashes
  // now. No fault is left, the disk's contents are.
  void Restart() {
    if (!process_ended_ && !disk_->crashed()) disk_->Crash();
    process_ended_ = false;
    store_.reset();
    StopEngine();
    disk_->Restart();
    disk_->set_rates({});
    disk_->ClearBadRanges();
    at_event = nullptr;
    StartEngine();
    UseUpPlacedFaults();
  }
  // The process goes on; nothing in flight is lost.
  void Close() { store_.reset(); }

  absl::Status Open() {
    auto store = Store::Open(*engine_, options_);
    if (!store.ok()) return store.status();
    store_ = *std::move(store);
    // What a run goes on from, and says so, is not lost any more.
    if (options_.sync == Sync::kPower)
      acknowledged_ = std::max(acknowledged_, static_cast<int64_t>(store_->committed_step()));
    attempted_ = std::max(attempted_, static_cast<int64_t>(store_->committed_step()));
    return absl::OkStatus();
  }

  // Reads everything and holds it against the oracle. kDataLoss: the store itself said that it is damaged.
  // kInternal: it said all is well, and it is not.
  absl::Status Check() {
    FakeModel model(layout_, seed_), oracle(layout_, seed_);
    oracle.Initialize();
    for (uint64_t u = 1; u <= store_->committed_updates(); ++u) oracle.UpdateAll(u);
    for (uint32_t t = 0; t < model.tiles(); ++t) {
      if (absl::Status s = Read(model, t); !s.ok()) return s;
    }
    const std::string difference = model.Difference(oracle);
    if (!difference.empty()) return absl::InternalError(absl::StrCat("silent damage: ", difference));
    return absl::OkStatus();
  }

  int64_t acknowledged() const {
    return acknowledged_;
  }                                                 // the last step whose commit was reported to be done
  int64_t attempted() const { return attempted_; }  // the last step whose commit was begun
  int64_t marked() const { return marked_; }  // with one slot: the last step whose writes were announced
  uint64_t events() const { return events_; }
  aio::SimDisk& disk() { return *disk_; }
  aio::Engine& engine() { return *engine_; }
  Store& store() { return *store_; }
  bool has_store() const { return store_ != nullptr; }
  StoreOptions& options() { return options_; }
  const Layout& layout() const { return layout_; }
  std::string Path(uint32_t directory) const {
    return absl::StrCat(options_.directories[directory], "/penstock.store");
  }

  // Lets virtual time pass until `done`; kAborted if at_event ended the run.
  absl::Status Pump(const std::function<bool()>& done) {
    while (!done()) {
      ++events_;
      if (at_event && at_event(events_)) return absl::AbortedError("killed");
      if (engine_->Poll() > 0) continue;
      const int64_t next = engine_->NextEventNs();
      if (next == aio::Engine::kNever) return absl::InternalError("hang: nothing in flight and not done");
      engine_->RunUntil(next);
    }
    return absl::OkStatus();
  }

 private:
  void StartEngine() {
    aio::EngineOptions engine_options;
    engine_options.backend = aio::BackendKind::kSim;
    engine_options.sim = disk_.get();
    engine_options.block_bytes = 4096;  // many transfers a tile
    engine_options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(engine_options);
    if (engine.ok()) engine_ = *std::move(engine);
  }
  void StopEngine() {
    store_.reset();
    engine_.reset();
    ios_.clear();
    commit_.reset();
  }

  // Faults that were placed and have not happened would hit the next run.
  void UseUpPlacedFaults() {
    aio::FileOptions file_options;
    file_options.path = "/sim/elsewhere";
    file_options.create = true;
    file_options.sim = disk_.get();
    auto file = aio::File::Open(file_options);
    if (!file.ok()) return;
    AlignedBuffer sector(kSectorBytes);
    for (bool failed = true; failed;) {
      failed = false;
      aio::Request write, read, sync;
      write.PrepareWrite(**file, 0, sector.data(), sector.bytes());
      read.PrepareRead(**file, 0, sector.data(), sector.bytes());
      sync.PrepareSync(**file);
      for (aio::Request* request : {&write, &read, &sync}) {
        if (!engine_->Submit(request).ok() || !engine_->Wait(request).ok()) failed = true;
      }
    }
  }

  absl::Status Read(FakeModel& model, uint32_t tile) {
    std::vector<void*> places;
    for (const FakeModel::Segment& segment : model.tile(tile)) places.push_back(segment.data());
    auto io = std::make_unique<TileIo>();
    if (absl::Status s = store_->ReadSegments(io.get(), tile, 0, static_cast<uint32_t>(places.size()), places,
                                              aio::Priority::kDemand);
        !s.ok()) {
      return s;
    }
    const absl::Status pumped = Pump([&] { return io->finished(); });
    if (!pumped.ok()) {
      if (io->pending()) (void)engine_->Drain();  // into memory that is about to go
      return pumped;
    }
    if (!io->request().ok()) return io->status();
    return store_->VerifyRead(*io);
  }

  // All of them in flight at once.
  absl::Status Write(FakeModel& model, const std::vector<uint32_t>& tiles, uint64_t version) {
    ios_.clear();
    absl::Status result;
    for (uint32_t t : tiles) {
      ios_.push_back(std::make_unique<TileIo>());
      result.Update(model.Submit(*store_, ios_.back().get(), t, version));
    }
    const absl::Status pumped = Pump([&] {
      for (const auto& io : ios_) {
        if (io->pending()) return false;
      }
      return true;
    });
    if (!pumped.ok()) {
      // The process is dead: what is in flight may or may not reach the disk. Its memory goes with it.
      if (!process_ended_ && !disk_->crashed()) disk_->Crash();
      (void)engine_->Drain();
      return pumped;
    }
    for (const auto& io : ios_) {
      if (io->finished()) result.Update(model.Note(*store_, io.get()));
    }
    return result;
  }

  // Of a store of one slot: from here on its only version may go.
  absl::Status Mark() {
    commit_ = std::make_unique<CommitIo>();
    if (absl::Status s = store_->StartOverwriting(commit_.get()); !s.ok()) return s;
    marked_ = attempted_ + 1;
    if (absl::Status s = Pump([&] { return commit_->finished(); }); !s.ok()) return s;
    return store_->FinishCommit(commit_.get());
  }

  absl::Status Commit(uint64_t step, uint64_t updates) {
    attempted_ = static_cast<int64_t>(step);
    commit_ = std::make_unique<CommitIo>();
    const std::string payload = absl::StrCat("step ", step);
    if (absl::Status s =
            store_->Commit(commit_.get(), {.step = step, .updates = updates, .payload = payload});
        !s.ok()) {
      return s;
    }
    if (absl::Status s = Pump([&] { return commit_->finished(); }); !s.ok()) return s;
    absl::Status finished = store_->FinishCommit(commit_.get());
    if (finished.ok()) acknowledged_ = static_cast<int64_t>(step);
    return finished;
  }

  uint64_t seed_;
  Layout layout_;
  aio::VirtualClock clock_;
  StoreOptions options_;
  std::unique_ptr<aio::SimDisk> disk_;
  std::unique_ptr<aio::Engine> engine_;
  std::vector<std::unique_ptr<TileIo>> ios_;
  std::unique_ptr<CommitIo> commit_;
  std::unique_ptr<Store> store_;
  uint64_t events_ = 0;
  int64_t acknowledged_ = -1;
  int64_t attempted_ = -1;
  int64_t marked_ = -1;
  bool process_ended_ = false;  // and the next has not begun
};

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_SIM_WORLD_H_
