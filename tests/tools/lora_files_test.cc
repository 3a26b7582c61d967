// The files that adapters go to, over the life of a run: changed, gone, moved, many; told by name and way
// out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/directory.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"
#include "tests/tools/rank_programs.h"

namespace penstock::tools::lora_files_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing_support::Arguments;
using testing_support::Lines;
using testing_support::Program;
using testing_support::Ran;
using testing_support::ReadFile;
using testing_support::StartRanks;
using testing_support::WaitForAll;
using testing_support::WriteFile;
using testing_support::WriteModel;
using testing_support::operator+;
namespace fs = std::filesystem;

const json kLlama = {{"model_type", "llama"},    {"hidden_size", 32},
                     {"intermediate_size", 64},  {"num_hidden_layers", 2},
                     {"num_attention_heads", 2}, {"num_key_value_heads", 2},
                     {"vocab_size", 256},        {"max_position_embeddings", 32}};

class LoraFilesTest : public testing_support::ProgramTest {
 protected:
  Arguments Tune(const std::string& state, const Arguments& more = {}) const {
    return Arguments{"train",
                     "--data",
                     text_,
                     "--state-dir",
                     dir_ + state,
                     "--log",
                     dir_ + state + ".jsonl",
                     "--batch",
                     "2",
                     "--seq",
                     "16",
                     "--steps",
                     "3",
                     "--threads",
                     "1",
                     "--dtype",
                     "fp32",
                     "--lr",
                     "1e-2",
                     "--lora-rank",
                     "2"} +
           more;
  }
  Arguments Resume(const std::string& state, const std::string& steps, const Arguments& more = {}) const {
    return Arguments{"train",       "--resume",   "--data",  text_, "--log", dir_ + state + ".jsonl",
                     "--state-dir", dir_ + state, "--steps", steps} +
           more;
  }
  std::string Losses(const std::string& state) const {
    std::string losses;
    for (const std::string& line : Lines(ReadFile(dir_ + state + ".jsonl")))
      losses += json::parse(line)["loss"].dump() + "\n";
    return losses;
  }
  // As damage does: neither the size nor the time tells.
  static void ChangeAByte(const std::string& file) {
    const auto time = fs::last_write_time(file);
    std::string bytes = ReadFile(file);
    bytes[bytes.size() - 100] ^= 1;
    WriteFile(file, bytes);
    fs::last_write_time(file, time);
  }
};

TEST_F(LoraFilesTest, ChangedBytesOfTheSameSizeAndTimeAreFoundByVerifyAndMerge) {
  WriteModel(dir_ + "/model", kLlama, 2);
  ASSERT_EQ(Run(Tune("/state", {"--model", dir_ + "/model"})).code, 0);
  const Ran whole = Run({"verify", dir_ + "/state"});
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("in " + dir_ + "/model, read and checked"));
  const std::string file = dir_ + "/model/model-1.safetensors";
  ChangeAByte(file);
  const std::string told = file + ": not the weights that this run's adapters were made for (its bytes";
  const Ran verified = Run({"verify", dir_ + "/state"});
  EXPECT_EQ(verified.code, 1);
  EXPECT_THAT(verified.err, HasSubstr(told));
  EXPECT_THAT(verified.out, Not(HasSubstr("whole")));
  const json base = json::parse(Run({"verify", dir_ + "/state", "--json"}).out);
  EXPECT_EQ(base["whole"], false);
  EXPECT_EQ(base["base"]["whole"], false);
  EXPECT_THAT(base["base"]["error"].get<std::string>(), HasSubstr(told));
  const Ran merged = Run({"export", dir_ + "/state", dir_ + "/out.safetensors", "--merge"});
  EXPECT_EQ(merged.code, 2);
  EXPECT_THAT(merged.err, HasSubstr(told));
  EXPECT_FALSE(fs::exists(dir_ + "/out.safetensors"));
  // The adapters are whole, and nothing of the base is in them.
  EXPECT_EQ(Run({"export", dir_ + "/state", dir_ + "/adapter"}).code, 0);
  ChangeAByte(file);  // back again
  EXPECT_EQ(Run({"verify", dir_ + "/state"}).code, 0);
}

