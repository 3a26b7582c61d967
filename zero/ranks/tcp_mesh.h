// A mesh over sockets, with nothing but the operating system.
//
// One connection between every two ranks, each opened by a proof that both ends know the run's secret
// (handshake.h), and one thread for all of them. What goes over a connection is mesh_link.h's: a message is
// sent when its receiver has asked for it, so it goes straight to its place, and nothing is kept in between.
// It goes in pieces, between which those of other messages may pass.
#ifndef PENSTOCK_ZERO_RANKS_TCP_MESH_H_
#define PENSTOCK_ZERO_RANKS_TCP_MESH_H_

#include <memory>

#include "absl/status/statusor.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/mesh.h"
#include "zero/ranks/watched_comm.h"

namespace penstock::zero {

// Throws where not all ranks came within `place.wait`.
std::unique_ptr<Mesh> MakeTcpMesh(const MeshPlace& place);

// Meets the other ranks at a TcpStore (tcp_store.h) and connects to each of them. `options`: with the
// secret of the run. kUnavailable: somebody did not come, or another process has the port. kInvalidArgument:
// no secret, or not the one that rank 0 knows.
absl::StatusOr<std::unique_ptr<Comm>> ConnectTcp(const RankEnvironment& environment,
                                                 const WatchOver& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_TCP_MESH_H_
