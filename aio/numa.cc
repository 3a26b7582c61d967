#include "aio/numa.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace penstock::aio {

int NumaNodes() {
  int nodes = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (name.size() > 4 && name.rfind("node", 0) == 0 &&
        std::isdigit(static_cast<unsigned char>(name[4])) != 0)
      ++nodes;
  }
  return std::max(1, nodes);
}

int NodeOfDevice(const std::string& device) {
  if (NumaNodes() == 1) return -1;
  // A disk's link leads below its controller; a partition's directory lies in its disk's.
  for (const char* up : {"/device/", "/../device/", "/device/device/", "/../device/device/"}) {
    std::ifstream file(absl::StrCat("/sys/class/block/", device, up, "numa_node"));
    int node = -1;
    if (file >> node) return node;
  }
  return -1;
}

std::vector<int> ParseCpuList(std::string_view text) {
  constexpr int kCpusMax = CPU_SETSIZE;
  std::vector<int> cpus;
  while (!text.empty()) {
    const std::string_view range = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), range.size() + 1));
    int first = 0, last = 0;
    const char* const end = range.data() + range.size();
    const auto [rest, error] = std::from_chars(range.data(), end, first);
    if (error != std::errc() || first < 0) continue;
    last = first;
    if (rest != end && *rest == '-' && std::from_chars(rest + 1, end, last).ec != std::errc()) continue;
    for (int cpu = first; cpu <= std::min(last, kCpusMax - 1); ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

bool PinThreadToNode(pthread_t thread, int node) {
  if (node < 0) return false;
  std::ifstream file(absl::StrCat("/sys/devices/system/node/node", node, "/cpulist"));
  std::string text;
  if (!std::getline(file, text)) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  const std::vector<int> cpus = ParseCpuList(text);
  for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
  return !cpus.empty() && pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
}

}  // namespace penstock::aio
