// What the main of a program does first that writes files with this engine. Not for libraries: signals are
// the program's.
#ifndef PENSTOCK_AIO_PROGRAM_H_
#define PENSTOCK_AIO_PROGRAM_H_

#include <csignal>

namespace penstock::aio {

// A write beyond `ulimit -f` then fails with EFBIG, an error that says what to do, instead of ending the
// program with SIGXFSZ.
inline void IgnoreFileSizeSignal() { std::signal(SIGXFSZ, SIG_IGN); }

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_PROGRAM_H_
