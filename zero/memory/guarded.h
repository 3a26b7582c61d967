// The border between what throws, LibTorch among it, and Penstock, which returns statuses.
#ifndef PENSTOCK_ZERO_MEMORY_GUARDED_H_
#define PENSTOCK_ZERO_MEMORY_GUARDED_H_

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace penstock::zero {

// The first line of a message: LibTorch adds its source location and a stack trace.
inline std::string FirstLine(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

// Runs `body`, which returns nothing, and turns what it throws into a status that begins with `what`. A
// tensor for which there is no memory, by a limit or on a device, is kResourceExhausted.
template <typename Body>
absl::Status Guarded(std::string_view what, Body&& body) {
  auto failed = [&](std::string_view why) {
    const std::string text = absl::StrCat(absl::string_view(what.data(), what.size()), ": ", FirstLine(why));
    if (text.find("tensor memory budget") != std::string::npos) return absl::ResourceExhaustedError(text);
    if (text.find("CUDA out of memory") != std::string::npos) {
      return absl::ResourceExhaustedError(
          absl::StrCat(text, "; a larger `device_memory`, or a smaller batch or sequence"));
    }
    return absl::InternalError(text);
  };
  try {
    std::forward<Body>(body)();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_GUARDED_H_
