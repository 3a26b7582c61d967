// What a model is made of, parameter by parameter: pure numbers and names, so that a model too large for
// memory can be described, read and written without building a block of it.
//
// A family (models/families/family.h) describes every parameter once. Its modules, where it lies in the
// state, how it is read from published files and written to them, and what a plan counts all follow from
// that.
#ifndef PENSTOCK_MODELS_WEIGHTS_LAYOUT_H_
#define PENSTOCK_MODELS_WEIGHTS_LAYOUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace penstock::models {

inline constexpr int64_t kParameterAlignment = 64;  // zero/compute/block.h's

// Where a published file may have a parameter under another name: elements [first, first + elements) of that
// tensor, which has this shape. With `transposed` a matrix lies there as [columns, rows]. One that has it
// not may also lie there in mxfp4 (models/weights/scaled_weights.h), whose tensors have this one's name and
// shape.
struct OtherPlace {
  std::string name;
  std::vector<uint64_t> shape;
  int64_t first = 0;
  bool transposed = false;
};

struct ParameterDescription {
  std::string name;         // in its block: "attn.c_attn.weight"
  std::string published;    // in Hugging Face's files, whole: "transformer.h.0.attn.c_attn.weight"
  int64_t rows = 0;         // as kept, row by row: [rows, columns]
  int64_t columns = 0;      // 0: a vector of `rows`
  double mean = 0;          // what it begins with: normally distributed,
  double deviation = 0;     // or where this is 0, the mean everywhere;
  double bound = 0;         // or where this is above 0, uniformly within it
  bool transposed = false;  // published as [columns, rows]
  bool frozen = false;      // training leaves it as it is
  // Of a block's rows of a matrix that is published as one: the first of them there, and how many there are.
  int64_t first_row = 0;
  int64_t published_rows = 0;  // 0: these are all
  std::vector<OtherPlace> other_places = {};
  // Of a mixture: which of its experts the matrix is a part of; -1: of none.
  int expert = -1;

  int64_t elements() const { return columns == 0 ? rows : rows * columns; }
  bool is_tile() const { return published_rows > 0; }
};

// What adapters (models/families/lora.h) add to their matrices' products.
struct AdapterFunction {
  double scaling = 1;
  double dropout = 0;  // of what goes into them, in training
};

// In the order of zero::FlatLayout: what has no dot in its name first, parameters of one submodule together,
// what is frozen before what trains.
struct BlockDescription {
  std::string name;
  // Blocks of one kind have the same shapes, and their stages that take the same compute alike; empty: like
  // no other.
  std::string kind;
  std::vector<ParameterDescription> parameters;
  AdapterFunction adapters = {};  // of those among them
};

// Names in its block of what adapts the matrix of this name: [rank, in] and [out, rank].
inline constexpr std::string_view kAdapterPrefix = "lora.";
inline std::string AdapterDown(const std::string& matrix) { return "lora." + matrix + ".A"; }
inline std::string AdapterUp(const std::string& matrix) { return "lora." + matrix + ".B"; }

// A parameter, and where it lies.
struct PublishedTensor {
  std::string name;  // Hugging Face's, whole
  int block = 0;
  int64_t offset = 0;  // in the block's run, in elements
  int64_t rows = 0;
  int64_t columns = 0;
  bool transposed = false;
  // Above 0: `block` has the first rows_of_block rows, each block behind it as many more, at its offset.
  int64_t rows_of_block = 0;
  // As it is published, where it is neither a vector nor a matrix: `rows` are its elements then.
  std::optional<std::vector<uint64_t>> shape = std::nullopt;
  // Where files may have it instead of under `name`; not of one that is published turned.
  std::vector<OtherPlace> other_places = {};

  int64_t elements() const { return columns == 0 ? rows : rows * columns; }
  std::vector<uint64_t> published_shape() const;
};

struct ModelLayout {
  std::string prefix;                    // of names; published files may leave it out
  std::vector<std::string> passed_over;  // endings of names that old files have beside the weights: constants
  // Where files are of a model that has this one as a part: what their names begin with instead of the
  // prefix, and the beginnings of the names of its other parts.
  std::vector<std::string> wrapped_prefixes, other_parts;
  std::vector<PublishedTensor>
      tensors;  // in the order of blocks and offsets; the input embedding is the first
  std::vector<int64_t> block_elements;  // of each block's run, padding included
  // Where what a state has of each block begins; empty: it has all of it.
  std::vector<int64_t> state_from;

  int64_t parameters() const;
  int64_t largest_block_parameters() const;
};

// What elements [first, first + elements) of a block have of a tensor.
struct TensorPiece {
  int64_t from = 0, to = 0;  // elements of the tensor
  int64_t at = 0;            // where `from` is, counted from `first`
};
// nullopt: nothing.
std::optional<TensorPiece> PieceOf(const PublishedTensor& tensor, int block, int64_t first, int64_t elements);

// Where an element of a tensor lies, and how many of those behind it, itself included, lie there with it.
struct TensorPlace {
  int block = 0;
  int64_t first = 0;  // in the block's run
  int64_t elements = 0;
};
TensorPlace PlaceOf(const PublishedTensor& tensor, int64_t element);

// Calls use(i, piece) for each tensor i of the layout that has some of those elements, in its order, to the
// first error.
absl::Status ForTensorsIn(const ModelLayout& layout, int block, int64_t first, int64_t elements,
                          absl::FunctionRef<absl::Status(size_t tensor, const TensorPiece& piece)> use);

// Places the parameters of each block one after the other, as zero::FlatLayout does.
ModelLayout LayoutOf(const std::vector<BlockDescription>& blocks);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_LAYOUT_H_
