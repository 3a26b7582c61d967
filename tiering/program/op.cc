#include "tiering/program/op.h"

namespace penstock::tiering {

std::string_view LaneName(Lane lane) {
  switch (lane) {
    case Lane::kRead:
      return "read";
    case Lane::kWrite:
      return "write";
    case Lane::kCompute:
      return "compute";
    case Lane::kUpdate:
      return "update";
    case Lane::kCommit:
      return "commit";
    case Lane::kHost:
      return "host";
    case Lane::kCopyIn:
      return "copy in";
    case Lane::kCopyOut:
      return "copy out";
    case Lane::kGather:
      return "gather";
    case Lane::kReduce:
      return "reduce";
  }
  return "unknown";
}

std::string_view OpKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kReadWeights:
      return "read weights";
    case OpKind::kReadState:
      return "read state";
    case OpKind::kReadGradient:
      return "read gradient";
    case OpKind::kVerify:
      return "verify";
    case OpKind::kUpdate:
      return "update";
    case OpKind::kWriteTile:
      return "write tile";
    case OpKind::kWriteState:
      return "write state";
    case OpKind::kWriteWeights:
      return "write weights";
    case OpKind::kWriteGradient:
      return "write gradient";
    case OpKind::kWriteInput:
      return "write input";
    case OpKind::kReadInput:
      return "read input";
    case OpKind::kForward:
      return "forward";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kTakeGradient:
      return "take gradient";
    case OpKind::kFinalize:
      return "finalize gradient";
    case OpKind::kNorm:
      return "norm";
    case OpKind::kSeal:
      return "seal";
    case OpKind::kCommit:
      return "commit";
    case OpKind::kBatch:
      return "batch";
    case OpKind::kEvaluated:
      return "evaluated";
    case OpKind::kCopyIn:
      return "copy in";
    case OpKind::kRoundGradient:
      return "round gradient";
    case OpKind::kCopyOut:
      return "copy out";
    case OpKind::kGather:
      return "gather weights";
    case OpKind::kReduce:
      return "reduce gradient";
    case OpKind::kExchange:
      return "exchange norms";
    case OpKind::kAgree:
      return "agree on commit";
    case OpKind::kSquareGradient:
      return "square gradient";
    case OpKind::kUpdateOnDevice:
      return "update on device";
    case OpKind::kCopyStateIn:
      return "copy state in";
    case OpKind::kCopyStateOut:
      return "copy state out";
  }
  return "unknown";
}

}  // namespace penstock::tiering
