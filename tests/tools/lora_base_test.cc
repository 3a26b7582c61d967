// Weights that adapters go to, read where they lie: the bits are those of weights that were copied into the
// state, whatever type or code they have there, and the files are those that the run began with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kernels/split_master.h"
#include "models/families/lora.h"
#include "models/weights/frozen_weights.h"
#include "models/weights/weight_import.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::lora_base_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Formula;
using testing_support::Lines;
using testing_support::Program;
using testing_support::Ran;
using testing_support::ReadFile;
using testing_support::WriteFile;
using testing_support::operator+;

// Columns that are no whole number of codes, and a vocabulary that makes a large block of the embedding.
const json kLlama = {{"model_type", "llama"},    {"hidden_size", 72},
                     {"intermediate_size", 104}, {"num_hidden_layers", 3},
                     {"num_attention_heads", 6}, {"num_key_value_heads", 2},
                     {"vocab_size", 256},        {"max_position_embeddings", 64}};
const json kGpt = {{"model_type", "gpt2"}, {"n_embd", 64},      {"n_layer", 2},
                   {"n_head", 4},          {"n_positions", 64}, {"vocab_size", 256},
                   {"resid_pdrop", 0.0},   {"embd_pdrop", 0.0}, {"attn_pdrop", 0.0}};

