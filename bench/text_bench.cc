// How fast a text becomes tokens, and tokens a text; one thread.
//
//   text_bench TOKENIZER.json TEXT [--benchmark_filter=...]
//
// Documents are what stands between blank lines. bench/text_peer.py does the same with Hugging Face's
// tokenizers.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace {

using penstock::text::Tokenizer;

struct Input {
  std::unique_ptr<Tokenizer> tokenizer;
  std::string text;
  std::vector<std::string_view> documents;
};

void Encode(benchmark::State& state, const Input& input, bool whole) {
  size_t tokens = 0;
  for (auto unused : state) {
    (void)unused;
    tokens = 0;
    std::vector<int32_t> ids;
    const std::vector<std::string_view> one = {input.text};
    for (const std::string_view document : whole ? one : input.documents) {
      ids.clear();
      if (!input.tokenizer->Append(document, {}, ids).ok()) state.SkipWithError("the text is not encoded");
      tokens += ids.size();
    }
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * input.text.size()));
  state.counters["tokens"] = static_cast<double>(tokens);
}

// The text as one document, in parts of 1 MiB.
void EncodeParts(benchmark::State& state, const Input& input) {
  size_t tokens = 0;
  for (auto unused : state) {
    (void)unused;
    tokens = 0;
    penstock::text::Encoder encoder(*input.tokenizer);
    std::vector<int32_t> ids;
    for (std::string_view rest = input.text; !rest.empty();) {
      const std::string_view part = rest.substr(0, 1 << 20);
      if (!encoder.Append(part, ids).ok()) state.SkipWithError("the text is not encoded");
      rest.remove_prefix(part.size());
      tokens += ids.size();
      ids.clear();
    }
    if (!encoder.Finish(ids).ok()) state.SkipWithError("the text is not encoded");
    tokens += ids.size();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * input.text.size()));
  state.counters["tokens"] = static_cast<double>(tokens);
}

void Decode(benchmark::State& state, const Input& input) {
  const auto ids = input.tokenizer->Encode(input.text);
  if (!ids.ok()) return state.SkipWithError("the text is not encoded");
  for (auto unused : state) {
    (void)unused;
    benchmark::DoNotOptimize(input.tokenizer->Decode(*ids));
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * input.text.size()));
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s TOKENIZER.json TEXT [--benchmark_...]\n", argv[0]);
    return 2;
  }
  Input input;
  auto tokenizer = Tokenizer::Open(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(tokenizer.status().message()).c_str());
    return 1;
  }
  input.tokenizer = *std::move(tokenizer);
  std::ifstream file(argv[2], std::ios::binary);
  input.text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  const std::string_view text = input.text;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find("\n\n", begin);
    input.documents.push_back(text.substr(begin, end - begin));
    begin = end == std::string_view::npos ? text.size() : end + 2;
  }
  benchmark::RegisterBenchmark("Encode/documents", Encode, std::cref(input), false)
      ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("Encode/whole", Encode, std::cref(input), true)->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("Encode/parts", EncodeParts, std::cref(input))->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("Decode", Decode, std::cref(input))->Unit(benchmark::kMillisecond);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
