// One forward pass, as each thread of a crew runs it. Included by the isa_*.cpp files only.
#pragma once
#include "attention.h"
#include "linear.h"
#include "pass.h"

namespace {

using outrider::ActsBuffer;
using outrider::Job;
using outrider::Layer;
using outrider::Model;
using outrider::Team;

INLINE Acts acts_of(const ActsBuffer& b, int k) {
  return {b.bytes, b.scale, b.start, b.lift, b.halves, b.floats, round_up(k, 64)};
}

// out = x / sqrt(mean(x^2) + epsilon) * weight, the squares summed in 16 lanes.
inline void rms_norm(const float* x, const float* weight, int n, float epsilon, float* out) {
  F squares = f_zero();
  for (int i = 0; i < n; i += kLanes) {
    F v = load_tail(x, i, n);
    squares = f_fma(v, v, squares);
  }
  float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / (float)n + epsilon);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    f_store(out + i, f_mul(f_mul(f_load(x + i), f_set(scale)), f_load(weight + i)));
  for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    F a = f_load(x + i), b = f_load(x + half + i), c = f_load(cosine + i), s = f_load(sine + i);
    f_store(x + i, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store(x + half + i, f_add(f_mul(b, c), f_mul(a, s)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

// A thread's view of the pass. The order of the methods is the order of the work.
struct Worker {
  const Job& job;
  Team& team;
  const Model& model;
  const outrider::Pass& pass;
  outrider::ThreadBuffers& mine;

  Worker(const Job& j, Team& t)
      : job(j), team(t), model(*j.model), pass(*j.pass), mine(j.thread[t.thread]) {}

  void run() {
    embed();
    team.barrier();
    int wanted = 0;
    for (int l = 0; l < model.layers; l++) {
      wanted += capture(l, wanted);
      attention_block(model.layer[l], l);
      mlp_block(model.layer[l]);
    }
    capture(model.layers, wanted);
    head();
  }

  template <class Body>
  void own_rows(int rows, Body&& body) {
    int first = (int)((int64_t)rows * team.thread / team.threads);
    int last = (int)((int64_t)rows * (team.thread + 1) / team.threads);
    for (int row = first; row < last; row++) body(row);
  }

  void embed() {
    size_t width = model.width;
    own_rows(pass.rows, [&](int row) {
      if (pass.inputs) std::memcpy(hidden(row), pass.inputs + row * width, width * sizeof(float));
      else load_embedding(row, hidden(row));
    });
  }

  void load_embedding(int row, float* to) {
    int width = model.width;
    size_t at = (size_t)pass.tokens[row] * width;
    if (model.embedding_float32) {
      std::memcpy(to, (const float*)model.embedding + at, width * sizeof(float));
      return;
    }
    const uint16_t* from = (const uint16_t*)model.embedding + at;
    for (int i = 0; i < width; i++) {
      uint32_t bits = (uint32_t)from[i] << 16;
      std::memcpy(to + i, &bits, 4);
    }
  }

  // Copies the states entering `layer` where they are wanted; no thread changes them before the
  // next two barriers.
  int capture(int layer, int wanted) {
    if (wanted >= pass.feature_layers || pass.feature[wanted] != layer) return 0;
    size_t width = model.width;
    own_rows(pass.rows, [&](int row) {
      std::memcpy(pass.features + ((size_t)row * pass.feature_layers + wanted) * width,
                  job.hidden + row * width, width * sizeof(float));
    });
    return 1;
  }

  // Activations for `w`, row r made from input(r). Few rows: each thread makes all of them for
  // itself, which is cheaper than meeting the others.
  template <class Input>
  Acts activations(const Matrix& w, int rows, Input&& input) {
    bool alone = rows <= job.alone_rows;
    Acts acts = acts_of(alone ? mine.acts : job.acts, w.k);
    auto make = [&](int row) { prepare(w, input(row), row, acts); };
    if (alone) {
      for (int row = 0; row < rows; row++) make(row);
    } else {
      own_rows(rows, make);
      team.barrier();
    }
    return acts;
  }

  const float* normed(const float* x, const float* weight) {
    if (!weight) return x;
    rms_norm(x, weight, model.width, model.epsilon, mine.row);
    return mine.row;
  }

  // What queries, keys and values of a row are made of.
  const float* attention_input(const Layer& layer, int row) {
    if (!layer.token_norm) return normed(hidden(row), layer.attention_norm);
    int width = model.width;
    float* state = mine.row + width;
    load_embedding(row, mine.row);
    rms_norm(mine.row, layer.token_norm, width, model.epsilon, mine.row);
    if (layer.attention_norm)
      rms_norm(hidden(row), layer.attention_norm, width, model.epsilon, state);
    else
      std::memcpy(state, hidden(row), width * sizeof(float));
    return mine.row;
  }

  float* hidden(int row) { return job.hidden + (size_t)row * model.width; }

  void attention_block(const Layer& layer, int index) {
    int heads = model.heads + 2 * model.kv_heads, dim = model.head_dim;
    int columns = heads * dim;
    Acts acts = activations(layer.qkv, pass.rows,
                            [&](int row) { return attention_input(layer, row); });
    auto store = [&](int block) {
      compute_block(layer.qkv, block, acts, pass.rows, [&](int row, F left, F right) {
        put(job.qkv + (size_t)row * columns, block * kBlock, columns, left, right);
      });
    };
    auto finish = [&](int head) {
      for (int row = 0; row < pass.rows; row++) finish_head(layer, index, row, head);
    };
    if (dim % kBlock == 0) {
      team.loop(heads, [&](int head) {
        for (int b = 0; b < dim / kBlock; b++) store(head * (dim / kBlock) + b);
        finish(head);
      });
    } else {
      team.loop(blocks_of(layer.qkv), store);
      team.barrier();
      team.loop(heads, finish);
    }
    team.barrier();
    // Where fewer threads came than were planned, the last one has all that is left.
    team.loop_over([&](int t) { return t < team.threads ? job.tile_bound[t] : job.tiles; },
                   [&](int tile) { attend_tile(job.tile[tile], index); });
    team.barrier();
    size_t width = (size_t)model.heads * dim;
    add_projection(layer.output, activations(layer.output, pass.rows, [&](int row) {
                     return job.mixed + row * width;
                   }));
  }

  static INLINE void put(float* row, int column, int columns, F left, F right) {
    if (column + kBlock <= columns) {
      f_store(row + column, left);
      f_store(row + column + kLanes, right);
      return;
    }
    alignas(64) float lane[kBlock];
    f_store(lane, left);
    f_store(lane + kLanes, right);
    for (int i = 0; column + i < columns; i++) row[column + i] = lane[i];
  }

  // Bias, norm and rotation of one head; keys and values go to the cache.
  void finish_head(const Layer& layer, int index, int row, int head) {
    int dim = model.head_dim, half = model.rotary_dim / 2;
    float* x = job.qkv + ((size_t)row * (model.heads + 2 * model.kv_heads) + head) * dim;
    if (layer.qkv_bias)
      for (int i = 0; i < dim; i++) x[i] += layer.qkv_bias[head * dim + i];
    const outrider::RowPath& path = job.path[row];
    bool query = head < model.heads, key = !query && head < model.heads + model.kv_heads;
    if (query || key) {
      const float* norm = query ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(x, norm, dim, model.epsilon, x);
      size_t at = (size_t)(path.visible - 1) * half;
      if (layer.rotate) rotate(x, pass.cosine + at, pass.sine + at, half);
    }
    if (query) {
      Factor* factors = reinterpret_cast<Factor*>(x);  // in place, over what has been read
      F scale = f_set(model.attention_scale);
      for (int i = 0; i < dim; i += kLanes)
        store_factors(factors + i, to_bf16(f_mul(f_load(x + i), scale)));
      return;
    }
    const outrider::Segment& segment = pass.segment[path.segment];
    int kv = head - model.heads - (key ? 0 : model.kv_heads);
    uint16_t* to = (key ? pass.keys : pass.values) + index * pass.layer_stride +
                   segment.slot * pass.slot_stride + kv * pass.head_stride +
                   (size_t)(segment.cached + row - segment.first_row) * dim;
    for (int i = 0; i < dim; i += kLanes) f_store_bf16(to + i, f_load(x + i));
  }

  void attend_tile(const outrider::AttentionTile& tile, int index) {
    const outrider::Segment& segment = pass.segment[tile.segment];
    int dim = model.head_dim, group = model.heads / model.kv_heads;
    int64_t at = place(tile, index);
    size_t stride = round_up(job.most_visible, kLanes);
    Pair pair[outrider::kTilePairs];
    for (int i = 0; i < tile.count; i++) {
      int row = segment.first_row + (tile.first + i) / group;
      int head = tile.kv_head * group + (tile.first + i) % group;
      const outrider::RowPath& path = job.path[row];
      const float* query = job.qkv + ((size_t)row * (model.heads + 2 * model.kv_heads) + head) * dim;
      pair[i].query = reinterpret_cast<const Factor*>(query);
      pair[i].out = job.mixed + ((size_t)row * model.heads + head) * dim;
      pair[i].scores = mine.scores + i * stride;
      pair[i].path = {path.visible, path.plain, path.past};
      pair[i].row = row;
    }
    attend(pair, tile.count, pass.keys + at, pass.values + at, dim, segment.cached + segment.rows,
           ahead(tile, index), mine.keys);
  }

  // Where a tile's keys and values begin in a layer's cache.
  int64_t place(const outrider::AttentionTile& tile, int index) {
    return index * pass.layer_stride + pass.segment[tile.segment].slot * pass.slot_stride +
           tile.kv_head * pass.head_stride;
  }

  // What the next tile reads, unless it is what this one reads.
  Ahead ahead(const outrider::AttentionTile& tile, int index) {
    const outrider::AttentionTile* next = &tile + 1;
    if (next == job.tile + job.tiles) return {};
    if (next->segment == tile.segment && next->kv_head == tile.kv_head) return {};
    int64_t at = place(*next, index);
    return {pass.keys + at, pass.values + at, pass.segment[next->segment].cached};
  }

  // hidden += x W^T
  void add_projection(const Matrix& w, const Acts& acts) {
    int width = model.width;
    team.loop(blocks_of(w), [&](int block) {
      int column = block * kBlock;
      compute_block(w, block, acts, pass.rows, [&](int row, F left, F right) {
        float* to = hidden(row) + column;
        if (column + kBlock <= width) {
          f_store(to, f_add(f_load(to), left));
          f_store(to + kLanes, f_add(f_load(to + kLanes), right));
          return;
        }
        alignas(64) float lane[kBlock];
        f_store(lane, left);
        f_store(lane + kLanes, right);
        for (int i = 0; column + i < width; i++) to[i] += lane[i];
      });
    });
    team.barrier();
  }

  void mlp_block(const Layer& layer) {
    Acts acts = activations(layer.gate_up, pass.rows,
                            [&](int row) { return normed(hidden(row), layer.mlp_norm); });
    size_t mlp = model.mlp;
    team.loop(blocks_of(layer.gate_up), [&](int block) {
      compute_block(layer.gate_up, block, acts, pass.rows, [&](int row, F gate, F up) {
        f_store(job.gated + row * mlp + block * kLanes, f_mul(f_silu(gate), up));
      });
    });
    team.barrier();
    add_projection(layer.down, activations(layer.down, pass.rows, [&](int row) {
                     return job.gated + row * mlp;
                   }));
  }

  void head() {
    if (pass.logit_rows == 0) return;
    Acts acts = activations(model.head, pass.logit_rows, [&](int i) {
      return normed(hidden(pass.logit_row[i]), model.final_norm);
    });
    int vocab = model.vocab;
    team.loop(blocks_of(model.head), [&](int block) {
      compute_block(model.head, block, acts, pass.logit_rows, [&](int row, F left, F right) {
        put(pass.logits + (size_t)row * vocab, block * kBlock, vocab, left, right);
      });
    });
  }
};

void run_pass(void* job, Team& team) { Worker(*static_cast<const Job*>(job), team).run(); }

void run_linear(void* argument, Team& team) {
  const outrider::LinearJob& job = *static_cast<const outrider::LinearJob*>(argument);
  const Matrix& w = *job.weight;
  Acts acts = acts_of(job.acts, w.k);
  int first = (int)((int64_t)job.rows * team.thread / team.threads);
  int last = (int)((int64_t)job.rows * (team.thread + 1) / team.threads);
  for (int row = first; row < last; row++) prepare(w, job.x + row * job.ldx, row, acts);
  team.barrier();
  team.loop(blocks_of(w), [&](int block) {
    compute_block(w, block, acts, job.rows, [&](int row, F left, F right) {
      Worker::put(job.y + row * job.ldy, block * kBlock, w.n, left, right);
    });
  });
}

}  // namespace
