#include "zero/memory/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace penstock::zero {
namespace {

// Limits from here on are none: version 1 says so with the largest number of pages.
constexpr int64_t kNoLimit = int64_t{1} << 60;

std::optional<int64_t> Number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// A file of one number; none where it is not there or says "max".
std::optional<int64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  return Number(text);
}

// "name value" lines: the sum of those that are asked for.
int64_t SumOf(const std::string& path, const std::vector<std::string_view>& names) {
  int64_t sum = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    for (const std::string_view name : names) {
      if (line.size() > name.size() && line[name.size()] == ' ' && line.compare(0, name.size(), name) == 0)
        sum += Number(std::string_view(line).substr(name.size() + 1)).value_or(0);
    }
  }
  return sum;
}

struct Version {
  std::vector<const char*> limits;
  const char* usage;
  std::vector<std::string_view> droppable;  // of memory.stat
};
const Version& OfVersion(bool second) {
  static const Version first_version{
      {"memory.limit_in_bytes"}, "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
  static const Version second_version{
      {"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
  return second ? second_version : first_version;
}

// The groups of the process: of version 2, and of a controller of version 1.
struct Paths {
  std::optional<std::string> first, second;
};
Paths PathsOf(const std::string& root, const char* controller) {
  Paths paths;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[1].empty()) paths.second = fields[2];
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) != controllers.end())
      paths.first = fields[2];
  }
  return paths;
}

// "\040" and its like, as mountinfo writes blanks.
std::string Unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::all_of(text.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                    text.begin() + static_cast<std::ptrdiff_t>(i) + 4,
                    [](char c) { return c >= '0' && c <= '7'; })) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// Where a hierarchy is mounted, and which of its groups is shown there.
struct Mount {
  bool second = false;
  std::string group, point;
};
std::vector<Mount> Mounts(const std::string& root, const char* controller) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> before = absl::StrSplit(line.substr(0, dash), ' ');
    const std::vector<std::string> after = absl::StrSplit(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const std::vector<std::string> options = absl::StrSplit(after[2], ',');
    const bool second = after[0] == "cgroup2";
    const bool of_controller =
        after[0] == "cgroup" && std::find(options.begin(), options.end(), controller) != options.end();
    if (second || of_controller) mounts.push_back({second, Unescaped(before[3]), Unescaped(before[4])});
  }
  return mounts;
}

// The group below the mount point: "" or "/a/b"; none where the mount shows a part of the hierarchy that the
// path does not lie in.
std::optional<std::string> Below(const Mount& mount, const std::string& path) {
  std::string_view below = path;
  const std::string_view group = mount.group == "/" ? std::string_view() : std::string_view(mount.group);
  if (below.compare(0, group.size(), group) != 0 ||
      (below.size() > group.size() && below[group.size()] != '/'))
    return std::nullopt;
  below.remove_prefix(group.size());
  if (absl::StrContains(std::string(below) + "/", "/../")) return std::nullopt;
  while (!below.empty() && below.back() == '/') below.remove_suffix(1);
  return std::string(below);
}

void Bound(int64_t free, int64_t limit, const std::string& by, HostMemory* memory) {
  if (free >= memory->free_bytes) return;
  memory->free_bytes = std::max<int64_t>(free, 0);
  memory->limit_bytes = limit;
  memory->bound_by = by;
  memory->is_cgroup = true;
}

// By the group that is shown there.
void BoundByGroup(const std::string& root, bool second, const std::string& shown, HostMemory* memory) {
  const Version& version = OfVersion(second);
  const std::string directory = root + shown;
  for (const char* const name : version.limits) {
    const std::optional<int64_t> limit = NumberIn(absl::StrCat(directory, "/", name));
    if (!limit.has_value() || *limit < 0 || *limit >= kNoLimit) continue;
    if (!absl::EndsWith(name, ".high") && *limit < memory->hard_limit_bytes) {
      memory->hard_limit_bytes = *limit;
      memory->hard_limit_by = absl::StrCat(shown, "/", name);
    }
    const int64_t used = NumberIn(absl::StrCat(directory, "/", version.usage)).value_or(0);
    const int64_t droppable = SumOf(directory + "/memory.stat", version.droppable);
    Bound(*limit - std::max<int64_t>(used - droppable, 0), *limit, absl::StrCat(shown, "/", name), memory);
  }
}

