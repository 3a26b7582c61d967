// Checkpoints and directories of models that were made to do harm: whatever they say, with checksums that are
// right, each verb ends with an error in one line, without waiting and without much more memory than it takes
// for a good one.
#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "aio/arena.h"
#include "aio/engine.h"
#include "gmock/gmock.h"
#include "swap/inspect.h"
#include "swap/store.h"
#include "tests/fuzz/torch_archive.h"
#include "tests/hostile_files.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools::hostile_checkpoint_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using namespace testing_support;

constexpr int64_t kMostMore = int64_t{64} << 20;

class HostileTest : public CliTest {
 protected:
  // A checkpoint of one step of a small model, and what its records say.
  void MakeCheckpoint(const std::string& dtype) {
    const std::string kept = dir_ + "/kept";
    const Ran ran = Run({"train",
                         "--model",
                         "gpt-tiny",
                         "--dtype",
                         dtype,
                         "--threads",
                         "1",
                         "--quiet",
                         "--data",
                         text_,
                         "--steps",
                         "1",
                         "--offload",
                         "none",
                         "--seq",
                         "32",
                         "--batch",
                         "1",
                         "--checkpoint-dir",
                         kept,
                         "--checkpoint-every",
                         "1"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    checkpoint_ = kept + "/step-00000001";
    auto found = swap::Inspect({checkpoint_});
    ASSERT_TRUE(found.ok()) << found.status();
    good_ = *std::move(found);
    peak_bytes_ = Run({"verify", checkpoint_, "--quiet"}).peak_bytes;
  }

  // Another one of that run, with zeros, whose checksums are right.
  std::string Forge(const std::string& name, const std::string& identity, const std::string& payload,
                    const swap::Layout& layout) {
    const std::string kept = dir_ + "/" + name, path = kept + "/step-00000001";
    std::filesystem::create_directories(path);
    auto engine = aio::Engine::Create({});
    EXPECT_TRUE(engine.ok()) << engine.status();
    swap::StoreOptions options;
    options.directories = {path};
    options.slots = 1;
    options.uuid = good_.shape.uuid;
    options.payload_capacity = std::max<uint64_t>(1, payload.size());
    options.allow_unaligned_file_system = true;
    auto store = swap::Store::Create(**engine, options, layout, identity);
    EXPECT_TRUE(store.ok()) << store.status();
    if (!store.ok()) return kept;
    aio::ArenaOptions arena_options;
    arena_options.lock = false;
    arena_options.bytes = (*store)->geometry().largest_slot_bytes();
    auto arena = aio::Arena::Create(arena_options);
    EXPECT_TRUE(arena.ok()) << arena.status();
    swap::TileIo io;
    std::array<void*, swap::kMaxSegments> places;
    for (uint32_t t = 0; t < (*store)->geometry().tiles(); ++t) {
      const auto segments = (*store)->geometry().SegmentPlaces(t, (*arena)->data(), &places);
      const std::vector<const void*> sources(segments.begin(), segments.end());
      const absl::Status written = (*store)->WriteTileNow(&io, t, 1, sources, aio::Priority::kDemand);
      EXPECT_TRUE(written.ok()) << written;
    }
    const absl::Status committed =
        (*store)->CommitNow({.step = good_.record.step, .updates = good_.record.updates, .payload = payload});
    EXPECT_TRUE(committed.ok()) << committed;
    return kept;
  }
  swap::Layout Layout() const {
    swap::Layout layout;
    for (const swap::TilePlacement& tile : good_.shape.tiles) layout.tiles.push_back(tile.layout);
    return layout;
  }

  void ExpectRefused(const Ran& ran, const std::string& what) const {
    EXPECT_TRUE(ran.code == 1 || ran.code == 2) << what << ": " << ran.code << "\n" << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << what << ": " << ran.err.substr(0, 2000);
    EXPECT_THAT(ran.err, testing::Not(HasSubstr("this is a bug"))) << what;
    EXPECT_LT(ran.err.size(), 2000u) << what;
    if (peak_bytes_ > 0) {
      EXPECT_LT(ran.peak_bytes, peak_bytes_ + kMostMore) << what;
    }
  }

  std::string checkpoint_;
  swap::Inspection good_;
  int64_t peak_bytes_ = 0;
};

// `text` is an object; `key` becomes the first of its keys, with arrays nested 200,000 deep.
std::string WithNested(const std::string& text, const std::string& key) {
  return "{\"" + key + "\":" + hostile::Nested() + (text == "{}" ? "" : ",") + text.substr(1);
}

TEST_F(HostileTest, NestedRecordsAreRefusedByEveryVerb) {
  MakeCheckpoint("fp32");
  if (HasFatalFailure()) return;
  json model = json::parse(good_.shape.identity);
  const std::string plain = model["model"].dump();
  model["model"] = "MODEL";
  std::string of_model = model.dump();
  of_model.replace(of_model.find("\"MODEL\""), 7, WithNested(plain, "model_type"));
  const std::pair<const char*, std::string> forged[] = {
      {"payload", Forge("payload", good_.shape.identity, WithNested(good_.record.payload, "x"), Layout())},
      {"identity", Forge("identity", WithNested(good_.shape.identity, "x"), good_.record.payload, Layout())},
      {"model_type", Forge("model_type", of_model, good_.record.payload, Layout())},
  };
  for (const auto& [what, kept] : forged) {
    const std::string path = kept + "/step-00000001";
    const std::vector<Arguments> verbs = {
        {"inspect", path},
        {"inspect", path, "--json"},
        {"verify", path, "--quiet"},
        {"export", path, dir_ + "/out.safetensors", "--quiet"},
        {"train", "--data", text_, "--threads", "1", "--quiet", "--offload", "none", "--steps", "2", "--seq",
         "32", "--batch", "1", "--checkpoint-dir", kept, "--resume"},
        {"train", "--data", text_, "--threads", "1", "--quiet", "--steps", "2", "--seq", "32", "--batch", "1",
         "--state-dir", path, "--resume"},
        {"plan", "--data", text_, "--no-probe", "--host-memory", "512MiB", "--state-dir", path, "--resume"},
    };
    const std::vector<Ran> ran = RunAll(verbs);
    for (size_t i = 0; i < verbs.size(); ++i)
      ExpectRefused(ran[i], std::string(what) + ": " + verbs[i][0] + " " + std::to_string(i));
    EXPECT_FALSE(std::filesystem::exists(dir_ + "/out.safetensors"));
  }
}

// In bf16 export joins two segments: a second one that is shorter would be read beyond its end.
TEST_F(HostileTest, TilesThatAreNoneOfTheirModelAreNotExported) {
  MakeCheckpoint("bf16");
  if (HasFatalFailure()) return;
  swap::Layout layout = Layout();
  ASSERT_EQ(layout.tiles.front().segment_bytes.size(), 4u);
  for (const size_t segment : {size_t{1}, size_t{3}}) {
    swap::Layout changed = layout;
    changed.tiles.back().segment_bytes[segment] = 4096;
    const std::string path =
        Forge("segment-" + std::to_string(segment), good_.shape.identity, good_.record.payload, changed) +
        "/step-00000001";
    for (const char* const dtype : {"fp32", "bf16"}) {
      const Ran ran = Run({"export", path, dir_ + "/out.safetensors", "--dtype", dtype, "--quiet"});
      ExpectRefused(ran, dtype);
      EXPECT_THAT(ran.err, HasSubstr("is not one of its model's"));
    }
  }
}

TEST_F(HostileTest, SmallFilesOfAnyKindAreRefusedWithoutWaiting) {
  peak_bytes_ = Run({"plan", "--model", "gpt-tiny", "--data", text_, "--no-probe"}).peak_bytes;
  const std::string model = dir_ + "/model", tags = dir_ + "/tags";
  std::filesystem::create_directories(model);
  std::filesystem::create_directories(tags);
  for (const hostile::Maker& maker : hostile::Makers()) {
    ASSERT_TRUE(maker.make(model + "/config.json")) << maker.name;
    ASSERT_TRUE(maker.make(tags + "/latest")) << maker.name;
    const std::vector<Arguments> verbs = {
        {"plan", "--model", model, "--data", text_, "--no-probe"},
        {"plan", "--model", model + "/config.json", "--data", text_, "--no-probe"},
        {"train", "--config", model + "/config.json", "--data", text_, "--check"},
        {"export", tags, dir_ + "/out.safetensors"},
        {"inspect", tags},
        {"import-checkpoint", tags, "--model", "gpt-tiny", "--data", text_, "--state-dir", dir_ + "/state"},
    };
    const std::vector<Ran> ran = RunAll(verbs);
    for (size_t i = 0; i < verbs.size(); ++i)
      ExpectRefused(ran[i], std::string(maker.name) + ": " + verbs[i][0] + " " + std::to_string(i));
    hostile::Remove(model + "/config.json");
    hostile::Remove(tags + "/latest");
  }
}

// Pickles of torch.save, in pieces.
std::string Text(const std::string& text) {
  std::string pickle = "X";
  fuzz::Number(&pickle, text.size(), 4);
  return pickle + text;
}
std::string Repeated(const std::string& what, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += what;
  return all;
}

// A few MB that say the same text, or the same dict, a million times.
TEST_F(HostileTest, ShortCheckpointsOfDeepSpeedTakeNoLongMemory) {
  peak_bytes_ = Run({"export", dir_, dir_ + "/out.safetensors"}).peak_bytes;
  const std::string remember("q\0", 2), recall("h\0", 2), one("K\1", 2);
  const std::string long_text = Text(std::string(1 << 20, 'x')) + remember;
  const std::string names = "(" + Repeated(recall, 600'000) + "e";
  const std::string pairs = "(" + Repeated(recall + recall, 300'000) + "u";
  const std::pair<const char*, std::string> bombs[] = {
      {"buffers of one name", Text("a") + long_text + "s" + Text("buffer_names") + "]" + names + "s"},
      {"short names", Text("a") + Text("x") + remember + "s" + Text("buffer_names") + "]" + names + "s"},
      {"tied", Text("a") + long_text + "s" + Text("shared_params") + "}" + pairs + "s"},
      {"client state", Text("a") + long_text + "s" + Text("b") + "]" + names + "s"},
      {"shapes", Text("a") + "}(" + Text("w") + "]" + one + "au" + remember + "s" + Text("param_shapes") +
                     "]" + names + "s"},
  };
  for (const auto& [what, entries] : bombs) {
    const std::string tag = dir_ + "/tag";
    std::filesystem::remove_all(tag);
    std::filesystem::create_directories(tag);
    const std::string pickle = "\x80\x02}" + Text("global_steps") + one + "s" + entries + ".";
    const std::string zip = fuzz::TorchArchive({{"archive/data.pkl", pickle}});
    WriteFile(tag + "/mp_rank_00_model_states.pt", zip);
    WriteFile(tag + "/zero_pp_rank_0_mp_rank_00_optim_states.pt", zip);
    const Ran ran = Run({"export", tag, dir_ + "/out.safetensors"});
    ExpectRefused(ran, what);
    ExpectRefused(Run({"import-checkpoint", tag, "--model", "gpt-tiny", "--data", text_, "--state-dir",
                       dir_ + "/state"}),
                  what);
  }
}

}  // namespace
}  // namespace penstock::tools::hostile_checkpoint_test
