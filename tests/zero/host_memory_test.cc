#include "zero/memory/host_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace penstock::zero::host_memory_test {
namespace {

constexpr int64_t kMiB = 1 << 20;

// A machine of files: /proc and /sys/fs/cgroup below a directory of its own.
class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    std::string path = (std::filesystem::temp_directory_path() / "host-memory-XXXXXX").string();
    root_ = mkdtemp(path.data());
    Write("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree:   1 kB\nMemAvailable:   8388608 kB\n");
  }
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  // Version 2, at its usual place.
  void Unified(const std::string& group, const std::string& max, int64_t used_mib, int64_t file_mib,
               const std::string& high = "max") {
    const std::string at = "/sys/fs/cgroup" + group;
    Write(at + "/memory.max", max + "\n");
    Write(at + "/memory.high", high + "\n");
    Write(at + "/memory.current", std::to_string(used_mib * kMiB) + "\n");
    Write(at + "/memory.stat", "anon 1\nfile 3\ninactive_file " + std::to_string(file_mib * kMiB) +
                                   "\nactive_file 0\ninactive_file_other 77777777777\n");
  }
  void First(const std::string& at, int64_t limit, int64_t used_mib) {
    Write(at + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    Write(at + "/memory.usage_in_bytes", std::to_string(used_mib * kMiB) + "\n");
    Write(at + "/memory.stat", "inactive_file 99999999999\ntotal_inactive_file 0\ntotal_active_file 0\n");
  }
  HostMemory Find() { return FindHostMemory(root_); }

  static constexpr const char* kUnified =
      "24 18 0:21 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
  std::string root_;
};

TEST_F(HostMemoryTest, WithoutGroupsItIsWhatTheMachineHas) {
  HostMemory memory = Find();
  EXPECT_EQ(memory.free_bytes, int64_t{8} << 30);
  EXPECT_EQ(memory.limit_bytes, int64_t{16} << 30);
  EXPECT_FALSE(memory.is_cgroup);
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", kUnified);
  Unified("", "max", 0, 0);
  EXPECT_EQ(Find().free_bytes, int64_t{8} << 30);
}

TEST_F(HostMemoryTest, AGroupOfVersion2BoundsIt) {
  Write("/proc/self/cgroup", "0::/user.slice/run-1.scope\n");
  Write("/proc/self/mountinfo", kUnified);
  Unified("/user.slice/run-1.scope", std::to_string(300 * kMiB), 100, 40);
  const HostMemory memory = Find();
  EXPECT_EQ(memory.free_bytes, 240 * kMiB) << "page cache can be dropped";
  EXPECT_EQ(memory.limit_bytes, 300 * kMiB);
  EXPECT_TRUE(memory.is_cgroup);
  EXPECT_EQ(memory.bound_by, "/sys/fs/cgroup/user.slice/run-1.scope/memory.max");
}

TEST_F(HostMemoryTest, TheTightestOfAllParentsCounts) {
  Write("/proc/self/cgroup", "0::/a/b/c\n");
  Write("/proc/self/mountinfo", kUnified);
  Unified("/a/b/c", std::to_string(900 * kMiB), 10, 0);
  Unified("/a/b", "max", 10, 0);
  Unified("/a", std::to_string(2000 * kMiB), 1500, 0);  // neighbours have most of it
  EXPECT_EQ(Find().free_bytes, 500 * kMiB);
  EXPECT_EQ(Find().bound_by, "/sys/fs/cgroup/a/memory.max");
  Unified("/a/b", "max", 10, 0, /*high=*/std::to_string(110 * kMiB));
  EXPECT_EQ(Find().free_bytes, 100 * kMiB) << "beyond memory.high everything crawls";
  Unified("/a", std::to_string(2000 * kMiB), 2100, 0);
  EXPECT_EQ(Find().free_bytes, 0);
}

