// The kernels for AVX-512 with VNNI but without BF16, as many servers have it; the build compiles
// this file with those flags. Products of bf16 pairs are made of fp32 ones.
#include "body.h"

namespace outrider {
#if defined(__AVX512F__) && defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
extern const Kernels kernels_avx512_vnni = {"avx512_vnni", run_pass, run_linear};
#else
#error "compile this file for avx512f, avx512bw, avx512dq, avx512vl and avx512vnni"
#endif
}  // namespace outrider
