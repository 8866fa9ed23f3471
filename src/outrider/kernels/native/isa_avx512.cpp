// The kernels for AVX-512 with VNNI and BF16; the build compiles this file with those flags.
#include "body.h"

namespace outrider {
#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
extern const Kernels kernels_avx512 = {"avx512", run_pass, run_linear};
#else
#error "compile this file for avx512f, avx512bw, avx512dq, avx512vl, avx512vnni and avx512bf16"
#endif
}  // namespace outrider
