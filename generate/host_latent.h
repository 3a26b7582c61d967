// Attention to latents in host memory: a part of generate/host_pass.h.
//
//   HostLatent latent(parts, &scratch);
//   RETURN_IF_ERROR(latent.Begin(type));                        // room for the layer's matrix `up`
//   for each of its parts: latent.Add(matrix, memory, first, elements);
//   ASSIGN_OR_RETURN(HostRows records, latent.Records(down, c));   // turned elements first
//   ASSIGN_OR_RETURN(HostRows queries, latent.Queries(q));         // of records, the turned elements first
//   ... positions turn both; attention sums latents: mixed, fp32 [rows, heads * rank] ...
//   ASSIGN_OR_RETURN(HostRows result, latent.Values(mixed));
//
// The matrix is kept while its layer attends, in the compute type: its keys' half makes queries of records,
// the other one values of what attention gives (models/families/decoder.h). Both are products of
// kernels/product.h, head by head, whether a row decodes or is a prompt's.
//
// Threads: one calls; those of the scratch's pool compute. Errors: kResourceExhausted: memory is at its
// limit.
#ifndef PENSTOCK_GENERATE_HOST_LATENT_H_
#define PENSTOCK_GENERATE_HOST_LATENT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/host_rows.h"
#include "generate/matrix_product.h"
#include "generate/stored_matrix.h"
#include "models/families/decoder.h"

namespace penstock::generate {

class HostLatent {
 public:
  // All outlive it.
  HostLatent(const models::Decoder& decoder, ProductScratch* scratch);

  absl::Status Begin(kernels::DType type);
  // Elements [first, first + elements) of the matrix, as stored. Coded ones: whole rows.
  void Add(const StoredMatrix& matrix, const std::byte* memory, int64_t first, int64_t elements);
  // Until the next Begin.
  void End() { up_ = {}; }

  // `down`: [rows, rank + turned], what the matrix of this name gives: its latents, not normalized.
  absl::StatusOr<HostRows> LatentsOf(const HostRows& down) const;
  // [rows, turned + rank], of `down` and its normalized latents. Neighbours that turn lie half and half.
  absl::StatusOr<HostRows> Records(const HostRows& down, const HostRows& latents) const;
  // `q`: [rows, heads * (plain + turned)]; the result [rows, heads * (turned + rank)].
  absl::StatusOr<HostRows> Queries(const HostRows& q);
  // `mixed`: fp32 [rows, heads * rank]; the result [rows, heads * value], in the type of Begin.
  absl::StatusOr<HostRows> Values(const HostRows& mixed);

 private:
  // Copies what a position turns to where it turns it.
  void PlaceTurned(kernels::DType type, const std::byte* from, std::byte* to) const;
  int64_t head_rows() const { return shape_.plain + shape_.value; }  // of the matrix

  const models::LatentShape& shape_;
  const bool neighbours_;
  const int64_t heads_;
  ProductScratch& scratch_;
  HostRows up_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_HOST_LATENT_H_