// As published in this type.
void WriteAs(const std::string& directory, const json& config, swap::Dtype dtype) {
  std::filesystem::create_directory(directory);
  WriteFile(directory + "/config.json", config.dump());
  const models::ModelLayout layout = (*models::ModelFromJson(config))->Layout();
  std::vector<swap::TensorInfo> infos;
  for (const models::PublishedTensor& t : layout.tensors)
    infos.push_back({t.name, dtype, t.published_shape(), 0});
  auto writer = swap::SafetensorsWriter::Create(directory + "/model.safetensors", infos, {}, true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto type = dtype == swap::Dtype::kF32    ? kernels::DType::kFp32
                    : dtype == swap::Dtype::kBf16 ? kernels::DType::kBf16
                                                  : kernels::DType::kFp16;
  for (const models::PublishedTensor& t : layout.tensors) {
    std::vector<float> values = Formula(t.name, t.elements());
    for (float& value : values) value /= 4;
    std::vector<std::byte> bytes(values.size() * swap::DtypeBytes(dtype));
    kernels::Convert(kernels::DType::kFp32, values.data(), type, bytes.data(), values.size());
    ASSERT_TRUE((*writer)->Append(bytes).ok());
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

class LoraBaseTest : public testing_support::ProgramTest {
 protected:
  Arguments Tune(const std::string& model, const std::string& state, const Arguments& more = {}) const {
    return Arguments{"train",      "--data",      text_,
                     "--model",    dir_ + model,  "--state-dir",
                     dir_ + state, "--log",       dir_ + state + ".jsonl",
                     "--batch",    "2",           "--seq",
                     "32",         "--steps",     "4",
                     "--threads",  "1",           "--lr",
                     "1e-2",       "--lora-rank", "4"} +
           more;
  }
  std::string Losses(const std::string& state) const {
    std::string losses;
    for (const std::string& line : Lines(ReadFile(dir_ + state + ".jsonl")))
      losses += json::parse(line)["loss"].dump() + "," + json::parse(line)["grad_norm"].dump() + "\n";
    return losses;
  }
  std::unique_ptr<aio::Engine> Io() {
    aio::EngineOptions options;
    options.log = [](std::string_view) {};
    return *aio::Engine::Create(std::move(options));
  }
};

// Every element is where the model has it, however the runs are cut.
TEST_F(LoraBaseTest, ARunCutAnywhereHasTheWeightsOfTheFiles) {
  WriteAs(dir_ + "/bf16", kLlama, swap::Dtype::kBf16);
  WriteAs(dir_ + "/fp16", kLlama, swap::Dtype::kF16);
  ASSERT_EQ(Run({"pack", dir_ + "/bf16", dir_ + "/p8", "--weights", "8"}).code, 0);
  ASSERT_EQ(Run({"pack", dir_ + "/bf16", dir_ + "/p4", "--weights", "4", "--group", "32"}).code, 0);
  const auto model = *models::ModelFromJson(kLlama);
  const auto adapted = *models::WithLora(model, {.rank = 4, .targets = {}});
  const models::ModelLayout layout = models::WithoutAdapters(adapted->Layout());
  const auto io = Io();
  std::mt19937 random(3);
  for (const std::string name : {"bf16", "fp16", "p8", "p4"}) {
    for (const auto type : {kernels::DType::kFp32, kernels::DType::kBf16, kernels::DType::kFp16}) {
      SCOPED_TRACE(name + " " + std::to_string(static_cast<int>(type)));
      const auto weights = models::FrozenWeights::Open(dir_ + "/" + name, layout, type, "--model");
      ASSERT_TRUE(weights.ok()) << weights.status();
      const auto width = static_cast<int64_t>(kernels::BytesPerElement(type));
      auto published = models::WeightImport::Open(dir_ + (name == "fp16" ? "/fp16" : "/bf16"), layout);
      for (int b = 0; b < static_cast<int>(layout.block_elements.size()); ++b) {
        const int64_t all = layout.block_elements[static_cast<size_t>(b)];
        const auto read = [&](int64_t first, int64_t n) {
          std::vector<std::byte> to(static_cast<size_t>(n * width), std::byte{0x7f});
          const absl::Status status =
              zero::ReadFrozenNow(**weights, *io, tiering::BlockIndex(b), first, n, to.data());
          EXPECT_TRUE(status.ok()) << status;
          std::vector<float> values(static_cast<size_t>(n));
          kernels::Convert(type, to.data(), kernels::DType::kFp32, values.data(), values.size());
          return values;
        };
        const std::vector<float> whole = read(0, all);
        std::vector<float> expected(static_cast<size_t>(all));
        ASSERT_TRUE((*published)->Read(b, 0, all, expected.data()).ok());
        if (name[0] != 'p') {
          std::vector<std::byte> rounded(static_cast<size_t>(all * width));
          kernels::Convert(kernels::DType::kFp32, expected.data(), type, rounded.data(), expected.size());
          for (int64_t i = 0; i < all && type == kernels::DType::kBf16; ++i) {
            const auto high = kernels::SplitOne(expected[static_cast<size_t>(i)]).master_high;
            std::memcpy(rounded.data() + 2 * i, &high, sizeof(high));
          }
          kernels::Convert(type, rounded.data(), kernels::DType::kFp32, expected.data(), expected.size());
          ASSERT_EQ(whole, expected);
        } else {
          const float worst = name == "p8" ? 0.125F / 120 : 0.125F / 6;
          for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(whole[i], expected[i], worst) << i;
        }
        for (int cut = 0; cut < 30; ++cut) {
          const int64_t n = std::min<int64_t>(all, 1 + static_cast<int64_t>(random() % 900));
          const int64_t first = static_cast<int64_t>(random()) % (all - n + 1);
          const std::vector<float> part = read(first, n);
          ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first)) << first << " " << n;
        }
      }
    }
  }
}

TEST_F(LoraBaseTest, TheBitsAreThoseOfWeightsThatWereCopied) {
  WriteAs(dir_ + "/fp32", kLlama, swap::Dtype::kF32);
  WriteAs(dir_ + "/bf16", kLlama, swap::Dtype::kBf16);
  WriteAs(dir_ + "/fp16", kLlama, swap::Dtype::kF16);
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"fp32", "fp32"}, {"bf16", "bf16"}, {"bf16", "fp32"}, {"fp16", "bf16"}};
  for (const auto& [file, type] : pairs) {
    SCOPED_TRACE(file + " " + type);
    const std::string at = "/" + file + "-" + type;
    const Ran copied = Run(Tune("/" + file, at + "-none", {"--dtype", type, "--offload", "none"}));
    ASSERT_EQ(copied.code, 0) << copied.err;
    EXPECT_THAT(copied.out, HasSubstr("copied into the state: without a drive"));
    const Ran in_place = Run(Tune("/" + file, at, {"--dtype", type}));
    ASSERT_EQ(in_place.code, 0) << in_place.err;
    EXPECT_THAT(in_place.out, HasSubstr("are read where they lie"));
    EXPECT_EQ(Losses(at), Losses(at + "-none"));
    EXPECT_EQ(Lines(Losses(at)).size(), 4U);
  }
  // What cannot be read so is copied, and that is said; the bits are the same.
  const Ran wide = Run(Tune("/fp32", "/wide", {"--dtype", "bf16"}));
  ASSERT_EQ(wide.code, 0) << wide.err;
  EXPECT_THAT(wide.out, HasSubstr("is published in fp32, and the run computes in 16 bit"));
  WriteAs(dir_ + "/gpt", kGpt, swap::Dtype::kBf16);
  const Ran turned = Run(Tune("/gpt", "/turned", {"--dtype", "bf16"}));
  ASSERT_EQ(turned.code, 0) << turned.err;
  EXPECT_THAT(turned.out, HasSubstr("is published turned"));
}