TEST_F(LoraFilesTest, AMissingFileIsNamedBeforeAnythingIsOpened) {
  WriteModel(dir_ + "/model", kLlama, 3);
  ASSERT_EQ(Run(Tune("/state", {"--model", dir_ + "/model"})).code, 0);
  const std::string file = dir_ + "/model/model-2.safetensors";
  fs::rename(file, file + ".gone");
  for (const Arguments& flags :
       {Resume("/state", "4"), Arguments{"verify", dir_ + "/state"},
        Arguments{"sample", dir_ + "/state", "--tokens", "1"},
        Arguments{"export", dir_ + "/state", dir_ + "/out.safetensors", "--merge"}}) {
    const Ran ran = Run(flags);
    EXPECT_EQ(ran.code, flags.front() == "verify" ? 1 : 2);
    EXPECT_THAT(ran.err, AllOf(HasSubstr(file + ": the weights that this run's adapters go to are not there"),
                               HasSubstr("--model DIR")));
  }
}

TEST_F(LoraFilesTest, AFinishedRunWhoseModelMovedIsReadWhereAFlagSays) {
  WriteModel(dir_ + "/model", kLlama);
  ASSERT_EQ(Run(Tune("/state", {"--model", dir_ + "/model"})).code, 0);
  const std::string moved = dir_ + "/moved";
  fs::rename(dir_ + "/model", moved);
  EXPECT_THAT(Run({"verify", dir_ + "/state"}).err, HasSubstr("say where they are (--model DIR"));
  EXPECT_EQ(Run({"verify", dir_ + "/state", "--model", moved}).code, 0);
  const Ran nothing_to_do = Run(Resume("/state", "3", {"--model", moved, "--quiet"}));
  ASSERT_EQ(nothing_to_do.code, 0) << nothing_to_do.err;
  EXPECT_THAT(nothing_to_do.err,
              HasSubstr("no step left, so it is not recorded that its weights lie in " + moved));
  EXPECT_EQ(Run({"verify", dir_ + "/state"}).code, 1);
  fs::create_directory(dir_ + "/merged");
  const Ran merged = Run({"export", dir_ + "/state", dir_ + "/merged", "--merge", "--model", moved});
  EXPECT_EQ(merged.code, 0) << merged.err;
  EXPECT_EQ(Run({"export", dir_ + "/state", dir_ + "/adapter", "--model", moved}).code, 0);
  EXPECT_EQ(json::parse(ReadFile(dir_ + "/adapter/adapter_config.json"))["base_model_name_or_path"], moved);
  EXPECT_EQ(Run({"sample", dir_ + "/state", "--tokens", "1", "--model", moved}).code, 0);
  // A step more, and it is recorded.
  const Ran more = Run(Resume("/state", "4", {"--model", moved, "--quiet"}));
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_THAT(more.err, Not(HasSubstr("no step left")));
  EXPECT_EQ(Run({"verify", dir_ + "/state"}).code, 0);
  // The flag is of runs that read weights elsewhere.
  ASSERT_EQ(Run(Train(dir_ + "/plain", {"--steps", "1"})).code, 0);
  for (const Arguments& flags :
       {Arguments{"verify", dir_ + "/plain", "--model", moved},
        Arguments{"sample", dir_ + "/plain", "--model", moved},
        Arguments{"export", dir_ + "/plain", dir_ + "/plain.safetensors", "--model", moved}}) {
    const Ran ran = Run(flags);
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err, HasSubstr("this state has its weights itself"));
  }
}

