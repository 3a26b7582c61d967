// `penstock pack`, and generation from what it writes: the round trip, the same tokens for every budget,
// logits near those of the original, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "generate/generator.h"
#include "kernels/weight_code.h"
#include "models/families/family.h"
#include "models/weights/weight_import.h"
#include "models/weights/weight_pack.h"
#include "tests/soak.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::pack_test {
namespace {

using generate::CachePlace;
using nlohmann::json;
using testing::HasSubstr;
using testing_support::Ran;
using testing_support::operator+;
using testing_support::ReadFile;
using testing_support::WriteFile;
using testing_support::WriteModel;

constexpr uint64_t kMiB = uint64_t{1} << 20;

json LlamaConfig(bool tied = false) {
  return {{"model_type", "llama"},      {"hidden_size", 96},
          {"intermediate_size", 224},   {"num_hidden_layers", 3},
          {"num_attention_heads", 4},   {"num_key_value_heads", 2},
          {"vocab_size", 300},          {"max_position_embeddings", 512},
          {"tie_word_embeddings", tied}};
}
json GptConfig() {
  return {{"model_type", "gpt2"}, {"n_layer", 2},       {"n_embd", 96},
          {"n_head", 4},          {"n_positions", 256}, {"vocab_size", 300},
          {"resid_pdrop", 0.0},   {"attn_pdrop", 0.0},  {"embd_pdrop", 0.0}};
}

class PackTest : public testing_support::ProgramTest {
 protected:
  std::string Model(const std::string& name, const json& config, size_t files = 1) {
    WriteModel(dir_ + "/" + name, config, files);
    return dir_ + "/" + name;
  }
  Ran Pack(const std::string& from, const std::string& to, testing_support::Arguments more = {}) {
    return Run(testing_support::Arguments{"pack", from, to} + more);
  }
  Ran Generate(const std::string& model, testing_support::Arguments more = {}) {
    return Run(testing_support::Arguments{"generate", model, "--prompt", "1 2 3 4 5", "--tokens", "12",
                                          "--json", "--quiet"} +
               more);
  }

  // Tokens of several prompts, and the plan.
  struct Made {
    std::vector<std::vector<int64_t>> texts;
    generate::GenerationPlan plan;
    generate::GenerationStats stats;
  };
  Made Texts(const std::string& directory, uint64_t budget, std::optional<int64_t> batch, CachePlace place) {
    const auto model = models::OpenModel(directory);
    EXPECT_TRUE(model.ok()) << model.status();
    const models::ModelLayout layout = (*model)->Layout();
    generate::GeneratorOptions options;
    options.wish.budget_bytes = budget;
    options.wish.batch = batch;
    options.wish.cache = place;
    options.wish.sequences = 5;
    options.wish.prompt = 140;
    options.wish.positions = 152;
    options.cache_directory = dir_;
    const auto open = [&](aio::Engine* engine, const generate::WeightUses& uses) {
      return generate::OpenSafetensors(engine, directory, layout, uses, "weights");
    };
    auto generator = generate::Generator::Create(*model, open, std::move(options));
    EXPECT_TRUE(generator.ok()) << generator.status();
    Made made{std::vector<std::vector<int64_t>>(5), (*generator)->plan(), {}};
    int64_t next = 0;
    generate::GenerationCallbacks callbacks;
    callbacks.next = [&]() -> absl::StatusOr<std::optional<generate::GenerationRequest>> {
      if (next == 5) return std::nullopt;
      std::vector<int64_t> prompt;
      for (int64_t i = 0; i <= next * 34; ++i) prompt.push_back((7 * i + next) % 300);
      const int64_t id = next++;
      return generate::GenerationRequest{id, prompt, 12, 1};
    };
    callbacks.token = [&](int64_t id, int64_t token) {
      made.texts[static_cast<size_t>(id)].push_back(token);
      return false;
    };
    callbacks.finished = [](int64_t, generate::Finish) { return absl::OkStatus(); };
    const absl::Status status = (*generator)->Run(callbacks);
    EXPECT_TRUE(status.ok()) << status;
    made.stats = (*generator)->stats();
    return made;
  }

