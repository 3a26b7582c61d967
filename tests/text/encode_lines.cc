// Encodes what stands on standard input, a JSON text a line, and prints a line for each:
// {"ids": [...], "plain": [...], "text": "...", "shown": "..."}: ids with and without the template, decoded
// without special tokens and with them. Ends with 1 if a text that comes in parts has other ids.
// tests/golden/make text compares it with Hugging Face's. The tokenizer's notes are lines on standard error.
//
//   text_encode_lines TOKENIZER.json < LINES
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

int main(int argc, char** argv) try {
  using penstock::text::Tokenizer;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s TOKENIZER.json < LINES\n", argv[0]);
    return 2;
  }
  const auto tokenizer = Tokenizer::Open(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(tokenizer.status().message()).c_str());
    return 1;
  }
  for (const std::string& note : (*tokenizer)->notes()) std::fprintf(stderr, "%s\n", note.c_str());
  penstock::text::Encoder encoder(**tokenizer);
  std::minstd_rand random(1);
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto text = nlohmann::json::parse(line).get<std::string>();
    const auto ids = (*tokenizer)->Encode(text);
    const auto plain = (*tokenizer)->Encode(text, {.add_special_tokens = false});
    if (!ids.ok() || !plain.ok()) {
      std::fprintf(stderr, "%s\n", std::string(ids.status().message()).c_str());
      return 1;
    }
    std::vector<int32_t> in_parts;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t bytes = std::min(rest.size(), 1 + random() % 20);
      if (!encoder.Append(rest.substr(0, bytes), in_parts).ok()) return 1;
      rest.remove_prefix(bytes);
    }
    if (!encoder.Finish(in_parts).ok() || in_parts != *ids) {
      std::fprintf(stderr, "in parts it is another text: %s\n", line.c_str());
      return 1;
    }
    const nlohmann::json answer = {{"ids", *ids},
                                   {"plain", *plain},
                                   {"text", (*tokenizer)->Decode(*ids)},
                                   {"shown", (*tokenizer)->Decode(*ids, /*skip_special_tokens=*/false)}};
    std::cout << answer.dump() << '\n';
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