// Each group that the process is in and all above it, as far as they are shown: which version, and where.
template <class Visit>
void ForEachGroup(const std::string& root, const char* controller, const Visit& visit) {
  const Paths paths = PathsOf(root, controller);
  const std::vector<Mount> mounts = Mounts(root, controller);
  for (const bool second : {false, true}) {
    const std::optional<std::string>& path = second ? paths.second : paths.first;
    if (!path.has_value()) continue;
    // Where no mount has the path (a container that shares its host's view of paths), what is shown is all
    // that there is to see; where one has it, the others show groups of somebody else.
    bool has_path = false;
    for (const Mount& mount : mounts) has_path |= mount.second == second && Below(mount, *path).has_value();
    for (const Mount& mount : mounts) {
      const std::optional<std::string> found = Below(mount, *path);
      if (mount.second != second || (!found.has_value() && has_path)) continue;
      std::string below = found.value_or("");
      for (;; below.resize(below.rfind('/'))) {
        visit(second, mount.point + below);
        if (below.empty()) break;
      }
    }
  }
}

}  // namespace

HostMemory FindHostMemory(const std::string& root) {
  HostMemory memory;
  memory.free_bytes = memory.limit_bytes = int64_t{4} << 30;
  memory.bound_by = memory.hard_limit_by = "this machine";
  int64_t swap = 0, huge_pages = 0, huge_page = 0;
  std::ifstream info(root + "/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() < 2) continue;
    const std::optional<int64_t> kib = Number(words[1]);
    if (kib.has_value() && words[0] == "MemAvailable:") memory.free_bytes = *kib * 1024;
    if (kib.has_value() && words[0] == "MemTotal:") memory.limit_bytes = *kib * 1024;
    if (kib.has_value() && words[0] == "SwapTotal:") swap = *kib * 1024;
    if (kib.has_value() && words[0] == "HugePages_Free:") huge_pages = *kib;  // a count
    if (kib.has_value() && words[0] == "Hugepagesize:") huge_page = *kib * 1024;
  }
  memory.hard_limit_bytes = memory.limit_bytes + swap;
  memory.huge_page_bytes = huge_pages * huge_page;
  std::ifstream status(root + "/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() >= 2 && words[0] == "RssAnon:") memory.own_bytes = Number(words[1]).value_or(0) * 1024;
  }
  ForEachGroup(root, "memory",
               [&](bool second, const std::string& shown) { BoundByGroup(root, second, shown, &memory); });
  return memory;
}

bool HasProcessorQuota(const std::string& root) {
  bool has = false;
  ForEachGroup(root, "cpu", [&](bool second, const std::string& shown) {
    // Version 2: "50000 100000", or "max 100000"; version 1: -1 is none.
    const std::optional<int64_t> quota =
        NumberIn(absl::StrCat(root, shown, second ? "/cpu.max" : "/cpu.cfs_quota_us"));
    has |= quota.value_or(-1) > 0;
  });
  return has;
}

int64_t ProcessOverheadBytes(int threads) {
  // Control groups were charged 58 to 69 MiB more than budgets of 126 and 699 MiB, and 0.5 to 0.75 MiB more
  // for each thread (Debian's LibTorch and OpenBLAS); with a margin.
  constexpr int64_t kAlways = int64_t{72} << 20, kOfThread = int64_t{1} << 20;
  return kAlways + std::max(threads, 1) * kOfThread;
}

int64_t LeastProcessOverheadBytes() { return int64_t{48} << 20; }

}  // namespace penstock::zero
