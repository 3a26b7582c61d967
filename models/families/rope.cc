#include "models/families/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "zero/config/config_json.h"

namespace penstock::models {
namespace {

using nlohmann::json;
using Kind = Rope::Kind;

struct KindName {
  std::string_view name;
  Kind kind;
};
constexpr KindName kKinds[] = {{"default", Kind::kDefault},   {"linear", Kind::kLinear},
                               {"dynamic", Kind::kDynamic},   {"yarn", Kind::kYarn},
                               {"longrope", Kind::kLongRope}, {"llama3", Kind::kLlama3}};

// Keys of a kind's object; which of them a kind looks at, transformers warns of and so does nothing else.
constexpr std::string_view kKnown[] = {"rope_type",
                                       "type",
                                       "rope_theta",
                                       "factor",
                                       "low_freq_factor",
                                       "high_freq_factor",
                                       "original_max_position_embeddings",
                                       "partial_rotary_factor",
                                       "attention_factor",
                                       "beta_fast",
                                       "beta_slow",
                                       "mscale",
                                       "mscale_all_dim",
                                       "truncate",
                                       "short_factor",
                                       "long_factor",
                                       "finetuned"};

void ReadOptional(ModelKeys* keys, const char* key, std::optional<double>* value) {
  if (keys->Find(key) == nullptr) return;
  double number = 0;
  keys->Number(key, &number);
  *value = number;
}

bool ReadFactors(const json& given, const char* key, std::vector<double>* to) {
  const auto list = given.find(key);
  if (list == given.end() || !list->is_array()) return false;
  to->clear();
  for (const json& each : *list) {
    if (!each.is_number() || !(each.get<double>() > 0)) return false;
    to->push_back(each.get<double>());
  }
  return !to->empty();
}

// One object of rope_scaling or rope_parameters.
void ReadKind(const json& given, const char* name, const RopeKinds& kinds, ModelKeys* all, Rope* rope) {
  if (!given.is_object()) return all->Fail(absl::StrCat("model: ", name, " is not a JSON object"));
  const auto wrong = [&](const std::string& what) {
    all->Fail(absl::StrCat("model: ", name, " is ", zero::ShowValue(given), ", ", what));
  };
  json type = given.contains("rope_type") ? given["rope_type"]
              : given.contains("type")    ? given["type"]
                                          : json("default");
  if (kinds.phi3 && (type == "su" || type == "yarn")) type = "longrope";
  const auto* const kind =
      std::find_if(std::begin(kKinds), std::end(kKinds), [&](const KindName& k) { return type == k.name; });
  if (kind == std::end(kKinds))
    return wrong(
        "and of the kinds of rotary positions default, linear, dynamic, yarn, longrope and llama3 are "
        "served");
  rope->kind = kind->kind;
  if (kinds.phi3 && rope->kind != Kind::kDefault && rope->kind != Kind::kLongRope)
    return wrong("and this model_type has the kinds default and longrope alone");
  ModelKeys keys(given);
  keys.Number("rope_theta", &rope->theta);
  keys.Number("partial_rotary_factor", &rope->part);
  keys.Whole("original_max_position_embeddings", &rope->original_context);
  const bool may_lack_factor =
      rope->kind == Kind::kDefault || rope->kind == Kind::kYarn || rope->kind == Kind::kLongRope;
  if (!may_lack_factor && keys.Find("factor") == nullptr) return wrong("without a factor");
  if (rope->kind != Kind::kDefault) ReadOptional(&keys, "factor", &rope->factor);
  if (rope->factor.has_value() && !(*rope->factor >= 1)) return wrong("and a factor below 1 is none");
  if (rope->kind == Kind::kLlama3) {
    for (const char* key : {"low_freq_factor", "high_freq_factor"}) {
      if (keys.Find(key) == nullptr) return wrong(absl::StrCat("without ", key));
    }
    keys.Number("low_freq_factor", &rope->low);
    keys.Number("high_freq_factor", &rope->high);
    if (!(rope->low > 0 && rope->high > rope->low)) return wrong("and its factors are not 0 < low < high");
  }
  if (rope->kind == Kind::kYarn || rope->kind == Kind::kLongRope) {
    ReadOptional(&keys, "attention_factor", &rope->attention_factor);
    if (rope->attention_factor.has_value() && !(*rope->attention_factor > 0))
      return wrong("and its attention_factor is not above 0");
  }
  if (rope->kind == Kind::kYarn) {
    keys.Number("beta_fast", &rope->fast);
    keys.Number("beta_slow", &rope->slow);
    // transformers takes 0 for none given.
    if (rope->fast == 0) rope->fast = 32;
    if (rope->slow == 0) rope->slow = 1;
    if (!(rope->slow > 0 && rope->fast >= rope->slow))
      return wrong("and 0 < beta_slow <= beta_fast is not so");
    ReadOptional(&keys, "mscale", &rope->mscale);
    rope->truncate = !keys.IsNull("truncate");
    keys.Switch("truncate", &rope->truncate);
  }
  if (rope->kind != Kind::kDefault) ReadOptional(&keys, "mscale_all_dim", &rope->mscale_all_dim);
  if (rope->kind == Kind::kLongRope && (!ReadFactors(given, "short_factor", &rope->short_factors) ||
                                        !ReadFactors(given, "long_factor", &rope->long_factors)))
    return wrong("without lists of numbers above 0 in short_factor and long_factor");
  for (const auto& [key, value] : given.items()) {
    if (!value.is_null() && std::find(std::begin(kKnown), std::end(kKnown), key) == std::end(kKnown))
      return wrong(absl::StrCat("and its key ", zero::ShowValue(key), " is not served"));
  }
  if (!keys.status().ok()) wrong("which is not as it should be");
}

// What has to be so of a rope that was read, and its original context.
void Complete(const RopeKinds& kinds, int64_t positions, ModelKeys* keys, Rope* rope) {
  if (!(rope->theta > 0)) keys->Fail(absl::StrCat("model: rope_theta ", rope->theta, " is not above 0"));
  const bool has_original =
      rope->kind == Kind::kYarn || rope->kind == Kind::kLongRope || rope->kind == Kind::kLlama3;
  if (has_original) {
    // What stands beside the object goes before what is in it, as in transformers.
    if (kinds.phi3) rope->original_context = 4096;
    keys->Whole("original_max_position_embeddings", &rope->original_context);
    if (rope->original_context == 0) rope->original_context = positions;
    if (rope->original_context < 2)
      keys->Fail("model: original_max_position_embeddings of rotary positions is not 2 or more");
  } else {
    rope->original_context = 0;
  }
  if (!(rope->part > 0 && rope->part <= 1)) {
    keys->Fail(absl::StrCat("model: partial_rotary_factor ", rope->part, " is not above 0 and at most 1"));
  } else if (rope->part != 1 && !kinds.takes_part) {
    keys->Fail(
        absl::StrCat("model: partial_rotary_factor ", rope->part,
                     ", and rotary positions of a part of a head are not computed in this model_type"));
  }
}

float Power(double base, float exponent) {
  return static_cast<float>(std::pow(base, static_cast<double>(exponent)));
}

// Of yarn's ramp: by how much of each pair's frequency is left as it was.
struct Ramp {
  Ramp() = default;
  Ramp(const Rope& rope, int64_t turning) {
    const auto dim = static_cast<double>(turning);
    const auto place = [&](double rotations) {
      return dim * std::log(static_cast<double>(rope.original_context) / (rotations * 2 * std::numbers::pi)) /
             (2 * std::log(rope.theta));
    };
    double first = place(rope.fast), last = place(rope.slow);
    if (rope.truncate) {
      first = std::floor(first);
      last = std::ceil(last);
    }
    from = std::max(first, 0.0);
    double to = std::min(last, dim - 1);
    if (from == to) to += 0.001;
    length = to - from;
  }
  float Left(int64_t pair) const {
    const float along = (static_cast<float>(pair) - static_cast<float>(from)) / static_cast<float>(length);
    return 1.0F - std::clamp(along, 0.0F, 1.0F);
  }
  double from = 0, length = 1;
};

double YarnScale(double factor, double by) { return factor <= 1 ? 1 : 0.1 * by * std::log(factor) + 1; }

double ScaleOf(const Rope& rope, double factor) {
  if (rope.attention_factor.has_value()) return *rope.attention_factor;
  if (rope.kind == Kind::kYarn) {
    if (rope.mscale.value_or(0) != 0 && rope.mscale_all_dim.value_or(0) != 0)
      return YarnScale(factor, *rope.mscale) / YarnScale(factor, *rope.mscale_all_dim);
    return YarnScale(factor, 1);
  }
  if (rope.kind != Kind::kLongRope || factor <= 1) return 1;
  return std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(rope.original_context)));
}

}  // namespace

