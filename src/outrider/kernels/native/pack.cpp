// Packing weights for the kernels. Plain code: it runs once, when a model is loaded.
//
// Layouts, in blocks of 32 columns (n) so that a block is one run of memory:
//   kFloat32     [block][k][32]
//   kBfloat16    [block][k / 2][32][2]
//   kInt8        [block][half][group]{8 x [16][4] bytes of w + 128}
//   kInt4Groups  [block][half][group]{fp16 scale[16], fp16 minimum[16], 4 x [16][4] bytes}
//                byte (s, c, i): element 4 s + i of column c in the low half, 16 more in the high
//   kInt8Groups  [block][half][group]{fp16 scale[16], 8 x [16][4] bytes of w + 128}
// Columns and values behind the end are zero weights.
#include "pack.h"

#include <cmath>
#include <cstring>

namespace outrider {
namespace {

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

int64_t packed_bytes(int32_t kind, int64_t n, int64_t k) {
  int64_t columns = up(n, kBlock);
  switch (kind) {
    case kFloat32: return columns * k * 4;
    case kBfloat16: return columns * up(k, 2) * 2;
    case kInt8: return columns * up(k, kGroup);
    case kInt4Groups: return columns * (up(k, kGroup) / kGroup) * 20;
    case kInt8Groups: return columns * (up(k, kGroup) / kGroup) * 34;
    default: return -1;
  }
}

void pack_float32(const float* w, int64_t n, int64_t k, float* out) {
  for (int64_t c = 0; c < up(n, kBlock); c++) {
    float* to = out + c / kBlock * kBlock * k + c % kBlock;
    for (int64_t i = 0; i < k; i++) to[i * kBlock] = c < n ? w[c * k + i] : 0.0f;
  }
}

void pack_bfloat16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out) {
  int64_t wide = up(k, 2);
  for (int64_t c = 0; c < up(n, kBlock); c++) {
    uint16_t* to = out + c / kBlock * kBlock * wide + c % kBlock * 2;
    for (int64_t i = 0; i < wide; i++)
      to[i / 2 * 2 * kBlock + i % 2] = c < n && i < k ? w[c * k + i] : 0;
  }
}

namespace {

// [block][half][group]{scales, 8 x [16][4] bytes of w + 128}
void pack_bytes(const int8_t* w, const uint16_t* scale, int64_t n, int64_t k, uint8_t* out) {
  int64_t groups = up(k, kGroup) / kGroup, head = scale ? 32 : 0, bytes = head + 512;
  for (int64_t c = 0; c < up(n, kBlock); c++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t* to = out + ((c / 16) * groups + g) * bytes;
      int64_t lane = c % 16;
      uint16_t s = scale && c < n ? scale[c * groups + g] : 0;
      if (scale) std::memcpy(to + 2 * lane, &s, 2);
      for (int64_t i = 0; i < kGroup; i++) {
        bool inside = c < n && g * kGroup + i < k;
        int v = inside ? w[c * k + g * kGroup + i] : 0;
        to[head + i / 4 * 64 + lane * 4 + i % 4] = (uint8_t)(v + 128);
      }
    }
}

}  // namespace

void pack_int8(const int8_t* w, int64_t n, int64_t k, uint8_t* out) {
  pack_bytes(w, nullptr, n, k, out);
}

void pack_int4_groups(const uint8_t* q, const uint16_t* scale, const uint16_t* minimum, int64_t n,
                      int64_t k, uint8_t* out) {
  constexpr int64_t kBytes = 320;
  int64_t groups = up(k, kGroup) / kGroup;
  std::memset(out, 0, (size_t)packed_bytes(kInt4Groups, n, k));
  for (int64_t c = 0; c < n; c++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t* to = out + ((c / 16) * groups + g) * kBytes;
      int64_t lane = c % 16;
      std::memcpy(to + 2 * lane, scale + c * groups + g, 2);
      std::memcpy(to + 32 + 2 * lane, minimum + c * groups + g, 2);
      for (int64_t i = 0; i < kGroup && g * kGroup + i < k; i++) {
        uint8_t v = q[c * k + g * kGroup + i] & 15;
        to[64 + i % 16 / 4 * 64 + lane * 4 + i % 4] |= (uint8_t)(i < 16 ? v : v << 4);
      }
    }
}

void pack_int8_groups(const int8_t* w, const uint16_t* scale, int64_t n, int64_t k, uint8_t* out) {
  pack_bytes(w, scale, n, k, out);
}

}  // namespace outrider