TEST_F(HostMemoryTest, AContainerSeesItsOwnRoot) {
  // A namespace of its own: the path is relative to it.
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", kUnified);
  Unified("", std::to_string(260 * kMiB), 60, 0);
  EXPECT_EQ(Find().free_bytes, 200 * kMiB);
  // Without one: the path is the host's, and the mount shows that group as its root.
  Write("/proc/self/cgroup", "0::/docker/0123\n");
  Write("/proc/self/mountinfo", "24 18 0:21 /docker/0123 /sys/fs/cgroup ro - cgroup2 cgroup ro\n");
  EXPECT_EQ(Find().free_bytes, 200 * kMiB);
  // Outside of what is shown.
  Write("/proc/self/cgroup", "0::/../../other\n");
  Write("/proc/self/mountinfo", kUnified);
  EXPECT_EQ(Find().free_bytes, 200 * kMiB);
}

TEST_F(HostMemoryTest, Version1AndBothAtOnce) {
  Write("/proc/self/cgroup", "9:name=systemd:/x\n8:cpu,cpuacct:/y\n4:memory:/jobs/7\n0::/jobs/7\n");
  Write("/proc/self/mountinfo",
        "30 24 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "31 24 0:27 / /sys/fs/cgroup/memory\\040v1 rw shared:3 - cgroup cgroup rw,memory\n"
        "32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  First("/sys/fs/cgroup/memory v1/jobs/7", int64_t{9223372036854771712}, 10);
  EXPECT_FALSE(Find().is_cgroup) << "no limit at all";
  First("/sys/fs/cgroup/memory v1/jobs", 2000 * kMiB, 500);
  EXPECT_EQ(Find().free_bytes, 1500 * kMiB);
  EXPECT_EQ(Find().bound_by, "/sys/fs/cgroup/memory v1/jobs/memory.limit_in_bytes");
  First("/sys/fs/cgroup/memory v1", 9223372036854771712, 500);
  EXPECT_EQ(Find().free_bytes, 1500 * kMiB);
  Unified("/unified/jobs/7", std::to_string(700 * kMiB), 0, 0);
  EXPECT_EQ(Find().free_bytes, 700 * kMiB);
}

// A group of somebody else, shown at a place of its own, bounds nobody here.
TEST_F(HostMemoryTest, AMountOfAForeignGroupBoundsNothing) {
  Write("/proc/self/cgroup", "0::/jobs/7\n");
  Write("/proc/self/mountinfo",
        std::string(kUnified) + "40 18 0:21 /other /mnt/other rw - cgroup2 cgroup2 rw\n");
  Unified("/jobs/7", std::to_string(700 * kMiB), 0, 0);
  Write("/mnt/other/memory.max", "1048576\n");
  EXPECT_EQ(Find().free_bytes, 700 * kMiB);
  EXPECT_EQ(Find().hard_limit_bytes, 700 * kMiB);
}

TEST_F(HostMemoryTest, AQuotaOfTheProcessorsIsSeenInBothVersions) {
  EXPECT_FALSE(HasProcessorQuota(root_));
  Write("/proc/self/cgroup", "8:cpu,cpuacct:/y\n4:memory:/jobs/7\n0::/jobs/7\n");
  Write("/proc/self/mountinfo",
        std::string(kUnified) + "30 24 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  Write("/sys/fs/cgroup/jobs/7/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "-1\n");
  EXPECT_FALSE(HasProcessorQuota(root_));
  Write("/sys/fs/cgroup/jobs/cpu.max", "50000 100000\n");
  EXPECT_TRUE(HasProcessorQuota(root_));
  Write("/sys/fs/cgroup/jobs/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "40000\n");
  EXPECT_TRUE(HasProcessorQuota(root_));
}

TEST_F(HostMemoryTest, ReservedHugePagesAreCounted) {
  EXPECT_EQ(Find().huge_page_bytes, 0);
  Write("/proc/meminfo",
        "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 20\nHugePages_Free: 12\n"
        "Hugepagesize: 2048 kB\n");
  EXPECT_EQ(Find().huge_page_bytes, 24 * kMiB);
}

TEST_F(HostMemoryTest, WhatCannotBeReadIsNoLimit) {
  Write("/proc/self/cgroup", "nonsense\n0::/a\n::::\n");
  Write("/proc/self/mountinfo", std::string("x\n - cgroup2\n1 2 - cgroup2 x\n") + kUnified);
  Write("/sys/fs/cgroup/a/memory.max", "lots\n");
  Write("/sys/fs/cgroup/memory.max", "-5\n");
  EXPECT_EQ(Find().free_bytes, int64_t{8} << 30);
}

}  // namespace
}  // namespace penstock::zero::host_memory_test
