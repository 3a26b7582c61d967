#include "zero/compute/tile_format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/quantize.h"
#include "kernels/split_master.h"

namespace penstock::zero {
namespace {

using kernels::DType;
using kernels::StateType;

static_assert(tiering::kScaleBlock == static_cast<int64_t>(kernels::kStateBlock));
static_assert(tiering::kElementAlignment % tiering::kScaleBlock == 0);

constexpr std::array<std::pair<DType, std::string_view>, 3> kTypes = {
    {{DType::kFp32, "fp32"}, {DType::kBf16, "bf16"}, {DType::kFp16, "fp16"}}};
constexpr std::array<std::pair<StateType, std::string_view>, 3> kStateTypes = {
    {{StateType::kFp32, "fp32"}, {StateType::kBf16, "bf16"}, {StateType::k8Bit, "8bit"}}};

template <typename Table>
auto Find(const Table& table, std::string_view name) -> std::optional<decltype(table[0].first)> {
  for (const auto& [value, of] : table) {
    if (of == name) return value;
  }
  return std::nullopt;
}

template <typename Table, typename Value>
std::string_view NameIn(const Table& table, Value value) {
  for (const auto& [of, name] : table) {
    if (of == value) return name;
  }
  return "?";
}

// Segments of a tile before the first state, the weights not counted.
size_t Masters(const TileFormat& format) { return format.weights == DType::kFp32 ? 0 : 1; }

// The run's tiles have more than weights, and this one has not.
bool WeightsAlone(const TileFormat& format, const TileMemory& memory) {
  return memory.state.empty() && format.precision().segment_bytes.size() > 1;
}

template <typename T>
T* ElementAt(void* base, int64_t element) {
  return static_cast<T*>(base) + element;
}

kernels::Code8 CodeOf(bool first) { return first ? kernels::Code8::kSigned : kernels::Code8::kUnsigned; }

// The range widened to whole groups of elements that share a scale; sizes `values` for it.
int64_t ScaledRange(const TileMemory& memory, int64_t begin, int64_t n, std::vector<float>* values) {
  const int64_t from = begin / tiering::kScaleBlock * tiering::kScaleBlock;
  const int64_t to = std::min(tiering::AlignUp(begin + n, tiering::kScaleBlock), memory.elements);
  values->resize(static_cast<size_t>(to - from));
  return from;
}

void Decode8(const TileFormat& format, const TileMemory& memory, bool first, int64_t from,
             std::vector<float>* values) {
  const kernels::UpdateArrays arrays = ArraysOf(format, memory, from, static_cast<int64_t>(values->size()));
  kernels::Dequantize8(CodeOf(first), static_cast<const uint8_t*>(first ? arrays.m : arrays.v),
                       first ? arrays.m_scales : arrays.v_scales, values->data(), values->size());
}

void ReadWeights(const TileFormat& format, const TileMemory& memory, int64_t begin, size_t n, float* values) {
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(format.weights));
  kernels::Convert(format.weights, ElementAt<std::byte>(memory.weights, begin * width), DType::kFp32, values,
                   n);
}

// Rounded as they are where they have masters.
void WriteWeights(const TileFormat& format, const TileMemory& memory, int64_t begin, size_t n,
                  const float* values) {
  switch (format.weights) {
    case DType::kFp32:
      kernels::Convert(DType::kFp32, values, DType::kFp32, ElementAt<float>(memory.weights, begin), n);
      break;
    case DType::kBf16: {
      std::array<int16_t, 4096> low;
      for (size_t at = 0; at < n; at += low.size()) {
        kernels::SplitMaster(values + at,
                             ElementAt<uint16_t>(memory.weights, begin + static_cast<int64_t>(at)),
                             low.data(), std::min(n - at, low.size()));
      }
      break;
    }
    case DType::kFp16:
      kernels::Fp32ToFp16(values, ElementAt<uint16_t>(memory.weights, begin), n);
      break;
  }
}

}  // namespace

std::string_view DTypeName(DType type) { return NameIn(kTypes, type); }
std::string_view StateTypeName(StateType type) { return NameIn(kStateTypes, type); }
std::optional<DType> ParseDType(std::string_view name) { return Find(kTypes, name); }
std::optional<StateType> ParseStateType(std::string_view name) { return Find(kStateTypes, name); }

