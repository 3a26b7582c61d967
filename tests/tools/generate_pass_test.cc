// A pass: what a sequence gets of it has the same bits whoever else is in it, for weights of every kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "aio/arena.h"
#include "generate/device_pass.h"
#include "generate/expert_cache.h"
#include "generate/host_pass.h"
#include "generate/weight_source.h"
#include "models/families/family.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/mixtures.h"
#include "tests/tools/penstock_program.h"

namespace penstock::generate::generate_pass_test {
namespace {

using nlohmann::json;

constexpr int64_t kPositions = 400;
enum class Products { kOwn, kLibTorch };

// Everything that a PassRunner needs, with the cache in host memory and nothing resident.
class Passes {
 public:
  explicit Passes(const std::string& directory, Products products = Products::kOwn) {
    const auto model = models::OpenModel(directory);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *model;
    decoder_ = *model_->decoder();
    layout_ = model_->Layout();
    order_ = OrderOf(decoder_, layout_);
    aio::ArenaOptions memory;
    memory.bytes = uint64_t{96} << 20;
    arena_ = *aio::Arena::Create(memory);
    aio::EngineOptions options;
    options.arenas = {arena_.get()};
    engine_ = *aio::Engine::Create(std::move(options));
    auto source = OpenSafetensors(engine_.get(), directory, layout_, order_.uses(), "weights");
    EXPECT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
    const kernels::DType type = ComputeType(*source_, order_);
    const models::DecoderShape& shape = decoder_.shape;
    const int64_t width = type == kernels::DType::kFp32 ? 4 : 2;
    const CacheGeometry geometry = {.layers = shape.layers,
                                    .record_bytes = static_cast<uint64_t>(shape.record_elements() * width)};
    cache_ = KvCache::InHostMemory(geometry, arena_.get(), uint64_t{64} << 20);
    scratch_ = *arena_->Allocate(source_->scratch_bytes());
    ring_ = *arena_->Allocate(3 * source_->largest_unit_bytes());
    kept_ = *KeptTensors::Load(decoder_, layout_, source_.get(), type, /*table_bytes=*/0,
                               {scratch_.data(), source_->scratch_bytes()});
    stream_ = std::make_unique<Stream>(source_.get(), cache_.get(), engine_.get(),
                                       std::span(ring_.data(), 3 * source_->largest_unit_bytes()),
                                       std::vector<std::byte*>(source_->units().size(), nullptr));
    if (!order_.experts.empty()) {
      // Fewer than a pass uses.
      const uint64_t places = 4 * source_->largest_expert_bytes();
      expert_memory_ = *arena_->Allocate(places);
      experts_ = std::make_unique<ExpertCache>(source_.get(), engine_.get(),
                                               std::span(expert_memory_.data(), places), shape.layers,
                                               shape.mixture.experts);
    }
    const PassParts parts = {.model = model_.get(),
                             .decoder = &decoder_,
                             .layout = &layout_,
                             .order = &order_,
                             .source = source_.get(),
                             .kept = kept_.get(),
                             .stream = stream_.get(),
                             .cache = cache_.get(),
                             .experts = experts_.get(),
                             .device = zero::HostDevice().get()};
    runner_ =
        products == Products::kOwn ? MakeHostPass(parts, /*threads=*/2) : *LibTorchCompute()->MakePass(parts);
  }

  int Slot() { return *cache_->Take(kPositions); }

  // fp32 [wanted, vocabulary].
  at::Tensor Run(const std::vector<Share>& shares) {
    runner_->AppendStart();
    runner_->AppendRest(shares);
    auto logits = runner_->Run(shares);
    EXPECT_TRUE(logits.ok()) << logits.status();
    if (!logits.ok()) return {};
    const int64_t vocabulary = decoder_.shape.vocab;
    const at::Tensor rows =
        at::empty({static_cast<int64_t>(logits->size()) / vocabulary, vocabulary}, at::kFloat);
    std::copy(logits->begin(), logits->end(), rows.data_ptr<float>());
    return rows;
  }

