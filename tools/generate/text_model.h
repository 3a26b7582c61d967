// What a verb that makes text is pointed at: a Hugging Face directory, or a state directory or checkpoint;
// and how its tokens and texts become each other.
#ifndef PENSTOCK_TOOLS_GENERATE_TEXT_MODEL_H_
#define PENSTOCK_TOOLS_GENERATE_TEXT_MODEL_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "models/families/family.h"
#include "models/weights/packed_weights.h"
#include "text/tokenizer.h"
#include "tools/generate/generation_config.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {

struct TextModel {
  std::shared_ptr<const models::LanguageModel> model;
  int64_t window = 0;  // longest sequence: of the model, or what a run was trained on
  bool bytes = false;  // tokens are the bytes of a text
  std::shared_ptr<const text::Tokenizer> tokenizer;  // null: none
  std::vector<int64_t> ends;                         // tokens that end a text
  GenerationDefaults defaults;                       // of a directory's generation_config.json

  std::string directory;                         // Hugging Face's; empty: a state
  std::optional<models::PackedWeights> packed;   // of a directory, if `penstock pack` wrote it
  std::vector<std::string> state_dirs;           // of a state: what an engine opens
  zero::ShardDirectories parts;                  // of a state, by rank
  uint64_t sequence = 0;                         // its commit
  kernels::DType dtype = kernels::DType::kFp32;  // of its weights
  int64_t threads = 1;
  std::string
      base;  // of adapters: where the frozen weights lie that a run reads in place; empty: in its state
  nlohmann::json identity;  // of the model, and of a state's values: what a text depends on beside the
                            // weights of a directory (models::SampleWeights)

  // The bytes of a text, or its tokens where there is a tokenizer: one or the other is needed. Not checked.
  absl::StatusOr<std::vector<int64_t>> Encode(const std::string& prompt) const;
  // The tokens of a prompt: bytes, by the tokenizer, or numbers. kInvalidArgument says what is wrong.
  absl::StatusOr<std::vector<int64_t>> TokensOf(const std::string& prompt) const;
  // kInvalidArgument: none, or one that the model does not have.
  absl::Status CheckTokens(const std::vector<int64_t>& tokens) const;
  // The bytes that a token adds to a text.
  std::string BytesOf(int64_t token) const;
  // kInvalidArgument, of a token that the model does not have, as it was written.
  absl::Status NoSuchToken(std::string_view token) const;
};

// `arguments`: one directory of either kind, or the directories of a striped run. `tokenizer`: a path, or
// where a state or directory says that it is. `base`: where the frozen weights lie that a run with adapters
// reads in place; "": where they were last. Lines about what is left out go to `err`.
absl::StatusOr<TextModel> OpenTextModel(const std::vector<std::string>& arguments,
                                        const std::optional<std::string>& tokenizer, const std::string& base,
                                        std::string_view program, std::ostream& err);

// The same for states alone. A model of bytes stays one beside a tokenizer: its prompts are bytes.
absl::StatusOr<TextModel> OpenTrainedText(const std::vector<std::string>& arguments,
                                          const std::optional<std::string>& tokenizer,
                                          const std::string& base, std::string_view program,
                                          std::ostream& err);

// Text as its tokens come: bytes, a tokenizer's, or numbers with blanks.
class TokenText {
 public:
  explicit TokenText(const TextModel& model) : model_(model) {
    if (model.tokenizer != nullptr) decoder_.emplace(*model.tokenizer);
  }
  std::string Push(int64_t token) {
    if (decoder_.has_value()) return decoder_->Push(static_cast<int32_t>(token));
    if (model_.bytes) return std::string(1, static_cast<char>(token));
    return std::to_string(token) + " ";
  }
  std::string Finish() { return decoder_.has_value() ? decoder_->Finish() : std::string(); }

 private:
  const TextModel& model_;
  std::optional<text::TextDecoder> decoder_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_TEXT_MODEL_H_
