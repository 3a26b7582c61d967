// A checkpoint of DeepSpeed's, read in place: the fp32 masters and Adam's moments of every parameter of a
// model, and where the run stood.
//
//   ASSIGN_OR_RETURN(auto checkpoint, DeepSpeedCheckpoint::Open("ckpt", model->Layout(), names));
//   checkpoint->progress().step;                                  // 1000
//   status = checkpoint->Read(StateKind::kFirstMoment, block, first, elements, values);
//
// Served are ZeRO-1, 2 and 3 of any number of data-parallel ranks, in fp32, bf16 or fp16, and the universal
// format (ds_to_universal). A path is the directory of save_checkpoint (its `latest` or `latest_universal`
// says which tag; the second where there is no first, or it is of the tag that is named there), or that of a
// tag. Parameters have Hugging Face's names, with the family's prefix or without, or `module.` before them;
// or those of `names`. Nothing is executed (models/weights/torch_file.h), and nothing is guessed: a parameter
// that is missing, of another shape, or without a place in the model is an error that names it.
//
// Refused by name: pipeline, tensor and expert parallelism, frozen parameters, states that DeepSpeed left on
// an NVMe drive, runs without ZeRO, optimizers without Adam's moments.
//
// OpenWeights takes the weights alone, of whatever model and optimizer, under the names that they have there:
// what DeepSpeed's zero_to_fp32 makes of them.
//
// Memory: what the files' pickles describe (some thousand bytes a tensor and rank; bounded, whatever they
// say) and for masters
// and each of the moments a buffer of 512 KiB, or of 18 MiB where parameters are published transposed. Needs
// no LibTorch. Threads: one, but for Read. Errors: kNotFound, kInvalidArgument: not such a checkpoint, or not
// of this model; kDataLoss: cut short.
#ifndef PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_
#define PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/float16.h"
#include "models/deepspeed/scattered_tensor.h"
#include "models/weights/layout.h"
#include "models/weights/torch_file.h"
#include "zero/compute/tile_format.h"
#include "zero/config/loss_scale.h"

namespace penstock::models {

// Published name -> the name in the other's checkpoint.
using NameMap = std::map<std::string, std::string>;

// A JSON object of them. kInvalidArgument: the file cannot be read, or is none.
absl::StatusOr<NameMap> ReadNames(const std::string& path);

// What an error says is to be done: the CLI and Python have their own words for it.
struct CheckpointWords {
  std::string names = "the file of names";               // where other names are given
  std::string model = "give the `model` that it is of";  // it is not of this one
};

// Where a run stood, and with what it was trained.
struct DeepSpeedProgress {
  std::string format;           // "ZeRO-2 of 4 ranks", "universal"
  std::string version;          // of DeepSpeed
  int64_t ranks = 1;            // data-parallel ones
  int64_t step = 0;             // global_steps
  int64_t updates = 0;          // of the optimizer: without those that were skipped
  int64_t samples = 0;          // global_samples
  nlohmann::json config;        // what deepspeed.initialize was given; null: not recorded
  nlohmann::json lr_scheduler;  // its state; null: none
  bool step_is_tensor = false;  // as torch's own optimizers keep it; DeepSpeed's keep a number
  nlohmann::json optimizer;     // the options of the first parameter group: lr, betas, eps, weight_decay, ...
  nlohmann::json groups = nlohmann::json::array();  // those of each; none: older ones do not keep them
  nlohmann::json loss_scaler;                       // its attributes: cur_scale, cur_iter, ...; null: none
  // client_state. Tuples, dicts with keys that are no texts, and numbers that are not finite are as the
  // Python package's _engine/_json.py has them.
  nlohmann::json client = nlohmann::json::object();
  std::vector<std::string> unread;   // of its keys those with other values, and why: "weights (a tensor)"
  std::vector<std::string> buffers;  // names of the module's persistent ones
};

// Whether `path` is what DeepSpeed wrote: the directory of a tag, or one that Open finds by its name. Whether
// its files can be read is another matter; an error is one of finding that out.
absl::StatusOr<bool> IsDeepSpeedCheckpoint(const std::string& path);

// What DeepSpeed puts beside the client_state, in a file of model states.
std::span<const absl::string_view> DeepSpeedKeys();

// The state of zero::LossScaler for a run with such weights: in fp16 it goes on where the checkpoint's was,
// if both are dynamic, and begins by `options` else. `note`: gets one line where the checkpoint has a scale,
// or should, that is not taken over.
absl::StatusOr<nlohmann::json> LossScaleOf(kernels::DType weights, const zero::LossScaleOptions& options,
                                           const DeepSpeedProgress& progress, std::string* note);

class DeepSpeedCheckpoint {
 public:
  static absl::StatusOr<std::unique_ptr<DeepSpeedCheckpoint>> Open(const std::string& path,
                                                                   ModelLayout layout, const NameMap& names,
                                                                   CheckpointWords words = {});
  // For weights() and progress(), without a model. Frozen parameters are served.
  static absl::StatusOr<std::unique_ptr<DeepSpeedCheckpoint>> OpenWeights(const std::string& path);

  // A parameter, or a persistent buffer, in the order of names. A tied one is there under each of its names.
  struct Weight {
    std::string name;
    std::vector<int64_t> sizes;
    ScatteredTensor values;
    std::optional<TorchTensor> other = {};  // a buffer of another type: for ReadModuleBuffer
    std::string tied_to = {};               // the name whose values these are, if it is another
    bool frozen = false;                    // it did not train, or is tied to one that did not
  };
  // Of OpenWeights. Valid as long as this.
  const std::vector<Weight>& weights() const { return weights_; }

