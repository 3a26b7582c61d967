// Where generation reads weights: a Hugging Face directory, in place, packed or not, a state directory or
// checkpoint, or adapters in such a state and the weights that they go to in a directory.
//
// A source cuts the matrices that a pass uses into *units*, in the order in which the pass uses them. A unit
// is what one read brings: rows of one matrix (safetensors), or a tile (a store). Its *parts* say which
// elements of which matrix stand where in its memory. Vectors, and rows of tables, are read when asked for.
// An expert of a mixture is a unit of its own, with all of its matrices, which is read when a router has
// chosen it: where they lie side by side in a file, as `penstock pack` and transformers write them, by one
// request.
//
//   ASSIGN_OR_RETURN(auto source, OpenSafetensors(&engine, directory, layout, uses));
//   UnitRead read;
//   RETURN_IF_ERROR(source->Start(unit, memory, &read));     // memory: units()[unit].bytes, at 4096
//   RETURN_IF_ERROR(source->Finish(&read));                   // waits, and verifies what has a checksum
//
// Threads: one. Ownership: the engine outlives the source; memory and UnitRead belong to the caller, and stay
// until the read is finished. Errors: as aio/engine.h and swap/store.h; kDataLoss: damage.
#ifndef PENSTOCK_GENERATE_WEIGHT_SOURCE_H_
#define PENSTOCK_GENERATE_WEIGHT_SOURCE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/request.h"
#include "kernels/float16.h"
#include "kernels/weight_code.h"
#include "models/families/family.h"
#include "models/weights/layout.h"
#include "models/weights/scaled_weights.h"
#include "swap/store.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::generate {

// Units of safetensors are cut to this: small against a ring, long enough for the drive. It is the same for
// every budget, since products of other shapes may have other bits.
inline constexpr uint64_t kUnitBytes = uint64_t{8} << 20;

// Elements [first, first + elements) of a matrix, row by row as stored.
struct WeightPart {
  int tensor = 0;  // of ModelLayout::tensors
  int64_t first = 0;
  int64_t elements = 0;
  uint64_t at = 0;  // byte in the unit's memory
  // Of a matrix of an expert whose scales come with it (models::WeightImport::Place): where they are there.
  uint64_t scales_at = 0, scales_bytes = 0;
};

struct WeightUnit {
  uint64_t bytes = 0;  // of memory: a multiple of 4096
  std::vector<WeightPart> parts;
};

// The parameters of an expert: numbers of layout.tensors. -1: it has none; of a layer without a mixture, all.
// Matrices are read when they are used, vectors are kept.
struct ExpertMatrices {
  int gate = -1, up = -1, down = -1;
  int up_bias = -1, down_bias = -1;
  bool there() const { return up >= 0; }
};

// The matrices of a pass: numbers of layout.tensors.
struct WeightUses {
  std::span<const int> in_order;            // that every pass uses, in the order of use
  std::span<const ExpertMatrices> experts;  // of all layers, layer by layer
};

// One read in flight.
struct UnitRead {
  aio::Request request;
  swap::TileIo tile;
  swap::Store* store = nullptr;  // null: `request`
  bool pending = false;
};

// The reads of an expert in flight: one for each run of its bytes in a file.
struct ExpertRead {
  std::array<aio::Request, 4> requests;
  size_t started = 0;  // of them
  bool finished() const {
    return std::all_of(requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(started),
                       [](const aio::Request& request) { return request.finished(); });
  }
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // In the order of use.
  const std::vector<WeightUnit>& units() const { return units_; }
  // How the elements of a tensor are stored (coded ones: what they are decoded to), and whether a matrix is
  // stored as [columns, rows].
  kernels::DType type(int tensor) const { return tensors_[static_cast<size_t>(tensor)].type; }
  bool turned(int tensor) const { return tensors_[static_cast<size_t>(tensor)].turned; }
  // Of a matrix whose rows are stored coded (kernels/weight_code.h); its parts are whole rows.
  const std::optional<kernels::WeightCode>& code(int tensor) const {
    return tensors_[static_cast<size_t>(tensor)].code;
  }
  // Of a matrix with scales of its own, which are in memory; else null. Its parts are whole rows.
  const std::shared_ptr<const models::ScaledMatrix>& scaled(int tensor) const {
    return tensors_[static_cast<size_t>(tensor)].scaled;
  }
  // Bytes that a pass over all units moves, by what reads them.
  uint64_t pass_bytes() const;
  uint64_t largest_unit_bytes() const;

  // Reads begin at once and end in any order; several may be in flight.
  virtual absl::Status Start(size_t unit, std::byte* memory, UnitRead* read) = 0;
  absl::Status Finish(UnitRead* read);

  // Of WeightUses::experts, by their numbers; without parts where there is none.
  const std::vector<WeightUnit>& experts() const { return experts_; }
  // Of the largest; 0: there are none.
  uint64_t largest_expert_bytes() const;
  // Reads an expert as Start does. `memory`: experts()[expert].bytes, at 4096; it and `read` stay until the
  // read is finished. A read that could not be started has nothing in flight.
  virtual absl::Status StartExpert(size_t expert, std::byte* memory, aio::Priority priority,
                                   ExpertRead* read);
  // Waits. The status of the first request that failed.
  absl::Status FinishExpert(ExpertRead* read);

  // Rows of a table, or with rows 0..n all of it, as they are stored, row by row into `to`. Waits. `memory`:
  // scratch_bytes(), at 4096.
  virtual absl::Status ReadRows(int tensor, std::span<const int64_t> rows, std::span<std::byte> memory,
                                std::byte* to) = 0;
  virtual uint64_t scratch_bytes() const = 0;
  uint64_t rows_bytes() const { return rows_bytes_; }  // that ReadRows has read from the drive

 protected:
  struct Stored {
    kernels::DType type = kernels::DType::kBf16;
    bool turned = false;
    std::optional<kernels::WeightCode> code = std::nullopt;
    std::shared_ptr<const models::ScaledMatrix> scaled = nullptr;
  };
  explicit WeightSource(aio::Engine* engine) : engine_(*engine) {}

  aio::Engine& engine_;
  std::vector<WeightUnit> units_, experts_;
  std::vector<Stored> tensors_;  // parallel to ModelLayout::tensors
  uint64_t rows_bytes_ = 0;
};

// `label`: the words of the command line that errors begin with.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenSafetensors(aio::Engine* engine, const std::string& path,
                                                              const models::ModelLayout& layout,
                                                              const WeightUses& uses,
                                                              const std::string& label);

// The committed weights of a run whose weights are of type `type`. `parts`, by rank, at commit `sequence`:
// held open and locked, so that nobody trains there meanwhile. kUnimplemented: a mixture of experts.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenState(aio::Engine* engine,
                                                        const zero::ShardDirectories& parts,
                                                        uint64_t sequence, kernels::DType type,
                                                        const models::ModelLayout& layout,
                                                        const WeightUses& uses);

// The weights of a run that keeps adapters alone: these as OpenState's, the frozen weights that they go to
// from the safetensors in `path`, as OpenSafetensors'.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenAdapted(aio::Engine* engine,
                                                          const zero::ShardDirectories& parts,
                                                          uint64_t sequence, kernels::DType type,
                                                          const std::string& path,
                                                          const models::LanguageModel& model,
                                                          const WeightUses& uses, const std::string& label);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_WEIGHT_SOURCE_H_
