#include "zero/ranks/agree.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "zero/config/json_difference.h"

namespace penstock::zero {
namespace {

constexpr size_t kLongestText = 8192;  // of another rank's error

}  // namespace

absl::StatusOr<std::vector<int64_t>> AllNumbers(Comm& comm, const char* what, int64_t mine) {
  std::vector<int64_t> numbers(static_cast<size_t>(comm.world()));
  numbers[static_cast<size_t>(comm.rank())] = mine;
  RETURN_IF_ERROR(comm.AllGather(Channel::kSetup, {what}, numbers.data(), sizeof(int64_t)));
  return numbers;
}

absl::Status AgreeOnStatus(Comm& comm, Channel channel, const absl::Status& mine) {
  ASSIGN_OR_RETURN(
      std::vector<std::string> texts,
      comm.AllTexts(channel, {"how all fared"},
                    absl::StrCat(static_cast<int>(mine.code()), " ", std::string(mine.message()))));
  for (size_t k = 0; k < texts.size(); ++k) {
    const std::string& text = texts[k];
    const size_t space = text.find(' ');
    int code = 0;
    if (!absl::SimpleAtoi(text.substr(0, space), &code) || code == 0) continue;
    const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
    return {known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
            absl::StrCat("rank ", k, ": ",
                         space < text.size() ? OneLine(text.substr(space + 1), kLongestText) : "failed")};
  }
  return absl::OkStatus();
}

absl::Status AgreeOnOptions(Comm& comm, const nlohmann::json& mine) {
  ASSIGN_OR_RETURN(std::vector<std::string> texts,
                   comm.AllTexts(Channel::kSetup, {"the flags"}, mine.dump()));
  ASSIGN_OR_RETURN(const nlohmann::json first, ParseJson(texts.front(), "what rank 0 was started with"));
  for (size_t k = 1; k < texts.size(); ++k) {
    ASSIGN_OR_RETURN(const nlohmann::json theirs,
                     ParseJson(texts[k], absl::StrCat("what rank ", k, " was started with")));
    const std::string difference = JsonDifference(theirs, first, absl::StrCat("on rank ", k), "on rank 0");
    if (difference.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        RankName(static_cast<int>(k), comm.world()), " was not started like rank 0: ", difference,
        "; start all ranks with the same flags, config and files"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