  const DeepSpeedProgress& progress() const { return progress_; }
  const std::string& directory() const { return directory_; }  // of the tag
  // Of each tensor of the layout, how many updates it has had: progress().updates, or less where no gradient
  // came to it in some of them. Of Open.
  const std::vector<int64_t>& updates() const { return updates_; }

  // Elements [first, first + elements) of a block's run, as fp32; zeros between the parameters. Masters or
  // moments: one thread for each kind.
  absl::Status Read(zero::StateKind kind, int block, int64_t first, int64_t elements, float* to);

  // After all that is wanted was read, before anybody relies on it: checks the sums of the files' members of
  // which something was (TorchFile::CheckRead). kDataLoss: what was read is damaged.
  absl::Status CheckRead() const;

  // A persistent buffer of the module by its own name, looked for as parameters are; absent: the checkpoint
  // has none. Valid as long as this.
  TorchValue FindModuleBuffer(const std::string& name, const NameMap& names) const;
  absl::Status ReadModuleBuffer(const TorchTensor& buffer, std::span<std::byte> to) const;

 private:
  static constexpr size_t kKinds = 3;  // masters, first and second moments
  // Of one parameter.
  struct Values {
    std::vector<int64_t> sizes;  // empty: nobody says
    std::array<ScatteredTensor, kKinds> of;
    std::optional<int64_t> updates = {};  // of its own; nullopt: the optimizer's
  };
  using Parameters = std::map<std::string, Values>;            // by DeepSpeed's name
  using FlatTensors = std::array<const TorchTensor*, kKinds>;  // of a parameter group, one rank's

  DeepSpeedCheckpoint(std::string directory, ModelLayout layout, CheckpointWords words)
      : directory_(std::move(directory)), layout_(std::move(layout)), words_(std::move(words)) {}

  // Of Open, and of OpenWeights.
  absl::Status Load(const NameMap& names);
  absl::Status LoadWeights();
  absl::Status ReadFiles(Parameters* parameters);
  absl::StatusOr<const TorchFile*> OpenFile(const std::string& name);
  absl::Status ReadModelStates(const TorchFile& file, bool universal, Parameters* parameters);
  absl::Status TakeClientState(const TorchFile& file);
  // As JSON: dicts with keys that are texts or integers, lists, numbers, texts, truth values; what is none of
  // these is null. kInvalidArgument: more values than are read.
  absl::StatusOr<nlohmann::json> ToJson(const TorchFile& file, const TorchValue& value);
  absl::Status CheckLeft(const TorchFile& file) const;
  // Of a parameter or buffer: a text of at most 1,024 bytes. Each use of one counts, since a short file can
  // have very many of one text.
  absl::StatusOr<std::string> TakeName(const TorchFile& file, const TorchValue& value);
  absl::Status SpendBytes(const TorchFile& file, int64_t bytes);
  absl::Status ReadPartitions(const std::vector<std::string>& names, Parameters* parameters);
  // The count of steps, and the flat tensors, none of which is null. `where`: what an error adds.
  absl::StatusOr<FlatTensors> TakeGroup(const TorchFile& file, size_t group, const TorchValue& masters,
                                        const TorchValue& state, const char* where);
  // Elements [first, first + elements) of each come next in a parameter.
  absl::Status AddPart(const TorchFile& file, const FlatTensors& flat, int64_t first, int64_t elements,
                       Values* values);
  absl::Status ReadRank12(const TorchFile& file, const TorchValue& optimizer, Parameters* parameters);
  absl::Status ReadRank3(const TorchFile& file, const TorchValue& optimizer, int64_t rank, int64_t ranks,
                         Parameters* parameters);
  absl::Status ReadUniversal(Parameters* parameters);
  absl::Status ReadUniversalState();
  // What model states have of frozen parameters and persistent buffers.
  absl::Status ReadFrozen(Parameters* parameters);
  absl::Status ReadBuffers();
  // Masters, and beside a model the moments.
  size_t kinds() const { return weights_alone_ ? 1 : kKinds; }
  absl::Status TakeOptions(const TorchFile& file, const TorchValue& optimizer, const TorchValue& base);
  absl::Status TakeSteps(const TorchFile& file, const TorchValue& state);
  absl::StatusOr<std::optional<int64_t>> ReadSteps(const TorchFile& file, const TorchValue& state);
  // What a published name is called there unless --names says it.
  std::vector<std::string> OwnNames(const std::string& published) const;
  absl::Status Match(const NameMap& names, Parameters* parameters);
  absl::Status Wrong(const std::string& why) const;

  const std::string directory_;
  const ModelLayout layout_;
  const CheckpointWords words_;
  DeepSpeedProgress progress_;
  std::vector<std::vector<std::string>>
      order_;                                  // names by parameter group, in the order of their flat tensors
  std::map<std::string, std::string> shared_;  // name of a tied parameter -> the one that holds it
  std::optional<int64_t> optimizer_step_;
  std::vector<int64_t> updates_;  // parallel to layout_.tensors
  bool weights_alone_ = false;
  std::vector<std::string> model_files_;  // by rank
  int64_t optimizer_ranks_ = 0;           // 0: the universal format
  std::vector<Weight> weights_;
  bool sliced_ = false;                            // param_shapes are those of a rank of tensor parallelism
  int64_t values_left_ = 400'000;                  // that may become JSON, or lists of names
  int64_t bytes_left_ = TorchFile::kMostBytes;     // that the files may take while they are open
  std::vector<std::unique_ptr<TorchFile>> files_;  // the first has the model's states
  std::vector<std::array<ScatteredTensor, kKinds>> sources_;  // parallel to layout_.tensors
  std::array<ReadBuffer, kKinds> buffers_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DEEPSPEED_CHECKPOINT_H_
