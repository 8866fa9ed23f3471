// The C interface: plain structures that Python fills through ctypes. Nothing here knows torch.
//
// Every pointer is borrowed for the length of a call, except those in a `Model`, which must outlive
// it. Sizes are in elements. All floats are fp32 unless a field says otherwise.
#pragma once
#include <cstdint>

namespace outrider {

enum Kind : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,         // one scale per output column
  kInt4Groups = 3,   // groups of 32 along K, scale and minimum (fp16): w = scale * q + minimum
  kInt8Groups = 4,   // groups of 32 along K, scale (fp16): w = scale * q
};

constexpr int kBlock = 32;  // output columns that are packed and computed together
constexpr int kGroup = 32;  // values along K that share a scale in the grouped kinds

// A packed weight [N, K]. The layout of `data` is said in pack.cpp.
struct Matrix {
  int32_t kind;
  int32_t n;        // output columns, without padding
  int32_t k;        // inputs, without padding
  int32_t reserved;
  const void* data;
  const float* scale;  // kInt8: [blocks * 32]
};

struct Layer {
  const float* attention_norm;  // [width] or null: the states are normed already
  const float* token_norm;      // [width] or null; see Pass.inputs
  const float* mlp_norm;        // [width]
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;        // [head_dim] or null
  const float* qkv_bias;        // [(heads + 2 * kv_heads) * head_dim] or null
  Matrix qkv;                   // rows: queries, keys, values; with token_norm k = 2 * width
  Matrix output;
  Matrix gate_up;               // columns interleaved: 16 of the gate, 16 of the up projection
  Matrix down;
  int32_t rotate;               // 0: a layer without positions
  int32_t reserved;
};

struct Model {
  int32_t layers, width, heads, kv_heads, head_dim, mlp, vocab, rotary_dim;
  int32_t embedding_float32;  // 0: the embedding is bf16
  float epsilon, attention_scale;
  const Layer* layer;      // [layers]
  const float* final_norm; // [width] or null
  const void* embedding;   // [vocab, width]
  Matrix head;
};

// The rows of one sequence: `prefix` rows that see all before them, then the nodes of a tree.
struct Segment {
  int32_t slot, cached, first_row, rows, prefix;
  int32_t chain;  // 1: every row sees all rows before it
};

struct Pass {
  int32_t rows, segments, logit_rows, feature_layers, threads;
  const float* cosine;        // [positions, rotary_dim / 2]
  const float* sine;
  const int32_t* tokens;      // [rows]
  const int32_t* parents;     // [rows] tree rows: parent's index in the tree, -1 for its root
  const Segment* segment;     // [segments]
  const int32_t* logit_row;   // [logit_rows] increasing
  const int32_t* feature;     // [feature_layers] increasing
  uint16_t* keys;             // bf16; position rows of head_dim are contiguous
  uint16_t* values;
  int64_t layer_stride, slot_stride, head_stride;
  // [rows, width] states to start from, or null: the tokens' embeddings. A draft head's layer takes
  // both: with a token_norm its queries, keys and values are made of the normed embedding followed
  // by the normed state.
  const float* inputs;
  float* logits;              // [logit_rows, vocab]
  float* features;            // [rows, feature_layers, width]
};

// A whole draft of a head for one sequence: rows of true states, then level after level of a tree.
// Drafts of one call have all in common that belongs to the head and its cache.
// A row's state is what its parent's pass gave (after the final norm with `norm_output`); with `fc`
// the row starts from fc [embedding, state] + bias instead of the state itself.
struct Draft {
  int32_t slot, cached;     // rows of the slot that are kept
  int32_t prefix;           // rows to keep before the root; they are written behind `cached`
  int32_t beam, branching, nodes, depth, threads, norm_output, ends, capacity;
  double hopeless, temperature;
  const float* cosine;
  const float* sine;
  const int32_t* tokens;    // [prefix + 1], the root last
  const float* states;      // [prefix + 1, width]
  const Matrix* fc;         // null, or [width, 2 * width]
  const float* fc_bias;     // [width]
  const int32_t* ids;       // null, or [vocab]: the target's ids of the draft vocabulary
  const int32_t* end;       // [ends] tokens that nothing follows
  const uint64_t* noise;    // [depth] keys of the positions' noise, for a temperature above 0
  uint16_t* keys;
  uint16_t* values;
  int64_t layer_stride, slot_stride, head_stride;
  int32_t* token;           // [capacity] the nodes that were made, the root first
  int32_t* parent;
  double* confidence;
  int32_t count;            // out: how many
};

}  // namespace outrider
