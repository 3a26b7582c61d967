#include "zero/config/config_json.h"

#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

using Json = nlohmann::ordered_json;

// Watches the parser's events for what the finished value no longer shows: keys that came twice (the parser
// keeps one of them) and nesting without end.
class Watcher {
 public:
  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDeepestJson) {
      if (error_.empty()) error_ = absl::StrCat(Path(), ": nested deeper than ", kDeepestJson, " levels");
      return false;  // drops the value, so that no deep tree is ever built
    }
    switch (event) {
      case Json::parse_event_t::object_start:
        open_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        if (!open_.empty()) open_.pop_back();
        break;
      case Json::parse_event_t::key: {
        if (open_.empty()) break;
        const auto key = parsed.get<std::string>();
        open_.back().key = key;
        if (!open_.back().seen.insert(key).second && error_.empty()) {
          error_ = absl::StrCat(Path(), ": given twice in one object; keep one of them");
        }
        break;
      }
      default:
        break;
    }
    return true;
  }
  const std::string& error() const { return error_; }

 private:
  struct Object {
    std::set<std::string> seen;
    std::string key;
  };
  std::string Path() const {
    std::string path;
    for (const Object& object : open_) absl::StrAppend(&path, path.empty() ? "" : ".", Printable(object.key));
    return Printable(path, 200);
  }
  std::vector<Object> open_;
  std::string error_;
};

}  // namespace

std::string Printable(std::string_view text, size_t limit) {
  std::string shown;
  for (const char c : text.substr(0, limit)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  if (text.size() > limit) shown += "...";
  return shown;
}

std::string ShowValue(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return Printable(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace), 60);
}

absl::StatusOr<Json> ParseStrictJson(std::string_view text) {
  Watcher watcher;
  Json value;
  try {
    value = Json::parse(
        text.begin(), text.end(),
        [&watcher](int depth, Json::parse_event_t event, Json& parsed) {
          return watcher(depth, event, parsed);
        },
        /*allow_exceptions=*/true, /*ignore_comments=*/true);
  } catch (const Json::exception& error) {
    if (!watcher.error().empty()) return absl::InvalidArgumentError(watcher.error());
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ...": the tag says nothing to a
    // user.
    std::string_view what = error.what();
    const size_t tag = what.find("] ");
    if (what.starts_with("[json.exception") && tag != std::string_view::npos) what.remove_prefix(tag + 2);
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", Printable(what, 200)));
  }
  if (!watcher.error().empty()) return absl::InvalidArgumentError(watcher.error());
  if (!value.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("a configuration is an object, not ", ShowValue(value)));
  }
  return value;
}

}  // namespace penstock::zero
