// The mixture of experts of a layer in host memory: a part of generate/host_pass.h.
//
//   RETURN_IF_ERROR(mixture.Choose(layer, n, single));       // the layer's experts begin to be read
//   RETURN_IF_ERROR(mixture.Guess(layer + 1, m, single));    // and those that the next one may want
//   ASSIGN_OR_RETURN(HostRows y, mixture.Compute(n, single));
//
// Experts are computed in the order in which they come, and a row's results are summed in the order of
// experts when all are there: so its bits depend on neither memory, nor the drive, nor the rows beside it.
//
// Threads: one calls; those of the scratch's pool compute. Errors: kDataLoss: scores that are not numbers; of
// the reads; kResourceExhausted: memory is at its limit.
#ifndef PENSTOCK_GENERATE_HOST_MIXTURE_H_
#define PENSTOCK_GENERATE_HOST_MIXTURE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/host_rows.h"
#include "generate/matrix_product.h"
#include "generate/pass.h"
#include "generate/routing.h"

namespace penstock::generate {

class HostMixture {
 public:
  // Of a model with mixtures. All outlive it.
  HostMixture(const PassParts& parts, ProductScratch* scratch);

  bool Has(int64_t layer) const { return f_.mixture.Has(layer); }
  // `x`: what the layer's mixture takes; the first `single` of its rows decode.
  absl::Status Choose(int64_t layer, const HostRows& x, int64_t single);
  // Of a layer that has a mixture. `x`: about what it will take.
  absl::Status Guess(int64_t layer, const HostRows& x, int64_t single);
  // Of the layer of Choose: the sum over the experts, [rows, width].
  absl::StatusOr<HostRows> Compute(const HostRows& x, int64_t single);
  // What the shared expert gives, times the sigmoid of its own router. In place.
  absl::Status ScaleShared(int64_t layer, const HostRows& x, int64_t single, HostRows* shared);

 private:
  absl::StatusOr<Routes> RoutesOf(int64_t layer, const HostRows& x, int64_t single);
  // The product with a matrix that is kept in memory.
  absl::StatusOr<HostRows> KeptProduct(int64_t layer, const std::string& name, const HostRows& x,
                                       int64_t single);
  absl::StatusOr<HostRows> Product(int tensor, const WeightUnit& unit, const std::byte* memory,
                                   const HostRows& x, int64_t single);
  // Adds a vector that is kept to each row; -1: none.
  void AddKept(int tensor, HostRows* y);
  // What goes into the matrix down of an expert with MixtureFunction::pair_limit.
  absl::StatusOr<HostRows> ComputePairs(const ExpertMatrices& matrices, const WeightUnit& unit,
                                        const std::byte* memory, const HostRows& x, int64_t single);
  absl::StatusOr<HostRows> ComputeExpert(size_t number, const std::byte* memory, const HostRows& x,
                                         int64_t single);

  const PassParts parts_;
  const models::DecoderFunction& f_;
  const models::MixtureShape& shape_;
  ProductScratch& scratch_;
  int64_t layer_ = 0;  // of Choose
  Routes routes_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_HOST_MIXTURE_H_
