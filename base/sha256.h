// SHA-256 (FIPS 180-4), of what others have written with it. Not fast: for small files.
#ifndef PENSTOCK_BASE_SHA256_H_
#define PENSTOCK_BASE_SHA256_H_

#include <string>
#include <string_view>

namespace penstock {

// Returns the digest of `bytes` as 64 hexadecimal digits in lower case.
std::string Sha256(std::string_view bytes);

}  // namespace penstock

#endif  // PENSTOCK_BASE_SHA256_H_
