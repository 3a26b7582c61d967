#include "base/json.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/foreign_file.h"
#include "base/io_error.h"
#include "base/small_file.h"
#include "base/status_macros.h"

namespace penstock {
namespace {

using Json = nlohmann::json;

// Builds the value from the parser's events. An event handler that returns false ends the parse.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const JsonOptions& options) : options_(options) {}

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return Refuse("binary values"); }
  bool start_object(std::size_t /*count*/) override { return Open(Json::object()); }
  bool start_array(std::size_t /*count*/) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    Json& object = *open_.back();
    if (!options_.duplicate_keys && object.contains(name)) {
      return Refuse(absl::StrCat("the key \"", OneLine(name, 60), "\" twice"));
    }
    member_ = &object[name];
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    if (refusal_.empty()) refusal_ = absl::StrCat("is malformed at byte ", position);
    return false;
  }

  Json& root() { return root_; }
  const std::string& refusal() const { return refusal_; }

 private:
  bool Refuse(const std::string& what) {
    refusal_ = absl::StrCat("has ", what);
    return false;
  }

  Json* Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *member_ = std::move(value);
    return member_;
  }

  bool Add(Json value) {
    if (++values_ > options_.max_values) {
      return Refuse(absl::StrCat("more than ", options_.max_values, " values"));
    }
    Place(std::move(value));
    return true;
  }

  bool Open(Json value) {
    if (open_.size() >= static_cast<size_t>(options_.max_depth)) {
      return Refuse(absl::StrCat("values nested more than ", options_.max_depth, " deep"));
    }
    if (++values_ > options_.max_values) {
      return Refuse(absl::StrCat("more than ", options_.max_values, " values"));
    }
    // An open array or object is the last element of its parent or a member of it: neither moves while it is
    // open.
    open_.push_back(Place(std::move(value)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonOptions options_;
  Json root_;
  std::vector<Json*> open_;
  Json* member_ = nullptr;
  uint64_t values_ = 0;
  std::string refusal_;
};

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view name, const JsonOptions& options) {
  Builder builder(options);
  if (IsGitLfsPointer(text))
    return absl::InvalidArgumentError(absl::StrCat(OneLine(name), name.empty() ? "" : ": ", kGitLfsPointer));
  const bool parsed = Json::sax_parse(text, &builder, nlohmann::detail::input_format_t::json,
                                      /*strict=*/true, /*ignore_comments=*/options.comments);
  if (!parsed) {
    const std::string& why = builder.refusal();
    return absl::InvalidArgumentError(absl::StrCat(OneLine(name), name.empty() ? "" : ": ", "the JSON ",
                                                   why.empty() ? "is malformed" : why));
  }
  return std::move(builder.root());
}

absl::StatusOr<Json> ParseJsonObject(std::string_view text, std::string_view name,
                                     const JsonOptions& options) {
  ASSIGN_OR_RETURN(Json json, ParseJson(text, name, options));
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(OneLine(name), name.empty() ? "" : ": ", "is no JSON object"));
  }
  return json;
}

absl::StatusOr<Json> ReadJsonObject(const std::string& path, uint64_t limit_bytes,
                                    const JsonOptions& options) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, limit_bytes));
  return ParseJsonObject(text, path, options);
}

absl::StatusOr<Json> ReadJsonObject(const std::string& path) { return ReadJsonObject(path, kSmallFileBytes); }

}  // namespace penstock