 private:
  std::shared_ptr<const models::LanguageModel> model_;
  models::Decoder decoder_;
  models::ModelLayout layout_;
  MatrixOrder order_;
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> engine_;
  std::unique_ptr<WeightSource> source_;
  std::unique_ptr<KvCache> cache_;
  aio::Region scratch_, ring_, expert_memory_;
  std::unique_ptr<KeptTensors> kept_;
  std::unique_ptr<ExpertCache> experts_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<PassRunner> runner_;
};

class GeneratePassTest : public tools::testing_support::ProgramTest {};

std::vector<int64_t> Tokens(std::mt19937_64* random, size_t count) {
  std::vector<int64_t> tokens(count);
  for (int64_t& token : tokens) token = static_cast<int64_t>((*random)() % 300);
  return tokens;
}

void ExpectSameRow(const at::Tensor& a, int64_t row_of_a, const at::Tensor& b, int64_t row_of_b) {
  const auto bytes = static_cast<size_t>(a.size(1)) * sizeof(float);
  EXPECT_EQ(std::memcmp(a[row_of_a].data_ptr<float>(), b[row_of_b].data_ptr<float>(), bytes), 0)
      << "rows " << row_of_a << " and " << row_of_b;
}

// Within rounding, of the row's largest element: sums of other orders differ by 1e-5 of it, a row of another
// text by as much as it is. (An element near zero has no digits of its own.)
void ExpectNearRow(const at::Tensor& a, int64_t row_of_a, const at::Tensor& b, int64_t row_of_b) {
  const at::Tensor difference = (a[row_of_a] - b[row_of_b]).abs().max();
  EXPECT_LE(difference.item<float>(), 1e-4 * b[row_of_b].abs().max().item<float>())
      << "rows " << row_of_a << " and " << row_of_b;
}

// Prompts of many lengths, then four tokens each: alone, drafted at once, and beside all others in any order,
// some of which still read their prompts.
void ExpectTheSameRowsInAnyCompany(const std::string& directory, Products products,
                                   decltype(&ExpectSameRow) expect_same) {
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  Passes passes(directory, products);
  struct Text {
    std::vector<int64_t> prompt, next;
    at::Tensor begins, goes_on;  // logits of its last prompt position, and of four tokens behind it
  };
  std::vector<Text> texts;
  for (const size_t length : {1, 2, 17, 128, 129, 300, 31, 5, 64, 3, 130, 7, 8, 9, 10, 11, 12, 13, 14})
    texts.push_back({Tokens(&random, length), Tokens(&random, 4), {}, {}});
  for (Text& text : texts) {
    const int slot = passes.Slot();
    const auto past = static_cast<int64_t>(text.prompt.size());
    text.begins = passes.Run({{slot, 0, text.prompt, false, true}});
    std::vector<at::Tensor> rows;
    for (size_t i = 0; i < text.next.size(); ++i)
      rows.push_back(passes.Run({{slot, past + static_cast<int64_t>(i), {text.next[i]}, true, true}}));
    text.goes_on = at::cat(rows);
    // Verified as drafted ones: written over what is there.
    const at::Tensor drafted = passes.Run({{slot, past, text.next, true, true}});
    for (int64_t i = 0; i < 4; ++i) expect_same(drafted, i, text.goes_on, i);
  }
  // All at once: those at even places have read their prompts.
  std::vector<size_t> order(texts.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> slots(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) slots[i] = passes.Slot();
  std::vector<Share> first, second;
  for (const size_t i : order) {
    if (i % 2 == 0) first.push_back({slots[i], 0, texts[i].prompt, false, true});
  }
  const at::Tensor begun = passes.Run(first);
  int64_t row = 0;
  for (const size_t i : order) {
    if (i % 2 == 0) expect_same(begun, row++, texts[i].begins, 0);
  }
  for (const size_t i : order) {
    const auto past = static_cast<int64_t>(texts[i].prompt.size());
    if (i % 2 == 0) second.push_back({slots[i], past, texts[i].next, true, true});
  }
  for (const size_t i : order) {
    if (i % 2 == 1) second.push_back({slots[i], 0, texts[i].prompt, false, true});
  }
  const at::Tensor mixed = passes.Run(second);
  row = 0;
  for (const size_t i : order) {
    for (int64_t t = 0; i % 2 == 0 && t < 4; ++t) expect_same(mixed, row++, texts[i].goes_on, t);
  }
  for (const size_t i : order) {
    if (i % 2 == 1) expect_same(mixed, row++, texts[i].begins, 0);
  }
  EXPECT_EQ(row, mixed.size(0));
}

void ExpectTheSameBitsInAnyCompany(const std::string& directory) {
  ExpectTheSameRowsInAnyCompany(directory, Products::kOwn, ExpectSameRow);
}

std::vector<json> Configs() {
  return {{{"model_type", "gpt2"},
           {"n_layer", 2},
           {"n_embd", 100},
           {"n_head", 4},
           {"n_positions", 512},
           {"vocab_size", 300},
           {"resid_pdrop", 0.0},
           {"attn_pdrop", 0.0},
           {"embd_pdrop", 0.0}},
          {{"model_type", "gemma2"},
           {"hidden_size", 104},
           {"intermediate_size", 229},
           {"num_hidden_layers", 2},
           {"num_attention_heads", 4},
           {"num_key_value_heads", 2},
           {"head_dim", 26},
           {"vocab_size", 300},
           {"max_position_embeddings", 512},
           {"sliding_window", 50},
           {"attn_logit_softcapping", 2.0},
           {"final_logit_softcapping", 9.0}},
          {{"model_type", "phi3"},
           {"hidden_size", 104},
           {"intermediate_size", 229},
           {"num_hidden_layers", 2},
           {"num_attention_heads", 4},
           {"num_key_value_heads", 2},
           {"vocab_size", 300},
           {"head_dim", 24},
           {"max_position_embeddings", 512},
           {"partial_rotary_factor", 0.5},
           {"rope_scaling",
            {{"type", "longrope"},
             {"attention_factor", 1.3},
             {"short_factor", {1, 1.5, 2, 2.5, 3, 3.5}},
             {"long_factor", {1, 1, 1, 1, 1, 1}}}}},
          {{"model_type", "llama"},
           {"hidden_size", 104},
           {"intermediate_size", 229},
           {"num_hidden_layers", 2},
           {"num_attention_heads", 4},
           {"num_key_value_heads", 2},
           {"vocab_size", 300},
           {"max_position_embeddings", 512},
           {"tie_word_embeddings", true}}};
}

TEST_F(GeneratePassTest, ARowHasTheSameBitsInAnyCompanyInFp32AndBf16) {
  int number = 0;
  for (const json& config : Configs()) {
    for (const swap::Dtype dtype : {swap::Dtype::kF32, swap::Dtype::kBf16}) {
      SCOPED_TRACE(config.dump());
      const std::string directory = dir_ + "/model" + std::to_string(number++);
      tools::testing_support::WriteModel(directory, config, 1, dtype);
      ExpectTheSameBitsInAnyCompany(directory);
    }
  }
}

TEST_F(GeneratePassTest, ARowHasTheSameBitsInAnyCompanyOfMixtures) {
  int number = 0;
  for (const json& config : tools::testing_support::MixtureConfigs()) {
    for (const swap::Dtype dtype : {swap::Dtype::kF32, swap::Dtype::kBf16}) {
      SCOPED_TRACE(config.dump());
      const std::string directory = dir_ + "/mixture" + std::to_string(number++);
      tools::testing_support::WriteModel(directory, config, 1, dtype);
      ExpectTheSameBitsInAnyCompany(directory);
    }
  }
}

TEST_F(GeneratePassTest, ARowHasTheSameBitsInAnyCompanyOfCodedWeights) {
  const std::string directory = dir_ + "/model";
  tools::testing_support::WriteModel(directory, Configs().back(), 1, swap::Dtype::kBf16);
  for (const std::string bits : {"8", "4"}) {
    const std::string packed = dir_ + "/packed" + bits;
    const auto ran = ProgramTest::Run({"pack", directory, packed, "--weights", bits, "--group", "32"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    ExpectTheSameBitsInAnyCompany(packed);
  }
}

// As a device's pass is made, with rows that are nobody's: of LibTorch's products on the processor, whose
// bits depend on their places.
void ExpectTheRowsOfOwnProducts(const std::string& directory) {
  std::vector<Share> shares;
  Passes own(directory), librarys(directory, Products::kLibTorch);
  for (const int64_t length : {1, 40, 7, 130, 8}) {
    std::vector<int64_t> prompt;
    for (int64_t i = 0; i < length; ++i) prompt.push_back((31 * i + length) % 300);
    const int slot = own.Slot();
    EXPECT_EQ(librarys.Slot(), slot);
    shares.push_back({slot, 0, prompt, false, true});
  }
  for (int pass = 0; pass < 3; ++pass) {
    const at::Tensor expected = own.Run(shares), got = librarys.Run(shares);
    ASSERT_EQ(got.sizes(), expected.sizes());
    for (int64_t row = 0; row < expected.size(0); ++row) ExpectNearRow(got, row, expected, row);
    for (Share& share : shares) {
      share.past += static_cast<int64_t>(share.tokens.size());
      share.tokens = {(share.past * 17) % 300};
      share.decodes = true;
    }
  }
}

TEST_F(GeneratePassTest, APassOfLibTorchsProductsHasTheSameRows) {
  int number = 0;
  for (const json& config : Configs()) {
    SCOPED_TRACE(config.dump());
    const std::string directory = dir_ + "/model" + std::to_string(number++);
    tools::testing_support::WriteModel(directory, config, 1, swap::Dtype::kF32);
    ExpectTheSameRowsInAnyCompany(directory, Products::kLibTorch, ExpectNearRow);
    ExpectTheRowsOfOwnProducts(directory);
    for (const std::string bits : {"8", "4"}) {
      const std::string packed = directory + "-" + bits;
      const auto ran = ProgramTest::Run({"pack", directory, packed, "--weights", bits});
      ASSERT_EQ(ran.code, 0) << ran.err;
      ExpectTheRowsOfOwnProducts(packed);
    }
  }
}

}  // namespace
}  // namespace penstock::generate::generate_pass_test
