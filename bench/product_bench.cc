// Products of a few rows with a matrix of 8192 x 2048 (kernels/product.h), and of a prompt's many rows
// (kernels/many_rows.h), by the type of its weights, beside LibTorch's of the same rows. The weights come
// from memory: there are more of them than caches hold. Two threads. `items_per_second` counts multiply-adds,
// `bytes_per_second` the weights.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <string>
#include <vector>

#include "generate/matrix_product.h"

namespace penstock::bench {
namespace {

constexpr int64_t kOutputs = 8192, kColumns = 2048, kMatrices = 6;

void Report(benchmark::State& state, int64_t rows, double matrix_bytes) {
  state.SetItemsProcessed(state.iterations() * rows * kOutputs * kColumns);
  state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations()) * matrix_bytes));
}

// `prompt`: the rows are a prompt's.
void Ours(benchmark::State& state, const generate::StoredMatrix& matrix, int64_t rows, bool prompt) {
  const auto columns = static_cast<size_t>(kColumns);
  const size_t row_bytes = matrix.code.has_value() ? matrix.code->row_bytes(columns)
                                                   : columns * kernels::BytesPerElement(matrix.type);
  const size_t bytes = row_bytes * static_cast<size_t>(kOutputs);
  const std::vector<std::byte> weights(bytes * kMatrices, std::byte{1});
  // As a pass computes: in bf16 where the matrix is stored so or coded.
  const bool narrow = matrix.type == kernels::DType::kBf16 && !matrix.turned;
  const auto type = narrow ? kernels::DType::kBf16 : kernels::DType::kFp32;
  const generate::HostRows x = *generate::HostRows::Of(type, rows, kColumns);
  const std::vector<float> ones(x.elements(), 1);
  kernels::Convert(kernels::DType::kFp32, ones.data(), type, x.data(), x.elements());
  generate::ProductScratch scratch(2);
  size_t next = 0;
  for (auto _ : state) {
    auto product = generate::MatrixProduct::Begin(x, prompt ? 0 : rows, matrix, &scratch);
    (void)product->Add(weights.data() + bytes * (next++ % kMatrices), 0, kOutputs * kColumns);
    benchmark::DoNotOptimize(product->Result());
  }
  Report(state, rows, static_cast<double>(bytes));
}

void LibTorch(benchmark::State& state, torch::Dtype type, int64_t rows) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor weights = torch::ones({kMatrices, kOutputs, kColumns}, type);
  const torch::Tensor x = torch::ones({rows, kColumns}, type);
  int64_t next = 0;
  for (auto _ : state) benchmark::DoNotOptimize(torch::linear(x, weights[next++ % kMatrices]));
  Report(state, rows, static_cast<double>(weights[0].nbytes()));
}

void Register() {
  for (const int64_t rows : {1, 2, 4, 16, 32, 64, 128, 512}) {
    const auto add = [rows](const std::string& name, auto function) {
      benchmark::RegisterBenchmark((name + "/" + std::to_string(rows)).c_str(), function)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    };
    const auto ours = [&](const std::string& name, const generate::StoredMatrix& matrix) {
      if (rows <= 64)
        add("Product/" + name, [=](benchmark::State& state) { Ours(state, matrix, rows, false); });
      if (rows >= 16)
        add("Prompt/" + name, [=](benchmark::State& state) { Ours(state, matrix, rows, true); });
    };
    generate::StoredMatrix matrix = {.rows = kOutputs, .columns = kColumns, .type = kernels::DType::kFp32};
    ours("fp32", matrix);
    add("LibTorch/fp32", [=](benchmark::State& state) { LibTorch(state, torch::kFloat32, rows); });
    matrix.type = kernels::DType::kBf16;
    ours("bf16", matrix);
    add("LibTorch/bf16", [=](benchmark::State& state) { LibTorch(state, torch::kBFloat16, rows); });
    matrix.code = kernels::WeightCode{.bits = 8};
    ours("8bit", matrix);
    matrix.code = kernels::WeightCode{.bits = 4};
    ours("4bit", matrix);
    matrix.type = kernels::DType::kFp32;
    ours("4bit_in_fp32", matrix);
    matrix.code = kernels::WeightCode{.bits = 8};
    ours("8bit_in_fp32", matrix);
    matrix.type = kernels::DType::kBf16;
    matrix.code.reset();
    matrix.turned = true;
    ours("turned_bf16", matrix);
  }
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  at::set_num_threads(2);
  penstock::bench::Register();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