tiering::Precision TileFormat::precision() const {
  tiering::Precision precision;
  precision.name = std::string(DTypeName(weights));
  const int width = static_cast<int>(kernels::BytesPerElement(weights));
  precision.gradient_bytes = width;
  precision.segment_bytes = {width};
  if (weights == DType::kBf16) precision.segment_bytes.push_back(2);
  if (weights == DType::kFp16) precision.segment_bytes.push_back(4);
  const int state = static_cast<int>(kernels::StateBytes(states, 1));
  if (moments.m) precision.segment_bytes.push_back(state);
  if (moments.v) precision.segment_bytes.push_back(state);
  return precision;
}

kernels::UpdateArrays ArraysOf(const TileFormat& format, const TileMemory& memory, int64_t begin, int64_t n) {
  kernels::UpdateArrays arrays;
  arrays.n = static_cast<size_t>(n);
  switch (format.weights) {
    case DType::kFp32:
      arrays.param_type = kernels::ParamType::kFp32;
      arrays.param = ElementAt<float>(memory.weights, begin);
      break;
    case DType::kBf16:
      arrays.param_type = kernels::ParamType::kSplit;
      arrays.param = ElementAt<uint16_t>(memory.weights, begin);
      arrays.master_low = ElementAt<int16_t>(memory.state[0], begin);
      break;
    case DType::kFp16:
      arrays.param_type = kernels::ParamType::kFp32;
      arrays.param = ElementAt<float>(memory.state[0], begin);
      arrays.copy_out = ElementAt<uint16_t>(memory.weights, begin);
      arrays.copy_type = DType::kFp16;
      break;
  }
  arrays.grad_type = format.weights;
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(format.weights));
  arrays.grad = ElementAt<std::byte>(memory.gradient, begin * width);
  arrays.state_type = format.states;
  size_t segment = Masters(format);
  const auto state_width = static_cast<int64_t>(kernels::StateBytes(format.states, 1));
  auto take = [&](void** state, float** scales) {
    void* base = memory.state[segment++];
    *state = ElementAt<std::byte>(base, begin * state_width);
    if (format.states != StateType::k8Bit) return;
    auto* behind = reinterpret_cast<float*>(ElementAt<std::byte>(base, memory.elements));
    *scales = behind + begin / tiering::kScaleBlock;
  };
  if (format.moments.m) take(&arrays.m, &arrays.m_scales);
  if (format.moments.v) take(&arrays.v, &arrays.v_scales);
  return arrays;
}

std::string_view StateKindName(StateKind kind) {
  switch (kind) {
    case StateKind::kParameter:
      return "parameter";
    case StateKind::kFirstMoment:
      return "first moment";
    case StateKind::kSecondMoment:
      return "second moment";
    case StateKind::kGradient:
      return "gradient";
  }
  return "?";
}

bool Keeps(const TileFormat& format, StateKind kind) {
  switch (kind) {
    case StateKind::kParameter:
      return true;
    case StateKind::kFirstMoment:
      return format.moments.m;
    case StateKind::kSecondMoment:
      return format.moments.v;
    case StateKind::kGradient:
      return false;
  }
  return false;
}

void ReadValues(const TileFormat& format, const TileMemory& memory, StateKind kind, int64_t begin, int64_t n,
                float* values) {
  const auto count = static_cast<size_t>(n);
  if (WeightsAlone(format, memory)) {
    if (kind == StateKind::kParameter) return ReadWeights(format, memory, begin, count, values);
    std::fill_n(values, n, 0.0F);
    return;
  }
  if (kind == StateKind::kParameter) {
    const kernels::UpdateArrays arrays = ArraysOf(format, memory, begin, n);
    if (arrays.param_type == kernels::ParamType::kSplit) {
      kernels::JoinMaster(static_cast<const uint16_t*>(arrays.param), arrays.master_low, values, count);
    } else {
      kernels::Convert(DType::kFp32, arrays.param, DType::kFp32, values, count);
    }
    return;
  }
  const bool first = kind == StateKind::kFirstMoment;
  if (format.states != StateType::k8Bit) {
    const kernels::UpdateArrays arrays = ArraysOf(format, memory, begin, n);
    const DType type = format.states == StateType::kBf16 ? DType::kBf16 : DType::kFp32;
    kernels::Convert(type, first ? arrays.m : arrays.v, DType::kFp32, values, count);
    return;
  }
  std::vector<float> whole;
  const int64_t from = ScaledRange(memory, begin, n, &whole);
  Decode8(format, memory, first, from, &whole);
  std::copy_n(whole.begin() + (begin - from), n, values);
}

