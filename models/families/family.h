// Families of published language models, and one interface to them all: what programs use.
//
//   ASSIGN_OR_RETURN(std::shared_ptr<const LanguageModel> model, OpenModel("Llama-3.2-1B", &notes));
//   engine = zero::CreateEngine(MakeModel(*model), options);   // models/families/stages.h
//
// A family is two files: models/families/gpt.cc, models/families/llama.cc read config.json and describe each
// parameter once (models/weights/layout.h: name, shape, first values, published name) and what generation
// computes (models/families/decoder.h); gpt_stages.cc, llama_stages.cc compute stages, with LibTorch, over
// modules that are made from that description. Layout, import, export and plan follow from it. A key of
// config.json that changes the function is served, or refused by name.
#ifndef PENSTOCK_MODELS_FAMILIES_FAMILY_H_
#define PENSTOCK_MODELS_FAMILIES_FAMILY_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/families/decoder.h"
#include "models/weights/layout.h"

namespace penstock::models {

struct GptConfig;    // models/families/gpt.h
struct LlamaConfig;  // models/families/llama.h
struct LoraOptions;  // models/families/lora.h

// Where ToJson says what adapters a model has,
inline constexpr const char* kLoraKey = "penstock_lora";
// and of a vocabulary in tiles how many rows one has.
inline constexpr const char* kTileRowsKey = "penstock_vocabulary_rows";

enum class Head : uint8_t {
  kLoss,        // the last stage is the mean cross-entropy against Batch::targets
  kLastLogits,  // the last stage gives fp32 logits [batch, vocab] of the last position
};

// What a stage multiplies, in matrix products, which are nearly all that it computes: norms, activations,
// softmax and the look-up of embeddings are not in it. A multiply-add is two operations.
struct StageProducts {
  std::string stage;
  int block = 0;                  // index of its block
  int64_t parameters = 0;         // of the block's matrices that a token is multiplied with
  int64_t attention_width = 0;    // heads times depth of a head; 0: no attention
  int64_t frozen_parameters = 0;  // of those, that backward makes no gradient of

  // Of a forward pass over `sequences`: 2 * parameters for each token, and in attention 2 * width for
  // each of two products (queries with keys, probabilities with values) and each pair of a position with one
  // that it may see, itself included.
  double ForwardFlops(int64_t sequences, int64_t length) const;
  // Of the backward pass: a gradient of what goes into each product, and of the parameters that train.
  double BackwardFlops(int64_t sequences, int64_t length) const;
};

// A model's description, whole and valid; it holds no weights. Immutable.
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  virtual int64_t vocabulary() const = 0;
  virtual int64_t context() const = 0;       // longest sequence
  virtual int64_t usual_length() const = 0;  // of sequences, where nobody says
  // Every parameter, once; the input embedding is block 0, or the first blocks.
  virtual std::vector<BlockDescription> Blocks() const = 0;
  virtual ModelLayout Layout() const = 0;
  // One of each stage that trains (MakeModel, Head::kLoss), in their order.
  virtual std::vector<StageProducts> Products() const = 0;

  // What a run's record and identity say of it; ModelFromJson reads it back.
  virtual nlohmann::json ToJson() const = 0;
  // Hugging Face's config.json, complete but for the type of the weights.
  virtual nlohmann::ordered_json ToPublished() const = 0;

  virtual std::shared_ptr<const LanguageModel> WithVocabulary(int64_t vocabulary) const = 0;

  // Rows of the vocabulary that a block has (models/families/vocabulary_tiles.h); 0: all of them.
  virtual int64_t tile_rows() const { return 0; }
  // The same function in blocks of `rows` rows; 0: in one. Of a model with adapters, see
  // WithVocabularyTiles.
  virtual std::shared_ptr<const LanguageModel> WithTileRows(int64_t rows) const = 0;

  // Whether `penstock train` and its siblings train it, from the processor or a device. kInvalidArgument says
  // in one line why not, and what does.
  virtual absl::Status CheckTrains() const { return absl::OkStatus(); }

  // The same function, for generation with a cache. Adapters are parameters of its blocks (AdapterDown).
  virtual std::optional<Decoder> decoder() const = 0;

  // What it was described by: one of gpt(), llama() and base() is not null.
  virtual const GptConfig* gpt() const { return nullptr; }
  virtual const LlamaConfig* llama() const { return nullptr; }

  // What adapters go to where nobody says (models/families/lora.h), as in PEFT.
  virtual std::vector<std::string> AdapterTargets() const = 0;
  // Of a model with adapters, what they are, and the model without them. Null: it has none.
  virtual const LoraOptions* lora() const { return nullptr; }
  virtual std::shared_ptr<const LanguageModel> base() const { return nullptr; }

  // Same family, same function, same shapes.
  bool operator==(const LanguageModel& other) const { return ToJson() == other.ToJson(); }
};

// A config.json or what ToJson gave, by its "model_type" (where it has none: GPT-2). kInvalidArgument: a
// family that is not served, an impossible shape, a function that is not computed (names the key). `notes`
// takes lines for people.
absl::StatusOr<std::shared_ptr<const LanguageModel>> ModelFromJson(const nlohmann::json& json,
                                                                   std::vector<std::string>* notes = nullptr);

// How many tiles the vocabulary of a model is in,
int VocabularyTiles(const LanguageModel& model);
// and should be: 1 unless it is far larger than a layer.
int64_t UsualVocabularyTiles(const LanguageModel& model);
// The same function with embedding and head in blocks of `rows` rows of the vocabulary; 0, or as many as it
// has: in one. Its ToJson says so, and the first values that a run draws are others. kInvalidArgument: a
// target of the adapters is the head.
absl::StatusOr<std::shared_ptr<const LanguageModel>> WithVocabularyTiles(
    std::shared_ptr<const LanguageModel> model, int64_t rows);

// A preset's name, the path of a config.json, or a directory that has one. kInvalidArgument: none of them
// (names the presets), or as ModelFromJson.
absl::StatusOr<std::shared_ptr<const LanguageModel>> OpenModel(const std::string& preset_or_path,
                                                               std::vector<std::string>* notes = nullptr);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_FAMILY_H_
