// A zip of stored members, as torch.save makes it, without checksums.
#ifndef PENSTOCK_TESTS_FUZZ_TORCH_ARCHIVE_H_
#define PENSTOCK_TESTS_FUZZ_TORCH_ARCHIVE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::fuzz {

inline void Number(std::string* to, uint64_t value, size_t bytes) {
  to->append(reinterpret_cast<const char*>(&value), bytes);
}

inline std::string TorchArchive(const std::vector<std::pair<std::string, std::string_view>>& members) {
  std::string zip, directory;
  for (const auto& [name, data] : members) {
    std::string sizes;
    Number(&sizes, 0, 12);  // version, flags, method, time, date; the sum follows
    sizes.resize(10);
    Number(&sizes, 0, 4);
    Number(&sizes, data.size(), 4);
    Number(&sizes, data.size(), 4);
    Number(&sizes, name.size(), 2);
    Number(&sizes, 0, 2);
    Number(&directory, 0x02014b50, 4);
    Number(&directory, 0, 2);
    directory += sizes;
    Number(&directory, 0, 8);
    Number(&directory, 0, 2);
    Number(&directory, zip.size(), 4);
    directory += name;
    Number(&zip, 0x04034b50, 4);
    zip += sizes + name;
    zip += data;
  }
  const size_t first = zip.size();
  zip += directory;
  Number(&zip, 0x06054b50, 4);
  Number(&zip, 0, 4);
  Number(&zip, members.size(), 2);
  Number(&zip, members.size(), 2);
  Number(&zip, directory.size(), 4);
  Number(&zip, first, 4);
  Number(&zip, 0, 2);
  return zip;
}

}  // namespace penstock::fuzz

#endif  // PENSTOCK_TESTS_FUZZ_TORCH_ARCHIVE_H_
