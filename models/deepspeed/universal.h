// Writes a checkpoint in DeepSpeed's universal format: masters and Adam's moments by parameter, whole, so
// that a run goes on from it with any stage of ZeRO and any number of ranks ("checkpoint": {"load_universal":
// true}).
//
//   OUT/TAG/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
//   OUT/TAG/zero/optimizer_state.pt           options of the parameter groups, loss scale
//   OUT/TAG/mp_rank_00_model_states.pt        steps, scheduler, client_state; once more under ZeRO-3's name
//   OUT/latest_universal                      TAG; written last
//
// The tag is OUT/.TAG.partial until it is whole and on the drive. One that it replaces is OUT/.TAG.replaced
// while the names change; where a kill comes just then, the next call brings it back. Of these three no more
// is removed or renamed than files that this function or DeepSpeed's ds_to_universal writes: another file or
// directory in one of them is refused before anything changes. Needs no LibTorch.
//
// Each element is read once, but for matrices that are published transposed and whose values and moments are
// larger than three eighths of the memory given: those are read once for each strip. The next values are
// read, on a thread of their own, while the last are turned and written past the page cache.
#ifndef PENSTOCK_MODELS_DEEPSPEED_UNIVERSAL_H_
#define PENSTOCK_MODELS_DEEPSPEED_UNIVERSAL_H_

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "models/deepspeed/checkpoint.h"
#include "models/weights/layout.h"

namespace penstock::models {

// What universal checkpoints say of themselves: the version whose format is written.
inline constexpr const char* kDeepSpeedVersion = "0.19.8";

struct UniversalOptions {
  std::string directory;  // OUT
  std::string tag;
  bool overwrite = false;                       // of a universal checkpoint that has the tag
  uint64_t memory_bytes = uint64_t{128} << 20;  // of buffers
  NameMap names;                // published name -> DeepSpeed's; those that are not there are the same
  bool step_is_tensor = false;  // as torch's own optimizers keep it; DeepSpeed's keep a number
  // Of a parameter, where they have not all had DeepSpeedProgress::updates (MissedUpdates). Empty: all have.
  std::function<int64_t(const PublishedTensor& tensor)> updates_of = {};
  bool has_scheduler = false;  // which sets the rate of each group anew after the next step
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes
};

// Elements [first, first + elements) of a block's run: masters, first and second moments. Called on another
// thread than the caller's, which waits meanwhile; one call at a time.
using ReadMoments = std::function<absl::Status(int block, int64_t first, int64_t elements, float* master,
                                               float* m, float* v)>;

// DeepSpeed's attributes of what zero::LossScaler has as JSON; null where there is none.
nlohmann::json LossScalerOf(const nlohmann::json& ours);

// Of `run`: step, updates, samples, groups (of each its options), lr_scheduler, loss_scaler (null: none),
// config, client. Errors: kAlreadyExists: the tag is there; kInvalidArgument: what has its name, or a name
// that it needs, is not a universal checkpoint alone, and is not replaced, or OUT holds a state or checkpoint
// (CheckOutsideStores); kResourceExhausted: disk full; others as the operating system says. A tag that could
// not be finished is removed; one that is whole is not.
absl::Status WriteUniversal(const DeepSpeedProgress& run, const ModelLayout& layout, const ReadMoments& read,
                            const UniversalOptions& options);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DEEPSPEED_UNIVERSAL_H_
