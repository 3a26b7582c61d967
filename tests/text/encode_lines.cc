// Encodes what stands on standard input, a JSON text a line, and prints a line for each:
// {"ids": [...], "plain": [...], "text": "...", "shown": "..."}: ids with and without the template, decoded
// without special tokens and with them. scripts/golden-text compares it with Hugging Face's.
//
//   text_encode_lines TOKENIZER.json < LINES
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "text/tokenizer.h"

int main(int argc, char** argv) {
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
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto text = nlohmann::json::parse(line).get<std::string>();
    const auto ids = (*tokenizer)->Encode(text);
    const auto plain = (*tokenizer)->Encode(text, {.add_special_tokens = false});
    if (!ids.ok() || !plain.ok()) {
      std::fprintf(stderr, "%s\n", std::string(ids.status().message()).c_str());
      return 1;
    }
    const nlohmann::json answer = {{"ids", *ids},
                                   {"plain", *plain},
                                   {"text", (*tokenizer)->Decode(*ids)},
                                   {"shown", (*tokenizer)->Decode(*ids, /*skip_special_tokens=*/false)}};
    std::cout << answer.dump() << '\n';
  }
  return 0;
}
