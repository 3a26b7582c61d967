// What `penstock generate` has made, a line of JSON for each prompt, in the order of their ends. A line is
// written whole, with one write, when its text is done: what stands in the file is never lost, and who goes
// on after a kill does not make it again.
//
//   {"index": 0, "id": "a7", "text": " there was", "tokens": [727, 373], "prompt_tokens": 5,
//    "finish": "length", "key": "5f0c..."}
//
// "key" is of all that the text depends on: weights' model, prompt, seed, options. A file whose lines have
// other keys was made with something else, and is refused.
#ifndef PENSTOCK_TOOLS_GENERATE_GENERATE_OUTPUT_H_
#define PENSTOCK_TOOLS_GENERATE_GENERATE_OUTPUT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tools {

class GenerateOutput {
 public:
  // Makes the file, or reads what is done from the one that is there; cuts off a line that a kill has torn.
  // `overwrite`: nothing is done, and what stands there is replaced by the first line that is appended: in
  // one step, or where no other file may take its name (a directory that cannot be written to, a mount) in
  // place. kFailedPrecondition: another process writes it. kInvalidArgument: not such a file, which stays as
  // it is.
  static absl::StatusOr<std::unique_ptr<GenerateOutput>> Open(const std::string& path, bool overwrite);
  ~GenerateOutput();
  GenerateOutput(const GenerateOutput&) = delete;
  GenerateOutput& operator=(const GenerateOutput&) = delete;

  int64_t done() const { return static_cast<int64_t>(keys_.size()); }
  // Whether prompt `index` is there. kFailedPrecondition: it is, with another key.
  absl::StatusOr<bool> Has(int64_t index, const std::string& key) const;
  // kResourceExhausted: the disk is full; the file is as it was.
  absl::Status Append(const nlohmann::ordered_json& line);

 private:
  GenerateOutput(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status ReadDone();

  absl::Status ReplaceBy(const std::string& text);
  absl::Status WriteOver(const std::string& text);
  absl::Status AppendText(const std::string& text);

  const std::string path_;
  std::string target_;  // what has the file, where path_ is a link
  int fd_;
  uint64_t bytes_ = 0;
  bool replaces_ = false;                // what stands in the file still goes
  std::map<int64_t, std::string> keys_;  // by index
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_GENERATE_OUTPUT_H_
