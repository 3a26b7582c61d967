// Byte sizes on command lines and in output. The rules are tiering/plan/byte_size.h's, so that a size means
// the same as a flag and in a config file: KiB, MiB, GiB are powers of 1024; K, M, G and KB, MB, GB powers of
// 1000; 1e9 is bytes.
#ifndef PENSTOCK_TOOLS_BASE_SIZE_H_
#define PENSTOCK_TOOLS_BASE_SIZE_H_

#include "tiering/plan/byte_size.h"

namespace penstock::tools {

using tiering::FormatBandwidth;
using tiering::FormatBytes;
using tiering::ParseCount;
using tiering::ParseSize;

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_SIZE_H_
