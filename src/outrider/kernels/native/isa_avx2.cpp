// The kernels for AVX2 with FMA and F16C; the build compiles this file with those flags.
#include "body.h"

namespace outrider {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
extern const Kernels kernels_avx2 = {"avx2", run_pass, run_linear};
#else
#error "compile this file for avx2, fma and f16c, without avx512"
#endif
}  // namespace outrider
