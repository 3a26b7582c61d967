// What a stranger may put where a small file is expected: text nested deeper than a stack, a file that is
// longer than memory, one that waits for ever.
#ifndef PENSTOCK_TESTS_HOSTILE_FILES_H_
#define PENSTOCK_TESTS_HOSTILE_FILES_H_

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace penstock::hostile {

// Arrays in arrays, 200,000 deep.
inline std::string Nested() { return std::string(200'000, '[') + std::string(200'000, ']'); }

// An object whose value of `key` is nested as deep.
inline std::string NestedUnder(const std::string& key) { return "{\"" + key + "\":" + Nested() + "}"; }

inline bool WriteText(const std::string& path, const std::string& text) {
  ::unlink(path.c_str());
  std::ofstream(path, std::ios::binary) << text;
  return true;
}

// Nobody writes to it.
inline bool MakePipe(const std::string& path) {
  ::unlink(path.c_str());
  return ::mkfifo(path.c_str(), 0600) == 0;
}

// 1 TiB, of which nothing is on the disk.
inline bool MakeEndless(const std::string& path) {
  WriteText(path, "");
  return ::truncate(path.c_str(), off_t{1} << 40) == 0;
}

struct Maker {
  const char* name;
  std::function<bool(const std::string& path)> make;
};

// Each puts something at `path` that no reader of a small JSON file may accept, wait for, or hold in memory.
inline std::vector<Maker> Makers() {
  return {
      {"a pipe", MakePipe},
      {"a sparse file of 1 TiB", MakeEndless},
      {"a directory", [](const std::string& path) { return ::mkdir(path.c_str(), 0700) == 0; }},
      {"nested text", [](const std::string& path) { return WriteText(path, NestedUnder("model_type")); }}};
}

// Removes what a maker made.
inline void Remove(const std::string& path) {
  if (::unlink(path.c_str()) != 0) ::rmdir(path.c_str());
}

// The most memory that this process has had so far.
inline int64_t PeakBytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace penstock::hostile

#endif  // PENSTOCK_TESTS_HOSTILE_FILES_H_
