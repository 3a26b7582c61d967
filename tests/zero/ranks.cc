#include "tests/zero/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "swap/checkpoint.h"
#include "tests/free_port.h"

namespace penstock::zero::testing_support {

absl::StatusOr<std::unique_ptr<Comm>> ConnectLoopback(int rank, int world, int port,
                                                      const CommOptions& options) {
  RankEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world = environment.local_world = world;
  environment.master_port = port;
  return ConnectTcp(environment, {.comm = options, .secret = "what the ranks of these tests know"});
}

std::vector<RankOutcome> RunProcesses(int world, const RankBody& body) {
  const std::string scratch = ScratchDirectory();
  const auto path = [&](int rank) { return scratch + "/report-" + std::to_string(rank); };
  const int port = tests::FreePort();
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
          {"redone", trained.replayed},
          {"in_backward", trained.speculative_share},
          {"committed", trained.committed},
          {"resumed_from", trained.resumed_from},
          {"peak_managed_bytes", trained.peak_managed_bytes},
          {"peak_device_bytes", trained.peak_device_bytes},
          {"gds_read_bytes", trained.gds_read_bytes},
          {"on_device_share", trained.plan.on_device_share()},
          {"least_host_memory_bytes", trained.least_host_memory_bytes},
          {"read_bytes", trained.read_bytes},
          {"write_bytes", trained.write_bytes},
          {"state", trained.state}};
}

std::vector<RankOutcome> TrainRanks(int world, const RunOptions& run,
                                    const std::function<void(int rank, RunOptions*)>& adjust,
                                    const CommOptions& comm) {
  return RunProcesses(world, [&](int rank, int port) {
    absl::StatusOr<std::unique_ptr<Comm>> connected = ConnectLoopback(rank, world, port, comm);
    if (!connected.ok()) {
      return nlohmann::json{{"status", std::string(connected.status().message())},
                            {"code", static_cast<int>(connected.status().code())}};
    }
    RunOptions own = run;
    own.comm = std::move(*connected);
    own.keep_state = true;
    if (!own.state_dir.empty()) own.state_dir = swap::RankDirectory(own.state_dir, rank);
    if (adjust) adjust(rank, &own);
    return ToJson(TrainGpt(own));
  });
}

static constexpr int64_t kWords = 256, kWidth = 72;

Model Untied() {
  Model model;
  model.identity = {{"model", "untied"}};
  const int embedding = model.AddBlock(
      "embedding", "embedding", [] { return std::make_shared<torch::nn::EmbeddingImpl>(kWords, kWidth); });
  model.AddStage("embed", embedding,
                 [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
                   return module.as<torch::nn::EmbeddingImpl>()->forward(x);
                 });
  for (int i = 0; i < 4; ++i) {
    const std::string name = "layer." + std::to_string(i);
    const int64_t width = i == 1 ? 8 : 160;
    const int up = model.AddBlock(name + ".up", "",
                                  [width] { return std::make_shared<torch::nn::LinearImpl>(kWidth, width); });
    const int down = model.AddBlock(
        name + ".down", "", [width] { return std::make_shared<torch::nn::LinearImpl>(width, kWidth); });
    // Dropout: ranks draw other numbers, those of their micro-batch.
    model.AddStage(name + ".up", up,
                   [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
                     return torch::dropout(torch::tanh(module.as<torch::nn::LinearImpl>()->forward(x)), 0.1,
                                           module.is_training());
                   });
    model.AddStage(name + ".down", down, Apply<torch::nn::LinearImpl>);
  }
  const int head =
      model.AddBlock("head", "head", [] { return std::make_shared<torch::nn::LinearImpl>(kWidth, kWords); });
  model.AddStage(
      "loss", head, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
        const torch::Tensor logits = module.as<torch::nn::LinearImpl>()->forward(x).to(torch::kFloat32);
        return torch::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
      });
  return model;
}

RunOptions UntiedRun(OffloadDevice offload, kernels::DType dtype) {
  RunOptions run;
  run.make_model = Untied;
  run.offload = offload;
  run.dtype = dtype;
  run.batch = 2;
  run.steps = 4;
  run.evaluate_every = 3;
  run.hashes_state = true;
  return run;
}

nlohmann::json Alone(const RunOptions& run) {
  const auto outcomes = RunProcesses(1, [&](int, int) { return ToJson(TrainGpt(run)); });
  return outcomes.front().report;
}

void ExpectSameLosses(const nlohmann::json& one, const std::vector<RankOutcome>& ranks) {
  ASSERT_EQ(one["status"], "");
  for (size_t k = 0; k < ranks.size(); ++k) {
    SCOPED_TRACE(testing::Message() << "rank " << k);
    ASSERT_EQ(ranks[k].text(), "");
    for (const char* what : {"losses", "norms", "evaluations", "loss_scales", "skipped", "state"}) {
      EXPECT_EQ(ranks[k].report[what], one[what]) << what;
    }
  }
}

}  // namespace penstock::zero::testing_support
