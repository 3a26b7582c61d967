// The last include of a level's source file: its checksum functions and the table itself. The xxHash library
// is taken as its header with all functions static (XXH_INLINE_ALL), compiled here for the level's
// instructions: the library's own binary uses SSE2 alone.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

inline uint64_t ChecksumBytes(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}
inline void ChecksumUpdate(void* state, const void* data, size_t bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}

#define PENSTOCK_UPDATES_OF_PARAM(opt, p)                                                       \
  {                                                                                             \
    {Update<opt, p, 0, 0>, Update<opt, p, 0, 1>}, {Update<opt, p, 1, 0>, Update<opt, p, 1, 1>}, \
        {Update<opt, p, 2, 0>, Update<opt, p, 2, 1>},                                           \
  }
#define PENSTOCK_UPDATES(opt)                                                                                \
  {                                                                                                          \
    PENSTOCK_UPDATES_OF_PARAM(opt, 0), PENSTOCK_UPDATES_OF_PARAM(opt, 1), PENSTOCK_UPDATES_OF_PARAM(opt, 2), \
        PENSTOCK_UPDATES_OF_PARAM(opt, 3),                                                                   \
  }

// Inside this namespace, so that plain names mean this level's functions.
constexpr KernelTable kTable = {
    .stream_fence = StreamFence,
    .to_fp32 = {nullptr, ToFp32<1>, ToFp32<2>},
    .from_fp32 = {nullptr, FromFp32<1>, FromFp32<2>},
    .accumulate = {Accumulate<0>, Accumulate<1>, Accumulate<2>},
    .split = Split,
    .join = Join,
    .block_squares = {BlockSquares<0>, BlockSquares<1>, BlockSquares<2>},
    .all_finite = {AllFinite<0>, AllFinite<1>, AllFinite<2>},
    .scale = {Scale<0>, Scale<1>, Scale<2>},
    .encode8 = {Encode8<0>, Encode8<1>},
    .decode8 = {Decode8<0>, Decode8<1>},
    .encode_weights = {{EncodeWeightGroup<8, 0>, EncodeWeightGroup<8, 1>, EncodeWeightGroup<8, 2>},
                       {EncodeWeightGroup<4, 0>, EncodeWeightGroup<4, 1>, EncodeWeightGroup<4, 2>}},
    .decode_weights = {{DecodeWeightRow<8, 0>, DecodeWeightRow<8, 1>, DecodeWeightRow<8, 2>},
                       {DecodeWeightRow<4, 0>, DecodeWeightRow<4, 1>, DecodeWeightRow<4, 2>}},
    .product = {Product<PlainWeights<0>>, Product<PlainWeights<1>>, Product<PlainWeights<2>>},
    .coded_product = {Product<CodedWeights<8>>, Product<CodedWeights<4>>},
    .pack_bf16 = kPackBf16,
    .bf16_product = kBf16Product,
    .pack_pairs = PackPairs,
    .pair_product = Product<PairWeights>,
    .pack_tiles = PackTiles,
    .tile_product = {TileProduct<PlainStrip>, TileProduct<CodedStrip<8>>, TileProduct<CodedStrip<4>>},
    .amx_product = {kAmxProduct<PlainStrip>, kAmxProduct<CodedStrip<8>>, kAmxProduct<CodedStrip<4>>},
    .turned_product = {TurnedProduct<0>, TurnedProduct<1>, TurnedProduct<2>},
    .attend = {Attend<0>, Attend<1>, Attend<2>},
    .turn_rows = {TurnRows<0>, TurnRows<1>, TurnRows<2>},
    .take_turned = {TakeTurned<0>, TakeTurned<1>, TakeTurned<2>},
    .many_product = {ManyProduct<StripOf<PlainWeights<0>>>, ManyProduct<StripOf<PlainWeights<1>>>,
                     ManyProduct<StripOf<PlainWeights<2>>>},
    .coded_many_product = {ManyProduct<StripOf<CodedWeights<8>>>, ManyProduct<StripOf<CodedWeights<4>>>},
    .turned_many_product = {ManyProduct<TurnedStrip<0>>, ManyProduct<TurnedStrip<1>>,
                            ManyProduct<TurnedStrip<2>>},
    .root_norm = {RootNorm<0>, RootNorm<1>},
    .layer_norm = {LayerNormRows<0>, LayerNormRows<1>},
    .rotate_heads = {Rotate<0>, Rotate<1>},
    .activate = {{ActivateElements<0, 0>, ActivateElements<0, 1>, ActivateElements<0, 2>,
                  ActivateElements<0, 3>, ActivateElements<0, 4>},
                 {ActivateElements<1, 0>, ActivateElements<1, 1>, ActivateElements<1, 2>,
                  ActivateElements<1, 3>, ActivateElements<1, 4>}},
    .add_elements = {AddAll<0>, AddAll<1>},
    .soft_cap = {SoftCapAll<0>, SoftCapAll<1>},
    .update = {PENSTOCK_UPDATES(Adam), PENSTOCK_UPDATES(Adagrad), PENSTOCK_UPDATES(Lion),
               PENSTOCK_UPDATES(Sgd)},
    .lamb_moments = {{LambMoments<0, 0>, LambMoments<0, 1>},
                     {LambMoments<1, 0>, LambMoments<1, 1>},
                     {LambMoments<2, 0>, LambMoments<2, 1>}},
    .lamb_direction = {{LambDirections<0, 0>, LambDirections<0, 1>},
                       {LambDirections<1, 0>, LambDirections<1, 1>},
                       {LambDirections<2, 0>, LambDirections<2, 1>},
                       {LambDirections<3, 0>, LambDirections<3, 1>}},
    .lamb_apply = {{LambApply<0, 0>, LambApply<0, 1>},
                   {LambApply<1, 0>, LambApply<1, 1>},
                   {LambApply<2, 0>, LambApply<2, 1>},
                   {LambApply<3, 0>, LambApply<3, 1>}},
    .checksum = ChecksumBytes,
    .checksum_update = ChecksumUpdate,
};

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE

// The level's table under the name that kernels/simd/table.h declares.
const penstock::kernels::KernelTable penstock::kernels::PENSTOCK_SIMD_TABLE =
    penstock::kernels::PENSTOCK_SIMD_NAMESPACE::kTable;
