// A checkpoint of DeepSpeed's, read in place: the fp32 masters and Adam's moments of every parameter of a
// model, and where the run stood.
//
//   ASSIGN_OR_RETURN(auto checkpoint, DeepSpeedCheckpoint::Open("ckpt", model->Layout(), names));
//   checkpoint->progress().step;                                  // 1000
//   status = checkpoint->Read(StateKind::kFirstMoment, block, first, elements, values);
//
// Served are ZeRO-1, 2 and 3 of any number of data-parallel ranks, in fp32, bf16 or fp16, and the universal
// format (ds_to_universal). A path is the directory of save_checkpoint (its `latest` or `latest_universal`
// says which tag), or that of a tag. Parameters have Hugging Face's names, with the family's prefix or
// without, or `module.` before them; or those of `names`. Nothing is executed (models/torch_file.h), and
// nothing is guessed: a parameter that is missing, of another shape, or without a place in the model is an
// error that names it.
//
// Refused by name: pipeline, tensor and expert parallelism, frozen parameters, states that DeepSpeed left on
// an NVMe drive, runs without ZeRO, optimizers without Adam's moments, parameter groups of different options.
//
// Memory: what the files' pickles describe (some hundred bytes a tensor and rank) and a buffer of 512 KiB.
// Threads: one. Errors: kNotFound, kInvalidArgument: not such a checkpoint, or not of this model; kDataLoss:
// cut short.
#ifndef PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_
#define PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/layout.h"
#include "models/scattered_tensor.h"
#include "models/torch_file.h"
#include "zero/compute/tile_format.h"

namespace penstock::models {

// Published name -> the name in the other's checkpoint.
using NameMap = std::map<std::string, std::string>;

// A JSON object of them. kInvalidArgument: the file cannot be read, or is none.
absl::StatusOr<NameMap> ReadNames(const std::string& path);

// A value of a file of torch.save as JSON: dicts with keys that are texts or integers, lists, numbers, texts,
// truth values; what is none of these is null.
nlohmann::json ToJson(const TorchValue& value);

// Where a run stood, and with what it was trained.
struct DeepSpeedProgress {
  std::string format;           // "ZeRO-2 of 4 ranks", "universal"
  std::string version;          // of DeepSpeed
  int64_t ranks = 1;            // data-parallel ones
  int64_t step = 0;             // global_steps
  int64_t updates = 0;          // of the optimizer: without those that were skipped
  nlohmann::json config;        // what deepspeed.initialize was given; null: not recorded
  nlohmann::json lr_scheduler;  // its state; null: none
  bool step_is_tensor = false;  // as torch's own optimizers keep it; DeepSpeed's keep a number
  nlohmann::json optimizer;     // the options of the parameter groups: lr, betas, eps, weight_decay, ...
  nlohmann::json loss_scaler;   // its attributes: cur_scale, cur_iter, ...; null: none
};

class DeepSpeedCheckpoint {
 public:
  static absl::StatusOr<std::unique_ptr<DeepSpeedCheckpoint>> Open(const std::string& path,
                                                                   ModelLayout layout, const NameMap& names);

  const DeepSpeedProgress& progress() const { return progress_; }
  const std::string& directory() const { return directory_; }  // of the tag

  // Elements [first, first + elements) of a block's run, as fp32; zeros between the parameters. Masters or
  // moments.
  absl::Status Read(zero::StateKind kind, int block, int64_t first, int64_t elements, float* to);

 private:
  static constexpr size_t kKinds = 3;  // masters, first and second moments
  // Of one parameter.
  struct Values {
    std::vector<int64_t> sizes;  // empty: nobody says
    std::array<ScatteredTensor, kKinds> of;
  };
  using Parameters = std::map<std::string, Values>;            // by DeepSpeed's name
  using FlatTensors = std::array<const TorchTensor*, kKinds>;  // of a parameter group, one rank's

  DeepSpeedCheckpoint(std::string directory, ModelLayout layout)
      : directory_(std::move(directory)), layout_(std::move(layout)) {}

  absl::Status Load(const NameMap& names);
  absl::StatusOr<const TorchFile*> OpenFile(const std::string& name);
  absl::Status ReadModelStates(const TorchFile& file, Parameters* parameters);
  absl::Status ReadPartitions(const std::vector<std::string>& names, Parameters* parameters);
  // The count of steps, and the flat tensors, none of which is null. `where`: what an error adds.
  absl::StatusOr<FlatTensors> TakeGroup(const TorchFile& file, size_t group, const TorchValue& masters,
                                        const TorchValue& state, const char* where);
  // Elements [first, first + elements) of each come next in a parameter.
  static absl::Status AddPart(const TorchFile& file, const FlatTensors& flat, int64_t first, int64_t elements,
                              Values* values);
  absl::Status ReadRank12(const TorchFile& file, const TorchValue& optimizer, Parameters* parameters);
  absl::Status ReadRank3(const TorchFile& file, const TorchValue& optimizer, int64_t rank, int64_t ranks,
                         Parameters* parameters);
  absl::Status ReadUniversal(Parameters* parameters);
  absl::Status ReadUniversalState();
  absl::Status TakeOptions(const TorchFile& file, const TorchValue& optimizer, const TorchValue& base);
  absl::Status TakeSteps(const TorchFile& file, const TorchValue& state);
  // What a published name is called there unless --names says it.
  std::vector<std::string> OwnNames(const std::string& published) const;
  absl::Status Match(const NameMap& names, Parameters* parameters);
  absl::Status Wrong(const std::string& why) const;

  const std::string directory_;
  const ModelLayout layout_;
  DeepSpeedProgress progress_;
  std::vector<std::vector<std::string>>
      order_;                                  // names by parameter group, in the order of their flat tensors
  std::map<std::string, std::string> shared_;  // name of a tied parameter -> the one that holds it
  std::optional<int64_t> optimizer_step_;
  std::vector<std::unique_ptr<TorchFile>> files_;
  std::vector<std::array<ScatteredTensor, kKinds>> sources_;  // parallel to layout_.tensors
  ReadBuffer buffer_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_
