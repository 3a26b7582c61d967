// How budgets of host memory, and of a device's where one computes, are divided for generation, and how many
// sequences are generated at once.
//
// A pass reads every weight that is not resident, and every sequence's keys and values that are not in
// memory: it takes the longer of those reads and of what is computed. With a batch that is given, memory that
// is left keeps weights. Else it goes to sequences until that gains no tokens a second: all weights are read
// once for all of them. A device keeps what its memory holds: keys and values first, then weights; the others
// are copied there in each pass.
//
// Of a model with mixtures the memory that is left keeps first what every pass uses, and then experts.
//
// Pure numbers.
#ifndef PENSTOCK_GENERATE_MEMORY_PLAN_H_
#define PENSTOCK_GENERATE_MEMORY_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "generate/kv_cache.h"
#include "kernels/weight_code.h"
#include "models/families/decoder.h"
#include "models/weights/scaled_weights.h"
#include "tiering/plan/device_plan.h"

namespace penstock::generate {

// Positions of a prompt that are computed at once: a prompt is cut at multiples of this, whatever the budget.
inline constexpr int64_t kChunkRows = 128;
// Of those, that attend at once on a device.
inline constexpr int64_t kAttentionRows = 32;
// Where LibTorch's libraries multiply (on a device): rows that decode, so many at once; all that is computed
// has as many rows, or a multiple. The share of a prompt begins at a multiple of kShareRows, so that it is
// aligned alike in any company.
inline constexpr int64_t kDeviceRows = 64;
inline constexpr int64_t kShareRows = 8;
inline int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum class CachePlace : uint8_t { kAuto, kDevice, kHost, kDrive };

// Places for units on their way through a device's memory: one is multiplied with while one is held for a
// layer's records, and others are on their way.
inline constexpr uint64_t kDevicePlaces = 4;

// The experts of a model's mixtures, which are read when a router has chosen them.
struct ExpertSizes {
  int64_t layers = 0;        // that have a mixture; 0: there is none
  int64_t each = 0;          // experts of a layer
  int64_t chosen = 0;        // of them for each row
  uint64_t place_bytes = 0;  // of an expert in memory
  int64_t elements = 0;      // of an expert's matrices

  int64_t all() const { return layers * each; }
  int64_t row_elements() const { return layers * chosen * elements; }
  // Experts that a pass of `rows` rows uses in all layers, where each is as likely as any other.
  double used(int64_t rows) const;
};

struct GenerationSizes {
  models::DecoderShape decoder;
  CacheGeometry cache;
  int64_t element_bytes = 2;     // of the compute type
  std::vector<uint64_t> units;   // bytes of each, in the order of use
  uint64_t kept_bytes = 0;       // vectors, in the compute type
  uint64_t table_bytes = 0;      // tables that are kept too, where the budget holds them
  uint64_t scratch_bytes = 0;    // to read rows through
  int64_t largest_part = 0;      // elements of a matrix that are used at once
  int64_t adapter_elements = 0;  // of a row, that an adapter makes at most; 0: there are none
  int64_t largest_part_rows = 0;
  int64_t largest_packed_rows = 0;  // of those that all rows are multiplied with in packed form
  bool converts = false;            // the compute type is not the stored one
  int64_t matrix_elements = 0;      // of all units
  int64_t turned_elements = 0;      // of those, stored column by column
  int64_t coded_elements = 0;       // of those, coded
  kernels::WeightCode code;         // in which most of them are
  int64_t decoded_elements = 0;     // that are decoded at once, at most
  // Of most of those with scales of their own; null: there are none, or they are fewer than coded ones.
  std::optional<models::ScaledCode> scaled;
  ExpertSizes experts;
  uint64_t loading_bytes = 0;  // of a table as it is stored, where it is kept in another form
};

// A device that computes, with memory of its own.
struct DeviceWish {
  uint64_t budget_bytes = 0;
  tiering::TensorSlack slack = {};
  double copy_bytes_per_second = 1e10;
};

struct GenerationWish {
  uint64_t budget_bytes = 0;
  std::optional<int64_t> batch;
  CachePlace cache = CachePlace::kAuto;
  int64_t sequences = 1;  // to be generated in all
  int64_t positions = 1;  // of the longest, prompt and text
  int64_t prompt = 1;     // positions of the longest prompt
  // Tokens of a text that are guessed and verified in one pass, at most (generate/prompt_lookup.h). Keys and
  // values are in memory then: those of wrong guesses are written over.
  int64_t drafted = 0;
  std::optional<DeviceWish> device;
  double drive_bytes_per_second = 2e9;
  double product_seconds = 0;  // that the products of one row take in a whole pass, decoding with them
  double row_seconds = 0;      // that each further row takes
};

enum class PassBound : uint8_t { kRead, kCopy, kCompute };
const char* PassBoundName(PassBound bound);  // "read", "copy", "compute"

// What a device with memory of its own has of a plan.
struct DevicePart {
  uint64_t ring_bytes = 0;
  uint64_t cache_bytes = 0;
  uint64_t tensor_bytes = 0;  // LibTorch's, at most
  uint64_t resident_bytes = 0;
  std::vector<bool> resident;  // by unit
  uint64_t total_bytes = 0;    // all of these
  uint64_t least_bytes = 0;
  uint64_t pass_bytes = 0;  // copied there in each pass, weights and at the longest keys and values

  uint64_t arena_bytes() const { return ring_bytes + cache_bytes + resident_bytes; }
};

// What a plan has of the experts of mixtures.
struct ExpertPart {
  int64_t places = 0, all = 0;  // experts in memory, and those of the model; 0: it has no mixtures
  uint64_t memory_bytes = 0;
  // Of a pass that decodes: experts that it uses, and those that it reads, in all layers, where each is as
  // likely as any other. Routers that prefer some, or choose alike for what follows, read less.
  double pass_used = 0, pass_read = 0;
  uint64_t pass_bytes = 0;  // of those that it reads
};

struct GenerationPlan {
  int64_t batch = 1;
  int64_t prompt_rows = 0;  // of prompts in one pass, at most
  CachePlace cache = CachePlace::kHost;
  bool keeps_tables = false;
  uint64_t ring_bytes = 0;
  uint64_t cache_bytes = 0;  // in memory: of the cache, or of what a cache on a drive needs
  uint64_t scratch_bytes = 0;
  uint64_t tensor_bytes = 0;  // LibTorch's, at most
  uint64_t resident_bytes = 0;
  std::vector<bool> resident;  // by unit, in host memory
  uint64_t total_bytes = 0;    // all of these
  uint64_t least_bytes = 0;    // the least budget for this batch and place
  ExpertPart experts;
  uint64_t pass_bytes = 0;        // of weights, read in each pass; experts as far as can be expected
  uint64_t cache_pass_bytes = 0;  // of keys and values, read in each pass at the longest
  std::optional<DevicePart> device;
  double pass_seconds = 0;  // predicted, of decoding
  PassBound bound = PassBound::kRead;

  // Without what drafted tokens gain, which the text decides.
  double tokens_per_second() const { return static_cast<double>(batch) / pass_seconds; }
};

// kFailedPrecondition: a budget is too small (says the least). kInvalidArgument: drafted tokens, and keys and
// values on the drive; keys and values on a device, and none.
absl::StatusOr<GenerationPlan> PlanGeneration(const GenerationSizes& sizes, const GenerationWish& wish);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_MEMORY_PLAN_H_
