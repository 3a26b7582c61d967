// A ledger of bytes: what takes how much of one tier, line by line, and whether it stays within its budget.
#ifndef PENSTOCK_TIERING_PLAN_LEDGER_H_
#define PENSTOCK_TIERING_PLAN_LEDGER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace penstock::tiering {

class Ledger {
 public:
  struct Line {
    std::string what;
    int64_t bytes = 0;
    int64_t count = 1;  // how many pieces of equal or similar size
  };

  void Add(const std::string& what, int64_t bytes, int64_t count = 1) {
    if (bytes != 0) lines_.push_back({what, bytes, count});
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const Line& line : lines_) sum += line.bytes;
    return sum;
  }
  const std::vector<Line>& lines() const { return lines_; }
  // "what bytes, what bytes, ...": for an error's one line.
  std::string Listed() const {
    std::string parts;
    for (const Line& line : lines_)
      absl::StrAppend(&parts, parts.empty() ? "" : ", ", line.what, " ", line.bytes);
    return parts;
  }

 private:
  std::vector<Line> lines_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_LEDGER_H_
