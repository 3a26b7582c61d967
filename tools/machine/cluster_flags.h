// `penstock plan --cluster FILE`: many nodes on paper (tiering/advice/cluster.h), as a table or JSON.
#ifndef PENSTOCK_TOOLS_MACHINE_CLUSTER_FLAGS_H_
#define PENSTOCK_TOOLS_MACHINE_CLUSTER_FLAGS_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace penstock::tools {

// kInvalidArgument, one line, for a file that cannot be read or is wrong.
absl::Status PlanCluster(const std::string& path, bool json, std::ostream& out);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_CLUSTER_FLAGS_H_
