// A small training without arithmetic that can be killed: it opens or creates a store, checks what it finds
// against an oracle computed from nothing but the seed, and goes on from there.
//
//   store_harness --dir D [--dir D2 ...] --seed S --steps N [--expect STEP] [--fresh]
//                 [--sync process|power] [--slots 1|2|3] [--checkpoints DIR [--expect-checkpoint STEP]]
//                 [--kill-at STAGE [--kill-after K]] [--overwrite-at NS] [--hold]
//
// Prints "step N" once step N is committed, "checkpoint N" once its checkpoint is: what has been printed must
// never be lost. Ends with 0 when step N
// is reached; 1 with a line on stderr when anything is not as it must be; by SIGKILL at the K-th time that it
// comes by the named stage. --expect: the least step that recovery has to find. With one slot, a run that was
// ended while it was being overwritten starts over after it has printed "overwritten". --overwrite-at:
// creates the store at this moment of the steady clock, over whatever is there, and waits for nobody's lock.
// --hold: keeps the store open at the end until its standard input is closed.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "swap/checkpoint.h"
#include "swap/checkpoint_copy.h"
#include "swap/store.h"
#include "tests/swap/fake_model.h"

namespace penstock::swap {
namespace {

struct KillPlan {
  std::string stage;
  std::atomic<int> left{1};
};

void AtStage(CrashPoint stage, void* context) {
  auto* plan = static_cast<KillPlan*>(context);
  if (CrashPointName(stage) == plan->stage && plan->left.fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
}

int Fail(const std::string& what) {
  std::fprintf(stderr, "store_harness: %s\n", what.c_str());
  return 1;
}

bool Skipped(uint64_t step) { return step % 5 == 3; }
bool Speculative(uint64_t step) { return step % 4 == 2; }
// Versions only ever rise, whatever was dropped.
uint64_t VersionOf(uint64_t step) { return 2 * step + 2; }

struct Flags {
  StoreOptions options;
  uint64_t seed = 1;
  uint64_t steps = 10;
  int64_t expect = -1;
  bool fresh = false;
  int64_t overwrite_at_ns = 0;
  bool hold = false;
  std::string checkpoints;
  int64_t expect_checkpoint = -1;
  KillPlan kill;
};

std::string Payload(uint64_t seed, uint64_t step) {
  return absl::StrCat("{\"seed\":", seed, ",\"step\":", step, "}");
}

absl::Status RunStep(Store& store, FakeModel& model, uint64_t step) {
  if (store.geometry().slots() == 1) {
    if (absl::Status s = store.OverwriteNow(); !s.ok()) return s;
  }
  TileIo scratch;
  if (absl::Status s = model.ReadAll(store); !s.ok())
    return s;  // what is on disk, not what is in memory, goes on
  uint64_t updates = store.committed_updates();
  if (!Skipped(step)) {
    ++updates;
    if (Speculative(step) &&
        store.geometry().slots() > 1) {  // an update that turns out to be wrong and is undone
      FakeModel wrong = FakeModel(SmallLayout(6, 6000), 99);
      wrong.Initialize();
      if (absl::Status s = wrong.WriteAll(store, VersionOf(step) - 1); !s.ok()) return s;
      if (absl::Status s = store.DropAllWritten(); !s.ok()) return s;
    }
    model.UpdateAll(updates);
    const FakeModel::Segment& gradient = model.tile(0)[0];
    if (absl::Status s = store.WriteScratch(&scratch, 0, 0, gradient.data(),
                                            store.geometry().scratch_bytes(0), aio::Priority::kWriteBehind);
        !s.ok()) {
      return s;
    }
    if (absl::Status s = model.WriteAll(store, VersionOf(step)); !s.ok()) return s;
    if (absl::Status s = store.Wait(&scratch); !s.ok()) return s;
  }
  const std::string payload = Payload(step, step);
  return store.CommitNow({.step = step, .updates = updates, .payload = payload});
}

// Every checkpoint under its name is whole and holds what its step held.
absl::Status CheckCheckpoints(aio::Engine& engine, const Flags& flags, const Layout& layout) {
  const std::vector<CheckpointEntry> all = *ListCheckpoints(flags.checkpoints);
  const int64_t newest = all.empty() ? -1 : static_cast<int64_t>(all.back().step);
  if (newest < flags.expect_checkpoint)
    return absl::InternalError(absl::StrCat("checkpoint ", flags.expect_checkpoint, " was lost: ", newest));
  for (const CheckpointEntry& entry : all) {
    StoreOptions options;
    options.directories = {entry.path};
    options.read_only = true;
    auto store = Store::Open(engine, options);
    if (!store.ok())
      return absl::Status(store.status().code(), absl::StrCat("checkpoint: ", store.status().message()));
    FakeModel model(layout, flags.seed), oracle(layout, flags.seed);
    oracle.Initialize();
    for (uint64_t s = 1, updates = 0; s <= entry.step; ++s) {
      if (!Skipped(s)) oracle.UpdateAll(++updates);
    }
    if ((*store)->committed_step() != entry.step)
      return absl::InternalError(absl::StrCat(entry.path, ": wrong step"));
    if (absl::Status s = model.ReadAll(**store); !s.ok()) return s;
    if (const std::string difference = model.Difference(oracle); !difference.empty()) {
      return absl::InternalError(absl::StrCat(entry.path, ": ", difference));
    }
  }
  return absl::OkStatus();
}

int Run(Flags& flags) {
  aio::EngineOptions engine_options;
  engine_options.log = [](std::string_view) {};
  auto engine = aio::Engine::Create(engine_options);
  if (!engine.ok()) return Fail(engine.status().ToString());
  const Layout layout = SmallLayout(6, 6000);
  if (!flags.kill.stage.empty()) {
    flags.options.at_crash_point = &AtStage;
    flags.options.stage_context = &flags.kill;
  }
  FakeModel model(layout, flags.seed), oracle(layout, flags.seed);
  oracle.Initialize();

  // To the microsecond, without going to sleep.
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch(); };
  while (now() < std::chrono::nanoseconds(flags.overwrite_at_ns)) continue;
  if (flags.overwrite_at_ns != 0) {
    flags.fresh = true;
    flags.options.lock_patience_ms = 200;
  }
  auto store = flags.overwrite_at_ns == 0 ? Store::Open(**engine, flags.options)
                                          : absl::StatusOr<std::unique_ptr<Store>>(absl::NotFoundError(""));
  const bool overwritten = flags.options.slots == 1 && absl::IsDataLoss(store.status()) &&
                           absl::StrContains(store.status().message(), "one version");
  if (overwritten) {
    std::printf("overwritten\n");
    std::fflush(stdout);
    flags.expect = -1;
  }
  if (absl::IsNotFound(store.status()) || overwritten || flags.fresh) {
    if (flags.expect >= 0)
      return Fail(absl::StrCat("step ", flags.expect, " was lost: ", store.status().message()));
    if (store.ok()) store->reset();
    flags.options.overwrite = true;
    store = Store::Create(**engine, flags.options, layout, absl::StrCat("{\"seed\":", flags.seed, "}"));
    if (!store.ok()) return Fail(absl::StrCat("create: ", store.status().ToString()));
    if (absl::Status s = oracle.WriteAll(**store, 1); !s.ok()) return Fail(s.ToString());
    if (absl::Status s = (*store)->CommitNow({.step = 0, .updates = 0, .payload = Payload(0, 0)}); !s.ok()) {
      return Fail(s.ToString());
    }
    std::printf("step 0\n");
    std::fflush(stdout);
  } else if (!store.ok()) {
    return Fail(absl::StrCat("open: ", store.status().ToString()));
  }

  const uint64_t step = (*store)->committed_step();
  if (static_cast<int64_t>(step) < flags.expect) {
    return Fail(absl::StrCat("step ", flags.expect, " was committed, recovery found ", step));
  }
  if ((*store)->committed_payload() != Payload(step, step))
    return Fail("the payload is not that of the step");
  uint64_t updates = 0;
  for (uint64_t s = 1; s <= step; ++s) {
    if (!Skipped(s)) oracle.UpdateAll(++updates);
  }
  if ((*store)->committed_updates() != updates) return Fail("the number of updates is wrong");
  if (absl::Status s = model.ReadAll(**store); !s.ok()) return Fail(s.ToString());
  if (const std::string difference = model.Difference(oracle); !difference.empty()) {
    return Fail(absl::StrCat("after step ", step, ": ", difference));
  }
  if (absl::Status s = CheckCheckpoints(**engine, flags, layout); !s.ok()) return Fail(s.ToString());

  AlignedBuffer memory(2 << 20);
  std::unique_ptr<CheckpointCopy> copy;
  const auto finish = [&copy] {
    const uint64_t of_step = copy->step();
    const absl::Status done = std::exchange(copy, nullptr)->Finish();
    if (done.ok()) {
      std::printf("checkpoint %llu\n", static_cast<unsigned long long>(of_step));
      std::fflush(stdout);
    }
    return done.ok() || absl::IsAlreadyExists(done) ? 0 : Fail(absl::StrCat("checkpoint: ", done.ToString()));
  };
  for (uint64_t s = step + 1; s <= flags.steps; ++s) {
    if (!flags.checkpoints.empty() && copy == nullptr && s % 4 == 0) {
      CheckpointOptions options;
      options.parent = flags.checkpoints;
      options.memory = memory.span();
      options.keep = 2;
      auto begun = CheckpointCopy::OfStore(**store, options);
      if (!begun.ok()) return Fail(begun.status().ToString());
      copy = *std::move(begun);
      if (flags.options.slots == 1) {  // it holds the only version
        copy->AllowAll();
        if (const int code = finish(); code != 0) return code;
      }
    }
    if (absl::Status status = RunStep(**store, model, s); !status.ok()) return Fail(status.ToString());
    std::printf("step %llu\n", static_cast<unsigned long long>(s));
    std::fflush(stdout);
    if (copy == nullptr) continue;
    copy->Allow(1);
    if (!copy->finished()) continue;
    if (const int code = finish(); code != 0) return code;
  }
  if (char byte = 0; flags.hold) (void)!::read(STDIN_FILENO, &byte, 1);
  // An orderly end, as a training's.
  return copy != nullptr ? finish() : 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (word == "--dir")
      flags.options.directories.push_back(value());
    else if (word == "--seed")
      flags.seed = std::strtoull(value().c_str(), nullptr, 10);
    else if (word == "--steps")
      flags.steps = std::strtoull(value().c_str(), nullptr, 10);
    else if (word == "--expect")
      flags.expect = std::strtoll(value().c_str(), nullptr, 10);
    else if (word == "--slots")
      flags.options.slots = static_cast<uint32_t>(std::atoi(value().c_str()));
    else if (word == "--sync")
      flags.options.sync = value() == "power" ? Sync::kPower : Sync::kProcess;
    else if (word == "--checkpoints")
      flags.checkpoints = value();
    else if (word == "--expect-checkpoint")
      flags.expect_checkpoint = std::strtoll(value().c_str(), nullptr, 10);
    else if (word == "--kill-at")
      flags.kill.stage = value();
    else if (word == "--kill-after")
      flags.kill.left = std::atoi(value().c_str());
    else if (word == "--fresh")
      flags.fresh = true;
    else if (word == "--overwrite-at")
      flags.overwrite_at_ns = std::strtoll(value().c_str(), nullptr, 10);
    else if (word == "--hold")
      flags.hold = true;
    else {
      std::fprintf(stderr, "store_harness: unknown word %s\n", word.c_str());
      return 2;
    }
  }
  return Run(flags);
}

}  // namespace
}  // namespace penstock::swap

int main(int argc, char** argv) { return penstock::swap::Main(argc, argv); }
