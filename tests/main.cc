// The main of test programs of several files (penstock_tests in cmake/PenstockTargets.cmake). Called
// swap_store_test, it runs the tests of store_test.cc; by any other name, all that it has. --gtest_filter
// chooses among these.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>

int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename();
  testing::InitGoogleMock(&argc, argv);
  if (!name.ends_with("_test")) return RUN_ALL_TESTS();
  const std::string source = name.substr(name.find('_') + 1) + ".cc";
  std::string others;
  bool any = false;
  const auto& program = *testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *program.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (std::filesystem::path(test.file()).filename() == source) {
        any = true;
      } else {
        others.append(":").append(suite.name()).append(".").append(test.name());
      }
    }
  }
  if (!any) {
    std::fprintf(stderr, "%s: this program has no tests of %s\n", argv[0], source.c_str());
    return 1;
  }
  std::string filter = GTEST_FLAG_GET(filter);
  if (!others.empty()) filter.append(filter.find('-') == std::string::npos ? "-" : "").append(others);
  GTEST_FLAG_SET(filter, filter);
  return RUN_ALL_TESTS();
}