// With the least memory, resumed after a kill, evaluated, sampled, merged.
TEST_F(LoraBaseTest, ARunOnItLivesThroughEverything) {
  WriteAs(dir_ + "/model", kLlama, swap::Dtype::kBf16);
  const Arguments bf16 = {
      "--dtype",          "bf16",         "--eval-data",        text_, "--eval-windows", "3",
      "--checkpoint-dir", dir_ + "/kept", "--checkpoint-every", "2"};
  const Ran plan =
      Run({"plan", "--model", dir_ + "/model", "--batch", "2", "--seq", "32", "--lora-rank", "4", "--dtype",
           "bf16", "--threads", "1", "--json", "--no-probe", "--state-dir", dir_ + "/planned"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  const json planned = json::parse(plan.out);
  const std::string least = std::to_string(planned["least_host_memory_bytes"].get<int64_t>() + (1 << 20));
  ASSERT_EQ(Run(Tune("/model", "/none", {"--dtype", "bf16", "--offload", "none"})).code, 0);
  const Ran run =
      Run(Tune("/model", "/state", bf16 + Arguments{"--host-memory", least, "--report", dir_ + "/report"}));
  ASSERT_EQ(run.code, 0) << run.err;
  const auto steps = [&](const std::string& text) {
    std::string of_steps;
    for (const std::string& line : Lines(text)) {
      if (line.find("null") == std::string::npos) of_steps += line + "\n";
    }
    return of_steps;
  };
  EXPECT_EQ(steps(Losses("/state")), Losses("/none"));
  const json report = json::parse(ReadFile(dir_ + "/report"));
  const auto base = static_cast<int64_t>(std::filesystem::file_size(dir_ + "/model/model.safetensors"));
  // Two passes over the base, in whole sectors; of what trains, state and checkpoints.
  for (const json& step : report["steps"]) {
    EXPECT_LE(step["nvme_read_bytes"].get<int64_t>(), 2 * base + 600'000);
    EXPECT_LE(step["nvme_write_bytes"].get<int64_t>(), 600'000);
  }
  EXPECT_LE(report["state_bytes_total"].get<int64_t>(), 3 * 4096 * 12);

  Program killed(dir_, Tune("/model", "/killed", {"--dtype", "bf16", "--quiet"}));
  for (int i = 0; i < 3000 && Lines(ReadFile(dir_ + "/killed.jsonl")).size() < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  killed.Signal(SIGKILL);
  killed.Wait();
  // Its model has moved meanwhile, and was copied: other times, the same bytes.
  std::filesystem::copy(dir_ + "/model", dir_ + "/moved");
  const Ran resumed = Run({"train", "--resume", "--quiet", "--data", text_, "--state-dir", dir_ + "/killed",
                           "--log", dir_ + "/killed.jsonl", "--model", dir_ + "/moved"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(Losses("/killed"), Losses("/none"));
  // From a checkpoint, which has no more of the base than the state.
  const Ran restored = Run({"train", "--resume", "--quiet", "--data", text_, "--state-dir", dir_ + "/again",
                            "--checkpoint-dir", dir_ + "/kept", "--steps", "5"});
  EXPECT_EQ(restored.code, 0) << restored.err;
  const Ran in_memory = Run({"train", "--resume", "--quiet", "--data", text_, "--offload", "none",
                             "--checkpoint-dir", dir_ + "/kept", "--steps", "6"});
  EXPECT_EQ(in_memory.code, 2);
  EXPECT_THAT(in_memory.err, HasSubstr("go on with --offload nvme"));

  EXPECT_EQ(Run({"verify", dir_ + "/state"}).code, 0);
  std::filesystem::create_directory(dir_ + "/merged");
  const Ran merged = Run({"export", dir_ + "/state", dir_ + "/merged", "--merge"});
  ASSERT_EQ(merged.code, 0) << merged.err;
  const Ran over_base = Run({"export", dir_ + "/state", dir_ + "/model", "--merge", "--overwrite"});
  EXPECT_EQ(over_base.code, 2);
  EXPECT_THAT(over_base.err, HasSubstr("holds the weights that this run reads"));
  const Ran of_copy = Run({"export", dir_ + "/none/checkpoints", dir_ + "/copied.safetensors", "--merge"});
  ASSERT_EQ(of_copy.code, 0) << of_copy.err;
  const auto model = *models::ModelFromJson(kLlama);
  auto one = models::WeightImport::Open(dir_ + "/merged", model->Layout()),
       other = models::WeightImport::Open(dir_ + "/copied.safetensors", model->Layout());
  ASSERT_TRUE(one.ok() && other.ok());
  for (size_t b = 0; b < model->Layout().block_elements.size(); ++b) {
    std::vector<float> x(static_cast<size_t>(model->Layout().block_elements[b])), y(x);
    ASSERT_TRUE((*one)->Read(static_cast<int>(b), 0, std::ssize(x), x.data()).ok());
    ASSERT_TRUE((*other)->Read(static_cast<int>(b), 0, std::ssize(y), y.data()).ok());
    EXPECT_EQ(x, y) << b;
  }
  const Ran sampled =
      Run({"sample", dir_ + "/state", "--prompt", "water ", "--tokens", "8", "--temperature", "0"});
  const Ran copied = Run(
      {"sample", dir_ + "/none/checkpoints", "--prompt", "water ", "--tokens", "8", "--temperature", "0"});
  ASSERT_EQ(sampled.code, 0) << sampled.err;
  ASSERT_EQ(copied.code, 0) << copied.err;
  EXPECT_EQ(sampled.out, copied.out);
}

TEST_F(LoraBaseTest, AnotherBaseIsRefusedByName) {
  WriteAs(dir_ + "/model", kLlama, swap::Dtype::kBf16);
  ASSERT_EQ(Run(Tune("/model", "/state", {"--dtype", "bf16", "--quiet"})).code, 0);
  const std::string file = dir_ + "/model/model.safetensors";
  const Arguments again = {"train",       "--resume",      "--quiet", "--data", text_,
                           "--state-dir", dir_ + "/state", "--steps", "5"};
  const std::string bytes = ReadFile(file);
  std::string changed = bytes;
  changed[changed.size() - 100] ^= 1;
  WriteFile(file, changed);
  for (const Arguments& flags :
       {again, Arguments{"sample", dir_ + "/state", "--tokens", "1"},
        Arguments{"export", dir_ + "/state", dir_ + "/out.safetensors", "--merge"}}) {
    const Ran ran = Run(flags);
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err,
                HasSubstr(file + ": not the weights that this run's adapters were made for (its bytes"));
  }
  std::filesystem::remove(file);
  EXPECT_THAT(Run(again).err, HasSubstr(file + ": the weights that this run's adapters go to are not there"));
  // The adapters are there without it.
  EXPECT_EQ(Run({"export", dir_ + "/state", dir_ + "/adapter"}).code, 0);
  WriteFile(file, bytes);  // another time, the same bytes
  EXPECT_EQ(Run(again).code, 0);
}

// As from a directory that has the decoded values.
TEST_F(LoraBaseTest, PackedWeightsTrainAsWhatTheyDecodeTo) {
  for (const json& config : {kLlama, kGpt}) {
    const std::string kind = "/" + config["model_type"].get<std::string>();
    WriteAs(dir_ + kind, config, swap::Dtype::kBf16);
    for (const std::string bits : {"8", "4"}) {
      SCOPED_TRACE(kind + bits);
      const std::string packed = kind + "-packed" + bits, decoded = kind + "-decoded" + bits;
      ASSERT_EQ(Run({"pack", dir_ + kind, dir_ + packed, "--weights", bits}).code, 0);
      const auto model = *models::ModelFromJson(config);
      const models::ModelLayout layout = model->Layout();
      const auto weights =
          models::FrozenWeights::Open(dir_ + packed, layout, kernels::DType::kFp32, "--model");
      ASSERT_TRUE(weights.ok()) << weights.status();
      std::filesystem::create_directory(dir_ + decoded);
      WriteFile(dir_ + decoded + "/config.json", config.dump());
      std::vector<swap::TensorInfo> infos;
      for (const models::PublishedTensor& t : layout.tensors)
        infos.push_back({t.name, swap::Dtype::kF32, t.published_shape(), 0});
      auto writer = swap::SafetensorsWriter::Create(dir_ + decoded + "/model.safetensors", infos, {}, true);
      const auto io = Io();
      for (const models::PublishedTensor& t : layout.tensors) {
        std::vector<float> values(static_cast<size_t>(t.elements())), as_published(values);
        ASSERT_TRUE(zero::ReadFrozenNow(**weights, *io, tiering::BlockIndex(t.block), t.offset, t.elements(),
                                        reinterpret_cast<std::byte*>(values.data()))
                        .ok());
        for (int64_t e = 0; e < t.elements(); ++e) {
          const int64_t to = t.transposed ? e % t.columns * t.rows + e / t.columns : e;
          as_published[static_cast<size_t>(to)] = values[static_cast<size_t>(e)];
        }
        ASSERT_TRUE((*writer)->Append(std::as_bytes(std::span(as_published))).ok());
      }
      ASSERT_TRUE((*writer)->Finish().ok());
      for (const std::string type : {"fp32", "bf16"}) {
        const std::string at = kind + bits + type;
        const Ran plain = Run(Tune(decoded, at + "-none", {"--dtype", type, "--offload", "none"}));
        ASSERT_EQ(plain.code, 0) << plain.err;
        const Ran coded = Run(Tune(packed, at, {"--dtype", type}));
        ASSERT_EQ(coded.code, 0) << coded.err;
        EXPECT_THAT(coded.out, HasSubstr(" in " + bits + " bit, are read where they lie"));
        EXPECT_EQ(Losses(at), Losses(at + "-none"));
      }
      const Ran merged =
          Run({"export", dir_ + kind + bits + "fp32", dir_ + kind + bits + ".safetensors", "--merge"});
      EXPECT_EQ(merged.code, 0) << merged.err;
    }
    const Ran whole = Run({"train", "--data", text_, "--model", dir_ + kind + "-packed8", "--check"});
    EXPECT_EQ(whole.code, 2);
    EXPECT_THAT(whole.err, HasSubstr("--lora-rank"));
  }
}

}  // namespace
}  // namespace penstock::tools::lora_base_test
