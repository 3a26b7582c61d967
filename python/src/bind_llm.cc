// Language models that make texts, for Python (python/penstock/llm.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
#include "gil.h"
#include "llm.h"
#include "owned.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

// A budget that is too small, and memory at its limit, are MemoryErrors.
[[noreturn]] void RaiseOfModel(const absl::Status& status) {
  const std::string text = MessageOf(status);
  const bool small = status.code() == absl::StatusCode::kFailedPrecondition &&
                     text.find(" is too small: the least that works here is ") != std::string::npos;
  if (!small) Raise(status);
  PyErr_SetString(PyExc_MemoryError, text.c_str());
  throw nb::python_error();
}

// What is new of a text, as the bytes of UTF-8 that its tokens are.
nb::bytes Bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Refuses a text that another process makes.
void CheckHere(const LlmText& text) {
  if (!text.here()) {
    throw std::runtime_error(
        "this text is made by the parent process: a forked child must make its own, with an LLM of its own");
  }
}

// What a function of a text says, of one that this process makes.
template <class T>
auto Read(T (LlmText::*get)() const) {
  return [get](const LlmText& text) {
    CheckHere(text);
    return (text.*get)();
  };
}

class PyLlm {
 public:
  PyLlm(std::vector<std::string> directories, std::optional<std::string> tokenizer, std::string base_weights,
        uint64_t host_memory, int64_t max_length, int64_t texts, std::string kv, std::string kv_directory,
        int64_t prompt_lookup, int threads) {
    const LlmOptions options = {.directories = std::move(directories),
                                .tokenizer = std::move(tokenizer),
                                .base_weights = std::move(base_weights),
                                .host_memory = host_memory,
                                .max_length = max_length,
                                .texts = texts,
                                .kv = std::move(kv),
                                .kv_directory = std::move(kv_directory),
                                .prompt_lookup = prompt_lookup,
                                .threads = threads};
    absl::StatusOr<std::unique_ptr<Llm>> made;
    {
      const GilReleased released;
      made = Llm::Open(options);
    }
    if (!made.ok()) RaiseOfModel(made.status());
    llm_ = MakeOwned(*std::move(made));
  }

  // Keeps the model as long as it is used: another thread may close this object meanwhile.
  std::shared_ptr<Owned<Llm>> shared() const {
    if (llm_ == nullptr) throw nb::value_error("this LLM is closed");
    llm_->CheckHere();
    return llm_;
  }
  Llm& get() const { return shared()->get(); }
  void Close() { llm_.reset(); }

 private:
  std::shared_ptr<Owned<Llm>> llm_;
};

}  // namespace

