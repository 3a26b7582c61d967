// A comm over any mesh: it meets the other ranks at a TcpStore, leaves a sign of life there every second,
// looks for theirs, and tells all why one has failed (comm.h says what that means to callers).
#ifndef PENSTOCK_ZERO_RANKS_WATCHED_COMM_H_
#define PENSTOCK_ZERO_RANKS_WATCHED_COMM_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/mesh.h"
#include "zero/ranks/rank_environment.h"
#include "zero/ranks/tcp_store.h"

namespace penstock::zero {

struct WatchOver {
  CommOptions comm{};
  // What all ranks of the run know and nobody else does (handshake.h).
  std::string secret = "";
  // Of rank 0: where the ranks meet, if the caller has made it so that the others get its port
  // (RankEnvironment::master_port). Default: it is made there.
  std::shared_ptr<TcpStore> store = nullptr;
  // What gives all ranks one secret.
  std::string secret_way =
      "start all ranks with one `state_dir`, on a file system that they share, or with one "
      "PENSTOCK_RANKS_SECRET";
};

// `kind`: "TCP". Errors as ConnectTcp's (tcp_mesh.h).
absl::StatusOr<std::unique_ptr<Comm>> ConnectOver(const MeshMaker& make, const std::string& kind,
                                                  const RankEnvironment& environment,
                                                  const WatchOver& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_WATCHED_COMM_H_
