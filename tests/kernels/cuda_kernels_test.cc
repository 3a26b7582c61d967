// The CUDA kernels against the CPU's, bit by bit: their element functions on the host everywhere, the kernels
// themselves where there is a device, and everywhere on fibers that play one (tests/kernels/fibers/fibers.h).
#include "kernels/cuda/cuda_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <memory>

#include "kernels/split_master.h"
#include "kernels/weight_code.h"
#include "tests/kernels/cuda_element_shim.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::cuda_kernels_test {
namespace {

constexpr size_t kHostN = 3000;

template <class Step>
void ExpectHostElementsMatch(const Step& step) {
  for (const Values kind : AllValues()) {
    std::vector<float> p = Random(kHostN, kind, 1), g = Random(kHostN, kind, 2), m = Random(kHostN, kind, 3),
                       v = Random(kHostN, kind, 4);
    for (float& x : v) x = std::fabs(x);
    std::vector<float> p2 = p, m2 = m, v2 = v;
    UpdateArrays a;
    a.n = kHostN;
    a.param = p.data();
    a.grad = g.data();
    a.m = m.data();
    a.v = v.data();
    ApplyUpdate(step, a);
    cuda::UpdateOnHost(step, p2.data(), g.data(), m2.data(), v2.data(), kHostN);
    EXPECT_TRUE(SameFloats(p, p2));
    EXPECT_TRUE(SameFloats(m, m2));
    EXPECT_TRUE(SameFloats(v, v2));
  }
}

TEST(CudaElements, OptimizersGiveTheBitsOfTheCpu) {
  ExpectHostElementsMatch(MakeAdamStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectHostElementsMatch(MakeAdamStep({.weight_decay = 0.1, .mode = AdamMode::kAdam}, 3));
  ExpectHostElementsMatch(MakeAdagradStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectHostElementsMatch(MakeLionStep({.weight_decay = 0.1}, 0.5));
  ExpectHostElementsMatch(MakeSgdStep({.momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1}, 3));
  ExpectHostElementsMatch(MakeSgdStep({.momentum = 0.9, .nesterov = true}, 3));
  ExpectHostElementsMatch(MakeSgdStep({}, 3));
}

TEST(CudaElements, ConversionsGiveTheBitsOfTheCpu) {
  for (const Values kind : AllValues()) {
    const std::vector<float> in = Random(kHostN, kind, 5);
    std::vector<uint16_t> bf16(kHostN), fp16(kHostN), master_high(kHostN);
    std::vector<int16_t> master_low(kHostN);
    cuda::ConvertOnHost(in.data(), bf16.data(), fp16.data(), master_high.data(), master_low.data(), kHostN);
    std::vector<float> from_bf16(kHostN), from_fp16(kHostN), joined(kHostN);
    cuda::WidenOnHost(bf16.data(), fp16.data(), master_high.data(), master_low.data(), from_bf16.data(),
                      from_fp16.data(), joined.data(), kHostN);
    for (size_t i = 0; i < kHostN; ++i) {
      ASSERT_TRUE(SameFloat(from_bf16[i], Bf16ToFloat(FloatToBf16(in[i]))));
      ASSERT_TRUE(SameFloat(from_fp16[i], Fp16ToFloat(FloatToFp16(in[i]))));
      ASSERT_EQ(master_high[i], SplitOne(in[i]).master_high);
      ASSERT_EQ(master_low[i], SplitOne(in[i]).master_low);
      ASSERT_TRUE(SameFloat(joined[i], JoinOne(master_high[i], master_low[i])));
    }
  }
}

TEST(CudaElements, EightBitCodesAreTheCpus) {
  for (const Values kind : AllValues()) {
    for (const bool stochastic : {false, true}) {
      for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
        for (uint64_t round = 0; round < 20; ++round) {
          const size_t n = round == 0 ? 17 : kStateBlock;
          const std::vector<float> in = Random(n, kind, round);
          const Rounding rounding = {
              .stochastic = stochastic, .seed = round, .first_element = round * kStateBlock};
          std::vector<uint8_t> codes(n), other(n);
          std::vector<float> out(n), other_out(n);
          float scale = 0;
          Quantize8(code, in.data(), codes.data(), &scale, n, rounding);
          const float other_scale = cuda::EncodeOnHost(code, in.data(), other.data(), n, rounding);
          ASSERT_TRUE(SameFloat(scale, other_scale));
          Dequantize8(code, codes.data(), &scale, out.data(), n);
          cuda::DecodeOnHost(code, other.data(), other_scale, other_out.data(), n);
          ASSERT_TRUE(SameFloats(out, other_out));
        }
      }
    }
  }
}

std::vector<size_t> ChecksumLengths() {
  std::vector<size_t> lengths;
  for (size_t bytes = cuda::kLeastChecksumBytes; bytes < 3200; bytes += 8) lengths.push_back(bytes);
  for (const size_t block : {32u, 33u, 64u, 100u}) {
    for (const size_t more : {0u, 8u, 64u, 72u, 1016u}) lengths.push_back(1024 * block + more);
  }
  lengths.push_back(1 << 20);
  return lengths;
}
std::vector<uint64_t> RandomWords(size_t count) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> words(count);
  for (uint64_t& word : words) word = random();
  return words;
}

TEST(CudaElements, ChecksumsAreTheLibrarys) {
  const std::vector<uint64_t> words = RandomWords(size_t{1} << 17);
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{0x123456789ABCDEF}}) {
    for (const size_t bytes : ChecksumLengths()) {
      ASSERT_EQ(cuda::ChecksumOnHost(words.data(), bytes, seed), Checksum(words.data(), bytes, seed))
          << bytes << " bytes, seed " << seed;
    }
  }
}