TEST_F(LoraFilesTest, ARunWhoseWeightsAreFromElsewhereThanItsConfigGoesOnWithThem) {
  WriteModel(dir_ + "/model", kLlama);
  WriteModel(dir_ + "/weights", kLlama);
  ChangeAByte(dir_ + "/weights/model.safetensors");
  const Arguments from = {"--model", dir_ + "/model", "--init-from", dir_ + "/weights"};
  for (const std::string state : {"/one", "/two", "/three"}) ASSERT_EQ(Run(Tune(state, from)).code, 0);
  ASSERT_EQ(Run(Resume("/one", "4")).code, 0);
  const Ran by_model = Run(Resume("/two", "4", {"--model", dir_ + "/model"}));
  ASSERT_EQ(by_model.code, 0) << by_model.err;
  EXPECT_THAT(by_model.out, HasSubstr("read where they lie, in " + dir_ + "/weights"));
  EXPECT_EQ(Losses("/two"), Losses("/one"));
  // The same flags as at the beginning, and a copy of the model that is not what it was made for.
  const Ran again = Run(Resume("/three", "4", from));
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(Losses("/three"), Losses("/one"));
  fs::copy(dir_ + "/model", dir_ + "/copy");
  const Ran by_copy = Run(Resume("/three", "5", {"--model", dir_ + "/copy"}));
  ASSERT_EQ(by_copy.code, 0) << by_copy.err;
  EXPECT_THAT(by_copy.out, HasSubstr("has other weights than this run's adapters were made for"));
  // Moved: the error names what is missing, and --init-from says where it is.
  fs::rename(dir_ + "/weights", dir_ + "/elsewhere");
  const Ran missing = Run(Resume("/two", "5", {"--model", dir_ + "/model"}));
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.err, AllOf(HasSubstr(dir_ + "/weights/model.safetensors"), HasSubstr("--init-from")));
  const Ran found = Run(Resume("/two", "5", {"--init-from", dir_ + "/elsewhere"}));
  ASSERT_EQ(found.code, 0) << found.err;
  EXPECT_EQ(Run({"verify", dir_ + "/two"}).code, 0);
  // Other weights by that flag are refused.
  const Ran other = Run(Resume("/two", "6", {"--init-from", dir_ + "/model"}));
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("its bytes are others"));
}

TEST_F(LoraFilesTest, MoreFilesThanTheSoftLimitAllowsAreOpened) {
  json config = kLlama;
  config["num_hidden_layers"] = 8;
  WriteModel(dir_ + "/model", config, 60);
  const auto limited = [&](const char* limits, const Arguments& flags) {
    return Program(dir_, flags, {"sh", "-c", std::string(limits) + "; exec \"$0\" \"$@\""}).Wait();
  };
  const Ran soft = limited("ulimit -Sn 50", Tune("/state", {"--model", dir_ + "/model"}));
  EXPECT_EQ(soft.code, 0) << soft.err;
  for (const Arguments& flags :
       {Resume("/state", "4"), Arguments{"verify", dir_ + "/state"},
        Arguments{"export", dir_ + "/state", dir_ + "/out.safetensors", "--merge"},
        Arguments{"plan", "--model", dir_ + "/model", "--no-probe", "--seq", "16", "--lora-rank", "2"}}) {
    const Ran ran = limited("ulimit -Sn 50", flags);
    EXPECT_EQ(ran.code, 0) << ran.err;
  }
  const Ran hard = limited("ulimit -n 50", Tune("/other", {"--model", dir_ + "/model"}));
  EXPECT_EQ(hard.code, 1);
  EXPECT_THAT(hard.err, HasSubstr("ulimit -n"));
}

// GPT-2's matrices are copied into the state: nothing of the files stands in the way of several ranks.
TEST_F(LoraFilesTest, SeveralRanksDoNotGoOnWithAdapters) {
  const json gpt = {{"model_type", "gpt2"}, {"n_embd", 32},      {"n_layer", 2},
                    {"n_head", 2},          {"n_positions", 32}, {"vocab_size", 256}};
  WriteModel(dir_ + "/model", gpt);
  ASSERT_EQ(Run(Tune("/state", {"--model", dir_ + "/model", "--checkpoint-dir", dir_ + "/kept",
                                "--checkpoint-every", "2"}))
                .code,
            0);
  const Arguments flags = {"train", "--resume",         "--quiet",       "--data",
                           text_,   "--state-dir",      dir_ + "/again", "--steps",
                           "4",     "--checkpoint-dir", dir_ + "/kept"};
  for (const Ran& rank : WaitForAll(StartRanks(dir_, {flags, flags}))) {
    EXPECT_EQ(rank.code, 2);
    EXPECT_THAT(rank.err, HasSubstr("adapters are trained by one process"));
  }
  // Nothing was restored for them, and the directory is still one for a new run.
  EXPECT_FALSE(PathExists(dir_ + "/again").value());
  EXPECT_EQ(Run(flags).code, 0);
}

}  // namespace
}  // namespace penstock::tools::lora_files_test
