// tokenizer.json, and a few texts and ids through what it describes.
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using penstock::text::Tokenizer;
  const auto tokenizer = Tokenizer::Parse(penstock::fuzz::TextOf(data, bytes));
  if (!tokenizer.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(tokenizer.status()));
    penstock::fuzz::Refused(tokenizer.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  for (const char* const text : {"", "Hello  world\n\n it's 1234 ab<s> \xC3\xA9\xCC\x81 \xE2\x96\x81 ",
                                 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab ab"}) {
    const auto ids = (*tokenizer)->Encode(text);
    if (!ids.ok()) {
      FUZZ_CHECK(absl::IsResourceExhausted(ids.status()));
      continue;
    }
    for (const int32_t id : *ids) FUZZ_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
    FUZZ_CHECK(penstock::text::FindBroken((*tokenizer)->Decode(*ids)) == std::string_view::npos);
  }
  return 0;
}
