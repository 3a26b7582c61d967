// The secret of a run's ranks, in a file of a directory that all of them see.
#ifndef PENSTOCK_ZERO_RANKS_SECRET_FILE_H_
#define PENSTOCK_ZERO_RANKS_SECRET_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::zero {

// The variable of the environment that has it instead, for ranks that share no directory.
inline constexpr const char* kSecretVariable = "PENSTOCK_RANKS_SECRET";
inline constexpr const char* kSecretFile = ".penstock.ranks-secret";

// Returns the secret in `directory`/.penstock.ranks-secret, 64 hexadecimal digits. Where there is no such
// file it is made, for its owner alone (mode 0600), and the directory too; of several processes that make it
// at once all return the same one.
//
// kPermissionDenied: it is another user's, or others may read or write it. kFailedPrecondition: it is not a
// file of this kind. The others are those of IoErrorCode (base/io_error.h).
//
// `made`, if given, gets the paths of the directories that this process has made, and the file last; nothing
// where all was there.
absl::StatusOr<std::string> SecretIn(const std::string& directory, std::vector<std::string>* made = nullptr);

// Removes what SecretIn has made, after a start that was refused. All of it stays where something else is in
// the directory by now.
void RemoveSecret(const std::vector<std::string>& made);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_SECRET_FILE_H_
