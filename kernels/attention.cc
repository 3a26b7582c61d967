#include "kernels/attention.h"

#include "kernels/simd/table.h"

namespace penstock::kernels {

void Attend(const AttentionRecords& records, const void* queries, size_t heads, float scale, size_t first,
            size_t end, float* out) {
  Kernels().attend[static_cast<size_t>(records.type)]({.queries = queries,
                                                       .heads = heads,
                                                       .records = records.data,
                                                       .positions = records.positions,
                                                       .key_heads = records.key_heads,
                                                       .depth = records.depth,
                                                       .scale = scale,
                                                       .cap = records.cap,
                                                       .sinks = records.sinks,
                                                       .value_depth = records.value_depth,
                                                       .first = first,
                                                       .end = end,
                                                       .out = out});
}

}  // namespace penstock::kernels
