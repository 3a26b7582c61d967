// Headers of safetensors files. Input: the JSON header; the data behind it is as long as fits it, if anything
// does, so that a header of the right form is taken whatever its numbers are.
#include <algorithm>

#include "swap/safetensors.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  // The first two bytes: how much data follows the header.
  if (bytes < 2) return 0;
  const uint64_t data_bytes = data[0] + 256u * data[1];
  const auto header =
      penstock::swap::ParseSafetensorsHeader(penstock::fuzz::TextOf(data + 2, bytes - 2), data_bytes);
  if (!header.ok()) {
    penstock::fuzz::Refused(header.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  uint64_t at = 0;
  for (const penstock::swap::TensorInfo& tensor : header->tensors) {
    const auto length = tensor.Bytes();
    FUZZ_CHECK(length.ok());
    FUZZ_CHECK(tensor.offset == at);
    at += *length;
  }
  FUZZ_CHECK(at == data_bytes);
  return 0;
}
