// Texts from small models, made by a Generator under a budget and on a device.
#ifndef PENSTOCK_TESTS_TOOLS_GENERATING_H_
#define PENSTOCK_TESTS_TOOLS_GENERATING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "generate/device_pass.h"
#include "generate/generator.h"
#include "models/families/family.h"
#include "models/families/mixture.h"
#include "models/weights/weight_import.h"
#include "models/weights/weight_pack.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"
#include "zero/compute/device.h"

namespace penstock::generate::testing_support {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

// What a plan asks of a decoder.
inline models::DecoderShape ShapeOf(int64_t layers, int64_t width, int64_t inner, int64_t vocab,
                                    int64_t heads, int64_t depth) {
  models::DecoderShape shape;
  shape.layers = layers;
  shape.width = width;
  shape.inner = inner;
  shape.vocab = vocab;
  shape.heads = shape.key_heads = heads;
  shape.depth = depth;
  return shape;
}

struct Asked {
  std::vector<int64_t> prompt;
  int64_t tokens = 8;
};

struct Setting {
  uint64_t budget = 256 * kMiB;
  std::optional<int64_t> batch = std::nullopt;
  CachePlace cache = CachePlace::kAuto;
  int64_t drafted = 0;
  std::shared_ptr<zero::Device> device = zero::HostDevice();
  uint64_t device_budget = 256 * kMiB;  // of one with memory of its own
};

class GeneratingTest : public tools::testing_support::ProgramTest {
 protected:
  std::unique_ptr<Generator> Make(const std::string& directory, const std::vector<Asked>& asked,
                                  const Setting& setting, const models::SamplingOptions& sampling = {}) {
    const auto model = models::OpenModel(directory);
    EXPECT_TRUE(model.ok()) << model.status();
    const models::ModelLayout layout = (*model)->Layout();
    GeneratorOptions options;
    options.wish.budget_bytes = setting.budget;
    options.wish.batch = setting.batch;
    options.wish.cache = setting.cache;
    options.wish.drafted = setting.drafted;
    options.device = setting.device;
    options.threads = 2;
    if (NeedsDeviceCompute(*setting.device)) options.compute = LibTorchCompute();
    if (setting.device->has_own_memory()) {
      options.wish.device = {.budget_bytes = setting.device_budget, .slack = setting.device->tensor_slack()};
    }
    options.wish.sequences = static_cast<int64_t>(asked.size());
    for (const Asked& each : asked) {
      const auto prompt = static_cast<int64_t>(each.prompt.size());
      options.wish.prompt = std::max(options.wish.prompt, prompt);
      options.wish.positions = std::max(options.wish.positions, prompt + each.tokens);
    }
    options.sampling = sampling;
    options.cache_directory = dir_;
    const auto open = [&](aio::Engine* engine, const WeightUses& uses) {
      return OpenSafetensors(engine, directory, layout, uses, "weights");
    };
    auto generator = Generator::Create(*model, open, std::move(options));
    EXPECT_TRUE(generator.ok()) << generator.status();
    return generator.ok() ? *std::move(generator) : nullptr;
  }

  // Its directory beside `directory`, as `penstock pack` makes it.
  static std::string Packed(const std::string& directory, int bits) {
    const std::string to = directory + "-" + std::to_string(bits) + "bit";
    std::filesystem::create_directory(to);
    std::filesystem::copy_file(directory + "/config.json", to + "/config.json");
    const auto model = models::OpenModel(directory);
    EXPECT_TRUE(model.ok()) << model.status();
    const models::ModelLayout layout = (*model)->Layout();
    auto import = models::WeightImport::Open(directory, layout, "weights");
    EXPECT_TRUE(import.ok()) << import.status();
    models::PackOptions options;
    options.bits = bits;
    options.vocabulary = (*model)->vocabulary();
    options.whole = models::RoutersOf(**model);
    const auto packed = models::PackWeights(import->get(), layout, to, options);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return to;
  }

  // `after_pass`: may be empty.
  std::vector<std::vector<int64_t>> Texts(Generator* generator, const std::vector<Asked>& asked,
                                          const std::function<void()>& after_pass = nullptr) {
    std::vector<std::vector<int64_t>> texts(asked.size());
    size_t next = 0;
    std::set<int64_t> finished;
    GenerationCallbacks callbacks;
    callbacks.next = [&]() -> absl::StatusOr<std::optional<GenerationRequest>> {
      if (next == asked.size()) return std::nullopt;
      const auto id = static_cast<int64_t>(next);
      const Asked& each = asked[next++];
      return GenerationRequest{id, each.prompt, each.tokens, static_cast<uint64_t>(100 + id)};
    };
    callbacks.token = [&](int64_t id, int64_t token) {
      texts[static_cast<size_t>(id)].push_back(token);
      return false;
    };
    callbacks.finished = [&](int64_t id, Finish) {
      EXPECT_TRUE(finished.insert(id).second);
      return absl::OkStatus();
    };
    if (after_pass) callbacks.progress = [&](const GenerationStats&) { after_pass(); };
    const absl::Status status = generator->Run(callbacks);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(finished.size(), asked.size());
    return texts;
  }
};

// A GPT-2 whose weights take many units, with matrices that are stored turned.
inline nlohmann::json GptConfigOf() {
  return {{"model_type", "gpt2"}, {"n_layer", 3},       {"n_embd", 96},
          {"n_head", 4},          {"n_positions", 512}, {"vocab_size", 300},
          {"resid_pdrop", 0.0},   {"attn_pdrop", 0.0},  {"embd_pdrop", 0.0}};
}
inline nlohmann::json LlamaConfigOf() {
  return {{"model_type", "llama"},      {"hidden_size", 96},
          {"intermediate_size", 224},   {"num_hidden_layers", 3},
          {"num_attention_heads", 4},   {"num_key_value_heads", 2},
          {"vocab_size", 300},          {"max_position_embeddings", 512},
          {"tie_word_embeddings", true}};
}

// Windows in two of three layers, which have positions of their own; soft caps, and norms of all kinds.
inline nlohmann::json WindowsConfigOf() {
  nlohmann::json config = LlamaConfigOf();
  config.update({{"model_type", "gemma3_text"},
                 {"head_dim", 24},
                 {"sliding_window", 24},
                 {"sliding_window_pattern", 2},
                 {"query_pre_attn_scalar", 20},
                 {"final_logit_softcapping", 9.0}});
  return config;
}
// Matrices that are several in one, and sequences of more than 100 positions that are turned by other
// frequencies.
inline nlohmann::json FarConfigOf() {
  nlohmann::json config = LlamaConfigOf();
  config.update(
      {{"model_type", "phi3"}, {"original_max_position_embeddings", 100}, {"partial_rotary_factor", 0.5}});
  config["rope_scaling"] = {{"type", "longrope"},
                            {"short_factor", {1.0, 1.1, 1.2, 1.3, 1.4, 1.5}},
                            {"long_factor", {2.0, 3.0, 4.0, 5.0, 6.0, 7.0}}};
  return config;
}

inline std::vector<Asked> ManyPrompts() {
  std::mt19937_64 random(11);
  std::vector<Asked> asked;
  for (const size_t length : {1, 3, 31, 32, 33, 127, 128, 129, 200, 300, 5, 64}) {
    Asked each;
    for (size_t i = 0; i < length; ++i) each.prompt.push_back(static_cast<int64_t>(random() % 300));
    each.tokens = 3 + static_cast<int64_t>(random() % 30);
    asked.push_back(std::move(each));
  }
  return asked;
}

}  // namespace penstock::generate::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_GENERATING_H_
