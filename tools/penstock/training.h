// A training from its resolved settings to its report: the verb without its flags.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TRAINING_H_
#define PENSTOCK_TOOLS_PENSTOCK_TRAINING_H_

#include <ostream>

#include "absl/status/status.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// Trains until the last step, a signal (kOk: what was trained is kept, and said where) or an error. Lines for
// people go to `out`, the live line to stderr; report, log, monitors and trace where `flags` say. Over
// several ranks all call this.
absl::Status RunTraining(TrainOptions flags, TrainSettings settings, std::ostream& out);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TRAINING_H_
