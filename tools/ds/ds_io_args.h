// Command lines as Python's argparse reads them, since that is what the scripts that call these tools were
// written for:
// `--name value`, `--name=value`, unique prefixes of names, switches, and lists that take all values up to
// the next option.
#ifndef PENSTOCK_TOOLS_DS_DS_IO_ARGS_H_
#define PENSTOCK_TOOLS_DS_DS_IO_ARGS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace penstock::tools {

// The options of one tool, bound to variables. Values are checked as they are read; a later one wins.
class ArgumentTable {
 public:
  explicit ArgumentTable(std::string program, std::string summary)
      : program_(std::move(program)), summary_(std::move(summary)) {}

  void Switch(std::string name, bool* value, std::string help);
  void Text(std::string name, std::string* value, std::string metavar, std::string help);
  // One of a fixed set of words.
  void Choice(std::string name, std::string* value, std::vector<std::string> choices, std::string help);
  void Integer(std::string name, int64_t* value, int64_t least, int64_t most, std::string help);
  // A size as ParseBytes takes it, more than 0. `text`, if not null, keeps how it was written.
  void Size(std::string name, uint64_t* value, std::string* text, std::string help);
  // One or more values.
  void List(std::string name, std::vector<std::string>* value, std::string metavar, std::string help);
  void Require(std::string_view name);

  // kInvalidArgument: one line that names the argument, what is wrong and, for an unknown option, the nearest
  // right one.
  // --help and -h set help_asked() and end the reading without an error.
  absl::Status Parse(const std::vector<std::string>& arguments);
  bool help_asked() const { return help_asked_; }
  std::string Help() const;

 private:
  struct Option {
    std::string name;  // with its dashes
    std::string metavar;
    std::string help;
    bool takes_value = true;
    bool takes_list = false;
    bool required = false;
    bool seen = false;
    std::function<absl::Status(const std::vector<std::string>&)> set;
  };

  Option& Add(std::string name, std::string metavar, std::string help);
  absl::Status Find(std::string_view argument, Option** found);

  std::string program_;
  std::string summary_;
  std::vector<Option> options_;
  bool help_asked_ = false;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_DS_DS_IO_ARGS_H_
