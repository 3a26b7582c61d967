// A directory for one test, on the disk that the build is on (not /tmp, which may be memory), removed
// afterwards.
#ifndef PENSTOCK_TESTS_SWAP_SCRATCH_DIRECTORY_H_
#define PENSTOCK_TESTS_SWAP_SCRATCH_DIRECTORY_H_

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace penstock::swap {

class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = std::filesystem::current_path().string() + "/swap-test-XXXXXX";
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string Sub(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_SCRATCH_DIRECTORY_H_
