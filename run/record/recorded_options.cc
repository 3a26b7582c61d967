#include "run/record/recorded_options.h"

#include "absl/strings/str_cat.h"

namespace penstock::run {
namespace {

using nlohmann::json;

// Whether the record's value can be one of the kind that it is to be: a whole number is a number too.
bool IsOfKind(const json& recorded, const json& wanted) {
  if (wanted.is_number_integer()) return recorded.is_number_integer();
  if (wanted.is_number()) return recorded.is_number();
  return recorded.type() == wanted.type();
}

}  // namespace

absl::Status RecordedOptions::Damaged(const char* name, const json& recorded) {
  return absl::DataLossError(absl::StrCat("the run's record is damaged: its ", name, " is ", recorded.dump(),
                                          "; go on from a checkpoint"));
}

absl::StatusOr<json> RecordedOptions::Of(const char* name, const json& given, const json& otherwise) const {
  const json& wanted = given.is_null() ? otherwise : given;
  if (!run_.is_object() || !run_.contains(name)) return wanted;
  const json& recorded = run_[name];
  if (!IsOfKind(recorded, otherwise)) return Damaged(name, recorded);
  const bool is_fixed = IsFixedInRecord(name);
  const bool changes = (!given.is_null() && (by_flag(name) || ConfigChanges(name, recorded))) ||
                       (!by_flag(name) && !is_fixed && Removed(name));
  if (!changes || wanted == recorded) return recorded;
  if (is_fixed) {
    return absl::FailedPreconditionError(absl::StrCat(
        by_flag(name) ? absl::StrCat(FlagOfRecord(name), " ", wanted.dump())
                      : absl::StrCat("`config`: ", KeyOfRecord(name), " ", wanted.dump()),
        ": this run was created with ", recorded.dump(), ", and its state is made of that; leave it ",
        by_flag(name) ? "out" : "as it was", ", or start another run in another `state_dir`"));
  }
  changes_->run[name] = wanted;
  changes_->Tell(name, recorded.dump(), wanted.dump(), SourceOf(name));
  return wanted;
}

}  // namespace penstock::run
