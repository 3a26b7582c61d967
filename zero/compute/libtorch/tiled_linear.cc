#include "zero/compute/libtorch/tiled_linear.h"

#include <torch/nn/modules/linear.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

absl::Status AddTiledLinear(Model* model, const std::string& name, const TiledLinearOptions& options) {
  const int64_t in = options.in, tiles = options.tiles;
  if (in < 1 || options.out < 1 || tiles < 1 || options.out % tiles != 0) {
    return absl::InvalidArgumentError(absl::StrCat("linear layer ", name, " of ", in, " inputs and ",
                                                   options.out, " outputs cannot be cut into ", tiles,
                                                   " tiles: they must divide the outputs"));
  }
  const int64_t rows = options.out / tiles;
  const bool bias = options.bias;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const std::string tile_name = absl::StrCat(name, ".", tile);
    const int block = model->AddBlock(tile_name, absl::StrCat(name, ".tile"), [in, rows, bias] {
      return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(in, rows).bias(bias));
    });
    model->AddStage(tile_name, block,
                    [in, tile, tiles](torch::nn::Module& module, const torch::Tensor& input, const Batch&) {
                      const torch::Tensor x = tile == 0 ? input : input.narrow(-1, 0, in);
                      torch::Tensor part = module.as<torch::nn::LinearImpl>()->forward(x);
                      if (tiles == 1) return part;
                      if (tile + 1 < tiles) return torch::cat({input, part}, -1);
                      return torch::cat({input.narrow(-1, in, input.size(-1) - in), part}, -1);
                    });
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
