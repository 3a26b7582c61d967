// The pickle of a file of torch.save, in an archive that is right.
// Input: the pickle.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/weights/torch_file.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/torch_archive.h"

namespace {

using penstock::models::TorchFile;
using penstock::models::TorchValue;

// Every tensor that is found can be read, and no walk over values ends the process.
void Walk(const TorchFile& file, TorchValue value, int depth, int* left) {
  if (depth > 20 || --*left < 0) return;  // a value may hold itself
  if (const auto* const tensor = value.tensor(); tensor != nullptr) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor->elements) *
                                 penstock::swap::DtypeBytes(tensor->dtype));
    FUZZ_CHECK(bytes.size() <= 64);
    FUZZ_CHECK(file.Read(*tensor, 0, bytes).ok());
  }
  for (size_t i = 0; i < value.size() && i < 8; ++i) Walk(file, value[i], depth + 1, left);
  const auto entries = value.entries();
  for (size_t i = 0; i < entries.size() && i < 8; ++i) Walk(file, entries[i].second, depth + 1, left);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string storage(64, '\1');
  const std::string zip =
      penstock::fuzz::TorchArchive({{"archive/data.pkl", penstock::fuzz::TextOf(data, bytes)},
                                    {"archive/byteorder", "little"},
                                    {"archive/data/0", storage}});
  static const int fd = memfd_create("torch_pickle", MFD_CLOEXEC);
  FUZZ_CHECK(ftruncate(fd, 0) == 0);
  FUZZ_CHECK(pwrite(fd, zip.data(), zip.size(), 0) == static_cast<ssize_t>(zip.size()));
  const auto file = TorchFile::Open("/proc/self/fd/" + std::to_string(fd));
  if (!file.ok()) {
    penstock::fuzz::Refused(file.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  int left = 1000;
  Walk(**file, (*file)->root(), 0, &left);
  return 0;
}
