// Several ranks of the `penstock` program, started by the plain environment as torchrun would.
#ifndef PENSTOCK_TESTS_TOOLS_RANK_PROGRAMS_H_
#define PENSTOCK_TESTS_TOOLS_RANK_PROGRAMS_H_

#include <string>
#include <utility>
#include <vector>

#include "tests/free_port.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::testing_support {

// Where the ranks are: all on this host, or each on a host of its own, that `launchers` start them on.
struct RankHosts {
  std::string master_address = "127.0.0.1";
  std::string master_port = std::to_string(tests::FreePort());
  std::vector<Arguments> launchers;
};

// One process for each list of arguments.
inline std::vector<Program> StartRanks(const std::string& directory, const std::vector<Arguments>& ranks,
                                       const RankHosts& hosts = {}) {
  const bool together = hosts.launchers.empty();
  std::vector<Program> programs;
  for (size_t k = 0; k < ranks.size(); ++k) {
    const std::string rank = std::to_string(k), world = std::to_string(ranks.size());
    setenv("RANK", rank.c_str(), 1);
    setenv("WORLD_SIZE", world.c_str(), 1);
    setenv("LOCAL_RANK", together ? rank.c_str() : "0", 1);
    setenv("LOCAL_WORLD_SIZE", together ? world.c_str() : "1", 1);
    setenv("MASTER_ADDR", hosts.master_address.c_str(), 1);
    setenv("MASTER_PORT", hosts.master_port.c_str(), 1);
    programs.emplace_back(directory, ranks[k], together ? Arguments() : hosts.launchers[k]);
  }
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    unsetenv(name);
  return programs;
}

inline std::vector<Ran> WaitForAll(std::vector<Program> programs) {
  std::vector<Ran> results;
  for (Program& program : programs) results.push_back(program.Wait());
  return results;
}

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_RANK_PROGRAMS_H_
