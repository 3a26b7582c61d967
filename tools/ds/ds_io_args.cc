#include "tools/ds/ds_io_args.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "aio/bytes.h"
#include "aio/io_error.h"
#include "base/status_macros.h"

namespace penstock::tools {
namespace {

// Levenshtein's: insertions, deletions and changes of single letters.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row.back();
}

absl::Status Refuse(const std::string& name, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("argument ", name, ": ", why));
}

bool IsOption(const std::string& argument) {
  return argument.size() > 2 && argument[0] == '-' && argument[1] == '-';
}

}  // namespace

ArgumentTable::Option& ArgumentTable::Add(std::string name, std::string metavar, std::string help) {
  Option option;
  option.name = std::move(name);
  option.metavar = std::move(metavar);
  option.help = std::move(help);
  options_.push_back(std::move(option));
  return options_.back();
}

void ArgumentTable::Switch(std::string name, bool* value, std::string help) {
  Option& option = Add(std::move(name), "", std::move(help));
  option.takes_value = false;
  option.set = [value](const std::vector<std::string>&) {
    *value = true;
    return absl::OkStatus();
  };
}

void ArgumentTable::Text(std::string name, std::string* value, std::string metavar, std::string help) {
  Add(std::move(name), std::move(metavar), std::move(help)).set =
      [value](const std::vector<std::string>& values) {
        *value = values[0];
        return absl::OkStatus();
      };
}

void ArgumentTable::Choice(std::string name, std::string* value, std::vector<std::string> choices,
                           std::string help) {
  const std::string known = absl::StrJoin(choices, ", ");
  Option& option = Add(std::move(name), absl::StrCat("{", absl::StrJoin(choices, ","), "}"), std::move(help));
  option.set = [value, choices = std::move(choices), known,
                own = option.name](const std::vector<std::string>& values) {
    if (std::find(choices.begin(), choices.end(), values[0]) == choices.end()) {
      return Refuse(own, absl::StrCat("'", aio::OneLine(values[0]), "' is none of ", known));
    }
    *value = values[0];
    return absl::OkStatus();
  };
}

void ArgumentTable::Integer(std::string name, int64_t* value, int64_t least, int64_t most, std::string help) {
  Option& option = Add(std::move(name), "N", std::move(help));
  option.set = [value, least, most, own = option.name](const std::vector<std::string>& values) {
    const std::string& argument = values[0];
    int64_t number = 0;
    const auto [rest, error] = std::from_chars(argument.data(), argument.data() + argument.size(), number);
    if (error != std::errc() || rest != argument.data() + argument.size() || number < least ||
        number > most) {
      return Refuse(own, absl::StrCat("'", aio::OneLine(argument), "' is not a whole number from ", least,
                                      " to ", most));
    }
    *value = number;
    return absl::OkStatus();
  };
}

void ArgumentTable::Size(std::string name, uint64_t* value, std::string* text, std::string help) {
  Option& option = Add(std::move(name), "SIZE", std::move(help));
  option.set = [value, text, own = option.name](const std::vector<std::string>& values) {
    const absl::StatusOr<uint64_t> bytes = aio::ParseBytes(values[0]);
    if (!bytes.ok()) return Refuse(own, std::string(bytes.status().message()));
    if (*bytes == 0) return Refuse(own, "must be more than 0");
    *value = *bytes;
    if (text != nullptr) *text = values[0];
    return absl::OkStatus();
  };
}

void ArgumentTable::List(std::string name, std::vector<std::string>* value, std::string metavar,
                         std::string help) {
  Option& option = Add(std::move(name), std::move(metavar), std::move(help));
  option.takes_list = true;
  option.set = [value](const std::vector<std::string>& values) {
    *value = values;
    return absl::OkStatus();
  };
}

void ArgumentTable::Require(std::string_view name) {
  for (Option& option : options_) option.required |= option.name == name;
}

absl::Status ArgumentTable::Find(std::string_view argument, Option** found) {
  std::vector<Option*> fitting;
  for (Option& option : options_) {
    if (option.name == argument) {
      *found = &option;
      return absl::OkStatus();
    }
    if (std::string_view(option.name).substr(0, argument.size()) == argument) fitting.push_back(&option);
  }
  if (fitting.size() == 1) {
    *found = fitting[0];
    return absl::OkStatus();
  }
  const std::string quoted = aio::OneLine(argument);
  if (!fitting.empty()) {
    std::vector<std::string> names;
    names.reserve(fitting.size());
    for (const Option* option : fitting) names.push_back(option->name);
    return absl::InvalidArgumentError(
        absl::StrCat("ambiguous option: ", quoted, " could match ", absl::StrJoin(names, ", ")));
  }
  const Option* nearest = nullptr;
  for (const Option& option : options_) {
    if (nearest == nullptr || EditDistance(argument, option.name) < EditDistance(argument, nearest->name))
      nearest = &option;
  }
  std::string hint = "; see --help";
  if (nearest != nullptr && EditDistance(argument, nearest->name) <= 3) {
    hint = absl::StrCat("; did you mean ", nearest->name, "?");
  }
  return absl::InvalidArgumentError(absl::StrCat("unrecognized argument: ", quoted, hint));
}

absl::Status ArgumentTable::Parse(const std::vector<std::string>& arguments) {
  size_t i = 0;
  while (i < arguments.size()) {
    const std::string& argument = arguments[i++];
    if (argument == "--help" || argument == "-h") {
      help_asked_ = true;
      return absl::OkStatus();
    }
    if (!IsOption(argument))
      return absl::InvalidArgumentError(
          absl::StrCat("unrecognized argument: ", aio::OneLine(argument), "; see --help"));
    const size_t equals = argument.find('=');
    Option* option = nullptr;
    RETURN_IF_ERROR(Find(std::string_view(argument).substr(0, equals), &option));
    std::vector<std::string> values;
    if (equals != std::string::npos) {
      if (!option->takes_value) return Refuse(option->name, "takes no value");
      values.push_back(argument.substr(equals + 1));
    } else if (option->takes_value) {
      const size_t most = option->takes_list ? SIZE_MAX : 1;
      while (i < arguments.size() && values.size() < most && !IsOption(arguments[i]))
        values.push_back(arguments[i++]);
      if (values.empty()) {
        return Refuse(option->name,
                      option->takes_list ? "expected at least one value" : "expected one value");
      }
    }
    RETURN_IF_ERROR(option->set(values));
    option->seen = true;
  }
  for (const Option& option : options_) {
    if (option.required && !option.seen) {
      return absl::InvalidArgumentError(
          absl::StrCat("the argument ", option.name, " is required; see --help"));
    }
  }
  return absl::OkStatus();
}

std::string ArgumentTable::Help() const {
  std::string text = absl::StrCat("usage: ", program_, " [options]\n\n", summary_, "\n\noptions:\n");
  for (const Option& option : options_) {
    std::string left = absl::StrCat("  ", option.name);
    if (!option.metavar.empty()) absl::StrAppend(&left, " ", option.metavar, option.takes_list ? " ..." : "");
    absl::StrAppend(&text, left,
                    left.size() < 38 ? std::string(38 - left.size(), ' ') : "\n" + std::string(38, ' '),
                    option.help, option.required ? " (required)" : "", "\n");
  }
  return text;
}

}  // namespace penstock::tools
