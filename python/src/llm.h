// A language model that makes texts for several callers at once: a generate::Generator on a thread of its
// own, to which texts are given and from which they are taken as they grow. No Python here.
//
// Texts that come while others are under way join them between two passes. A text's tokens depend on its
// prompt, its seed and its options alone. An error of the drive ends all texts with it, and all that come
// later.
//
// Threads: any. Ownership: texts live as long as their callers hold them, after the model too.
#ifndef PENSTOCK_PYTHON_LLM_H_
#define PENSTOCK_PYTHON_LLM_H_

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/generator.h"
#include "models/data/text_sampler.h"
#include "tools/generate/generate_text.h"
#include "tools/generate/text_model.h"

namespace penstock::python {

struct LlmOptions {
  std::vector<std::string> directories;
  std::optional<std::string> tokenizer;
  std::string base_weights;  // of adapters: where the frozen weights lie; "": where the run last read them
  uint64_t host_memory = 0;  // 0: half of what is free
  int64_t max_length = 0;    // of prompt and text together; 0: the model's, at most 4096
  int64_t texts = 8;         // at once, at most
  std::string kv = "auto", kv_directory = ".";
  int64_t prompt_lookup = 0;
  int threads = 0;  // 0: one for each core
};

struct TextRequest {
  std::vector<int64_t> prompt;
  int64_t tokens = 1;
  models::SamplingOptions sampling;
  uint64_t seed = 0;
  std::vector<std::string> stops;
  std::optional<int64_t> logprobs;  // asked for: how many of the likeliest tokens too
};

// A token of a text, as likely as the model takes it.
struct LlmLogprob {
  int64_t token = 0;
  std::string bytes;  // that it adds to a text
  double logprob = 0;
  size_t begins = 0;                 // where in the text, in bytes
  std::vector<LlmLogprob> top = {};  // the likeliest at its place
};

// One text, under way or done.
class LlmText {
 public:
  // Waits until something of it is new, it is over, or so long. What is new and certain, else "".
  std::string Next(std::chrono::milliseconds patience);
  bool over() const;
  absl::Status status() const;  // kCancelled: it was
  std::string text() const;
  std::vector<int64_t> tokens() const;  // that ended it included
  // Of the tokens from `first` on whose text Next has given; when it is over, of all. None that was not
  // asked.
  std::vector<LlmLogprob> logprobs(size_t first) const;
  std::string finish() const;  // "length", "stop", "end"; "" while it is under way
  // It ends with the next token. Nothing waits. In a forked child, where nothing makes it, it does nothing;
  // whatever else is called there may wait for ever.
  void Cancel();
  bool here() const { return getpid() == process_; }

 private:
  friend class Llm;
  LlmText(const tools::TextModel* model, TextRequest request)
      : model_(*model), request_(std::move(request)), growing_(model, &request_.stops) {}

  const pid_t process_ = getpid();
  const tools::TextModel& model_;
  const TextRequest request_;
  mutable std::mutex mutex_;  // of the following
  std::condition_variable changed_;
  tools::GrowingText growing_;
  std::vector<models::TokenLogprobs> logprobs_;  // parallel to its tokens
  std::string fresh_;
  bool over_ = false, cancelled_ = false;
  absl::Status status_;
  std::string finish_;
};

class Llm {
 public:
  // kFailedPrecondition: the budget is too small (says the least).
  static absl::StatusOr<std::unique_ptr<Llm>> Open(const LlmOptions& options);
  // Ends what is under way with kCancelled, after the pass that computes.
  ~Llm();
  Llm(const Llm&) = delete;
  Llm& operator=(const Llm&) = delete;

  // kInvalidArgument: not a prompt of this model, or longer than it takes.
  absl::StatusOr<std::shared_ptr<LlmText>> Submit(TextRequest request);
  // The tokens of a prompt. `complete`: the special tokens that a text begins and ends with stand in it.
  absl::StatusOr<std::vector<int64_t>> Encode(const std::string& text, bool complete) const;

  int64_t max_length() const { return max_length_; }
  const tools::GenerationDefaults& defaults() const { return model_->defaults; }
  int64_t vocabulary() const { return model_->model->vocabulary(); }
  const std::vector<std::string>& notes() const { return notes_; }
  const generate::GenerationPlan& plan() const { return generator_->plan(); }
  // What was planned and what has been done, up to the last pass that ended: the keys of `penstock generate
  // --report`.
  nlohmann::ordered_json Report() const;

 private:
  Llm() = default;
  void Work();

  // Shared with the texts, whose decoders look at it.
  std::shared_ptr<tools::TextModel> model_;
  std::vector<std::string> notes_;
  int64_t max_length_ = 0;
  std::unique_ptr<generate::Generator> generator_;

  mutable std::mutex mutex_;  // of the following
  std::condition_variable given_;
  std::deque<std::shared_ptr<LlmText>> waiting_;
  bool closing_ = false;
  absl::Status broken_;
  generate::GenerationStats stats_;

  std::map<int64_t, std::shared_ptr<LlmText>> active_;  // of the thread, by id
  int64_t next_id_ = 0;
  std::thread thread_;
};

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_LLM_H_
