// Replacement and residency against brute force: every choice tried, over thousands of small random cases.
#include "tiering/plan/belady.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace penstock::tiering::belady_test {
namespace {

// Fewest misses over every choice of what to give up, with the content as a set of bits. `bypass`: what is
// fetched need not be kept. `keeps_previous`: never what was used just before, unless it is alone.
int64_t FewestMisses(const std::vector<int>& trace, int items, int capacity, bool bypass,
                     bool keeps_previous = false) {
  std::map<unsigned, int64_t> now = {{0u, 0}};
  int previous = -1;
  for (const int item : trace) {
    const int kept = keeps_previous && capacity > 1 ? previous : -1;
    previous = item;
    std::map<unsigned, int64_t> after;
    auto reach = [&](unsigned content, int64_t misses) {
      const auto [it, first] = after.try_emplace(content, misses);
      if (!first) it->second = std::min(it->second, misses);
    };
    for (const auto& [content, misses] : now) {
      const unsigned bit = 1u << item;
      if ((content & bit) != 0) {
        reach(content, misses);
        continue;
      }
      if (bypass) reach(content, misses + 1);
      if (__builtin_popcount(content) < capacity) reach(content | bit, misses + 1);
      for (int victim = 0; victim < items; ++victim) {
        if (victim != kept && (content & (1u << victim)) != 0)
          reach((content & ~(1u << victim)) | bit, misses + 1);
      }
    }
    now = std::move(after);
  }
  int64_t fewest = now.begin()->second;
  for (const auto& [content, misses] : now) fewest = std::min(fewest, misses);
  return fewest;
}

TEST(Belady, NoChoiceOfVictimsMissesLessOverTenThousandRandomTraces) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 10'000; ++round) {
    const int items = 2 + static_cast<int>(random() % 5);
    const int capacity = 1 + static_cast<int>(random() % static_cast<uint64_t>(items));
    std::vector<int> trace(1 + random() % 14);
    for (int& item : trace) item = static_cast<int>(random() % static_cast<uint64_t>(items));
    const Replacement belady = BeladyMisses(trace, items, capacity);
    ASSERT_EQ(belady.misses, FewestMisses(trace, items, capacity, /*bypass=*/false)) << "round " << round;
    ASSERT_EQ(BeladyMisses(trace, items, capacity, 1, /*keeps_previous=*/true).misses,
              FewestMisses(trace, items, capacity, /*bypass=*/false, /*keeps_previous=*/true))
        << "round " << round;
    int64_t sum = 0;
    for (const int64_t misses : belady.misses_of) sum += misses;
    ASSERT_EQ(sum, belady.misses);
  }
}

TEST(Belady, SteadyStateOfACycleIsOnePassOfTheLongTrace) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    const int items = 2 + static_cast<int>(random() % 4);
    const int capacity = 1 + static_cast<int>(random() % static_cast<uint64_t>(items));
    std::vector<int> trace(2 + random() % 7);
    for (int& item : trace) item = static_cast<int>(random() % static_cast<uint64_t>(items));
    // Over many passes the misses of brute force are those of the steady state, and of a start and an end
    // that do not grow with the number of passes.
    std::vector<int> twice, many;
    for (int pass = 0; pass < 12; ++pass) {
      if (pass < 6) twice.insert(twice.end(), trace.begin(), trace.end());
      many.insert(many.end(), trace.begin(), trace.end());
    }
    const int64_t six =
        FewestMisses(many, items, capacity, false) - FewestMisses(twice, items, capacity, false);
    int64_t steady = 0;
    for (int pass = 4; pass < 10; ++pass) steady += BeladyMisses(trace, items, capacity, pass).misses;
    // The mean of a pass may be no whole number: the content wanders over several passes.
    EXPECT_NEAR(static_cast<double>(steady), static_cast<double>(six), 3.0) << "round " << round;
  }
}

// A cyclic trace that uses every item once a cycle: a fixed set beside the stream is as good as anything.
TEST(ResidentSet, NoReplacementBeatsAFixedSetOnACycle) {
  for (int items = 1; items <= 6; ++items) {
    for (int capacity = 1; capacity <= items; ++capacity) {
      for (int cycles = 1; cycles <= 4; ++cycles) {
        std::vector<int> trace;
        for (int cycle = 0; cycle < cycles; ++cycle) {
          for (int item = 0; item < items; ++item) trace.push_back(item);
        }
        const std::vector<char> stays =
            ChooseResident(std::vector<Keepable>(static_cast<size_t>(items), {1, 1}), capacity);
        ASSERT_EQ(std::count(stays.begin(), stays.end(), 1), capacity);
        const int64_t fixed = items + (cycles - 1) * (items - capacity);  // cold: each is fetched once
        EXPECT_EQ(FewestMisses(trace, items, capacity, /*bypass=*/true), fixed)
            << items << " items, " << capacity << " stay, " << cycles << " cycles";
      }
    }
  }
}

TEST(ResidentSet, NoSetSavesMoreOverTenThousandRandomCases) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 10'000; ++round) {
    const size_t n = 1 + random() % 11;
    const uint64_t kinds = 1 + random() % 12;
    std::vector<Keepable> items(n);
    for (Keepable& item : items) {
      std::mt19937_64 kind(random() % kinds + 100 * static_cast<uint64_t>(round));
      item = {static_cast<int64_t>(kind() % 20), static_cast<double>(kind() % 15)};
    }
    const auto budget = static_cast<int64_t>(random() % 100);
    const std::vector<char> stays = ChooseResident(items, budget);
    int64_t bytes = 0;
    double saved = 0;
    for (size_t i = 0; i < n; ++i) {
      if (stays[i] == 0) continue;
      bytes += items[i].bytes;
      saved += items[i].saves;
    }
    ASSERT_LE(bytes, budget);
    double most = 0;
    for (unsigned set = 0; set < (1u << n); ++set) {
      int64_t set_bytes = 0;
      double set_saves = 0;
      for (size_t i = 0; i < n; ++i) {
        if ((set >> i & 1) == 0) continue;
        set_bytes += items[i].bytes;
        set_saves += items[i].saves;
      }
      if (set_bytes <= budget) most = std::max(most, set_saves);
    }
    ASSERT_DOUBLE_EQ(saved, most) << "round " << round;
  }
}

TEST(ResidentSet, AThousandDifferentItemsTakeNoTimeAndAreNoWorseThanGreedy) {
  std::mt19937_64 random(4);
  std::vector<Keepable> items(1000);
  int64_t all = 0;
  for (Keepable& item : items) {
    item = {static_cast<int64_t>(1'000'000 + random() % 1'000'000),
            1e6 + static_cast<double>(random() % 1'000'000)};
    all += item.bytes;
  }
  const std::vector<char> stays = ChooseResident(items, all / 3);
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return items[a].saves * static_cast<double>(items[b].bytes) >
           items[b].saves * static_cast<double>(items[a].bytes);
  });
  double greedy = 0, saved = 0;
  int64_t left = all / 3;
  for (const size_t i : order) {
    if (items[i].bytes > left) continue;
    left -= items[i].bytes;
    greedy += items[i].saves;
  }
  for (size_t i = 0; i < items.size(); ++i) saved += stays[i] != 0 ? items[i].saves : 0;
  EXPECT_GE(saved, greedy * (1 - 1e-9));
}

}  // namespace
}  // namespace penstock::tiering::belady_test