void BindLlm(nb::module_& module) {
  nb::class_<LlmText>(module, "LlmText")
      .def(
          "next",
          [](LlmText& text, double seconds) {
            std::string part;
            CheckHere(text);
            {
              const GilReleased released;
              part = text.Next(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)));
            }
            return Bytes(part);
          },
          nb::arg("seconds"))
      .def("check",
           [](const LlmText& text) {
             CheckHere(text);
             const absl::Status status = text.status();
             if (!status.ok()) RaiseOfModel(status);
           })
      .def("cancel", &LlmText::Cancel)
      .def_prop_ro("over", Read(&LlmText::over))
      .def_prop_ro("text",
                   [](const LlmText& text) {
                     CheckHere(text);
                     return Bytes(text.text());
                   })
      .def_prop_ro("tokens", Read(&LlmText::tokens))
      .def_prop_ro("finish", Read(&LlmText::finish))
      .def(
          "logprobs",
          [](const LlmText& text, size_t first) {
            CheckHere(text);
            nb::list all;
            for (const LlmLogprob& each : text.logprobs(first)) {
              nb::list top;
              for (const LlmLogprob& likely : each.top)
                top.append(nb::make_tuple(likely.token, Bytes(likely.bytes), likely.logprob));
              all.append(nb::make_tuple(each.token, Bytes(each.bytes), each.logprob, each.begins, top));
            }
            return all;
          },
          nb::arg("first"));
  module.def("sampling_bounds", [] {
    std::map<std::string, std::tuple<double, double, bool, bool>> all;
    for (const models::SamplingBound& each : models::SamplingBounds())
      all[std::string(each.name)] = {each.least, each.most, each.above, each.whole};
    return all;
  });
  nb::class_<PyLlm>(module, "Llm")
      .def(nb::init<std::vector<std::string>, std::optional<std::string>, std::string, uint64_t, int64_t,
                    int64_t, std::string, std::string, int64_t, int>(),
           nb::arg("directories"), nb::arg("tokenizer").none(), nb::arg("base_weights"),
           nb::arg("host_memory"), nb::arg("max_length"), nb::arg("texts"), nb::arg("kv"),
           nb::arg("kv_directory"), nb::arg("prompt_lookup"), nb::arg("threads"))
      .def(
          "submit",
          [](PyLlm& llm, std::vector<int64_t> prompt, int64_t tokens, double temperature, int64_t top_k,
             double top_p, double min_p, double repetition_penalty, double presence_penalty,
             double frequency_penalty, std::map<int64_t, double> logit_bias, int64_t min_tokens,
             uint64_t seed, std::vector<std::string> stops, std::optional<int64_t> logprobs) {
            TextRequest request = {.prompt = std::move(prompt),
                                   .tokens = tokens,
                                   .sampling = {.logit_bias = std::move(logit_bias),
                                                .repetition_penalty = repetition_penalty,
                                                .presence_penalty = presence_penalty,
                                                .frequency_penalty = frequency_penalty,
                                                .min_tokens = min_tokens,
                                                .temperature = temperature,
                                                .top_k = top_k,
                                                .top_p = top_p,
                                                .min_p = min_p},
                                   .seed = seed,
                                   .stops = std::move(stops),
                                   .logprobs = logprobs};
            const std::shared_ptr<Owned<Llm>> model = llm.shared();
            absl::StatusOr<std::shared_ptr<LlmText>> text;
            {
              const GilReleased released;
              text = model->get().Submit(std::move(request));
            }
            if (!text.ok()) RaiseOfModel(text.status());
            return *std::move(text);
          },
          nb::arg("prompt"), nb::arg("tokens"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
          nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("presence_penalty"),
          nb::arg("frequency_penalty"), nb::arg("logit_bias"), nb::arg("min_tokens"), nb::arg("seed"),
          nb::arg("stops"), nb::arg("logprobs").none())
      .def(
          "encode",
          [](PyLlm& llm, const std::string& text, bool complete) {
            const std::shared_ptr<Owned<Llm>> model = llm.shared();
            absl::StatusOr<std::vector<int64_t>> tokens;
            {
              const GilReleased released;  // a prompt may be a book
              tokens = model->get().Encode(text, complete);
            }
            return ValueOrRaise(std::move(tokens));
          },
          nb::arg("text"), nb::arg("complete"))
      .def("close", &PyLlm::Close)
      .def_prop_ro("max_length", [](const PyLlm& llm) { return llm.get().max_length(); })
      .def_prop_ro("vocabulary", [](const PyLlm& llm) { return llm.get().vocabulary(); })
      .def_prop_ro("defaults", [](const PyLlm& llm) { return llm.get().defaults().sampling; })
      .def_prop_ro("default_max_tokens", [](const PyLlm& llm) { return llm.get().defaults().max_tokens; })
      .def_prop_ro("default_stop", [](const PyLlm& llm) { return llm.get().defaults().stop; })
      .def_prop_ro("notes", [](const PyLlm& llm) { return llm.get().notes(); })
      .def_prop_ro("texts", [](const PyLlm& llm) { return llm.get().plan().batch; })
      .def("report", [](const PyLlm& llm) { return llm.get().Report().dump(); })
      .def_prop_ro("planned_bytes", [](const PyLlm& llm) { return llm.get().plan().total_bytes; });
}

}  // namespace penstock::python