int64_t Rope::Turning(int64_t depth) const { return static_cast<int64_t>(static_cast<double>(depth) * part); }

double Rope::DivisorOf(int64_t positions) const {
  const double whole =
      original_context > 0 ? static_cast<double>(positions) / static_cast<double>(original_context) : 1;
  return factor.value_or(whole);
}

double Rope::AllDimensionsScale(int64_t positions) const {
  if (mscale_all_dim.value_or(0) == 0) return 1;
  const double scale = YarnScale(DivisorOf(positions), *mscale_all_dim);
  return scale * scale;
}

// In fp32, rounded where transformers does: a last bit of a frequency is a hundredth of a turn at position
// 100,000.
Rotation Rope::RotationOf(int64_t depth, int64_t positions) const {
  const int64_t turning = Turning(depth);
  const auto original = static_cast<double>(original_context);
  const double divisor = DivisorOf(positions);
  const auto narrow = static_cast<float>(divisor);
  Rotation rotation;
  rotation.scale = ScaleOf(*this, divisor);
  const Ramp ramp = kind == Kind::kYarn ? Ramp(*this, turning) : Ramp();
  for (int64_t pair = 0; pair < turning / 2; ++pair) {
    const float raised = Power(theta, static_cast<float>(2 * pair) / static_cast<float>(turning));
    float each = 1.0F / raised;
    if (kind == Kind::kLinear) each /= narrow;
    if (kind == Kind::kYarn) {
      const float left = ramp.Left(pair);
      each = 1.0F / (narrow * raised) * (1.0F - left) + each * left;
    }
    if (kind == Kind::kLongRope) {
      const auto index = static_cast<size_t>(pair);
      each = 1.0F / (static_cast<float>(short_factors[index]) * raised);
      rotation.far_frequencies.push_back(1.0F / (static_cast<float>(long_factors[index]) * raised));
    }
    if (kind == Kind::kLlama3) {
      const float length = static_cast<float>(2 * std::numbers::pi) / each;
      const auto longest = static_cast<float>(original / low), shortest = static_cast<float>(original / high);
      if (length > longest) {
        each /= narrow;
      } else if (length >= shortest) {
        const float smooth = (static_cast<float>(original) / length - static_cast<float>(low)) /
                             static_cast<float>(high - low);
        each = (1.0F - smooth) * each / narrow + smooth * each;
      }
    }
    rotation.frequencies.push_back(each);
  }
  if (kind == Kind::kLongRope) rotation.near_positions = original_context;
  return rotation;
}

