// Texts to learn from, as a line of JSONL has them:
//
//   {"text": "..."}                                                   learned whole
//   {"prompt": "...", "completion": "..."}                            the completion is learned
//   {"messages": [{"role": "user", "content": "..."}, ...]}           what the assistant says is learned
//   {"conversations": [{"from": "human", "value": "..."}, ...]}       the same, in ShareGPT's words
//   {"instruction": "...", "input": "...", "output": "..."}           Alpaca's: the output is learned
//
// Of a line with keys of several, the first of messages, prompt, text, conversations and instruction counts.
// Keys besides these are passed over, as a data set's own columns are.
#ifndef PENSTOCK_TEXT_EXAMPLE_H_
#define PENSTOCK_TEXT_EXAMPLE_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "text/tokenizer.h"

namespace penstock::text {

// How messages become one text. A published model's own template (tokenizer_config.json) is a program in
// Jinja, which is not run here: it may also put a system message of its own first, which these do not.
enum class ChatTemplate : uint8_t {
  kChatMl,  // "<|im_start|>role\ncontent<|im_end|>\n": Qwen, SmolLM2
  kLlama3,  // "<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>"
  kLlama2,  // "<s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser [/INST] assistant </s>"
};
// "chatml", "llama3", "llama2"; empty: no such template.
std::optional<ChatTemplate> ParseChatTemplate(std::string_view name);

// kInvalidArgument names the first of the template's tokens that the tokenizer does not have.
absl::Status CheckChatTemplate(ChatTemplate chat, const Tokenizer& tokenizer);

struct Example {
  std::vector<int32_t> ids;
  // Of each id: whether its prediction counts. A prompt's ids are read and not learned.
  std::vector<bool> learned;
};

// A whole text, all of it learned. It begins with what the tokenizer's template puts before a text, and ends
// with the token that ends a text, where the tokenizer has one.
absl::StatusOr<Example> ExampleOfText(std::string_view text, const Tokenizer& tokenizer);

// `chat`: of messages; without one they are refused. A prompt and its completion are encoded as one text: a
// token that has characters of both belongs to the completion, and so does, with tokenizers that change a
// text before they cut it, one that the prompt alone would not have. The token that ends a text is learned.
// Special tokens that stand in the text are tokens; of keys that stand twice the last one counts.
// Alpaca's examples stand in the words that Alpaca was trained with ("Below is an instruction ..."), or, with
// `chat`, are a message of the user, the instruction and on the next line the input, and the answer.
// kInvalidArgument, one line: what is wrong with the line.
absl::StatusOr<Example> ExampleOfLine(std::string_view line, const Tokenizer& tokenizer,
                                      std::optional<ChatTemplate> chat);

// Whether an object of JSON has a key that the examples above begin with.
bool HasExampleKeys(const nlohmann::json& object);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_EXAMPLE_H_
