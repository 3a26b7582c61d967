// Compiled with AVX-512 F, BW, DQ and VL; called only where the processor has them.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for uninitialized variables.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define PENSTOCK_SIMD_TABLE kAvx512Kernels
#include "kernels/simd/vec_avx512.h"
// The order of these matters: each builds on the one before.
#include "kernels/simd/elementwise_inl.h"
#include "kernels/simd/optimizer_inl.h"
#include "kernels/simd/product_inl.h"
#include "kernels/simd/product_inl_bf16.h"
#include "kernels/simd/product_inl_many.h"
#include "kernels/simd/product_inl_tiles.h"
#include "kernels/simd/product_inl_tiles_amx.h"
#include "kernels/simd/query_attention_inl.h"
#include "kernels/simd/row_functions_inl.h"
#include "kernels/simd/table_inl.h"
