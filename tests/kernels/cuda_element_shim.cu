#include "kernels/cuda/checksum.cuh"
#include "kernels/cuda/element.cuh"
#include "tests/kernels/cuda_element_shim.h"

namespace penstock::kernels::cuda {
namespace {

template <class Element>
void Update(const typename Element::Step& step, float* p, const float* g, float* m, float* v, size_t n) {
  const Element element{step};
  for (size_t i = 0; i < n; ++i) element(step.grad_scale, &p[i], g[i], &m[i], &v[i]);
}

template <int kCode>
float Encode(const float* in, uint8_t* codes, size_t n, const Rounding& rounding) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = Bits(in[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = ScaleOf(largest);
  const uint32_t key = DrawKey(rounding.seed);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t random = Draw(key, rounding.first_element + i);
    const uint32_t draw = !rounding.stochastic ? 0x8000u : kCode == 0 ? random & 0xFFFFu : random >> 16;
    codes[i] = Encode8<kCode>(in[i], scale, draw);
  }
  return scale;
}

}  // namespace

void UpdateOnHost(const AdamStep& step, float* p, const float* g, float* m, float* v, size_t n) {
  Update<AdamElement>(step, p, g, m, v, n);
}
void UpdateOnHost(const AdagradStep& step, float* p, const float* g, float* m, float* v, size_t n) {
  Update<AdagradElement>(step, p, g, m, v, n);
}
void UpdateOnHost(const LionStep& step, float* p, const float* g, float* m, float* v, size_t n) {
  Update<LionElement>(step, p, g, m, v, n);
}
void UpdateOnHost(const SgdStep& step, float* p, const float* g, float* m, float* v, size_t n) {
  Update<SgdElement>(step, p, g, m, v, n);
}

void ConvertOnHost(const float* in, uint16_t* bf16, uint16_t* fp16, uint16_t* master_high,
                   int16_t* master_low, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    bf16[i] = ToBf16(in[i]);
    fp16[i] = ToFp16(in[i]);
    Split(in[i], &master_high[i], &master_low[i]);
  }
}
void WidenOnHost(const uint16_t* bf16, const uint16_t* fp16, const uint16_t* master_high,
                 const int16_t* master_low, float* from_bf16, float* from_fp16, float* joined, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    from_bf16[i] = FromBf16(bf16[i]);
    from_fp16[i] = FromFp16(fp16[i]);
    joined[i] = Join(master_high[i], master_low[i]);
  }
}

float EncodeOnHost(Code8 code, const float* in, uint8_t* codes, size_t n, const Rounding& rounding) {
  return code == Code8::kSigned ? Encode<0>(in, codes, n, rounding) : Encode<1>(in, codes, n, rounding);
}
void DecodeOnHost(Code8 code, const uint8_t* codes, float scale, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    out[i] = code == Code8::kSigned ? Decode8<0>(codes[i], scale) : Decode8<1>(codes[i], scale);
  }
}

uint64_t ChecksumOnHost(const uint64_t* in, size_t bytes, uint64_t seed) {
  const ChecksumKeys keys = MakeChecksumKeys(seed);
  const uint64_t blocks = (bytes - 1) / kChecksumBlockBytes;
  uint64_t lanes[kChecksumLanes];
  for (int lane = 0; lane < kChecksumLanes; ++lane) lanes[lane] = LaneStart(lane);
  const auto add = [&](const uint64_t* stripe, const uint64_t* of) {
    for (int lane = 0; lane < kChecksumLanes; ++lane) {
      lanes[lane] += StripeTerm(stripe[lane], stripe[lane ^ 1], of[lane]);
    }
  };
  for (uint64_t b = 0; b < blocks; ++b) {
    const uint64_t* const block = in + b * kChecksumBlockBytes / 8;
    for (int s = 0; s < kStripesPerBlock; ++s) add(block + s * kChecksumLanes, keys.words + s);
    for (int lane = 0; lane < kChecksumLanes; ++lane) {
      lanes[lane] = Scramble(lanes[lane], keys.words[kStripesPerBlock + lane]);
    }
  }
  const uint64_t stripes = (bytes - 1 - blocks * kChecksumBlockBytes) / kStripeBytes;
  for (uint64_t s = 0; s < stripes; ++s) {
    add(in + blocks * kChecksumBlockBytes / 8 + s * kChecksumLanes, keys.words + s);
  }
  add(in + bytes / 8 - kChecksumLanes, keys.last);
  return FinishChecksum(lanes, bytes, keys);
}

}  // namespace penstock::kernels::cuda
