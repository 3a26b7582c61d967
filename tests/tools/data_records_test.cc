// What form data has, and its records, in pieces of any length.
#include "models/data/data_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace penstock::models::data_records_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DataRecordsTest : public testing::Test {
 protected:
  DataRecordsTest() {
    std::string name = (std::filesystem::current_path() / "data_records_test.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
  }
  ~DataRecordsTest() override { std::filesystem::remove_all(directory_); }
  DataForm Form(const std::string& name, const std::string& content) const {
    const std::string path = directory_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    const auto form = DataFormOf(path);
    EXPECT_TRUE(form.ok()) << form.status();
    return form.value_or(DataForm::kText);
  }

  std::string directory_;
};

struct Cut {
  std::vector<std::string> records;
  std::string error;
};

Cut CutUp(DataForm form, const std::string& text, size_t bytes) {
  RecordSplitter splitter(form);
  Cut cut;
  const auto take = [&](std::string_view record) {
    cut.records.emplace_back(splitter.place() + "=" + std::string(record));
    return absl::OkStatus();
  };
  absl::Status status;
  for (size_t at = 0; at < text.size() && status.ok(); at += bytes)
    status = splitter.Push(std::string_view(text).substr(at, bytes), take);
  if (status.ok()) status = splitter.Finish(take);
  cut.error = std::string(status.message());
  return cut;
}

