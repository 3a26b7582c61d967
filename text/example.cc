#include "text/example.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "text/strings.h"

namespace penstock::text {
namespace {

using nlohmann::json;

absl::Status Bad(const std::string& text) { return absl::InvalidArgumentError(text); }

// Where the text of each id ends, in bytes of what they were made of. Empty where that cannot be known: a
// tokenizer that changes a text before it cuts it.
std::vector<size_t> EndsOf(const std::vector<int32_t>& ids, std::string_view text,
                           const Tokenizer& tokenizer) {
  TextDecoder decoder(tokenizer, /*skip_special_tokens=*/false);
  std::string all;
  std::vector<size_t> ends;
  ends.reserve(ids.size());
  for (const int32_t id : ids) {
    const std::string part = decoder.Push(id);
    all += part;
    // A part of a character, or what is held back, ends where the next id does.
    ends.push_back(part.empty() ? 0 : all.size());
  }
  all += decoder.Finish();
  if (all != text) return {};
  size_t next = all.size();
  for (size_t i = ends.size(); i-- > 0;) next = ends[i] = ends[i] == 0 ? next : ends[i];
  if (!ends.empty()) ends.back() = all.size();
  return ends;
}

// A text in parts, each of which is learned or not.
class Script {
 public:
  void Add(std::string_view text, bool learned) {
    if (learned) spans_.emplace_back(text_.size(), text_.size() + text.size());
    text_.append(text);
  }
  // The ids of the whole, not of its parts. A token that has characters of two of them belongs to the later
  // one.
  absl::StatusOr<Example> Encode(const Tokenizer& tokenizer, bool add_special_tokens) const {
    Example example;
    ASSIGN_OR_RETURN(example.ids, tokenizer.Encode(text_, {.add_special_tokens = add_special_tokens}));
    example.learned.assign(example.ids.size(), false);
    ASSIGN_OR_RETURN(const std::vector<int32_t> plain,
                     tokenizer.Encode(text_, {.add_special_tokens = false}));
    // The template puts tokens before a text and behind it.
    const auto at = std::search(example.ids.begin(), example.ids.end(), plain.begin(), plain.end());
    const auto before = static_cast<size_t>(at - example.ids.begin());
    const std::vector<size_t> ends = EndsOf(plain, text_, tokenizer);
    if (ends.size() != plain.size()) {
      RETURN_IF_ERROR(MarkByParts(plain, before, tokenizer, &example));
      return example;
    }
    size_t i = 0;
    for (const auto& [first, last] : spans_) {
      while (i < plain.size() && ends[i] <= first) ++i;
      for (; i < plain.size() && ends[i] <= last; ++i) example.learned[before + i] = true;
    }
    return example;
  }

 private:
  // By the ids that the text has up to each place: what they have in common with the whole's.
  absl::Status MarkByParts(const std::vector<int32_t>& plain, size_t before, const Tokenizer& tokenizer,
                           Example* example) const {
    if (spans_.size() > kMostParts)
      return Bad(Cat("it has more than ", kMostParts, " answers, for a tokenizer that changes texts"));
    const auto ids_until = [&](size_t bytes) -> absl::StatusOr<size_t> {
      if (bytes == text_.size()) return plain.size();
      ASSIGN_OR_RETURN(
          const std::vector<int32_t> first,
          tokenizer.Encode(std::string_view(text_).substr(0, bytes), {.add_special_tokens = false}));
      return static_cast<size_t>(std::mismatch(first.begin(), first.end(), plain.begin(), plain.end()).first -
                                 first.begin());
    };
    for (const auto& [first, last] : spans_) {
      ASSIGN_OR_RETURN(const size_t from, ids_until(first));
      ASSIGN_OR_RETURN(const size_t to, ids_until(last));
      for (size_t i = from; i < to; ++i) example->learned[before + i] = true;
    }
    return absl::OkStatus();
  }

  static constexpr size_t kMostParts = 100;  // each is encoded with all before it

