#include "llm.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base_weights.h"
#include "tools/generate/generate_flags.h"
#include "zero/memory/thread_times.h"

namespace penstock::python {
namespace {

constexpr int64_t kUsualLength = 4096;

}  // namespace

std::string LlmText::Next(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return over_ || !fresh_.empty(); });
  return std::exchange(fresh_, {});
}

bool LlmText::over() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return over_ && fresh_.empty();
}

absl::Status LlmText::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

std::string LlmText::text() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return growing_.text();
}

std::vector<int64_t> LlmText::tokens() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return growing_.tokens();
}

std::vector<LlmLogprob> LlmText::logprobs(size_t first) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t given = growing_.taken() - fresh_.size();
  std::vector<LlmLogprob> all;
  for (size_t i = first; i < logprobs_.size(); ++i) {
    const size_t begins = growing_.begins()[i];
    if (!over_ && begins >= given) break;
    const int64_t token = growing_.tokens()[i];
    all.push_back({token, model_.BytesOf(token), logprobs_[i].logprob, begins});
    for (const auto& [likely, logprob] : logprobs_[i].top)
      all.back().top.push_back({likely, model_.BytesOf(likely), logprob, begins});
  }
  return all;
}

std::string LlmText::finish() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finish_;
}

void LlmText::Cancel() {
  if (!here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
}

absl::StatusOr<std::unique_ptr<Llm>> Llm::Open(const LlmOptions& given) {
  std::unique_ptr<Llm> llm(new Llm());
  std::ostringstream notes;
  absl::StatusOr<tools::TextModel> opened =
      tools::OpenTextModel(given.directories, given.tokenizer, given.base_weights, "LLM", notes);
  if (!opened.ok()) return BaseInPython(opened.status());
  for (const absl::string_view line : absl::StrSplit(notes.str(), '\n', absl::SkipEmpty()))
    llm->notes_.emplace_back(line);
  llm->model_ = std::make_shared<tools::TextModel>(*std::move(opened));
  llm->max_length_ = given.max_length > 0 ? given.max_length : std::min(llm->model_->window, kUsualLength);
  if (llm->max_length_ > llm->model_->window || llm->max_length_ < 2) {
    return absl::InvalidArgumentError(absl::StrCat("max_length is ", given.max_length, ": from 2 to the ",
                                                   llm->model_->window, " that the model takes"));
  }
  tools::GenerateMemoryFlags flags;
  if (given.host_memory > 0) flags.host_memory = absl::StrCat(given.host_memory);
  flags.kv = given.kv;
  flags.prompt_lookup = given.prompt_lookup;
  const int threads = given.threads > 0 ? given.threads : zero::DefaultIntraOpThreads();
  generate::GeneratorOptions options;
  RETURN_IF_ERROR(tools::ResolveGenerateMemory(flags, threads, nullptr, &options));
  options.wish.sequences = given.texts;
  options.wish.prompt = llm->max_length_ - 1;
  options.wish.positions = llm->max_length_;
  options.ends = llm->model_->ends;
  options.cache_directory = given.kv_directory;
  ASSIGN_OR_RETURN(llm->generator_,
                   generate::Generator::Create(llm->model_->model, tools::OpenWeightsOf(*llm->model_),
                                               std::move(options)));
  llm->thread_ = std::thread([made = llm.get()] { made->Work(); });
  return llm;
}

Llm::~Llm() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  given_.notify_all();
  if (thread_.joinable()) thread_.join();
}

nlohmann::ordered_json Llm::Report() const {
  nlohmann::ordered_json report = tools::GenerationPlanJson(generator_->plan(), generator_->wish());
  const std::lock_guard<std::mutex> lock(mutex_);
  tools::AddGenerationRun(stats_, &report);
  return report;
}

absl::StatusOr<std::vector<int64_t>> Llm::Encode(const std::string& text, bool complete) const {
  if (!complete || model_->tokenizer == nullptr) return model_->TokensOf(text);
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                   model_->tokenizer->Encode(text, {.add_special_tokens = false}));
  return std::vector<int64_t>(ids.begin(), ids.end());
}

