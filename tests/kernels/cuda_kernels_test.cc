// The CUDA kernels against the CPU's, bit by bit: their element functions on the host everywhere, the kernels
// themselves where there is a device.
#include "kernels/cuda/cuda_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/split_master.h"
#include "tests/kernels/cuda_element_shim.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels {
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
    std::vector<uint16_t> bf16(kHostN), fp16(kHostN), hi(kHostN);
    std::vector<int16_t> lo(kHostN);
    cuda::ConvertOnHost(in.data(), bf16.data(), fp16.data(), hi.data(), lo.data(), kHostN);
    std::vector<float> from_bf16(kHostN), from_fp16(kHostN), joined(kHostN);
    cuda::WidenOnHost(bf16.data(), fp16.data(), hi.data(), lo.data(), from_bf16.data(), from_fp16.data(),
                      joined.data(), kHostN);
    for (size_t i = 0; i < kHostN; ++i) {
      ASSERT_TRUE(SameFloat(from_bf16[i], Bf16ToFloat(FloatToBf16(in[i]))));
      ASSERT_TRUE(SameFloat(from_fp16[i], Fp16ToFloat(FloatToFp16(in[i]))));
      ASSERT_EQ(hi[i], SplitOne(in[i]).hi);
      ASSERT_EQ(lo[i], SplitOne(in[i]).lo);
      ASSERT_TRUE(SameFloat(joined[i], JoinOne(hi[i], lo[i])));
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

// What follows runs on a device.
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
    EXPECT_EQ(cudaMalloc(&base_, bytes + offset + 16), cudaSuccess);
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

// One tensor's arrays on the host, as bytes.
struct HostTensor {
  UpdateArrays a;
  std::vector<unsigned char> param, lo, copy, grad, m, v, m_scales, v_scales;

  HostTensor(size_t n, ParamType param_type, DType grad_type, StateType state, uint64_t seed) {
    a.n = n;
    a.param_type = param_type;
    a.grad_type = grad_type;
    a.state_type = state;
    a.seed = seed;
    a.first_element = 256 * seed;
    const std::vector<float> p0 = Random(n, Values::kNormal, seed), g0 = Random(n, Values::kNormal, seed + 1),
                             m0 = Random(n, Values::kNormal, seed + 2);
    std::vector<float> v0 = Random(n, Values::kNormal, seed + 3);
    for (float& x : v0) x = std::fabs(x);
    param.resize(4 * n);
    lo.resize(2 * n);
    copy.resize(2 * n);
    grad.resize(4 * n);
    m.resize(4 * n);
    v.resize(4 * n);
    m_scales.resize(4 * (n / kStateBlock + 1));
    v_scales.resize(4 * (n / kStateBlock + 1));
    Point();
    if (param_type == ParamType::kSplit) {
      SplitMaster(p0.data(), reinterpret_cast<uint16_t*>(param.data()), a.param_lo, n);
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
    a.param_lo = reinterpret_cast<int16_t*>(lo.data());
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
  DeviceBytes param, lo, copy, grad, m, v, m_scales, v_scales;
  UpdateArrays a;
  explicit DeviceTensor(const HostTensor& t, size_t offset)
      : param(t.param.data(), t.param.size(), offset),
        lo(t.lo.data(), t.lo.size(), offset),
        copy(t.copy.data(), t.copy.size(), offset),
        grad(t.grad.data(), t.grad.size(), offset),
        m(t.m.data(), t.m.size(), offset),
        v(t.v.data(), t.v.size(), offset),
        m_scales(t.m_scales.data(), t.m_scales.size()),
        v_scales(t.v_scales.data(), t.v_scales.size()),
        a(t.a) {
    a.param = param.data();
    a.param_lo = static_cast<int16_t*>(lo.data());
    if (a.copy_out != nullptr) a.copy_out = static_cast<uint16_t*>(copy.data());
    a.grad = grad.data();
    a.m = m.data();
    a.v = v.data();
    a.m_scales = static_cast<float*>(m_scales.data());
    a.v_scales = static_cast<float*>(v_scales.data());
  }
  void ExpectEquals(const HostTensor& t) {
    EXPECT_EQ(param.Get(), t.param);
    EXPECT_EQ(lo.Get(), t.lo);
    EXPECT_EQ(copy.Get(), t.copy);
    EXPECT_EQ(m.Get(), t.m);
    EXPECT_EQ(v.Get(), t.v);
    EXPECT_EQ(m_scales.Get(), t.m_scales);
    EXPECT_EQ(v_scales.Get(), t.v_scales);
  }
};

template <class Step>
void ExpectDeviceMatches(const Step& step) {
  std::vector<std::unique_ptr<HostTensor>> host;
  std::vector<std::unique_ptr<DeviceTensor>> device;
  std::vector<UpdateArrays> arrays;
  uint64_t seed = 0;
  for (const ParamType param : {ParamType::kFp32, ParamType::kSplit, ParamType::kBf16, ParamType::kFp16}) {
    for (const DType grad : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const StateType state : {StateType::kFp32, StateType::kBf16, StateType::k8Bit}) {
        for (const size_t n : {0, 1, 3, 257, 4096, 50001}) {
          ++seed;
          host.push_back(std::make_unique<HostTensor>(n, param, grad, state, seed));
          device.push_back(std::make_unique<DeviceTensor>(*host.back(), seed % 3 == 0 ? 4 : 0));
          arrays.push_back(device.back()->a);
        }
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

TEST_F(CudaDevice, UpdatesOfManyTensorsGiveTheBitsOfTheCpu) {
  ExpectDeviceMatches(MakeAdamStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectDeviceMatches(MakeAdamStep({.weight_decay = 0.1, .mode = AdamMode::kAdam}, 3));
  ExpectDeviceMatches(MakeAdagradStep({.weight_decay = 0.1}, 3, 0.5));
  ExpectDeviceMatches(MakeLionStep({.weight_decay = 0.1}, 0.5));
  ExpectDeviceMatches(MakeSgdStep({.momentum = 0.9, .weight_decay = 0.1}, 3));
  ExpectDeviceMatches(MakeSgdStep({}, 3));
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
      std::vector<uint16_t> bf16(n), hi(n);
      std::vector<int16_t> lo(n);
      std::vector<float> sum = in;
      Fp32ToBf16(in.data(), bf16.data(), n);
      SplitMaster(in.data(), hi.data(), lo.data(), n);
      AccumulateBf16(bf16.data(), sum.data(), n);
      DeviceBytes wide(in.data(), 4 * n, offset), narrow(bf16.data(), 2 * n, offset),
          high(hi.data(), 2 * n, offset), low(lo.data(), 2 * n, offset), joined(in.data(), 4 * n, offset);
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
      EXPECT_TRUE(same(high.Get(), hi.data()));
      EXPECT_TRUE(same(low.Get(), lo.data()));
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

TEST_F(CudaDevice, LambGivesTheBitsOfTheCpu) {
  LambOptions options;
  options.adam.weight_decay = 0.01;
  const LambStep step = MakeLambStep(options, 3, 0.5);
  for (const ParamType param : {ParamType::kFp32, ParamType::kSplit}) {
    for (const StateType state : {StateType::kFp32, StateType::kBf16}) {
      const size_t n = 50001;
      HostTensor host(n, param, DType::kBf16, state, 7);
      DeviceTensor device(host, 0);
      std::vector<double> zeros(cuda::PartialSums(n));
      DeviceBytes params(zeros.data(), zeros.size() * 8), updates(zeros.data(), zeros.size() * 8),
          trust(zeros.data(), 4);
      ASSERT_EQ(cuda::LambMoments(step, device.a, {}, nullptr), 0);
      ASSERT_EQ(cuda::LambPartials(step, device.a, static_cast<double*>(params.data()),
                                   static_cast<double*>(updates.data()), nullptr),
                0);
      ASSERT_EQ(
          cuda::LambTrusts(step, static_cast<double*>(params.data()), static_cast<double*>(updates.data()),
                           zeros.size(), static_cast<float*>(trust.data()), nullptr),
          0);
      ASSERT_EQ(cuda::LambApply(step, static_cast<float*>(trust.data()), device.a, {}, nullptr), 0);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      LambNorms norms;
      LambMoments(step, host.a, &norms);
      float device_trust;
      std::memcpy(&device_trust, trust.Get().data(), 4);
      EXPECT_NEAR(device_trust / LambTrust(step, norms), 1.0, 1e-6);
      LambApply(step, device_trust, host.a);
      device.ExpectEquals(host);
    }
  }
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
}  // namespace penstock::kernels
