#include "tests/zero/ranks.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "zero/rank_setup.h"

namespace penstock::zero::testing_support {

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    std::abort();
  }
  close(fd);
  return ntohs(address.sin_port);
}

RankEnvironment LoopbackRank(int rank, int world, int port) {
  RankEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world = environment.local_world = world;
  environment.master_port = port;
  return environment;
}

std::vector<RankOutcome> RunProcesses(int world, const RankBody& body) {
  const std::string scratch = ScratchDirectory();
  const auto path = [&](int rank) { return scratch + "/report-" + std::to_string(rank); };
  const int port = FreePort();
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) std::abort();
    if (pid == 0) {
      const nlohmann::json report = body(rank, port);
      std::ofstream(path(rank)) << report.dump();
      _exit(0);
    }
    children.push_back(pid);
  }
  std::vector<RankOutcome> outcomes;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    RankOutcome& outcome = outcomes.emplace_back();
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::ifstream file(path(rank));
    if (file) outcome.report = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  }
  std::filesystem::remove_all(scratch);
  return outcomes;
}

nlohmann::json ToJson(const TrainedLosses& trained) {
  return {{"status", trained.status.ok() ? "" : std::string(trained.status.message())},
          {"code", static_cast<int>(trained.status.code())},
          {"losses", trained.losses},
          {"norms", trained.norms},
          {"evaluations", trained.evaluations},
          {"loss_scales", trained.loss_scales},
          {"skipped", trained.skipped},
          {"redone", trained.redone},
          {"in_backward", trained.in_backward},
          {"committed", trained.committed},
          {"resumed_from", trained.resumed_from},
          {"peak_managed_bytes", trained.peak_managed_bytes},
          {"least_host_memory_bytes", trained.least_host_memory_bytes},
          {"read_bytes", trained.read_bytes},
          {"write_bytes", trained.write_bytes}};
}

std::vector<RankOutcome> TrainRanks(int world, const RunOptions& run,
                                    const std::function<void(int rank, RunOptions*)>& adjust,
                                    const CommOptions& comm) {
  return RunProcesses(world, [&](int rank, int port) {
    absl::StatusOr<std::unique_ptr<Comm>> connected = ConnectGloo(LoopbackRank(rank, world, port), comm);
    if (!connected.ok()) {
      return nlohmann::json{{"status", std::string(connected.status().message())},
                            {"code", static_cast<int>(connected.status().code())}};
    }
    RunOptions own = run;
    own.comm = std::move(*connected);
    own.keep_state = true;
    if (!own.state_dir.empty()) own.state_dir = RankDirectory(own.state_dir, rank);
    if (adjust) adjust(rank, &own);
    return ToJson(TrainGpt(own));
  });
}

}  // namespace penstock::zero::testing_support
