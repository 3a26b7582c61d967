#include "models/families/vocabulary_tiles.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <utility>

namespace penstock::models {
namespace {

using torch::Tensor;

constexpr int64_t kIgnored = -100;  // as a target: of no token, as nll_loss has it

// Rows of a matrix by number. Of torch's own the gradient of 16-bit rows is summed in 16 bit, and the matrix
// as fp32 would be twice as much again.
struct SelectedRows : torch::autograd::Function<SelectedRows> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& matrix,
                        const Tensor& numbers, int64_t padding) {
    context->save_for_backward({numbers});
    context->saved_data["shape"] = matrix.sizes();
    context->saved_data["padding"] = padding;
    return matrix.index_select(0, numbers);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensor numbers = context->get_saved_variables()[0];
    const Tensor& of_rows = gradients[0];
    Tensor gradient = torch::zeros(context->saved_data["shape"].toIntVector(), of_rows.options());
    const Tensor learned = numbers.ne(context->saved_data["padding"].toInt()).nonzero().squeeze(1);
    if (learned.numel() > 0) {
      const auto [rows, which] = torch::_unique(numbers.index_select(0, learned), true, true);
      Tensor sums = torch::zeros({rows.size(0), of_rows.size(1)}, of_rows.options().dtype(torch::kFloat32));
      sums.index_add_(0, which, of_rows.index_select(0, learned).to(torch::kFloat32));
      gradient.index_copy_(0, rows, sums.to(of_rows.scalar_type()));
    }
    return {gradient, Tensor(), Tensor()};
  }
};

Tensor LogitsOf(const Tensor& tile, const Tensor& x, double cap) {
  const Tensor logits = torch::linear(x.to(tile.scalar_type()), tile);
  return (cap > 0 ? torch::tanh(logits / cap) * cap : logits).to(torch::kFloat32);
}

Tensor IsInTile(const Tensor& local, const Tensor& tile) {
  return local.ge(0).logical_and(local.lt(tile.size(0)));
}

}  // namespace

void AddEmbeddingTiles(const VocabularyCut& cut, const std::string& matrix, int64_t padding,
                       zero::Model* model) {
  for (int tile = 0; tile < cut.tiles(); ++tile) {
    model->AddStage(cut.StageOf("embed", tile), tile,
                    [matrix, padding, first = cut.first(tile)](torch::nn::Module& module, const Tensor& x,
                                                               const zero::TensorBatch& batch) {
                      const Tensor rows = module.as<DescribedModule>()->Get(matrix);
                      return EmbedTile(rows, first, batch.inputs, padding, first == 0 ? Tensor() : x);
                    });
  }
}

void AddLastNorm(int block, LastNorm norm, Head head, zero::Model* model) {
  const bool last = head == Head::kLastLogits;
  model->AddStage(
      "norm", block,
      [norm = std::move(norm), last](torch::nn::Module& module, const Tensor& x, const zero::TensorBatch&) {
        const Tensor of = last ? x.slice(1, x.size(1) - 1) : x;
        const Tensor normal = norm(*module.as<DescribedModule>(), of).to(torch::kFloat32);
        return normal.reshape({-1, normal.size(-1)});
      });
}

void AddHeadTiles(const VocabularyCut& cut, const std::string& matrix, int block, Head head, double cap,
                  zero::Model* model) {
  const bool gives_loss = head == Head::kLoss;
  for (int tile = 0; tile < cut.tiles(); ++tile) {
    const bool last = tile + 1 == cut.tiles();
    const zero::ValuesFunction compute = [matrix, first = cut.first(tile), last, gives_loss, cap](
                                             zero::StageCall& call, const zero::Values& in) -> zero::Values {
      const Tensor rows = call.module<DescribedModule>().Get(matrix);
      if (!gives_loss) return AppendLogits(rows, last, in, cap);
      zero::Values seen = LogitsOfTile(rows, first, call.batch().targets, in, cap);
      if (!last) return seen;
      return {MeanLoss(seen, call.batch().targets)};
    };
    model->AddStage(cut.StageOf(gives_loss ? "loss" : "logits", tile), block + tile, compute);
  }
}

Tensor EmbedTile(const Tensor& tile, int64_t first, const Tensor& ids, int64_t padding,
                 const Tensor& before) {
  const int64_t width = tile.size(1);
  const Tensor local = ids.reshape({-1}) - first;
  const Tensor here = IsInTile(local, tile).nonzero().squeeze(1);
  const Tensor rows = SelectedRows::apply(tile, local.index_select(0, here), padding - first);
  const Tensor all =
      before.defined() ? before.reshape({-1, width}) : torch::zeros({local.size(0), width}, tile.options());
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(width);
  return all.index_copy(0, here, rows).view(sizes);
}

zero::Values LogitsOfTile(const Tensor& tile, int64_t first, const Tensor& targets, const zero::Values& in,
                          double cap) {
  const Tensor& x = in[0];
  const Tensor logits = LogitsOf(tile, x, cap);
  Tensor largest, sum, own;
  {
    torch::NoGradGuard constant;  // it cancels out
    largest = logits.amax(-1);
    if (in.size() > 1) largest = torch::maximum(largest, in[1]);
  }
  sum = (logits - largest.unsqueeze(-1)).exp().sum(-1);
  const Tensor local = targets.reshape({-1}) - first;
  const Tensor chosen = logits.gather(-1, local.clamp(0, tile.size(0) - 1).unsqueeze(-1)).squeeze(-1);
  if (in.size() > 1) {
    sum = sum + in[2] * (in[1] - largest).exp();
    own = torch::where(IsInTile(local, tile), chosen, in[3]);
  } else {
    own = torch::where(IsInTile(local, tile), chosen, torch::zeros_like(chosen));
  }
  return {x, largest, sum, own};
}

zero::Values AppendLogits(const Tensor& tile, bool last, const zero::Values& in, double cap) {
  Tensor logits = LogitsOf(tile, in[0], cap);
  if (in.size() > 1) logits = torch::cat({in[1], logits}, -1);
  if (last) return {logits};
  return {in[0], logits};
}

Tensor MeanLoss(const zero::Values& seen, const Tensor& targets) {
  const Tensor counts = targets.reshape({-1}).ne(kIgnored);
  const Tensor losses = seen[2].log() - (seen[3] - seen[1]);
  return torch::where(counts, losses, torch::zeros_like(losses)).sum() / counts.sum();
}

}  // namespace penstock::models
