#include "zero/compute/libtorch/changing_buffers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

nlohmann::json JsonOf(Device& device, const torch::Tensor& value) {
  const torch::Tensor here = ToHost(device, value).contiguous();
  std::string text;
  absl::Base64Escape({static_cast<const char*>(here.data_ptr()), here.nbytes()}, &text);
  return {{"type", std::string(NameOf(ElementTypeOf(here.scalar_type())))},
          {"sizes", here.sizes().vec()},
          {"data", std::move(text)}};
}

// Of the type and the sizes of `like`; undefined where it is of others.
torch::Tensor TensorOfJson(const nlohmann::json& json, const torch::Tensor& like) {
  std::string bytes;
  if (!json.is_object() || json.value("type", "") != NameOf(ElementTypeOf(like.scalar_type())) ||
      !json.contains("sizes") || json["sizes"] != nlohmann::json(like.sizes().vec()) ||
      !absl::Base64Unescape(json.value("data", ""), &bytes) || bytes.size() != like.nbytes())
    return {};
  torch::Tensor value = torch::empty(like.sizes(), torch::TensorOptions().dtype(like.scalar_type()));
  if (!bytes.empty()) std::memcpy(value.data_ptr(), bytes.data(), bytes.size());
  return value;
}

}  // namespace

ChangingBuffers::ChangingBuffers(const Model& model, const std::vector<std::shared_ptr<BlockModule>>& modules,
                                 const std::vector<std::vector<size_t>>& which, Device& device)
    : device_(&device) {
  for (size_t b = 0; b < modules.size(); ++b) {
    blocks_.push_back({model.blocks[b].name, modules[b], which[b], {}, {}});
    if (!which[b].empty()) Begin(static_cast<int>(b), modules[b]->module());
  }
}

bool ChangingBuffers::any() const {
  return std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) { return !block.which.empty(); });
}

void ChangingBuffers::Begin(int block, const torch::nn::Module& module) {
  Block& of = blocks_[static_cast<size_t>(block)];
  const std::vector<torch::Tensor> buffers = module.buffers();
  of.now.clear();
  for (const size_t i : of.which) {
    const torch::Tensor value = buffers[i].detach().clone(torch::MemoryFormat::Contiguous);
    of.now.push_back(value.device() == TorchDeviceOf(*device_) ? value : ToDevice(*device_, value));
  }
  of.accepted = ClonesOf(of.now);
}

void ChangingBuffers::LendThese(int block, const Values& values) const {
  const Block& of = blocks_[static_cast<size_t>(block)];
  for (size_t i = 0; i < of.which.size(); ++i) of.module->SetBuffer(of.which[i], values[i]);
}

Values ChangingBuffers::Copies(int block) const { return ClonesOf(blocks_[static_cast<size_t>(block)].now); }

int64_t ChangingBuffers::ChangesOfOthers(int block) const {
  const Block& of = blocks_[static_cast<size_t>(block)];
  int64_t changes = 0;
  for (size_t i = 0; i < of.module->buffers().size(); ++i) {
    if (std::find(of.which.begin(), of.which.end(), i) == of.which.end())
      changes += of.module->buffers()[i]._version();
  }
  return changes;
}

Values ChangingBuffers::ClonesOf(const Values& values) const {
  Values clones;
  for (const torch::Tensor& value : values) clones.push_back(value.clone());
  return clones;
}

void ChangingBuffers::Undo() {
  for (Block& block : blocks_) {
    for (size_t i = 0; i < block.now.size(); ++i) block.now[i].copy_(block.accepted[i]);
  }
}

absl::StatusOr<nlohmann::json> ChangingBuffers::Accept() {
  nlohmann::json values;
  RETURN_IF_ERROR(Guarded("the buffers of the model", [&] {
    values = ToJson();
    for (Block& block : blocks_) {
      for (size_t i = 0; i < block.now.size(); ++i) block.accepted[i].copy_(block.now[i]);
    }
  }));
  return values;
}

nlohmann::json ChangingBuffers::ToJson() const {
  nlohmann::json values;
  for (const Block& block : blocks_) {
    for (size_t i = 0; i < block.which.size(); ++i)
      values[block.name][block.module->buffer_names()[block.which[i]]] = JsonOf(*device_, block.now[i]);
  }
  return values;
}

absl::Status ChangingBuffers::RestoreBlock(Block* block, const nlohmann::json& values) const {
  const std::vector<std::string>& names = block->module->buffer_names();
  for (const auto& [name, json] : values.items()) {
    const auto wrong = [&, of = name](const char* why) {
      return absl::DataLossError(absl::StrCat("buffer ", of, " of block ", block->name, ": ", why));
    };
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) return wrong("the model has no such buffer");
    const auto number = static_cast<size_t>(found - names.begin());
    torch::Tensor value = TensorOfJson(json, block->module->buffers()[number]);
    if (!value.defined()) return wrong("the commit has another type or shape of it than the model");
    value = ToDevice(*device_, value);
    const auto known = std::find(block->which.begin(), block->which.end(), number);
    const auto i = static_cast<size_t>(known - block->which.begin());
    if (known == block->which.end()) {  // nothing was trained where it was measured
      block->which.push_back(number);
      block->now.emplace_back();
      block->accepted.emplace_back();
    }
    block->now[i] = value;
    block->accepted[i] = value.clone();
  }
  for (const size_t i : block->which) {
    if (values.contains(names[i])) continue;
    return absl::DataLossError(
        absl::StrCat("the commit has no buffer ", names[i], " of block ", block->name));
  }
  return absl::OkStatus();
}

absl::Status ChangingBuffers::Restore(const nlohmann::json& values) {
  for (const Block& block : blocks_) {
    if (block.which.empty() || (values.is_object() && values.contains(block.name))) continue;
    return absl::DataLossError(absl::StrCat("the commit has no buffers of block ", block.name));
  }
  if (values.is_null()) return absl::OkStatus();
  for (const auto& [name, of_block] : values.items()) {
    const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                    [&, of = name](const Block& block) { return block.name == of; });
    if (found == blocks_.end() || !of_block.is_object())
      return absl::DataLossError(
          absl::StrCat("the commit has buffers of block ", name, ", the model has none"));
    absl::Status restored;
    RETURN_IF_ERROR(Guarded(absl::StrCat("the buffers of block ", name),
                            [&] { restored = RestoreBlock(&*found, of_block); }));
    RETURN_IF_ERROR(restored);
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
