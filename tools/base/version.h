#ifndef PENSTOCK_TOOLS_BASE_VERSION_H_
#define PENSTOCK_TOOLS_BASE_VERSION_H_

namespace penstock::tools {

inline constexpr const char* kVersion = PENSTOCK_VERSION;  // of the project, from CMake

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_VERSION_H_
