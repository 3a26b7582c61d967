// A mesh over sockets, with nothing but the operating system: for processes in which no Gloo may be linked,
// such as Python's with torch, whose library shows the symbols of a Gloo of its own.
//
// One connection between every two ranks, and one thread for all of them. A message is sent when its receiver
// has said that it waits for it, so it goes straight to its place, and nothing is kept in between. It goes in
// pieces, between which those of other messages may pass.
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

// As ConnectGloo (comm.h).
absl::StatusOr<std::unique_ptr<Comm>> ConnectTcp(const RankEnvironment& environment,
                                                 const WatchOver& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_TCP_MESH_H_
