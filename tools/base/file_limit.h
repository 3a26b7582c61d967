// How many files this process may have open.
#ifndef PENSTOCK_TOOLS_BASE_FILE_LIMIT_H_
#define PENSTOCK_TOOLS_BASE_FILE_LIMIT_H_

namespace penstock::tools {

// As many as its user is allowed, instead of the soft limit that programs begin with (1,024 often): a model
// may lie in hundreds of files, each of which is open while it is read. Once, before there are threads.
void AllowManyFiles();

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_FILE_LIMIT_H_
