// The prompts of `penstock generate`: those of --prompt, or the records of a file, lines of JSON or one array
// of it, one after the other.
//
//   {"prompt": "Once upon a time", "id": "a7"}      "id" is copied to what is written; anything will do
//   {"tokens": [1, 15043], "max_tokens": 20}        tokens instead of a text; fewer than --tokens
//
// Other keys are refused. The file is read twice, so that a wrong record is known before anything is
// computed; 64 KiB of it and one record are in memory at a time.
#ifndef PENSTOCK_TOOLS_GENERATE_GENERATE_PROMPTS_H_
#define PENSTOCK_TOOLS_GENERATE_GENERATE_PROMPTS_H_

#include <cstdint>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/data_records.h"
#include "tools/generate/text_model.h"

namespace penstock::tools {

struct Prompt {
  int64_t index = 0;  // of all prompts, from 0
  nlohmann::json id;  // null: none
  std::vector<int64_t> tokens;
  int64_t max_tokens = 0;  // 0: as many as --tokens says
};

class Prompts {
 public:
  Prompts(const TextModel* model, std::vector<std::string> texts)
      : model_(*model), texts_(std::move(texts)) {}
  // Of a file.
  Prompts(const TextModel* model, std::string path) : model_(*model), path_(std::move(path)) {}

  // The next one; nullopt: there is none any more. kInvalidArgument names file and record.
  absl::StatusOr<std::optional<Prompt>> Next();
  // Begins again.
  absl::Status Rewind();

 private:
  absl::StatusOr<Prompt> Parse(const std::string& record) const;
  absl::Status ReadMore();

  const TextModel& model_;
  const std::vector<std::string> texts_;
  const std::string path_;
  std::ifstream file_;
  std::optional<models::RecordSplitter> splitter_;        // while there is more to read
  std::deque<std::pair<std::string, std::string>> read_;  // records with their places
  bool open_ = false;
  int64_t next_ = 0;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_GENERATE_PROMPTS_H_
