// A line of JSONL as an example to learn from.
// Input: a byte that chooses the template of messages, then the line.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "tests/text/byte_tokenizer.h"
#include "text/example.h"

namespace {

using penstock::text::ChatTemplate;
using penstock::text::Example;
using penstock::text::Tokenizer;

const Tokenizer& Bytes() {
  static const Tokenizer* const tokenizer =
      Tokenizer::Parse(penstock::text::ByteTokenizer({"<s>", "</s>", "<|im_start|>", "<|im_end|>"}))
          ->release();
  return *tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes == 0) return 0;
  static constexpr std::optional<ChatTemplate> kTemplates[] = {std::nullopt, ChatTemplate::kChatMl,
                                                               ChatTemplate::kLlama3, ChatTemplate::kLlama2};
  const std::string_view line = penstock::fuzz::TextOf(data + 1, bytes - 1);
  const absl::StatusOr<Example> example =
      penstock::text::ExampleOfLine(line, Bytes(), kTemplates[data[0] % std::size(kTemplates)]);
  if (!example.ok()) {
    penstock::fuzz::Refused(example.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  FUZZ_CHECK(example->ids.size() == example->learned.size());
  FUZZ_CHECK(std::all_of(example->ids.begin(), example->ids.end(),
                         [](int32_t id) { return id >= 0 && id < Bytes().vocab_size(); }));
  return 0;
}
