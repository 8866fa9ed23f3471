// Packing weights [n, k] (row-major) for the kernels.
#pragma once
#include "abi.h"

namespace outrider {

int64_t packed_bytes(int32_t kind, int64_t n, int64_t k);  // -1: no such kind
void pack_float32(const float* w, int64_t n, int64_t k, float* out);
void pack_bfloat16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out);
void pack_int8(const int8_t* w, int64_t n, int64_t k, uint8_t* out);
// scale, minimum: fp16 [n, groups]
void pack_int4_groups(const uint8_t* q, const uint16_t* scale, const uint16_t* minimum, int64_t n,
                      int64_t k, uint8_t* out);
void pack_int8_groups(const int8_t* w, const uint16_t* scale, int64_t n, int64_t k, uint8_t* out);

}  // namespace outrider
