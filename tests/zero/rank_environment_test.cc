// What launchers put into the environment, as ranks.
#include "zero/ranks/rank_environment.h"

#include <gtest/gtest.h>

#include <map>

namespace penstock::zero::rank_environment_test {
namespace {

absl::StatusOr<RankEnvironment> Read(const std::map<std::string, std::string>& variables) {
  return ReadRankEnvironment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

TEST(RankEnvironment, NothingIsOneRank) {
  const auto environment = Read({});
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->world, 1);
  EXPECT_EQ(environment->rank, 0);
}

TEST(RankEnvironment, Torchrun) {
  const auto environment = Read({{"RANK", "5"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "4"},
                                 {"MASTER_ADDR", "10.0.0.7"},
                                 {"MASTER_PORT", "4000"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RUN_ID", "run"},
                                 {"TORCHELASTIC_RESTART_COUNT", "2"},
                                 {"SLURM_PROCID", "0"}});
  ASSERT_TRUE(environment.ok()) << environment.status();
  EXPECT_EQ(environment->rank, 5);
  EXPECT_EQ(environment->world, 8);
  EXPECT_EQ(environment->local_rank, 1);
  EXPECT_EQ(environment->local_world, 4);
  EXPECT_EQ(environment->master_address, "10.0.0.7");
  EXPECT_EQ(environment->master_port, 4000);
  EXPECT_TRUE(environment->agent_is_master);
  EXPECT_EQ(environment->session, "run/2");
}

TEST(RankEnvironment, MpirunAndSrun) {
  auto environment = Read({{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"MASTER_ADDR", "host"}});
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->rank, 1);
  EXPECT_EQ(environment->world, 3);
  EXPECT_EQ(environment->local_world, 2);
  EXPECT_EQ(environment->master_address, "host");
  EXPECT_EQ(environment->master_port, 29500);

  environment = Read({{"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "2"},
                      {"SLURM_STEP_NUM_TASKS", "6"},
                      {"SLURM_NTASKS", "12"},
                      {"SLURM_LOCALID", "2"},
                      {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
                      {"SLURM_LAUNCH_NODE_IPADDR", "10.1.1.1"}});
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->rank, 2);
  EXPECT_EQ(environment->world, 6);
  EXPECT_EQ(environment->local_rank, 2);
  EXPECT_EQ(environment->local_world, 3);
  EXPECT_EQ(environment->master_address, "10.1.1.1");
}

// As Slurm writes them: tasks of each node, those that have as many in one.
TEST(RankEnvironment, SlurmsTasksOfEachNode) {
  const auto local_world = [](const char* tasks, int rank, int local_rank, const char* node) {
    std::map<std::string, std::string> variables = {{"SLURM_STEP_ID", "0"},
                                                    {"SLURM_PROCID", std::to_string(rank)},
                                                    {"SLURM_STEP_NUM_TASKS", "7"},
                                                    {"SLURM_LOCALID", std::to_string(local_rank)},
                                                    {"SLURM_STEP_TASKS_PER_NODE", tasks}};
    if (node != nullptr) variables["SLURM_NODEID"] = node;
    const auto environment = Read(variables);
    EXPECT_TRUE(environment.ok()) << environment.status();
    return environment.ok() ? environment->local_world : -1;
  };
  EXPECT_EQ(local_world("4,2", 0, 0, "0"), 4);
  EXPECT_EQ(local_world("4,2", 5, 1, "1"), 2);
  EXPECT_EQ(local_world("2(x3),1", 4, 0, "2"), 2);
  EXPECT_EQ(local_world("2(x3),1", 6, 0, "3"), 1);
  EXPECT_EQ(local_world("7", 6, 6, "0"), 7);
  // Without the node's number: hosts that are filled one after the other.
  EXPECT_EQ(local_world("4,2", 3, 3, nullptr), 4);
  EXPECT_EQ(local_world("4,2", 5, 1, nullptr), 2);
  EXPECT_EQ(local_world("2(x3),1", 6, 0, nullptr), 1);
  // Dealt round, a host's ranks do not follow one another: the most that any host has.
  EXPECT_EQ(local_world("1,3(x2)", 2, 0, nullptr), 3);
}

TEST(RankEnvironment, ABatchScriptIsOneProcess) {
  const auto environment = Read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->world, 1);
}

TEST(RankEnvironment, WhatIsWrongIsNamed) {
  const auto text = [](const std::map<std::string, std::string>& variables) {
    const auto environment = Read(variables);
    EXPECT_TRUE(absl::IsInvalidArgument(environment.status()));
    return std::string(environment.status().message());
  };
  EXPECT_NE(text({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK=2"), std::string::npos);
  EXPECT_NE(text({{"RANK", "x"}, {"WORLD_SIZE", "2"}}).find("RANK=x"), std::string::npos);
  EXPECT_NE(text({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("WORLD_SIZE=0"), std::string::npos);
  EXPECT_NE(text({{"RANK", "0"}}).find("WORLD_SIZE is not"), std::string::npos);
  EXPECT_NE(text({{"WORLD_SIZE", "2"}}).find("RANK is not"), std::string::npos);
  for (const char* tasks :
       {"", "2(x", "x", "2(x3", "0", "2,", "-1", "2(x0)", "2(y3)", "99999999999", "1(x99999999)"}) {
    EXPECT_NE(text({{"SLURM_STEP_ID", "0"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_STEP_NUM_TASKS", "2"},
                    {"SLURM_STEP_TASKS_PER_NODE", tasks}})
                  .find("SLURM_STEP_TASKS_PER_NODE=" + std::string(tasks) + " in"),
              std::string::npos)
        << tasks;
  }
  EXPECT_NE(text({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "x"}}).find("LOCAL_WORLD_SIZE=x"),
            std::string::npos);
  EXPECT_NE(text({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}}).find("MASTER_PORT=99999"),
            std::string::npos);
}

}  // namespace
}  // namespace penstock::zero::rank_environment_test