  std::string text_;
  std::vector<std::pair<size_t, size_t>> spans_;  // that are learned, in bytes
};

bool EndsText(const Tokenizer& tokenizer, int32_t id) {
  const std::vector<int32_t>& ends = tokenizer.special_ids().eos;
  return std::find(ends.begin(), ends.end(), id) != ends.end();
}

void AppendEnd(const Tokenizer& tokenizer, Example* example) {
  const std::vector<int32_t>& ends = tokenizer.special_ids().eos;
  if (ends.empty() || (!example->ids.empty() && EndsText(tokenizer, example->ids.back()))) return;
  example->ids.push_back(ends.front());
  example->learned.push_back(true);
}

struct Message {
  std::string role, content;
};

// ShareGPT's speakers, in the words of messages.
std::string RoleOf(const std::string& speaker) {
  if (speaker == "human") return "user";
  if (speaker == "gpt" || speaker == "chatgpt") return "assistant";
  return speaker;
}

// `name`: "messages", or "conversations", whose entries have "from" and "value" or what messages have.
absl::StatusOr<std::vector<Message>> MessagesOf(const json& list, const char* name) {
  if (!list.is_array() || list.empty()) return Bad(Cat(name, " is not a list of messages"));
  std::vector<Message> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    const json& entry = list[i];
    const bool shared = entry.is_object() && entry.contains("from") && !entry.contains("role");
    const char* const role_key = shared ? "from" : "role";
    const char* const content_key = shared ? "value" : "content";
    for (const char* const key : {role_key, content_key}) {
      if (!entry.is_object() || !entry.contains(key) || !entry[key].is_string())
        return Bad(Cat(name, "[", i, "] has no ", key, " that is a text"));
    }
    messages.push_back({entry[role_key].get<std::string>(), entry[content_key].get<std::string>()});
    std::string& role = messages.back().role;
    if (shared) role = RoleOf(role);
    if (role != "system" && role != "user" && role != "assistant")
      return Bad(Cat(name, "[", i, "] is of role ", Quoted(role), "; served are system, user and assistant",
                     shared ? " (human and gpt)" : ""));
  }
  if (std::none_of(messages.begin(), messages.end(),
                   [](const Message& message) { return message.role == "assistant"; }))
    return Bad(Cat(name, " has none of role assistant: there is nothing to learn"));
  return messages;
}

std::string Stripped(const std::string& text) { return std::string(absl::StripAsciiWhitespace(text)); }

void WriteChatMl(const std::vector<Message>& messages, Script* to) {
  for (const Message& message : messages) {
    const bool learned = message.role == "assistant";
    to->Add(Cat("<|im_start|>", message.role, "\n"), false);
    to->Add(Cat(message.content, "<|im_end|>"), learned);
    to->Add("\n", false);
  }
}

void WriteLlama3(const std::vector<Message>& messages, Script* to) {
  to->Add("<|begin_of_text|>", false);
  for (const Message& message : messages) {
    to->Add(Cat("<|start_header_id|>", message.role, "<|end_header_id|>\n\n"), false);
    to->Add(Cat(Stripped(message.content), "<|eot_id|>"), message.role == "assistant");
  }
}

absl::Status WriteLlama2(const std::vector<Message>& messages, Script* to) {
  std::string system;
  size_t i = 0;
  if (messages[0].role == "system") {
    system = Cat("<<SYS>>\n", messages[0].content, "\n<</SYS>>\n\n");
    i = 1;
  }
  for (bool user = true; i < messages.size(); ++i, user = !user) {
    if (messages[i].role != (user ? "user" : "assistant"))
      return Bad(
          Cat("messages[", i, "]: llama2 wants user and assistant in turns, after at most one system"));
    if (user) {
      to->Add(Cat("<s>[INST] ", Stripped(std::exchange(system, "") + messages[i].content), " [/INST]"),
              false);
    } else {
      to->Add(Cat(" ", Stripped(messages[i].content), " </s>"), true);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Example> OfMessages(const std::vector<Message>& messages, ChatTemplate chat,
                                   const Tokenizer& tokenizer) {
  Script script;
  switch (chat) {
    case ChatTemplate::kChatMl:
      WriteChatMl(messages, &script);
      break;
    case ChatTemplate::kLlama3:
      WriteLlama3(messages, &script);
      break;
    case ChatTemplate::kLlama2:
      RETURN_IF_ERROR(WriteLlama2(messages, &script));
      break;
  }
  // The template's own tokens stand in the text.
  return script.Encode(tokenizer, /*add_special_tokens=*/false);
}

absl::StatusOr<std::string> TextAt(const json& line, const char* key) {
  if (!line[key].is_string()) return Bad(Cat(key, " is no text"));
  return line[key].get<std::string>();
}

// "" where there is none.
absl::StatusOr<std::string> OptionalTextAt(const json& line, const char* key) {
  if (!line.contains(key) || line[key].is_null()) return std::string();
  return TextAt(line, key);
}

absl::Status NoTemplate(const char* what) {
  return Bad(Cat(what, " need a template: give `chat_template` chatml, llama3 or llama2"));
}

absl::StatusOr<Example> OfConversations(const json& line, std::optional<ChatTemplate> chat,
                                        const Tokenizer& tokenizer) {
  if (!chat.has_value()) return NoTemplate("conversations");
  ASSIGN_OR_RETURN(std::vector<Message> messages, MessagesOf(line["conversations"], "conversations"));
  ASSIGN_OR_RETURN(std::string system, OptionalTextAt(line, "system"));
  if (!system.empty() && messages.front().role != "system")
    messages.insert(messages.begin(), {"system", std::move(system)});
  return OfMessages(messages, *chat, tokenizer);
}

// What a prompt makes likely, with the token that ends a text.
absl::StatusOr<Example> OfPrompt(std::string_view prompt, std::string_view completion,
                                 const Tokenizer& tokenizer) {
  Script script;
  script.Add(prompt, false);
  script.Add(completion, true);
  ASSIGN_OR_RETURN(Example example, script.Encode(tokenizer, /*add_special_tokens=*/true));
  AppendEnd(tokenizer, &example);
  return example;
}

// The prompts of Stanford's Alpaca.
absl::StatusOr<Example> OfInstruction(const json& line, std::optional<ChatTemplate> chat,
                                      const Tokenizer& tokenizer) {
  for (const char* const key : {"instruction", "output"}) {
    if (!line.contains(key)) return Bad(Cat("it has no ", key));
  }
  ASSIGN_OR_RETURN(const std::string instruction, TextAt(line, "instruction"));
  ASSIGN_OR_RETURN(const std::string output, TextAt(line, "output"));
  ASSIGN_OR_RETURN(const std::string input, OptionalTextAt(line, "input"));
  ASSIGN_OR_RETURN(const std::string system, OptionalTextAt(line, "system"));
  if (line.contains("history") && !line["history"].empty())
    return Bad("it has a history, which is not served: write it as messages");
  if (chat.has_value()) {
    std::vector<Message> messages;
    if (!system.empty()) messages.push_back({"system", system});
    messages.push_back({"user", Cat(instruction, input.empty() ? "" : "\n", input)});
    messages.push_back({"assistant", output});
    return OfMessages(messages, *chat, tokenizer);
  }
  if (!system.empty()) return NoTemplate("it has a system message: such");
  return OfPrompt(input.empty()
                      ? Cat("Below is an instruction that describes a task. Write a response that "
                            "appropriately completes the request.\n\n### Instruction:\n",
                            instruction, "\n\n### Response:")
                      : Cat("Below is an instruction that describes a task, paired with an input that "
                            "provides further context. Write a response that appropriately completes the "
                            "request.\n\n### Instruction:\n",
                            instruction, "\n\n### Input:\n", input, "\n\n### Response:"),
                  output, tokenizer);
}

// The keys of a line that has none of those that are read.
std::string KeysOf(const json& line) {
  constexpr int kMost = 6;
  std::string keys;
  int count = 0;
  for (const auto& [key, unused] : line.items()) {
    if (++count > kMost) return Cat(keys, ", ...");
    CatTo(keys, keys.empty() ? "" : ", ", Quoted(key));
  }
  return keys.empty() ? "no keys" : keys;
}

}  // namespace

std::optional<ChatTemplate> ParseChatTemplate(std::string_view name) {
  if (name == "chatml") return ChatTemplate::kChatMl;
  if (name == "llama3") return ChatTemplate::kLlama3;
  if (name == "llama2") return ChatTemplate::kLlama2;
  return std::nullopt;
}

absl::Status CheckChatTemplate(ChatTemplate chat, const Tokenizer& tokenizer) {
  std::vector<const char*> tokens;
  switch (chat) {
    case ChatTemplate::kChatMl:
      tokens = {"<|im_start|>", "<|im_end|>"};
      break;
    case ChatTemplate::kLlama3:
      tokens = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
      break;
    case ChatTemplate::kLlama2:
      tokens = {"<s>", "</s>"};
      break;
  }
  for (const char* const token : tokens) {
    if (!tokenizer.IdOf(token).has_value())
      return Bad(Cat("the tokenizer has no token ", token, ", which the template of the messages needs"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Example> ExampleOfText(std::string_view text, const Tokenizer& tokenizer) {
  Example example;
  ASSIGN_OR_RETURN(example.ids, tokenizer.Encode(text));
  example.learned.assign(example.ids.size(), true);
  AppendEnd(tokenizer, &example);
  return example;
}

absl::StatusOr<Example> ExampleOfLine(std::string_view line, const Tokenizer& tokenizer,
                                      std::optional<ChatTemplate> chat) {
  ASSIGN_OR_RETURN(const json parsed, ParseJson(line, ""));
  if (!parsed.is_object()) return Bad("it is no object");
  if (parsed.contains("messages")) {
    if (!chat.has_value()) return NoTemplate("messages");
    ASSIGN_OR_RETURN(const std::vector<Message> messages, MessagesOf(parsed["messages"], "messages"));
    return OfMessages(messages, *chat, tokenizer);
  }
  if (parsed.contains("prompt") || parsed.contains("completion")) {
    for (const char* const key : {"prompt", "completion"}) {
      if (!parsed.contains(key)) return Bad(Cat("it has no ", key));
    }
    ASSIGN_OR_RETURN(const std::string prompt, TextAt(parsed, "prompt"));
    ASSIGN_OR_RETURN(const std::string completion, TextAt(parsed, "completion"));
    return OfPrompt(prompt, completion, tokenizer);
  }
  if (parsed.contains("text")) {
    ASSIGN_OR_RETURN(const std::string text, TextAt(parsed, "text"));
    return ExampleOfText(text, tokenizer);
  }
  if (parsed.contains("conversations")) return OfConversations(parsed, chat, tokenizer);
  if (parsed.contains("instruction")) return OfInstruction(parsed, chat, tokenizer);
  return Bad(Cat("it has ", KeysOf(parsed),
                 " and none of text, prompt and completion, messages, conversations, or instruction and "
                 "output: rename what is to be learned"));
}

bool HasExampleKeys(const json& object) {
  for (const char* const key : {"messages", "prompt", "completion", "text", "conversations", "instruction"}) {
    if (object.contains(key)) return true;
  }
  return false;
}

}  // namespace penstock::text