absl::StatusOr<std::shared_ptr<LlmText>> Llm::Submit(TextRequest request) {
  RETURN_IF_ERROR(model_->CheckTokens(request.prompt));
  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (const absl::Status there = model_->CheckTokens({token}); !there.ok())
      return absl::InvalidArgumentError(absl::StrCat("logit_bias: ", there.message()));
  }
  const auto length = static_cast<int64_t>(request.prompt.size());
  if (length >= max_length_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a prompt has ", length, " tokens: max_length is ", max_length_,
                     ", prompt and text together (the model takes ", model_->window, ")"));
  }
  request.tokens = std::min(request.tokens, max_length_ - length);
  // The text's decoder looks at the model as long as it lives.
  struct Held {
    std::shared_ptr<const tools::TextModel> model;
    LlmText text;
  };
  const auto held = std::shared_ptr<Held>(new Held{model_, LlmText(model_.get(), std::move(request))});
  std::shared_ptr<LlmText> text(held, &held->text);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return absl::FailedPreconditionError("this LLM is closed");
    RETURN_IF_ERROR(broken_);
    waiting_.push_back(text);
  }
  given_.notify_all();
  return text;
}

void Llm::Work() {
  const auto end = [](LlmText& text, absl::Status status, const char* finish) {
    const std::lock_guard<std::mutex> lock(text.mutex_);
    text.growing_.Finish();
    text.fresh_ += text.growing_.TakeCertain();
    text.over_ = true;
    text.status_ = text.cancelled_ ? absl::CancelledError("the text was cancelled") : std::move(status);
    text.finish_ = finish;
    text.changed_.notify_all();
  };
  generate::GenerationCallbacks callbacks;
  callbacks.next = [&]() -> absl::StatusOr<std::optional<generate::GenerationRequest>> {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!waiting_.empty()) {
      const std::shared_ptr<LlmText> text = std::move(waiting_.front());
      waiting_.pop_front();
      bool cancelled = false;
      {
        const std::lock_guard<std::mutex> of_text(text->mutex_);
        cancelled = text->cancelled_;
      }
      if (cancelled) {
        end(*text, absl::OkStatus(), "");
        continue;
      }
      const TextRequest& request = text->request_;
      const int64_t id = next_id_++;
      active_.emplace(id, text);
      return generate::GenerationRequest{.id = id,
                                         .prompt = request.prompt,
                                         .tokens = request.tokens,
                                         .seed = request.seed,
                                         .sampling = request.sampling,
                                         .logprobs = request.logprobs};
    }
    return std::nullopt;
  };
  callbacks.logprobs = [&](int64_t id, models::TokenLogprobs logprobs) {
    LlmText& text = *active_.at(id);
    const std::lock_guard<std::mutex> lock(text.mutex_);
    text.logprobs_.push_back(std::move(logprobs));
  };
  callbacks.token = [&](int64_t id, int64_t token) {
    LlmText& text = *active_.at(id);
    const std::lock_guard<std::mutex> lock(text.mutex_);
    const bool stops = text.growing_.Push(token);
    text.fresh_ += text.growing_.TakeCertain();
    if (!text.fresh_.empty()) text.changed_.notify_all();
    return stops || text.cancelled_;
  };
  callbacks.finished = [&](int64_t id, generate::Finish finish) {
    end(*active_.at(id), absl::OkStatus(), generate::FinishName(finish));
    active_.erase(id);
    return absl::OkStatus();
  };
  callbacks.progress = [&](const generate::GenerationStats& stats) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_ = stats;
  };
  callbacks.cancelled = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closing_;
  };
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      given_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (closing_) break;
    }
    absl::Status status = generator_->Run(callbacks);
    if (status.ok()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) broken_ = std::move(status);
    break;
  }
  std::deque<std::shared_ptr<LlmText>> left;
  absl::Status why;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left.swap(waiting_);
    why = broken_.ok() ? absl::CancelledError("the LLM was closed") : broken_;
  }
  for (const auto& [id, text] : active_) left.push_back(text);
  active_.clear();
  for (const std::shared_ptr<LlmText>& text : left) end(*text, why, "");
}

}  // namespace penstock::python
