// How SIGINT and SIGTERM stop a training: the first asks for an orderly stop and is acknowledged at once; one
// more, a while later, ends the process, and what was kept stands. Launchers send INT and TERM together, or
// one of them to the group and again to the process: that is the same wish. One set of handlers for the
// process.
#ifndef PENSTOCK_TOOLS_BASE_STOP_SIGNAL_H_
#define PENSTOCK_TOOLS_BASE_STOP_SIGNAL_H_

#include <string>

namespace penstock::tools {

// The first that came; 0: none.
int StopSignal();
const char* StopSignalName(int signal);

// From now on. `what_stands`: when the process ends at once. `speaks`: one rank for all.
void CatchStopSignals(const std::string& what_stands, bool speaks);

// While it lives they are taken note of, without a word: of work of which nothing is left when it stops.
class NotedStopSignals {
 public:
  NotedStopSignals();
  ~NotedStopSignals();
  NotedStopSignals(const NotedStopSignals&) = delete;
  NotedStopSignals& operator=(const NotedStopSignals&) = delete;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_BASE_STOP_SIGNAL_H_
