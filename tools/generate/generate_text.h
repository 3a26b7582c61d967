// The texts that `penstock generate` is making: tokens in, text, stop words and finished lines out.
#ifndef PENSTOCK_TOOLS_GENERATE_GENERATE_TEXT_H_
#define PENSTOCK_TOOLS_GENERATE_GENERATE_TEXT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tools/generate/generate_prompts.h"
#include "tools/generate/text_model.h"

namespace penstock::tools {

// One text, as its tokens come.
class GrowingText {
 public:
  // `stops`: the text ends before the first of these that it has.
  GrowingText(const TextModel* model, const std::vector<std::string>* stops);

  // True: a stop word is there.
  bool Push(int64_t token);
  void Finish();

  const std::string& text() const { return text_; }
  const std::vector<int64_t>& tokens() const { return tokens_; }
  // Where in the text, in bytes, each token begins: behind its end where a stop word ended it before.
  const std::vector<size_t>& begins() const { return begins_; }
  size_t taken() const { return taken_; }  // bytes that were handed out
  // What is certain and was not handed out before: nothing of it can become a part of a stop word.
  std::string TakeCertain();

 private:
  bool Cut(size_t from);

  const std::vector<std::string>& stops_;
  size_t longest_stop_ = 0;
  TokenText decoder_;
  std::string text_;
  std::vector<int64_t> tokens_;
  std::vector<size_t> begins_;
  size_t taken_ = 0;
  bool finished_ = false;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_GENERATE_TEXT_H_
