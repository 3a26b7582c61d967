// What ranks exchanged, by kind: DeepSpeed's comms_logger, from what the engine's lanes tell.
#ifndef PENSTOCK_RUN_WATCH_COMMS_LOG_H_
#define PENSTOCK_RUN_WATCH_COMMS_LOG_H_

#include <cstdint>
#include <map>
#include <string>

#include "tiering/program/op.h"

namespace penstock::run {

class CommsLog {
 public:
  // Of the executor's observer: what is no exchange is passed over.
  void Observe(const tiering::Op& op, double start_seconds, double end_seconds);
  // A line for each kind that there was: how many, their bytes, seconds, bytes a second. Bytes are those that
  // this rank gets from the others. Seconds are the exchange's own, with what it waits for the other ranks.
  std::string Text() const;

 private:
  struct Sum {
    int64_t count = 0, bytes = 0;
    double seconds = 0, longest = 0;
  };
  std::map<tiering::OpKind, Sum> sums_;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_COMMS_LOG_H_
