// What the kernel tests share: values that hurt, bit comparison, every SIMD level of this machine.
#ifndef PENSTOCK_TESTS_KERNELS_KERNEL_TESTING_H_
#define PENSTOCK_TESTS_KERNELS_KERNEL_TESTING_H_

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu_features.h"
#include "kernels/float16.h"

namespace penstock::kernels {

inline std::vector<SimdLevel> Levels() {
  std::vector<SimdLevel> levels;
  for (const SimdLevel level : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (level <= BestSimdLevel()) levels.push_back(level);
  }
  return levels;
}

// Sets a level for a scope.
class AtLevel {
 public:
  explicit AtLevel(SimdLevel level) : before_(ActiveSimdLevel()) { EXPECT_TRUE(SetSimdLevel(level)); }
  ~AtLevel() { SetSimdLevel(before_); }
  AtLevel(const AtLevel&) = delete;
  AtLevel& operator=(const AtLevel&) = delete;

 private:
  SimdLevel before_;
};

// Same bits, with any NaN equal to any other: payloads are not part of what the kernels promise.
inline bool SameFloat(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}
inline ::testing::AssertionResult SameFloats(const float* a, const float* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!SameFloat(a[i], b[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << " of " << n << ": " << std::hexfloat << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  return SameFloats(a.data(), b.data(), a.size());
}

// Distance in units in the last place of fp32 at `exact` (of the least normal's, below it).
inline double Ulps(float got, double exact) {
  if (std::isnan(got) || std::isnan(exact)) return std::isnan(got) && std::isnan(exact) ? 0.0 : HUGE_VAL;
  const float nearest = static_cast<float>(exact);
  if (std::isinf(nearest) || std::isinf(got)) return nearest == got ? 0.0 : HUGE_VAL;
  const float magnitude = std::fmax(std::fabs(nearest), std::numeric_limits<float>::min());
  const double ulp =
      static_cast<double>(std::nextafter(magnitude, HUGE_VALF)) - static_cast<double>(magnitude);
  return std::fabs(static_cast<double>(got) - exact) / ulp;
}

enum class Values { kNormal, kTiny, kHuge, kDenormal, kSpecial, kAnyBits };

inline std::vector<float> Random(size_t n, Values kind, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const float specials[] = {0.0f,
                            -0.0f,
                            1.0f,
                            -1.0f,
                            HUGE_VALF,
                            -HUGE_VALF,
                            std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::lowest(),
                            std::numeric_limits<float>::min(),
                            65504.0f,
                            65519.0f,
                            65520.0f,
                            0x1p-24f,
                            0x1p-25f,
                            0x1.000002p-25f,
                            3.3895e38f};
  std::vector<float> out(n);
  for (float& x : out) {
    switch (kind) {
      case Values::kNormal:
        x = normal(random);
        break;
      case Values::kTiny:
        x = normal(random) * 1e-18f;
        break;
      case Values::kHuge:
        x = normal(random) * 1e17f;
        break;
      case Values::kDenormal:
        x = std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807FFFFFu));
        break;
      case Values::kSpecial:
        x = specials[random() % std::size(specials)];
        break;
      case Values::kAnyBits:
        x = std::bit_cast<float>(static_cast<uint32_t>(random()));
        break;
    }
  }
  return out;
}

inline const std::vector<Values>& AllValues() {
  static const std::vector<Values> all = {Values::kNormal,   Values::kTiny,    Values::kHuge,
                                          Values::kDenormal, Values::kSpecial, Values::kAnyBits};
  return all;
}

// n elements of T that start `offset` bytes after a 64-byte border, with guards on both sides.
template <class T>
class Misaligned {
 public:
  Misaligned(size_t n, size_t offset) : n_(n), bytes_(n * sizeof(T) + 192 + offset, kGuard) {
    const size_t border = (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
    start_ = border + 64 + offset;
  }
  Misaligned(const std::vector<T>& values, size_t offset) : Misaligned(values.size(), offset) {
    if (n_ != 0) std::memcpy(bytes_.data() + start_, values.data(), n_ * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + start_); }
  std::vector<T> Get() const {
    std::vector<T> out(n_);
    if (n_ != 0) std::memcpy(out.data(), bytes_.data() + start_, n_ * sizeof(T));
    return out;
  }
  bool GuardsIntact() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < start_ || i >= start_ + n_ * sizeof(T)) && bytes_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kGuard = 0xA5;
  size_t n_;
  std::vector<unsigned char> bytes_;
  size_t start_;
};

}  // namespace penstock::kernels

#endif  // PENSTOCK_TESTS_KERNELS_KERNEL_TESTING_H_