// What follows runs on a device, or on what plays one (tests/kernels/fibers).
#ifdef PENSTOCK_ON_FIBERS
constexpr size_t kLarge = 17001;  // two pieces of work for thread blocks
#else
constexpr size_t kLarge = 50001;
#endif

class CudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!cuda::DeviceAvailable(&why)) GTEST_SKIP() << why << ": the device half of this test is left out";
  }
};

// A device copy of bytes, at an odd place if asked.
class DeviceBytes {
 public:
  DeviceBytes(const void* host, size_t bytes, size_t offset = 0) : bytes_(bytes), offset_(offset) {
    EXPECT_EQ(cudaMalloc(&base_, bytes + offset), cudaSuccess);  // no byte more: who goes beyond is seen
    EXPECT_EQ(cudaMemcpy(data(), host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(base_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void* data() { return static_cast<unsigned char*>(base_) + offset_; }
  std::vector<unsigned char> Get() {
    std::vector<unsigned char> out(bytes_);
    EXPECT_EQ(cudaMemcpy(out.data(), data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  void* base_ = nullptr;
  size_t bytes_, offset_;
};

// The same bits, but for the payload of NaNs.
::testing::AssertionResult SameElements(DType type, const std::vector<unsigned char>& a,
                                        const std::vector<unsigned char>& b) {
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  const size_t n = a.size() / BytesPerElement(type);
  std::vector<float> x(n), y(n);
  Convert(type, a.data(), DType::kFp32, x.data(), n);
  Convert(type, b.data(), DType::kFp32, y.data(), n);
  return SameFloats(x, y);
}

// One tensor's arrays on the host, as bytes.
struct HostTensor {
  UpdateArrays a;
  std::vector<unsigned char> param, master_low, copy, grad, m, v, m_scales, v_scales;

  HostTensor(size_t n, ParamType param_type, DType grad_type, StateType state, uint64_t seed,
             Values kind = Values::kNormal) {
    a.n = n;
    a.param_type = param_type;
    a.grad_type = grad_type;
    a.state_type = state;
    a.seed = seed;
    a.first_element = 256 * seed;
    const std::vector<float> p0 = Random(n, kind, seed), g0 = Random(n, kind, seed + 1),
                             m0 = Random(n, kind, seed + 2);
    std::vector<float> v0 = Random(n, kind, seed + 3);
    for (float& x : v0) x = std::fabs(x);
    // To the byte, so that whoever goes beyond is seen.
    param.resize((param_type == ParamType::kFp32 ? 4 : 2) * n);
    master_low.resize(param_type == ParamType::kSplit ? 2 * n : 0);
    copy.resize(param_type == ParamType::kFp32 ? 2 * n : 0);
    grad.resize(BytesPerElement(grad_type) * n);
    m.resize(StateBytes(state, n));
    v.resize(StateBytes(state, n));
    m_scales.resize(4 * StateScales(state, n));
    v_scales.resize(4 * StateScales(state, n));
    Point();
    if (param_type == ParamType::kSplit) {
      SplitMaster(p0.data(), reinterpret_cast<uint16_t*>(param.data()), a.master_low, n);
    } else {
      Convert(DType::kFp32, p0.data(),
              param_type == ParamType::kFp32   ? DType::kFp32
              : param_type == ParamType::kBf16 ? DType::kBf16
                                               : DType::kFp16,
              param.data(), n);
    }
    Convert(DType::kFp32, g0.data(), grad_type, grad.data(), n);
    if (state == StateType::k8Bit) {
      Quantize8(Code8::kSigned, m0.data(), m.data(), a.m_scales, n);
      Quantize8(Code8::kUnsigned, v0.data(), v.data(), a.v_scales, n);
    } else {
      Convert(DType::kFp32, m0.data(), state == StateType::kFp32 ? DType::kFp32 : DType::kBf16, m.data(), n);
      Convert(DType::kFp32, v0.data(), state == StateType::kFp32 ? DType::kFp32 : DType::kBf16, v.data(), n);
    }
  }
  void Point() {
    a.param = param.data();
    a.master_low = reinterpret_cast<int16_t*>(master_low.data());
    a.copy_out = a.param_type == ParamType::kFp32 ? reinterpret_cast<uint16_t*>(copy.data()) : nullptr;
    a.grad = grad.data();
    a.m = m.data();
    a.v = v.data();
    a.m_scales = reinterpret_cast<float*>(m_scales.data());
    a.v_scales = reinterpret_cast<float*>(v_scales.data());
  }
};

// Its copy on the device.
struct DeviceTensor {
  DeviceBytes param, master_low, copy, grad, m, v, m_scales, v_scales;
  UpdateArrays a;
  explicit DeviceTensor(const HostTensor& t, size_t offset)
      : param(t.param.data(), t.param.size(), offset),
        master_low(t.master_low.data(), t.master_low.size(), offset),
        copy(t.copy.data(), t.copy.size(), offset),
        grad(t.grad.data(), t.grad.size(), offset),
        m(t.m.data(), t.m.size(), offset),
        v(t.v.data(), t.v.size(), offset),
        m_scales(t.m_scales.data(), t.m_scales.size()),
        v_scales(t.v_scales.data(), t.v_scales.size()),
        a(t.a) {
    a.param = param.data();
    a.master_low = static_cast<int16_t*>(master_low.data());
    if (a.copy_out != nullptr) a.copy_out = static_cast<uint16_t*>(copy.data());
    a.grad = grad.data();
    a.m = m.data();
    a.v = v.data();
    a.m_scales = static_cast<float*>(m_scales.data());
    a.v_scales = static_cast<float*>(v_scales.data());
  }
  void ExpectEquals(const HostTensor& t) {
    const DType state = t.a.state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16;
    EXPECT_TRUE(SameElements(t.a.param_type == ParamType::kFp32   ? DType::kFp32
                             : t.a.param_type == ParamType::kFp16 ? DType::kFp16
                                                                  : DType::kBf16,
                             param.Get(), t.param));
    EXPECT_EQ(master_low.Get(), t.master_low);
    EXPECT_TRUE(SameElements(t.a.copy_type, copy.Get(), t.copy));
    if (t.a.state_type == StateType::k8Bit) {
      EXPECT_EQ(m.Get(), t.m);
      EXPECT_EQ(v.Get(), t.v);
    } else {
      EXPECT_TRUE(SameElements(state, m.Get(), t.m));
      EXPECT_TRUE(SameElements(state, v.Get(), t.v));
    }
    EXPECT_TRUE(SameElements(DType::kFp32, m_scales.Get(), t.m_scales));
    EXPECT_TRUE(SameElements(DType::kFp32, v_scales.Get(), t.v_scales));
  }
};

// The tensors of one parameter type in one call: more than a launch takes.
template <class Step>
void ExpectDeviceMatches(const Step& step, ParamType param) {
  std::vector<std::unique_ptr<HostTensor>> host;
  std::vector<std::unique_ptr<DeviceTensor>> device;
  std::vector<UpdateArrays> arrays;
  uint64_t seed = 54 * static_cast<uint64_t>(param);
  for (const DType grad : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    for (const StateType state : {StateType::kFp32, StateType::kBf16, StateType::k8Bit}) {
      for (const size_t n : {size_t{0}, size_t{1}, size_t{3}, size_t{257}, size_t{4096}, kLarge}) {
        ++seed;
        host.push_back(std::make_unique<HostTensor>(n, param, grad, state, seed));
        device.push_back(std::make_unique<DeviceTensor>(*host.back(), seed % 3 == 0 ? 4 : 0));
        arrays.push_back(device.back()->a);
      }
    }
  }
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cuda::ApplyUpdates(step, arrays.data(), arrays.size(), {}, stream), 0);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const int one = 1;
  DeviceBytes skip(&one, 4);
  ASSERT_EQ(cuda::ApplyUpdates(step, arrays.data(), arrays.size(), {nullptr, static_cast<int*>(skip.data())},
                               stream),
            0);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaStreamDestroy(stream);
  for (size_t i = 0; i < host.size(); ++i) {
    ApplyUpdate(step, host[i]->a);
    SCOPED_TRACE(i);
    device[i]->ExpectEquals(*host[i]);
    if (::testing::Test::HasFailure()) return;
  }
}
template <class Step>
void ExpectDeviceMatches(const Step& step) {
  for (const ParamType param : {ParamType::kFp32, ParamType::kSplit, ParamType::kBf16, ParamType::kFp16}) {
    ExpectDeviceMatches(step, param);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaDevice, UpdatesOfManyTensorsGiveTheBitsOfTheCpu) {
  ExpectDeviceMatches(MakeAdamStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectDeviceMatches(MakeAdamStep({.weight_decay = 0.1, .mode = AdamMode::kAdam}, 3));
  ExpectDeviceMatches(MakeAdagradStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectDeviceMatches(MakeLionStep({.weight_decay = 0.1}, 0.5));
  ExpectDeviceMatches(MakeSgdStep({.momentum = 0.9, .weight_decay = 0.1}, 3));
  ExpectDeviceMatches(MakeSgdStep({}, 3));
}

// Infinities, NaNs, denormals, any bits, no epsilon; lengths around every border.
constexpr std::array<size_t, 10> kRagged = {1, 2, 3, 5, 31, 127, 255, 256, 258, 4099};

template <class Step>
void ExpectDeviceMatchesUnusual(const Step& step) {
  uint64_t seed = 0;
  for (const Values kind : AllValues()) {
    std::vector<std::unique_ptr<HostTensor>> host;
    std::vector<std::unique_ptr<DeviceTensor>> device;
    std::vector<UpdateArrays> arrays;
    for (const ParamType param : {ParamType::kFp32, ParamType::kSplit, ParamType::kBf16, ParamType::kFp16}) {
      for (const DType grad : {DType::kFp32, DType::kBf16, DType::kFp16}) {
        for (const StateType state : {StateType::kFp32, StateType::kBf16, StateType::k8Bit}) {
          const size_t n = kRagged[++seed % kRagged.size()];
          host.push_back(std::make_unique<HostTensor>(n, param, grad, state, seed, kind));
          device.push_back(std::make_unique<DeviceTensor>(*host.back(), seed % 5 == 0 ? 4 : 0));
          arrays.push_back(device.back()->a);
        }
      }
    }
    const float scale = 0.5f;
    DeviceBytes grad_scale(&scale, 4);
    ASSERT_EQ(cuda::ApplyUpdates(step, arrays.data(), arrays.size(),
                                 {static_cast<float*>(grad_scale.data()), nullptr}, nullptr),
              0);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Step scaled = step;
    scaled.grad_scale *= scale;
    for (size_t i = 0; i < host.size(); ++i) {
      ApplyUpdate(scaled, host[i]->a);
      SCOPED_TRACE(::testing::Message()
                   << "values " << static_cast<int>(kind) << ", tensor " << i << " of " << host[i]->a.n);
      device[i]->ExpectEquals(*host[i]);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_F(CudaDevice, UnusualValuesAreUpdatedAsOnTheCpu) {
  ExpectDeviceMatchesUnusual(MakeAdamStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectDeviceMatchesUnusual(MakeAdamStep({.eps = 0.0}, 1));
  ExpectDeviceMatchesUnusual(MakeAdamStep({.eps = 0.0, .weight_decay = 0.1, .mode = AdamMode::kAdam}, 3));
  ExpectDeviceMatchesUnusual(MakeAdagradStep({.eps = 0.0}, 3));
  ExpectDeviceMatchesUnusual(MakeLionStep({.weight_decay = 0.1}));
  ExpectDeviceMatchesUnusual(MakeSgdStep({.momentum = 0.9, .nesterov = true}, 3));
  ExpectDeviceMatchesUnusual(MakeSgdStep({.weight_decay = 0.1}, 3));
}

TEST_F(CudaDevice, PartialSumsAndClipFactor) {
  for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    for (const size_t n : {size_t{1}, size_t{17}, size_t{4096}, size_t{4097}, size_t{1000003}}) {
      const std::vector<float> values = Random(n, Values::kNormal, n);
      std::vector<unsigned char> in(n * BytesPerElement(type));
      Convert(DType::kFp32, values.data(), type, in.data(), n);
      SumOfSquares expected, got;
      AddSquares(type, in.data(), n, &expected);
      DeviceBytes device(in.data(), in.size());
      std::vector<double> partials(cuda::PartialSums(n));
      DeviceBytes out(partials.data(), partials.size() * 8);
      float results[3] = {};
      DeviceBytes factor(results, 12);
      auto* outputs = static_cast<float*>(factor.data());
      ASSERT_EQ(cuda::SquarePartials(type, device.data(), n, static_cast<double*>(out.data()), nullptr), 0);
      ASSERT_EQ(cuda::ClipFactor(static_cast<const double*>(out.data()), partials.size(), 0.5f, 0.25f,
                                 outputs, reinterpret_cast<int*>(outputs + 1), outputs + 2, nullptr),
                0);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<unsigned char> bytes = out.Get();
      std::memcpy(partials.data(), bytes.data(), bytes.size());
      for (const double partial : partials) got.Add(partial);
      EXPECT_EQ(got.Value(), expected.Value()) << n;
      std::memcpy(results, factor.Get().data(), 12);
      const double norm = std::sqrt(expected.Value()) * 0.5;
      EXPECT_NEAR(results[2] / norm, 1.0, 1e-6);
      EXPECT_NEAR(results[0] / (0.5 * std::min(1.0, 0.25 / (norm + 1e-6))), 1.0, 1e-6);
      EXPECT_EQ(std::bit_cast<int>(results[1]), 0);
    }
  }
}

TEST_F(CudaDevice, CastsSumsAndMasters) {
  for (const size_t n : {size_t{1}, size_t{5}, size_t{1000}, size_t{70001}}) {
    for (const size_t offset : {0, 4}) {
      const std::vector<float> in = Random(n, Values::kNormal, n);
      std::vector<uint16_t> bf16(n), master_high(n);
      std::vector<int16_t> master_low(n);
      std::vector<float> sum = in;
      Fp32ToBf16(in.data(), bf16.data(), n);
      SplitMaster(in.data(), master_high.data(), master_low.data(), n);
      AccumulateBf16(bf16.data(), sum.data(), n);
      DeviceBytes wide(in.data(), 4 * n, offset), narrow(bf16.data(), 2 * n, offset),
          high(master_high.data(), 2 * n, offset), low(master_low.data(), 2 * n, offset),
          joined(in.data(), 4 * n, offset);
      auto* w = static_cast<float*>(wide.data());
      ASSERT_EQ(cudaMemset(narrow.data(), 0, 2 * n), cudaSuccess);
      ASSERT_EQ(cuda::Convert(DType::kFp32, w, DType::kBf16, narrow.data(), n, nullptr), 0);
      ASSERT_EQ(cuda::SplitMaster(w, static_cast<uint16_t*>(high.data()), static_cast<int16_t*>(low.data()),
                                  n, nullptr),
                0);
      ASSERT_EQ(cuda::JoinMaster(static_cast<uint16_t*>(high.data()), static_cast<int16_t*>(low.data()),
                                 static_cast<float*>(joined.data()), n, nullptr),
                0);
      ASSERT_EQ(cuda::Accumulate(DType::kBf16, narrow.data(), w, n, nullptr), 0);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const auto same = [](const std::vector<unsigned char>& bytes, const void* expected) {
        return std::memcmp(bytes.data(), expected, bytes.size()) == 0;
      };
      EXPECT_TRUE(same(narrow.Get(), bf16.data()));
      EXPECT_TRUE(same(high.Get(), master_high.data()));
      EXPECT_TRUE(same(low.Get(), master_low.data()));
      EXPECT_TRUE(same(joined.Get(), in.data()));
      EXPECT_TRUE(same(wide.Get(), sum.data()));

      std::vector<uint8_t> codes(n);
      std::vector<float> scales(n / kStateBlock + 1), decoded(n);
      const Rounding rounding = {.stochastic = true, .seed = n, .first_element = 512};
      Quantize8(Code8::kSigned, in.data(), codes.data(), scales.data(), n, rounding);
      Dequantize8(Code8::kSigned, codes.data(), scales.data(), decoded.data(), n);
      DeviceBytes device_in(in.data(), 4 * n), device_codes(codes.data(), n),
          device_scales(scales.data(), 4 * scales.size());
      ASSERT_EQ(cudaMemset(device_codes.data(), 0, n), cudaSuccess);
      ASSERT_EQ(cuda::Quantize8(Code8::kSigned, static_cast<float*>(device_in.data()),
                                static_cast<uint8_t*>(device_codes.data()),
                                static_cast<float*>(device_scales.data()), n, rounding, nullptr),
                0);
      ASSERT_EQ(cuda::Dequantize8(Code8::kSigned, static_cast<uint8_t*>(device_codes.data()),
                                  static_cast<float*>(device_scales.data()),
                                  static_cast<float*>(device_in.data()), n, nullptr),
                0);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_TRUE(same(device_codes.Get(), codes.data()));
      EXPECT_TRUE(same(device_in.Get(), decoded.data()));
    }
  }
}

void ExpectLambMatches(const LambStep& step, HostTensor* host, size_t offset) {
  DeviceTensor device(*host, offset);
  const std::vector<double> zeros(cuda::PartialSums(host->a.n));
  DeviceBytes params(zeros.data(), zeros.size() * 8), updates(zeros.data(), zeros.size() * 8),
      trust(zeros.data(), 4);
  ASSERT_EQ(cuda::LambMoments(step, device.a, {}, nullptr), 0);
  ASSERT_EQ(cuda::LambPartials(step, device.a, static_cast<double*>(params.data()),
                               static_cast<double*>(updates.data()), nullptr),
            0);
  ASSERT_EQ(cuda::LambTrusts(step, static_cast<double*>(params.data()), static_cast<double*>(updates.data()),
                             zeros.size(), static_cast<float*>(trust.data()), nullptr),
            0);
  ASSERT_EQ(cuda::LambApply(step, static_cast<float*>(trust.data()), device.a, {}, nullptr), 0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  LambNorms norms;
  LambMoments(step, host->a, &norms);
  float device_trust;
  std::memcpy(&device_trust, trust.Get().data(), 4);
  const double host_trust = LambTrust(step, norms);
  if (std::isnan(host_trust)) {
    EXPECT_TRUE(std::isnan(device_trust)) << device_trust;
  } else {
    EXPECT_NEAR(device_trust / host_trust, 1.0, 1e-6);
  }
  LambApply(step, device_trust, host->a);
  device.ExpectEquals(*host);
}

TEST_F(CudaDevice, LambGivesTheBitsOfTheCpu) {
  LambOptions options;
  options.adam.weight_decay = 0.01;
  const LambStep step = MakeLambStep(options, 3, 0.5);
  for (const ParamType param : {ParamType::kFp32, ParamType::kSplit}) {
    for (const StateType state : {StateType::kFp32, StateType::kBf16}) {
      HostTensor host(kLarge, param, DType::kBf16, state, 7);
      ExpectLambMatches(step, &host, 0);
    }
  }
}

TEST_F(CudaDevice, LambOfUnusualValuesIsTheCpus) {
  uint64_t seed = 0;
  for (const double eps : {1e-6, 0.0}) {
    LambOptions options;
    options.adam.eps = eps;
    options.adam.weight_decay = 0.01;
    const LambStep step = MakeLambStep(options, 3);
    for (const Values kind : AllValues()) {
      for (const ParamType param :
           {ParamType::kFp32, ParamType::kSplit, ParamType::kBf16, ParamType::kFp16}) {
        for (const StateType state : {StateType::kFp32, StateType::kBf16}) {
          const size_t n = kRagged[++seed % kRagged.size()];
          const auto grad = static_cast<DType>(seed % 3);
          HostTensor host(n, param, grad, state, seed, kind);
          SCOPED_TRACE(::testing::Message() << "values " << static_cast<int>(kind) << ", " << n);
          ExpectLambMatches(step, &host, seed % 2 == 0 ? 4 : 0);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

void AccumulateAny(DType type, const void* in, float* sums, size_t n) {
  if (type == DType::kFp32) return AccumulateFp32(static_cast<const float*>(in), sums, n);
  const auto* const narrow = static_cast<const uint16_t*>(in);
  type == DType::kBf16 ? AccumulateBf16(narrow, sums, n) : AccumulateFp16(narrow, sums, n);
}

TEST_F(CudaDevice, UnusualValuesAreConvertedAndSummedAsOnTheCpu) {
  constexpr std::array<DType, 3> kTypes = {DType::kFp32, DType::kBf16, DType::kFp16};
  uint64_t seed = 0;
  for (const Values kind : AllValues()) {
    for (const size_t n : kRagged) {
      const std::vector<float> values = Random(n, kind, ++seed);
      const size_t offset = seed % 2 == 0 ? 4 : 0;
      SCOPED_TRACE(::testing::Message() << "values " << static_cast<int>(kind) << ", " << n);
      for (const DType from : kTypes) {
        std::vector<unsigned char> in(n * BytesPerElement(from));
        Convert(DType::kFp32, values.data(), from, in.data(), n);
        DeviceBytes device_in(in.data(), in.size(), offset);
        for (const DType to : kTypes) {
          std::vector<unsigned char> out(n * BytesPerElement(to));
          DeviceBytes device_out(out.data(), out.size(), offset);
          Convert(from, in.data(), to, out.data(), n);
          ASSERT_EQ(cuda::Convert(from, device_in.data(), to, device_out.data(), n, nullptr), 0);
          ASSERT_TRUE(SameElements(to, device_out.Get(), out));
        }
        std::vector<float> sums = Random(n, kind, seed + 1000);
        DeviceBytes device_sums(sums.data(), 4 * n, offset);
        AccumulateAny(from, in.data(), sums.data(), n);
        ASSERT_EQ(
            cuda::Accumulate(from, device_in.data(), static_cast<float*>(device_sums.data()), n, nullptr), 0);
        std::vector<unsigned char> expected(4 * n);
        std::memcpy(expected.data(), sums.data(), expected.size());
        ASSERT_TRUE(SameElements(DType::kFp32, device_sums.Get(), expected));

        std::vector<double> partials(cuda::PartialSums(n));
        DeviceBytes device_partials(partials.data(), 8 * partials.size());
        std::array<float, 3> results{};
        DeviceBytes factor(results.data(), 12);
        auto* const outputs = static_cast<float*>(factor.data());
        ASSERT_EQ(cuda::SquarePartials(from, device_in.data(), n,
                                       static_cast<double*>(device_partials.data()), nullptr),
                  0);
        ASSERT_EQ(cuda::ClipFactor(static_cast<double*>(device_partials.data()), partials.size(), 0.5f, 1.0f,
                                   outputs, reinterpret_cast<int*>(outputs + 1), outputs + 2, nullptr),
                  0);
        std::memcpy(partials.data(), device_partials.Get().data(), 8 * partials.size());
        std::memcpy(results.data(), factor.Get().data(), 12);
        SumOfSquares squares, own;
        AddSquares(from, in.data(), n, &own);
        for (const double partial : partials) squares.Add(partial);
        ASSERT_EQ(squares.Value(), own.Value());
        ASSERT_EQ(std::bit_cast<int>(results[1]), own.Finite() ? 0 : 1);
      }
      std::vector<unsigned char> master_high(2 * n), master_low(2 * n), joined(4 * n);
      DeviceBytes device_in(values.data(), 4 * n, offset), device_hi(master_high.data(), 2 * n, offset),
          device_lo(master_low.data(), 2 * n, offset), device_joined(joined.data(), 4 * n, offset);
      auto* const high = reinterpret_cast<uint16_t*>(master_high.data());
      auto* const low = reinterpret_cast<int16_t*>(master_low.data());
      SplitMaster(values.data(), high, low, n);
      JoinMaster(high, low, reinterpret_cast<float*>(joined.data()), n);
      ASSERT_EQ(
          cuda::SplitMaster(static_cast<float*>(device_in.data()), static_cast<uint16_t*>(device_hi.data()),
                            static_cast<int16_t*>(device_lo.data()), n, nullptr),
          0);
      ASSERT_EQ(
          cuda::JoinMaster(static_cast<uint16_t*>(device_hi.data()), static_cast<int16_t*>(device_lo.data()),
                           static_cast<float*>(device_joined.data()), n, nullptr),
          0);
      ASSERT_TRUE(SameElements(DType::kBf16, device_hi.Get(), master_high));
      ASSERT_EQ(device_lo.Get(), master_low);
      ASSERT_TRUE(SameElements(DType::kFp32, device_joined.Get(), joined));
    }
  }
}

TEST_F(CudaDevice, EightBitCodesOfUnusualValuesAreTheCpus) {
  uint64_t seed = 0;
  for (const Values kind : AllValues()) {
    for (const size_t n : kRagged) {
      for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
        const std::vector<float> in = Random(n, kind, ++seed);
        const Rounding rounding = {.stochastic = seed / 2 % 2 == 0, .seed = seed, .first_element = 512};
        std::vector<unsigned char> codes(n), scales(4 * StateScales(StateType::k8Bit, n)), out(4 * n);
        DeviceBytes device_in(in.data(), 4 * n), device_codes(codes.data(), n),
            device_scales(scales.data(), scales.size()), device_out(out.data(), 4 * n);
        Quantize8(code, in.data(), codes.data(), reinterpret_cast<float*>(scales.data()), n, rounding);
        Dequantize8(code, codes.data(), reinterpret_cast<float*>(scales.data()),
                    reinterpret_cast<float*>(out.data()), n);
        ASSERT_EQ(cuda::Quantize8(code, static_cast<float*>(device_in.data()),
                                  static_cast<uint8_t*>(device_codes.data()),
                                  static_cast<float*>(device_scales.data()), n, rounding, nullptr),
                  0);
        ASSERT_EQ(cuda::Dequantize8(code, static_cast<uint8_t*>(device_codes.data()),
                                    static_cast<float*>(device_scales.data()),
                                    static_cast<float*>(device_out.data()), n, nullptr),
                  0);
        SCOPED_TRACE(::testing::Message() << "values " << static_cast<int>(kind) << ", " << n);
        ASSERT_EQ(device_codes.Get(), codes);
        ASSERT_TRUE(SameElements(DType::kFp32, device_scales.Get(), scales));
        ASSERT_TRUE(SameElements(DType::kFp32, device_out.Get(), out));
      }
    }
  }
}

TEST_F(CudaDevice, CodedWeightsAreDecodedToTheBitsOfTheCpu) {
  std::mt19937_64 random(29);
  for (const WeightCode& code :
       {WeightCode{8, 32}, WeightCode{8, 64}, WeightCode{4, 32}, WeightCode{4, 128}}) {
    for (const size_t columns : {1, 3, 31, 32, 33, 64, 130, 1000}) {
      // Any bytes: every code, and every scale, those that are not finite among them.
      const size_t rows = 1 + random() % 9;
      std::vector<uint8_t> coded(rows * code.row_bytes(columns));
      for (uint8_t& byte : coded) byte = static_cast<uint8_t>(random());
      for (const DType to : {DType::kFp32, DType::kBf16}) {
        const size_t width = BytesPerElement(to);
        std::vector<unsigned char> expected(rows * columns * width);
        for (size_t row = 0; row < rows; ++row) {
          DecodeWeights(code, coded.data() + row * code.row_bytes(columns), columns, to,
                        expected.data() + row * columns * width);
        }
        for (const size_t odd : {size_t{0}, width}) {
          DeviceBytes in(coded.data(), coded.size(), odd == 0 ? 0 : 1),
              out(expected.data(), expected.size(), odd);
          ASSERT_EQ(cudaMemset(out.data(), 0, expected.size()), cudaSuccess);
          ASSERT_EQ(cuda::DecodeWeights(code, in.data(), rows, columns, to, out.data(), nullptr), 0);
          SCOPED_TRACE(::testing::Message()
                       << code.bits << " bit, group " << code.group << ", " << rows << " of " << columns);
          ASSERT_TRUE(SameElements(to, out.Get(), expected));
        }
      }
    }
  }
  EXPECT_NE(cuda::DecodeWeights({8, 33}, nullptr, 1, 4, DType::kFp32, nullptr, nullptr), 0);
}

TEST_F(CudaDevice, WeightsAreCodedToTheBytesOfTheCpu) {
  uint64_t seed = 0;
  for (const WeightCode& code :
       {WeightCode{8, 32}, WeightCode{8, 128}, WeightCode{4, 32}, WeightCode{4, 128}}) {
    for (const size_t columns : {1, 3, 31, 32, 33, 64, 130, 1000, 5000}) {
      for (const Values kind : {Values::kNormal, Values::kTiny, Values::kHuge, Values::kDenormal}) {
        for (const DType from : {DType::kFp32, DType::kBf16, DType::kFp16}) {
          std::vector<float> values = Random(columns, kind, ++seed);
          if (seed % 5 == 0) values[seed % columns] = HUGE_VALF;
          std::vector<unsigned char> in(columns * BytesPerElement(from)), expected(code.row_bytes(columns));
          Convert(DType::kFp32, values.data(), from, in.data(), columns);
          EncodeWeights(code, from, in.data(), columns, expected.data());
          DeviceBytes device_in(in.data(), in.size()), out(expected.data(), expected.size(), seed % 2);
          ASSERT_EQ(cudaMemset(out.data(), 0, expected.size()), cudaSuccess);
          ASSERT_EQ(cuda::EncodeWeights(code, from, device_in.data(), columns, out.data(), nullptr), 0);
          ASSERT_EQ(out.Get(), expected) << code.bits << " bit, group " << code.group << ", " << columns
                                         << " of " << static_cast<int>(from);
        }
      }
    }
  }
  EXPECT_NE(cuda::EncodeWeights({8, 33}, DType::kFp32, nullptr, 4, nullptr, nullptr), 0);
}

TEST_F(CudaDevice, ChecksumsAreTheLibrarys) {
  const std::vector<uint64_t> words = RandomWords(size_t{1} << 17);
  DeviceBytes in(words.data(), words.size() * 8);
  const uint64_t nothing = 0;
  DeviceBytes out(&nothing, sizeof(nothing));
  for (const uint64_t seed : {uint64_t{0}, uint64_t{0x123456789ABCDEF}}) {
    for (const size_t bytes : ChecksumLengths()) {
      ASSERT_EQ(cuda::Checksum(in.data(), bytes, seed, static_cast<uint64_t*>(out.data()), nullptr), 0);
      uint64_t got = 0;
      std::memcpy(&got, out.Get().data(), sizeof(got));
      ASSERT_EQ(got, Checksum(words.data(), bytes, seed)) << bytes << " bytes, seed " << seed;
    }
  }
  for (const size_t wrong : {size_t{0}, size_t{240}, size_t{1001}}) {
    EXPECT_NE(cuda::Checksum(in.data(), wrong, 0, static_cast<uint64_t*>(out.data()), nullptr), 0);
  }
}

}  // namespace
}  // namespace penstock::kernels::cuda_kernels_test
