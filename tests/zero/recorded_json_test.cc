// What a run has recorded is read back as it stands on the drive: whatever somebody, or something, has made
// of it is a status, and never an exception.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "models/data/dataset.h"
#include "models/families/family.h"
#include "models/families/stages.h"
#include "swap/store.h"
#include "tests/zero/training.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/compute/tile_version.h"
#include "zero/config/json_field.h"
#include "zero/engine/restore.h"
#include "zero/lanes/hardware_lanes.h"

namespace penstock::zero::recorded_json_test {
namespace {

using nlohmann::json;

TEST(JsonField, IsOfItsTypeOrNothing) {
  const json object = json::parse(
      R"({"n":-3,"big":18446744073709551615,"x":1.5,"s":"t","b":true,"list":[1,2],"mixed":[1,"2"],"null":null})");
  EXPECT_EQ(JsonField<int64_t>(object, "n"), -3);
  EXPECT_EQ(JsonField<uint64_t>(object, "n"), std::nullopt);
  EXPECT_EQ(JsonField<int64_t>(object, "big"), std::nullopt);
  EXPECT_EQ(JsonField<uint64_t>(object, "big"), ~uint64_t{0});
  EXPECT_EQ(JsonField<int64_t>(object, "x"), std::nullopt);
  EXPECT_EQ(JsonField<double>(object, "n"), -3.0);
  EXPECT_EQ(JsonField<std::string>(object, "s"), "t");
  EXPECT_EQ(JsonField<std::string>(object, "b"), std::nullopt);
  EXPECT_EQ(JsonField<bool>(object, "b"), true);
  EXPECT_EQ(JsonField<bool>(object, "n"), std::nullopt);
  EXPECT_EQ(JsonField<std::vector<int64_t>>(object, "list"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(JsonField<std::vector<int64_t>>(object, "mixed"), std::nullopt);
  EXPECT_EQ(JsonField<int64_t>(object, "none"), std::nullopt);
  EXPECT_EQ(JsonField<int64_t>(object, "null"), std::nullopt);
  for (const char* other : {"[1]", "null", "3", "\"n\""})
    EXPECT_EQ(JsonField<int64_t>(json::parse(other), "n"), std::nullopt);
}

void Collect(json& node, std::vector<json*>* nodes) {
  nodes->push_back(&node);
  if (!node.is_structured()) return;
  for (json& below : node) Collect(below, nodes);
}

// One value becomes something else, goes, or comes.
json Mutated(const json& from, std::mt19937& random) {
  static const std::vector<json> strange = {nullptr,
                                            true,
                                            0,
                                            -1,
                                            1,
                                            2,
                                            7,
                                            int64_t{1} << 40,
                                            ~uint64_t{0},
                                            1.5,
                                            -1e300,
                                            "",
                                            "fp32",
                                            "x",
                                            json::array(),
                                            json::array({1, "a"}),
                                            json::object(),
                                            {{"run", 3}}};
  json mutated = from;
  for (uint32_t times = 1 + random() % 2; times > 0; --times) {
    std::vector<json*> nodes;
    Collect(mutated, &nodes);
    json& node = *nodes[random() % nodes.size()];
    if (node.is_object() && !node.empty() && random() % 2 == 0) {
      auto gone = node.begin();
      std::advance(gone, static_cast<std::ptrdiff_t>(random() % node.size()));
      node.erase(gone);
    } else if (node.is_array() && random() % 2 == 0) {
      node.push_back(strange[random() % strange.size()]);
    } else {
      node = strange[random() % strange.size()];
    }
  }
  return mutated;
}

// A GPT's run in a directory, and what it recorded.
class RecordedJson : public testing_support::ScratchTest {
 protected:
  RecordedJson() {
    run_.model = {1, 16, 2, 16, 32, 0};
    run_.batch = 1;
    run_.seq = 8;
    run_.steps = 1;
    run_.state_dir = scratch_ + "/state";
    run_.keep_state = true;
    run_.adjust = [this](EngineOptions& options) {
      options.resume.run = {{"model", run_.model.ToJson()},
                            {"steps", 3},
                            {"batch", 1},
                            {"accumulate", 1},
                            {"seq", 8},
                            {"vocab", 32},
                            {"seed", 7},
                            {"threads", 1},
                            {"clip", 1.0},
                            {"lr", 1e-3},
                            {"optimizer", "AdamW"},
                            {"run_id", "r"},
                            {"run_id_since", 0},
                            {"model_directory", scratch_},
                            {"data_order", models::kSequenceOrder},
                            {"data_weights", {1.0, 2.0}},
                            {"eval_split", 0.1},
                            {"ranks", 1}};
    };
    const testing_support::TrainedLosses trained = TrainGpt(run_);
    EXPECT_TRUE(trained.status.ok()) << trained.status;
    const absl::StatusOr<swap::Inspection> found = swap::Inspect({run_.state_dir});
    EXPECT_TRUE(found.ok()) << found.status();
    identity_ = json::parse(found->shape.identity);
    payload_ = json::parse(found->record.payload);
    for (const swap::TilePlacement& tile : found->shape.tiles) layout_.tiles.push_back(tile.layout);
    absl::StatusOr<std::unique_ptr<aio::Engine>> io = aio::Engine::Create({});
    EXPECT_TRUE(io.ok());
    io_ = *std::move(io);
  }

  // A whole store that says so.
  void Record(const std::string& directory, const json& identity, const json& payload) {
    swap::StoreOptions options;
    options.directories = {directory};
    options.overwrite = true;
    absl::StatusOr<std::unique_ptr<swap::Store>> store =
        swap::Store::Create(*io_, options, layout_, identity.dump());
    ASSERT_TRUE(store.ok()) << store.status();
    const std::unique_ptr<void, decltype(&std::free)> memory(
        std::aligned_alloc(4096, (*store)->geometry().largest_slot_bytes()), &std::free);
    std::memset(memory.get(), 0, (*store)->geometry().largest_slot_bytes());
    swap::TileIo io_of_tile;
    std::array<void*, swap::kMaxSegments> places;
    for (uint32_t t = 0; t < (*store)->geometry().tiles(); ++t) {
      const auto segments =
          (*store)->geometry().SegmentPlaces(t, static_cast<std::byte*>(memory.get()), &places);
      const std::vector<const void*> sources(segments.begin(), segments.end());
      const absl::Status written =
          (*store)->WriteTileNow(&io_of_tile, t, VersionAfter(1), sources, aio::Priority::kWriteBehind);
      ASSERT_TRUE(written.ok()) << written;
    }
    const absl::Status status = (*store)->CommitNow({.step = 1, .updates = 1, .payload = payload.dump()});
    ASSERT_TRUE(status.ok()) << status;
  }

  testing_support::RunOptions run_;
  json identity_, payload_;
  swap::Layout layout_;
  std::unique_ptr<aio::Engine> io_;
};

// Every way in which the engine and the flags look at a record.
void Read(const std::string& directory, const std::string& scratch, const testing_support::RunOptions& run) {
  EngineOptions options;
  options.storage.state_dirs = {directory};
  options.example = MakeBatch(run, 0, 0);
  options.seed = run.seed;
  options.resume.enabled = true;
  (void)CreateEngine(models::MakeGpt(run.model), options).status();
  options.trains = false;
  options.resume.enabled = false;
  (void)PlanEngine(models::MakeGpt(run.model), options).status();
  tools::TrainOptions flags;
  flags.resume = true;
  flags.state_dirs = {directory};
  flags.others["--host-memory"] = "64MiB";
  (void)tools::ResolveTrainOptions(flags, /*needs_data=*/false).status();
  EngineOptions to;
  to.storage.state_dirs = {scratch + "/restored"};
  (void)RestoreRun(directory, to);
}

TEST_F(RecordedJson, WhateverStandsThereNothingThrows) {
  std::mt19937 random(20260101);
  for (int round = 0; round < 60; ++round) {
    const bool of_identity = round % 2 == 0;
    const json identity = of_identity ? Mutated(identity_, random) : identity_;
    const json payload = of_identity ? payload_ : Mutated(payload_, random);
    SCOPED_TRACE(identity.dump() + "\n" + payload.dump());
    ASSERT_NO_FATAL_FAILURE(Record(scratch_ + "/odd", identity, payload));
    ASSERT_NO_THROW(Read(scratch_ + "/odd", scratch_, run_));
  }
}

// A part of two ranks, cut anew for one: what its identity says is what decides how.
TEST_F(RecordedJson, NorDoesAPartOfSeveralRanks) {
  std::mt19937 random(7);
  EngineOptions to;
  to.storage.state_dirs = {scratch_ + "/restored"};
  const auto restore = [&](const json& identity) {
    for (int rank : {0, 1}) {
      json own = identity;
      if (own.is_object()) own.update({{"ranks", 2}, {"rank", rank}});
      ASSERT_NO_FATAL_FAILURE(Record(scratch_ + "/odd/rank-" + std::to_string(rank), own, payload_));
    }
    absl::Status status;
    ASSERT_NO_THROW(status = RestoreRun(scratch_ + "/odd", to));
    EXPECT_FALSE(status.ok()) << "two parts of one rank's tiles fit no model";
  };
  for (const json& elements : {json("x"), json::array({"x"}), json::array({1.5}), json::array({-2048}),
                               json::array({0}), json::array({100}), json::array({int64_t{1} << 62}), json(),
                               json::array(), json::object({{"a", 1}})}) {
    json identity = identity_;
    identity["block_elements"] = elements;
    SCOPED_TRACE(elements.dump());
    restore(identity);
  }
  for (int round = 0; round < 15; ++round) {
    const json identity = Mutated(identity_, random);
    SCOPED_TRACE(identity.dump());
    if (identity.is_object()) restore(identity);
  }
}

}  // namespace
}  // namespace penstock::zero::recorded_json_test
