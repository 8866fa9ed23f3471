// Data of one pass that its threads share: buffers, paths and the attention's work list.
#pragma once
#include "abi.h"
#include "team.h"

namespace outrider {

constexpr int kTilePairs = 24;  // (row, head) pairs that share the keys of a block

// A run of (row, head) pairs of one sequence and one key head.
struct AttentionTile {
  int segment, kv_head, first, count;  // pairs are counted row by row, head by head
};

struct RowPath {
  int segment, visible, plain;
  const int32_t* past;
};

struct ActsBuffer {  // see Acts in linear.h
  uint8_t* bytes;
  float* scale;
  int32_t* start;
  float* lift;
  uint16_t* halves;
  float* floats;
};

struct ThreadBuffers {
  ActsBuffer acts;  // for a few rows, prepared by every thread for itself
  float* row;       // one row of the widest input
  uint16_t* keys;   // [head_dim, 16]
  float* scores;    // [kTilePairs, most visible rounded up to 16]
};

struct Job {
  const Model* model;
  const Pass* pass;
  const RowPath* path;        // [rows]
  const AttentionTile* tile;  // [tiles]
  int tiles;
  const int32_t* tile_bound;  // [planned threads + 1]: where the shares begin
  int most_visible;
  int alone_rows;   // up to so many rows every thread prepares activations for itself
  ActsBuffer acts;  // shared by all threads
  float* hidden;    // [rows, width]
  float* qkv;       // [rows, (heads + 2 kv_heads) * head_dim]
  float* mixed;     // [rows, heads * head_dim]
  float* gated;     // [rows, mlp]
  ThreadBuffers* thread;  // [threads]
};

struct LinearJob {
  const Matrix* weight;
  const float* x;
  float* y;
  int64_t ldx, ldy;
  int32_t rows;
  ActsBuffer acts;
};


// What each instruction set provides.
struct Kernels {
  const char* name;
  void (*pass)(void* job, Team& team);
  void (*linear)(void* job, Team& team);
};

}  // namespace outrider
