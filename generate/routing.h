// Which experts of a mixture each row of a pass takes, and how much each of them counts
// (models/families/decoder.h).
//
// A row's experts and weights depend on its own scores alone, to the bit: sums over a row are taken in the
// order of the experts. Of equal scores the expert of the lower number is chosen.
#ifndef PENSTOCK_GENERATE_ROUTING_H_
#define PENSTOCK_GENERATE_ROUTING_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "generate/host_rows.h"

namespace penstock::generate {

// A row's use of an expert: its number among the row's, in the order of experts, and its weight.
struct RoutedRow {
  int64_t row = 0, number = 0;
  float weight = 0;
};

struct Routes {
  std::vector<int64_t> experts;              // that some row takes, in their order
  std::vector<std::vector<RoutedRow>> rows;  // parallel to them; of each, in the order of rows
  std::vector<int64_t> likeliest;  // the same experts, those of the largest weight in all rows first
};

// As MixtureFunction has them.
struct RoutingOptions {
  int64_t chosen = 1;
  bool normalizes = false;
  bool rounds_weights = true;  // to the type of the scores
  bool sigmoid = false;
  std::span<const float> correction = {};  // of each expert; empty: none
  std::string correction_name = {};        // in the files
  int64_t groups = 1, chosen_groups = 1;   // groups of as many experts each
  bool sums_two = false;
  double scaling = 1;
};

// `scores`: [rows, experts], what the router gives. `where`: the router's name in the files. kDataLoss: a
// score or a correction that is not a finite number; names the tensor.
absl::StatusOr<Routes> Route(const HostRows& scores, const RoutingOptions& options, const std::string& where);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_ROUTING_H_