nlohmann::ordered_json Rope::ToJson() const {
  if (kind == Kind::kDefault) return nullptr;
  nlohmann::ordered_json made;
  for (const KindName& each : kKinds) {
    if (each.kind == kind) made["rope_type"] = each.name;
  }
  if (factor.has_value()) made["factor"] = *factor;
  if (kind == Kind::kLlama3) {
    made["low_freq_factor"] = low;
    made["high_freq_factor"] = high;
  }
  if (original_context > 0) made["original_max_position_embeddings"] = original_context;
  if (attention_factor.has_value()) made["attention_factor"] = *attention_factor;
  if (kind == Kind::kYarn) {
    made["beta_fast"] = fast;
    made["beta_slow"] = slow;
    if (mscale.has_value()) made["mscale"] = *mscale;
  }
  if (mscale_all_dim.has_value()) made["mscale_all_dim"] = *mscale_all_dim;
  if (kind == Kind::kYarn) {
    made["truncate"] = truncate;
    if (!factor.has_value()) made["factor"] = nullptr;
  }
  if (kind == Kind::kLongRope) {
    made["short_factor"] = short_factors;
    made["long_factor"] = long_factors;
  }
  return made;
}

void ReadRope(const RopeKinds& kinds, int64_t positions, ModelKeys* keys, Rope* rope) {
  keys->Number("rope_theta", &rope->theta);
  keys->Number("partial_rotary_factor", &rope->part);
  const double theta = rope->theta, part = rope->part;
  const json *parameters = keys->Find("rope_parameters"), *scaling = keys->Find("rope_scaling");
  if (scaling != nullptr) ReadKind(*scaling, "rope_scaling", kinds, keys, rope);
  if (parameters != nullptr) {
    if (scaling != nullptr && *scaling != *parameters)
      keys->Wrong("rope_scaling", "and rope_parameters is not the same: leave one of them out");
    ReadKind(*parameters, "rope_parameters", kinds, keys, rope);
  }
  if (keys->Find("rope_theta") != nullptr && rope->theta != theta)
    keys->Wrong("rope_theta",
                absl::StrCat("and in rope_parameters ", rope->theta, ": leave one of them out"));
  if (keys->Find("partial_rotary_factor") != nullptr && rope->part != part)
    keys->Wrong("partial_rotary_factor",
                absl::StrCat("and in rope_parameters ", rope->part, ": leave one of them out"));
  Complete(kinds, positions, keys, rope);
}