TEST_F(DataRecordsTest, AnArrayIsOneWhoseFirstElementIsAnObject) {
  EXPECT_EQ(Form("a.json", "[{\"text\": \"a\"}, {}]"), DataForm::kArray);
  EXPECT_EQ(Form("a.txt", "\xEF\xBB\xBF \n[\n  {\"a\": [1, {\"b\": \"]}\"}]}\n]"), DataForm::kArray);
  EXPECT_EQ(Form("a", "[{\"text\": \"" + std::string(100'000, 'x') + "\"}, what is no JSON"),
            DataForm::kArray);
  EXPECT_EQ(Form("a.json", " [ ] "), DataForm::kArray);
  for (const char* const text :
       {"[1] A footnote.\n", "[{not json}, 1]", "[\"a\", \"b\"]", "[", "[section]\nkey = 1\n", "[[1, 2]]",
        "[x](y) {\"text\": 1}", "[{\"text\": \"a\"}"}) {
    EXPECT_EQ(Form("a.txt", text), DataForm::kText) << text;
  }
}

TEST_F(DataRecordsTest, LinesAreThoseWhoseFirstIsAnExampleOrWhoseNameSaysSo) {
  EXPECT_EQ(Form("a.txt", "\n{\"text\": \"a\"}\n{\"text\": \"b\"}\n"), DataForm::kLines);
  EXPECT_EQ(Form("a", "{\"conversations\": []}"), DataForm::kLines);
  EXPECT_EQ(Form("a.jsonl", "what is no JSON\n"), DataForm::kLines);
  EXPECT_EQ(Form("a.jsonl", ""), DataForm::kLines);
  EXPECT_EQ(Form("a.txt", "{\"level\": \"info\"}\n"), DataForm::kText);
  EXPECT_EQ(Form("a.c", "{ int x; }\n"), DataForm::kText);
  EXPECT_EQ(Form("a.txt", ""), DataForm::kText);
}

TEST_F(DataRecordsTest, ElementsAreWholeInPiecesOfAnyLength) {
  const std::string text = "[ {\"a\": \"],\\\"}\"} ,\n{\"b\": [1, {\"c\": {}}]},7,\"x,y\" ] \n";
  for (size_t bytes = 1; bytes <= text.size(); ++bytes) {
    const Cut cut = CutUp(DataForm::kArray, text, bytes);
    EXPECT_EQ(cut.error, "");
    EXPECT_THAT(cut.records,
                ElementsAre("element 1={\"a\": \"],\\\"}\"} ", "element 2={\"b\": [1, {\"c\": {}}]}",
                            "element 3=7", "element 4=\"x,y\" "));
  }
  EXPECT_EQ(CutUp(DataForm::kArray, "[]", 1).records.size(), 0u);
}

TEST_F(DataRecordsTest, LinesAreWholeInPiecesOfAnyLength) {
  const std::string text = "\xEF\xBB\xBF{}\r\n \n{\"a\": 1}\nend";
  for (size_t bytes = 1; bytes <= text.size(); ++bytes) {
    const Cut cut = CutUp(DataForm::kLines, text, bytes);
    EXPECT_EQ(cut.error, "");
    EXPECT_THAT(cut.records, ElementsAre("line 1={}", "line 3={\"a\": 1}", "line 4=end"));
  }
}

TEST_F(DataRecordsTest, AnArrayThatIsNoneIsAnErrorWithItsPlace) {
  for (const auto& [text, says] : {std::pair{"[{}, {", "element 2: the file ends within the array"},
                                   {"[{}", "element 1: the file ends"},
                                   {"[{}] x", "element 2: text behind"},
                                   {"[{},, {}]", "element 2: nothing between"},
                                   {"[{},]", "element 2: nothing between"},
                                   {"[{}, }", "element 2: a } without"},
                                   {"", "the file ends within"}}) {
    for (const size_t bytes : {size_t{1}, size_t{100}})
      EXPECT_THAT(CutUp(DataForm::kArray, text, bytes).error, HasSubstr(says)) << text;
  }
}

TEST_F(DataRecordsTest, TokensAreRefusedOnlyWhereTheyAreCertainlyNone) {
  const auto check = [&](const std::string& content) {
    std::ofstream(directory_ + "/a.bin", std::ios::binary) << content;
    return std::string(CheckTokenData(directory_ + "/a.bin").message());
  };
  EXPECT_EQ(check("\x1f\x8b\x08\x01"), "");  // two tokens as good as others
  EXPECT_THAT(check("\x93NUMPY\x01"), HasSubstr("numpy.load"));
  EXPECT_THAT(check("version https://git-lfs.github.com/spec/v1\n"), HasSubstr("git lfs pull"));
}

// The head of a zip archive whose first file has this name.
std::string Zip(const std::string& name) {
  std::string head("PK\x03\x04\x14\x00\x00\x08\x00\x00", 10);
  head.resize(26);
  head += std::string{static_cast<char>(name.size()), '\0'} + std::string(2, '\0') + name;
  return head + std::string(300, 'x');
}

TEST_F(DataRecordsTest, AKnownFormatThatIsNotReadIsNamedWithWhatConvertsIt) {
  using namespace std::string_literals;
  const auto says = [&](const std::string& name, const std::string& content, bool tokens) {
    const std::string path = directory_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    return std::string(tokens ? CheckTokenData(path).message() : DataFormOf(path).status().message());
  };
  std::string tar(512, '\0');
  tar.replace(257, 5, "ustar");
  // What tokens do not begin with, and so is named in a .bin too.
  for (const auto& [content, way] :
       {std::pair{Zip("archive/data.pkl"), "torch.load('"},
        {Zip("arr_0.npy"), "numpy.load('"},
        {Zip("a.txt"), "unzip '"},
        {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"s, "torch.load('"},
        {"MMIDIDX\0\0"s, "give that .bin"},
        {"\x88\xd8\x34\x01\x01\0\0\0"s, "tail -c +1025 '"},
        {"\xa1\xd9\x34\x01\x07\0\0\0"s, "tail -c +1025 '"},
        {"7z\xbc\xaf\x27\x1c"s, "7z x '"},
        {tar, "tar -xf '"},
        {"\x89HDF\r\n\x1a\n"s, "h5py.File('"},
        {"SQLite format 3\0"s, "sqlite3 -json '"}}) {
    EXPECT_THAT(says("a.bin", content, true), HasSubstr(way));
    EXPECT_THAT(says("a.txt", content, false), HasSubstr(way));
  }
  EXPECT_THAT(says("a.bin", Zip("arr_0.npy"), true), HasSubstr("['arr_0'].astype('uint16')"));
  for (const auto& [content, way] : {std::pair{"\x04\x22\x4d\x18"s, "lz4 -d '"},
                                     {"ORC"s, "read_orc('"},
                                     {"Obj\x01"s, "fastavro.reader("},
                                     {"\x80\x04\x95"s, "pickle.load(open('"},
                                     {"GGUF\x03"s, "weights"},
                                     {"\x10\0\0\0\0\0\0\0{\"a\""s, "safetensors"},
                                     {"\xff\xfe"s + "a\0"s, "iconv -f UTF-16"},
                                     {"\xff\xfe\0\0a\0\0\0"s, "iconv -f UTF-32"}}) {
    EXPECT_THAT(says("a.txt", content, false), HasSubstr(way));
    EXPECT_EQ(says("a.bin", content, true), "") << way;
  }
}

TEST_F(DataRecordsTest, ADirectoryIsNamedWithWhatIsGivenInItsPlace) {
  EXPECT_THAT(std::string(DataFormOf(directory_).status().message()), HasSubstr("give the files in it"));
  std::ofstream(directory_ + "/dataset_info.json") << "{}";
  EXPECT_THAT(std::string(DataFormOf(directory_).status().message()),
              HasSubstr("datasets.load_from_disk('" + directory_ + "').to_json('"));
  std::ofstream(directory_ + "/dataset_dict.json") << "{}";
  EXPECT_THAT(std::string(CheckTokenData(directory_).message()), HasSubstr("')['train'].to_json('"));
}

}  // namespace
}  // namespace penstock::models::data_records_test