  // What a packed directory decodes to, as an unpacked one.
  std::string Unpacked(const std::string& packed, const std::string& name, const json& config) {
    const std::string to = dir_ + "/" + name;
    WriteModel(to, config);
    const models::ModelLayout layout = (*models::ModelFromJson(config))->Layout();
    const auto import = models::WeightImport::OpenAnyCode(packed, layout, "weights");
    EXPECT_TRUE(import.ok()) << import.status();
    std::vector<swap::TensorInfo> infos;
    for (const models::PublishedTensor& tensor : layout.tensors)
      infos.push_back({tensor.name, swap::Dtype::kF32, tensor.published_shape(), 0});
    auto writer = swap::SafetensorsWriter::Create(to + "/model.safetensors", infos, {}, /*overwrite=*/true);
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (size_t i = 0; i < layout.tensors.size(); ++i) {
      const std::vector<float> values = Values(**import, layout, i);
      EXPECT_TRUE((*writer)->Append(std::as_bytes(std::span(values))).ok());
    }
    EXPECT_TRUE((*writer)->Finish().ok());
    return to;
  }

  // As published: fp32, turned where the family turns.
  std::vector<float> Values(const models::WeightImport& import, const models::ModelLayout& layout, size_t i) {
    const models::PublishedTensor& tensor = layout.tensors[i];
    const auto place = import.PlaceOf(i);
    const std::string bytes = ReadFile(place.path);
    const auto* from = reinterpret_cast<const uint8_t*>(bytes.data()) + place.offset;
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    if (!place.code.has_value()) {
      EXPECT_EQ(place.dtype, swap::Dtype::kF32);
      std::memcpy(values.data(), from, values.size() * sizeof(float));
      return values;
    }
    const auto rows = static_cast<size_t>(tensor.rows), columns = static_cast<size_t>(tensor.columns);
    std::vector<float> row(columns);
    for (size_t r = 0; r < rows; ++r) {
      kernels::DecodeWeights(*place.code, from + r * place.code->row_bytes(columns), columns,
                             kernels::DType::kFp32, row.data());
      for (size_t c = 0; c < columns; ++c)
        values[tensor.transposed ? c * rows + r : r * columns + c] = row[c];
    }
    return values;
  }
};

TEST_F(PackTest, EveryWeightComesBackWithinHalfAStepAndVectorsExactly) {
  int number = 0;
  for (const json& config : {LlamaConfig(), LlamaConfig(true), GptConfig()}) {
    const std::string from = Model("from" + std::to_string(number), config, number == 0 ? 3 : 1);
    const models::ModelLayout layout = (*models::ModelFromJson(config))->Layout();
    for (const int bits : {8, 4}) {
      for (const int group : {32, 64, 128}) {
        // How weights are grouped is the same for every family; PENSTOCK_SOAK has all.
        if (tests::Soak() == 1 && number > 0 && group != 64) continue;
        SCOPED_TRACE(config.dump() + std::to_string(bits) + " " + std::to_string(group));
        const std::string to =
            dir_ + "/to" + std::to_string(number) + "." + std::to_string(bits * 1000 + group);
        const Ran ran = Pack(from, to,
                             {"--weights", std::to_string(bits), "--group", std::to_string(group),
                              "--max-shard", group == 64 ? "64KiB" : "4GiB"});
        ASSERT_EQ(ran.code, 0) << ran.err;
        EXPECT_EQ(std::filesystem::exists(to + "/model.safetensors.index.json"), group == 64);
        EXPECT_EQ(ReadFile(to + "/config.json"), ReadFile(from + "/config.json"));
        EXPECT_FALSE(std::filesystem::exists(to + ".partial"));
        const auto import = models::WeightImport::OpenAnyCode(to, layout, "weights");
        ASSERT_TRUE(import.ok()) << import.status();
        ASSERT_TRUE((*import)->packed().has_value());
        EXPECT_EQ((*import)->packed()->bits, bits);
        for (size_t i = 0; i < layout.tensors.size(); ++i) {
          const models::PublishedTensor& tensor = layout.tensors[i];
          const std::vector<float> original = testing_support::Formula(tensor.name, tensor.elements());
          const std::vector<float> decoded = Values(**import, layout, i);
          const auto code = (*import)->PlaceOf(i).code;
          ASSERT_EQ(code.has_value(), tensor.columns > 0);
          if (!code.has_value()) {
            EXPECT_EQ(decoded, original) << tensor.name;
            continue;
          }
          const bool is_end = tensor.block == 0 || tensor.name == "lm_head.weight";
          EXPECT_EQ(code->bits, is_end ? 8 : bits) << tensor.name;
          // Values are at most 0.5, and a scale is at most one bf16 above its quotient.
          const float half_step = 0.5f / (code->bits == 8 ? 127 : 7) * 0.5f * (1 + 0x1p-7f) * 1.000001f;
          float most = 0;
          for (size_t e = 0; e < original.size(); ++e)
            most = std::max(most, std::fabs(original[e] - decoded[e]));
          EXPECT_LE(most, half_step) << tensor.name;
          EXPECT_GT(most, 0) << tensor.name;
        }
      }
    }
    ++number;
  }
}

// The decoded weights as an ordinary directory are the same function: so streaming, decoding by tile and the
// tables' rows are right, bit by bit.
TEST_F(PackTest, TokensAreThoseOfTheDecodedWeightsForEveryBudgetAndPlaceAndBatch) {
  int number = 0;
  for (const json& config : {LlamaConfig(), LlamaConfig(true), GptConfig()}) {
    const std::string from = Model("model" + std::to_string(number), config);
    for (const std::string bits : {"8", "4"}) {
      SCOPED_TRACE(config.dump() + bits);
      const std::string name = "packed" + std::to_string(number) + "." + bits, to = dir_ + "/" + name;
      ASSERT_EQ(Pack(from, to, {"--weights", bits}).code, 0);
      const std::string plain = Unpacked(to, name + ".plain", config);
      const Made expected = Texts(plain, 512 * kMiB, 5, CachePlace::kHost);
      const Made all = Texts(to, 512 * kMiB, 5, CachePlace::kHost);
      EXPECT_EQ(all.texts, expected.texts);
      EXPECT_EQ(all.plan.pass_bytes, 0u) << "all of it is resident";
      EXPECT_LT(all.plan.resident_bytes * 3, expected.plan.resident_bytes) << "and stays coded there";
      for (const int64_t batch : {2, 5}) {
        for (const CachePlace place : {CachePlace::kHost, CachePlace::kDrive}) {
          const uint64_t least = Texts(to, 512 * kMiB, batch, place).plan.least_bytes;
          const Made small = Texts(to, least, batch, place);
          EXPECT_EQ(small.texts, expected.texts);
          EXPECT_GT(small.plan.pass_bytes, 0u);
          EXPECT_LE(small.plan.total_bytes, least);
          EXPECT_LE(small.stats.peak_tensor_bytes, static_cast<int64_t>(small.plan.tensor_bytes));
        }
      }
    }
    ++number;
  }
}

// The same where products are computed in bf16, by a header that says so: tiles and units are cut alike.
TEST_F(PackTest, TokensInBf16DependOnNeitherBudgetNorPlace) {
  const std::string from = Model("model", LlamaConfig()), to = dir_ + "/to";
  ASSERT_EQ(Pack(from, to, {"--weights", "4"}).code, 0);
  std::string bytes = ReadFile(to + "/model.safetensors");
  const std::string wide = R"("penstock.compute":"fp32")", narrow = R"("penstock.compute":"bf16")";
  ASSERT_NE(bytes.find(wide), std::string::npos);
  WriteFile(to + "/model.safetensors", bytes.replace(bytes.find(wide), wide.size(), narrow));
  const Made all = Texts(to, 512 * kMiB, 5, CachePlace::kHost);
  for (const CachePlace place : {CachePlace::kHost, CachePlace::kDrive}) {
    const uint64_t least = Texts(to, 512 * kMiB, 2, place).plan.least_bytes;
    const Made small = Texts(to, least, 2, place);
    EXPECT_EQ(small.texts, all.texts);
    EXPECT_GT(small.plan.pass_bytes, 0u);
    EXPECT_LE(small.stats.peak_tensor_bytes, static_cast<int64_t>(small.plan.tensor_bytes));
  }
}

TEST_F(PackTest, AFileThatCannotGrowEndsInOneLineAndNothingIsLeft) {
  const std::string from = Model("from", LlamaConfig()), to = dir_ + "/to";
  const Ran ran = testing_support::Program(dir_, {"pack", from, to, "--quiet"},
                                           {"bash", "-c", "ulimit -f 50; exec \"$@\"", "bash"})
                      .Wait();
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_EQ(testing_support::Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(to) || std::filesystem::exists(to + ".partial"));
}

TEST_F(PackTest, GenerateKnowsAPackedDirectoryAndSaysWhatAnotherNumberOfBitsNeeds) {
  const std::string from = Model("from", LlamaConfig()), to = dir_ + "/to";
  WriteFile(from + "/generation_config.json", "{}");
  ASSERT_EQ(Pack(from, to, {"--weights", "4"}).code, 0);
  EXPECT_EQ(ReadFile(to + "/generation_config.json"), "{}");
  for (const testing_support::Arguments& more :
       {testing_support::Arguments{}, testing_support::Arguments{"--weights", "4"}}) {
    const Ran ran = Generate(to, more + testing_support::Arguments{"--report", "report.json"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(json::parse(ran.out)["tokens"].size(), 12u);
    EXPECT_EQ(json::parse(ReadFile(dir_ + "/report.json"))["weights"], 4);
  }
  EXPECT_EQ(Generate(from, {"--weights", "16"}).code, 0);
  Ran ran = Generate(from, {"--weights", "8"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("penstock pack " + from + " OUT --weights 8"));
  ran = Generate(to, {"--weights", "16"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("is packed in 4 bit"));
  EXPECT_EQ(Generate(to, {"--weights", "5"}).code, 2);
  // Texts of other weights are other texts.
  const auto key = [&](const std::string& model) { return json::parse(Generate(model).out)["key"]; };
  EXPECT_NE(key(from), key(to));
}

TEST_F(PackTest, InspectSaysHowWeightsArePackedAndOfWhat) {
  const std::string from = Model("from", LlamaConfig()), to = dir_ + "/to";
  ASSERT_EQ(Pack(from, to, {"--weights", "4", "--group", "32", "--max-shard", "20000"}).code, 0);
  const Ran text = Run({"inspect", to});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("in 4 bit, embeddings and output in 8, a bf16 scale for each 32 of a row"));
  EXPECT_THAT(text.out, HasSubstr("source    " + from + "\n"));
  EXPECT_THAT(text.out, HasSubstr("model     llama\n"));
  const json packed = json::parse(Run({"inspect", to, "--json"}).out);
  EXPECT_EQ(packed["packed"]["bits"], 4);
  EXPECT_EQ(packed["packed"]["group"], 32);
  EXPECT_EQ(packed["packed"]["source"], from);
  int64_t bytes = 0;
  ASSERT_GT(packed["files"].size(), 1u);
  for (const json& file : packed["files"]) {
    EXPECT_LT(file["bytes"], std::filesystem::file_size(file["path"].get<std::string>()));
    bytes += file["bytes"].get<int64_t>();
  }
  EXPECT_EQ(packed["bytes"], bytes);
  int64_t tensors = 0;
  for (const json& type : packed["types"]) tensors += type["tensors"].get<int64_t>();
  EXPECT_EQ(packed["tensors"], tensors);
  // What it was made of is shown, too; and a file that is missing is named.
  const json plain = json::parse(Run({"inspect", from, "--json"}).out);
  EXPECT_TRUE(plain["packed"].is_null());
  EXPECT_EQ(plain["tensors"], tensors);
  const std::string gone = packed["files"][0]["path"];
  std::filesystem::remove(gone);
  const Ran missing = Run({"inspect", to});
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr(gone + " is missing"));
}

// How weights are coded is not guessed where the file that says it cannot be read, nor are they taken for
// plain.
TEST_F(PackTest, WhatCannotBeReadIsNotTakenForAbsent) {
  const std::string from = Model("from", LlamaConfig());
  const models::ModelLayout layout = (*models::OpenModel(from))->Layout();
  std::filesystem::rename(from + "/config.json", from + "/kept.json");
  EXPECT_TRUE(models::WeightImport::OpenAnyCode(from, layout, "weights").ok());
  std::filesystem::create_directory(from + "/config.json");  // cannot be read, by root either
  const auto import = models::WeightImport::OpenAnyCode(from, layout, "weights");
  ASSERT_FALSE(import.ok());
  EXPECT_THAT(std::string(import.status().message()), HasSubstr("config.json"));
  std::filesystem::remove(from + "/config.json");
  std::filesystem::rename(from + "/kept.json", from + "/config.json");
  const std::string to = dir_ + "/to";
  ASSERT_EQ(Pack(from, to, {"--quiet"}).code, 0);
  EXPECT_FALSE(models::PackingOf(from).value().has_value());
  EXPECT_FALSE(models::PackingOf(dir_ + "/nowhere").value().has_value());
  EXPECT_FALSE(models::PackingOf(dir_).value().has_value());
  const std::string file = to + "/model.safetensors";
  ASSERT_TRUE(std::filesystem::exists(file));
  std::filesystem::remove(file);
  std::filesystem::create_directory(file);
  EXPECT_FALSE(models::PackingOf(to).ok());
}

TEST_F(PackTest, WhatCannotBePackedIsRefusedInOneLineAndNothingIsLeft) {
  const std::string from = Model("from", LlamaConfig(), 3), to = dir_ + "/to";
  const auto refused = [&](const std::string& source, const std::string& out, testing_support::Arguments more,
                           int code, const std::string& why) {
    const Ran ran = Pack(source, out, std::move(more));
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_EQ(testing_support::Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(why));
    EXPECT_FALSE(std::filesystem::exists(out + ".partial"));
  };
  refused(from, to, {"--weights", "5"}, 2, "must be 8 or 4");
  refused(from, to, {"--group", "48"}, 2, "multiple of 32");
  refused(dir_, to, {}, 2, "not a Hugging Face directory");
  std::filesystem::create_symlink("config.json", dir_ + "/config.json");  // cannot be looked at
  refused(dir_, to, {}, 2, "symbolic links");
  refused(from, dir_ + "/no/where", {}, 1, "mkdir");
  ASSERT_EQ(Pack(from, to, {"--quiet"}).code, 0);
  refused(to, dir_ + "/again", {}, 2, "packed in 8 bit already");
  refused(from, to, {}, 2, "--overwrite");
  refused(from, from, {"--overwrite", "--quiet"}, 2, "is not a packed model");
  EXPECT_EQ(Pack(from, to, {"--overwrite", "--weights", "4", "--quiet"}).code, 0);
  EXPECT_EQ(models::PackingOf(to).value()->bits, 4);
  EXPECT_FALSE(std::filesystem::exists(to + ".partial"));
  WriteFile(to + "/mine.txt", "precious");
  refused(from, to, {"--overwrite", "--quiet"}, 2, "mine.txt");
  // A value that is not finite, a shard that is gone, a family that nobody knows.
  const std::string bad = Model("bad", LlamaConfig());
  std::string bytes = ReadFile(bad + "/model.safetensors");
  bytes.replace(bytes.size() - 4, 4, std::string("\0\0\x80\x7f", 4));
  WriteFile(bad + "/model.safetensors", bytes);
  refused(bad, dir_ + "/out", {"--quiet"}, 1, "not finite");
  std::filesystem::remove(from + "/model-1.safetensors");
  refused(from, dir_ + "/out", {"--quiet"}, 2, "is missing");
  json unknown = LlamaConfig();
  unknown["model_type"] = "mystery";
  WriteFile(bad + "/config.json", unknown.dump());
  refused(bad, dir_ + "/out", {"--quiet"}, 2, "mystery");
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/out"));
}

TEST_F(PackTest, AKillLeavesNothingUnderTheNameAndTheNextPackGoesThrough) {
  json config = LlamaConfig();
  config["vocab_size"] = 20'000;  // long enough to be killed in
  config["intermediate_size"] = 4'000;
  const std::string from = Model("from", config), to = dir_ + "/to";
  const std::string whole = dir_ + "/whole";
  ASSERT_EQ(Pack(from, whole, {"--max-shard", "200KiB"}).code, 0);
  int killed = 0;
  for (int round = 0; round < 12; ++round) {
    testing_support::Program program(dir_, {"pack", from, to, "--max-shard", "200KiB", "--quiet"});
    for (int i = 0; i < 2000 && !std::filesystem::exists(to + ".partial") && !std::filesystem::exists(to);
         ++i)
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
    program.Signal(SIGKILL);
    const Ran ran = program.Wait();
    if (ran.code == 0) break;
    ++killed;
    if (std::filesystem::exists(to)) break;  // published, and killed then
  }
  EXPECT_GT(killed, 0);
  if (std::filesystem::exists(to)) {
    EXPECT_TRUE(models::PackingOf(to).value().has_value());
  } else {
    const Ran last = Pack(from, to, {"--max-shard", "200KiB"});
    ASSERT_EQ(last.code, 0) << last.err;
  }
  for (const auto& entry : std::filesystem::directory_iterator(whole)) {
    const std::string name = entry.path().filename();
    EXPECT_EQ(ReadFile(to + "/" + name), ReadFile(whole + "/" + name)) << name;
  }
}

TEST_F(PackTest, WhatPackDidNotMakeStaysWhateverItIsCalled) {
  const std::string from = Model("from", LlamaConfig()), to = dir_ + "/to", other = to + ".partial";
  std::filesystem::copy(from, other);
  const std::string weights = ReadFile(other + "/model.safetensors");
  const Ran refused = Pack(from, to, {"--quiet"});
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("to.partial is not a packed model"));
  EXPECT_EQ(ReadFile(other + "/model.safetensors"), weights);
  EXPECT_FALSE(std::filesystem::exists(to));
}

// Before it takes the name, or into what has it then.
TEST_F(PackTest, AFileThatIsPutIntoTheOldDirectoryMeanwhileStaysThere) {
  json config = LlamaConfig();
  config["vocab_size"] = 20'000;  // long enough to be met on the way
  const std::string from = Model("from", config), to = dir_ + "/to";
  ASSERT_EQ(Pack(from, to, {"--weights", "4", "--quiet"}).code, 0);
  testing_support::Program program(dir_, {"pack", from, to, "--overwrite", "--quiet"});
  for (int i = 0; i < 20'000 && !std::filesystem::exists(to + ".partial"); ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  WriteFile(to + "/notes.txt", "mine");
  const Ran ran = program.Wait();
  EXPECT_EQ(ReadFile(to + "/notes.txt"), "mine");
  if (ran.code != 0) {
    EXPECT_THAT(ran.err, HasSubstr("holds notes.txt"));
    EXPECT_EQ(models::PackingOf(to).value()->bits, 4);
  }
  EXPECT_FALSE(std::filesystem::exists(to + ".partial"));
}

TEST_F(PackTest, DamagedPackedWeightsAreRefusedInOneLine) {
  const std::string from = Model("from", LlamaConfig()), to = dir_ + "/to";
  ASSERT_EQ(Pack(from, to).code, 0);
  const std::string file = to + "/model.safetensors", good = ReadFile(file);
  const auto refused = [&](const std::string& bytes, int code, const std::string& why) {
    WriteFile(file, bytes);
    const Ran ran = Generate(to);
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_EQ(testing_support::Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(why));
  };
  const auto with = [&](const std::string& old, const std::string& fresh) {
    std::string bytes = good;
    const size_t at = bytes.find(old);
    EXPECT_NE(at, std::string::npos) << old;
    return bytes.replace(at, old.size(), fresh);
  };
  refused(good.substr(0, good.size() - 100), 1, "model.safetensors");
  refused(with(R"("penstock.group":"64")", R"("penstock.group":"32")"), 2, "in groups of 32");
  refused(with(R"("penstock.group":"64")", R"("penstock.group":"17")"), 2, "not what `penstock pack` writes");
  refused(with(R"("penstock.packed":"1")", R"("penstock.packed":"2")"), 2, "this Penstock knows 1");
  refused(with(R"("penstock.packed":"1")", R"("penstock.packet":"1")"), 2, "in this model");
  WriteFile(file, good);
  EXPECT_EQ(Generate(to).code, 0);
  // Training has no use for them, and says so.
  const Ran ran = Run({"train", "--init-from", to, "--data", text_, "--state-dir", "state", "--quiet"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("is packed in 8 bit"));
}

}  // namespace
}  // namespace penstock::tools::pack_test
