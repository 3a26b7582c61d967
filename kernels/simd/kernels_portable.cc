// Plain C++, for any processor.
#define PENSTOCK_SIMD_TABLE kPortableKernels
#include "kernels/simd/vec_portable.h"
// The order of these matters: each builds on the one before.
#include "kernels/simd/elementwise_inl.h"
#include "kernels/simd/optimizer_inl.h"
#include "kernels/simd/product_inl.h"
#include "kernels/simd/product_inl_many.h"
#include "kernels/simd/product_inl_tiles.h"
#include "kernels/simd/query_attention_inl.h"
#include "kernels/simd/row_functions_inl.h"
#include "kernels/simd/table_inl.h"