void ReadRopes(int64_t positions, ModelKeys* keys, Rope* full, Rope* sliding) {
  const json *parameters = keys->Find("rope_parameters"), *scaling = keys->Find("rope_scaling");
  keys->Number("rope_theta", &full->theta);
  keys->Number("rope_local_base_freq", &sliding->theta);
  if (scaling != nullptr) ReadKind(*scaling, "rope_scaling", {}, keys, full);
  if (parameters != nullptr) {
    const auto of = [&](const char* layers, const char* name, const char* beside, Rope* rope) {
      if (!parameters->is_object() || !parameters->contains(layers))
        return keys->Wrong("rope_parameters",
                           "not an object for full_attention and one for sliding_attention");
      const double theta = rope->theta;
      ReadKind((*parameters)[layers], name, {}, keys, rope);
      if (keys->Find(beside) != nullptr && rope->theta != theta)
        keys->Wrong(beside, absl::StrCat("and in rope_parameters ", rope->theta, ": leave one of them out"));
    };
    if (scaling != nullptr)
      keys->Wrong("rope_scaling", "and rope_parameters is there: leave one of them out");
    of("full_attention", "rope_parameters.full_attention", "rope_theta", full);
    of("sliding_attention", "rope_parameters.sliding_attention", "rope_local_base_freq", sliding);
    if (parameters->is_object() && parameters->size() > 2)
      keys->Wrong("rope_parameters", "not an object for full_attention and one for sliding_attention");
  }
  if (sliding->kind != Kind::kDefault || full->kind == Kind::kLongRope || full->kind == Kind::kDynamic)
    keys->Fail(
        "model: rope_scaling or rope_parameters: of layers with a window the kind default alone is served, "
        "of the "
        "others neither longrope nor dynamic");
  double part = 1;
  keys->Number("partial_rotary_factor", &part);
  if (part != 1)
    keys->Wrong("partial_rotary_factor", "and rotary positions of a part of a head are not computed here");
  Complete({}, positions, keys, full);
  Complete({}, positions, keys, sliding);
}

}  // namespace penstock::models