void WriteValues(const TileFormat& format, const TileMemory& memory, StateKind kind, int64_t begin, int64_t n,
                 const float* values) {
  const auto count = static_cast<size_t>(n);
  if (WeightsAlone(format, memory)) {
    if (kind == StateKind::kParameter) WriteWeights(format, memory, begin, count, values);
    return;
  }
  if (kind == StateKind::kParameter) {
    const kernels::UpdateArrays arrays = ArraysOf(format, memory, begin, n);
    if (arrays.param_type == kernels::ParamType::kSplit) {
      kernels::SplitMaster(values, static_cast<uint16_t*>(arrays.param), arrays.master_low, count);
    } else {
      kernels::Convert(DType::kFp32, values, DType::kFp32, arrays.param, count);
      if (arrays.copy_out != nullptr) kernels::Fp32ToFp16(values, arrays.copy_out, count);
    }
    return;
  }
  const bool first = kind == StateKind::kFirstMoment;
  if (format.states != StateType::k8Bit) {
    const kernels::UpdateArrays arrays = ArraysOf(format, memory, begin, n);
    const DType type = format.states == StateType::kBf16 ? DType::kBf16 : DType::kFp32;
    kernels::Convert(DType::kFp32, values, type, first ? arrays.m : arrays.v, count);
    return;
  }
  std::vector<float> whole;
  const int64_t from = ScaledRange(memory, begin, n, &whole);
  Decode8(format, memory, first, from, &whole);
  std::copy_n(values, n, whole.begin() + (begin - from));
  const kernels::UpdateArrays arrays = ArraysOf(format, memory, from, static_cast<int64_t>(whole.size()));
  kernels::Quantize8(CodeOf(first), whole.data(), static_cast<uint8_t*>(first ? arrays.m : arrays.v),
                     first ? arrays.m_scales : arrays.v_scales, whole.size());
}

void FillTile(const TileFormat& format, const float* masters, const TileMemory& memory) {
  const auto n = static_cast<size_t>(memory.elements);
  if (WeightsAlone(format, memory)) return WriteWeights(format, memory, 0, n, masters);
  switch (format.weights) {
    case DType::kFp32:
      kernels::Convert(DType::kFp32, masters, DType::kFp32, memory.weights, n);
      break;
    case DType::kBf16:
      kernels::SplitMaster(masters, static_cast<uint16_t*>(memory.weights),
                           static_cast<int16_t*>(memory.state[0]), n);
      break;
    case DType::kFp16:
      kernels::Convert(DType::kFp32, masters, DType::kFp32, memory.state[0], n);
      kernels::Fp32ToFp16(masters, static_cast<uint16_t*>(memory.weights), n);
      break;
  }
  const tiering::Precision precision = format.precision();
  for (size_t s = Masters(format); s < memory.state.size(); ++s) {
    std::memset(memory.state[s], 0, static_cast<size_t>(precision.SegmentBytes(s + 1, memory.elements)));
  }
}

void ReadMasters(const TileFormat& format, const TileMemory& memory, float* masters) {
  const auto n = static_cast<size_t>(memory.elements);
  if (WeightsAlone(format, memory)) return ReadWeights(format, memory, 0, n, masters);
  if (format.weights == DType::kBf16) {
    kernels::JoinMaster(static_cast<const uint16_t*>(memory.weights),
                        static_cast<const int16_t*>(memory.state[0]), masters, n);
  } else {
    const void* from = format.weights == DType::kFp32 ? memory.weights : memory.state[0];
    kernels::Convert(DType::kFp32, from, DType::kFp32, masters, n);
  }
}

}  // namespace penstock::zero
