// The command lines of ds_io and ds_nvme_tune. Input: the arguments, one a line; 0x01 in one is a line break.
#include <algorithm>
#include <sstream>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tools/ds/ds_io_bench.h"
#include "tools/ds/ds_io_tune.h"

namespace penstock::fuzz {
namespace {

// Parses; what was accepted and is not a request for help goes to `check`.
template <typename Parse, typename Check>
void Try(Parse parse, const std::vector<std::string>& arguments, Check check) {
  std::string help;
  const auto options = parse(arguments, &help);
  if (!options.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(options.status()));
    Refused(options.status());
    return;
  }
  Accepted();
  if (help.empty()) check(*options);
}

void CheckIo(const tools::DsIoOptions& options) {
  FUZZ_CHECK(options.io_bytes > 0);
  FUZZ_CHECK(options.block_bytes > 0 && options.block_bytes % 4096 == 0);
  FUZZ_CHECK(options.queue_depth >= 1 && options.loops >= 1 && options.warmup_loops >= 0);
  FUZZ_CHECK(static_cast<uint64_t>(options.queue_depth) * options.Parallel() <= 4096);
  const auto mapping = options.Mapping();
  FUZZ_CHECK(!mapping.empty());
  for (const auto& [device, folder] : mapping) FUZZ_CHECK(!device.empty() && !folder.empty());
}

void CheckTune(const tools::TuneOptions& options) {
  FUZZ_CHECK(!options.nvme_dirs.empty());
  FUZZ_CHECK(options.io_bytes >= 1u << 20);
  FUZZ_CHECK(!(options.no_read && options.no_write));
}

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  std::vector<std::string> arguments;
  std::istringstream text{std::string(penstock::fuzz::TextOf(data, bytes))};
  for (std::string word; std::getline(text, word);) {
    std::replace(word.begin(), word.end(), char{1}, char{10});
    arguments.push_back(word);
  }
  penstock::fuzz::Try(&penstock::tools::ParseDsIo, arguments, &penstock::fuzz::CheckIo);
  penstock::fuzz::Try(&penstock::tools::ParseTune, arguments, &penstock::fuzz::CheckTune);
  return 0;
}
