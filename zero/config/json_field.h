// Fields of JSON that a run has recorded, read back: whatever stands there, damaged or made to do harm, is a
// value of the type that is asked for, or is not; nothing throws.
#ifndef PENSTOCK_ZERO_CONFIG_JSON_FIELD_H_
#define PENSTOCK_ZERO_CONFIG_JSON_FIELD_H_

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace penstock::zero {

// Bool, a whole number in T's range, any number as double, a string, or a vector of these.
template <typename T>
std::optional<T> JsonAs(const nlohmann::json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    if (value.is_boolean()) return value.get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    if (value.is_number_unsigned()) {
      const auto number = value.get<uint64_t>();
      if (number <= static_cast<uint64_t>(std::numeric_limits<T>::max())) return static_cast<T>(number);
    } else if (value.is_number_integer()) {
      const auto number = value.get<int64_t>();
      if (std::is_signed_v<T> && number >= static_cast<int64_t>(std::numeric_limits<T>::min()))
        return static_cast<T>(number);
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    if (value.is_number()) return value.get<T>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (value.is_string()) return value.get<std::string>();
  } else {
    if (!value.is_array()) return std::nullopt;
    T elements;
    for (const nlohmann::json& each : value) {
      const auto element = JsonAs<typename T::value_type>(each);
      if (!element.has_value()) return std::nullopt;
      elements.push_back(*element);
    }
    return elements;
  }
  return std::nullopt;
}

// Of an object, if it is one, has the key, and a T there.
template <typename T>
std::optional<T> JsonField(const nlohmann::json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto found = object.find(key);
  if (found == object.end()) return std::nullopt;
  return JsonAs<T>(*found);
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_JSON_FIELD_H_
