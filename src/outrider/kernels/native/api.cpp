// The functions that Python calls: dispatch, buffers, and the plan of a pass.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "draft.h"
#include "pack.h"
#include "pass.h"
#include "pool.h"

namespace outrider {

#if defined(OUTRIDER_AVX512)
extern const Kernels kernels_avx512;
#endif
#if defined(OUTRIDER_AVX2)
extern const Kernels kernels_avx2;
#endif

namespace {

const Kernels* find_kernels(const char* name) {
#if defined(OUTRIDER_AVX512)
  bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (vnni && (!name || !std::strcmp(name, "avx512"))) return &kernels_avx512;
#endif
#if defined(OUTRIDER_AVX2)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && (!name || !std::strcmp(name, "avx2"))) return &kernels_avx2;
#endif
  (void)name;
  return nullptr;
}

const Kernels*& chosen() {
  static const Kernels* one = find_kernels(nullptr);
  return one;
}

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// One growing block of memory that a pass cuts into buffers.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  void begin() { used_ = 0; }
  template <class T>
  void take(T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(base_ + used_);
    used_ += up(count * (int64_t)sizeof(T) + 64, 64);  // slack: 16 lanes are read at the end
  }
  // True when everything taken since begin() fits; else grows, and the caller takes again.
  bool fits() {
    if (used_ <= size_) return true;
    std::free(base_);
    size_ = up(used_, 4096);
    base_ = static_cast<char*>(std::aligned_alloc(4096, (size_t)size_));
    if (!base_) {
      size_ = 0;
      throw std::bad_alloc();
    }
    return false;
  }

 private:
  char* base_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

void take_acts(Arena& arena, ActsBuffer& acts, int64_t rows, int64_t k, bool floats, bool halves) {
  int64_t ld = up(k, 64);
  rows = up(rows, 8);  // whole panels
  arena.take(acts.bytes, rows * ld);
  arena.take(acts.scale, rows * (ld / kGroup));
  arena.take(acts.start, rows * (ld / kGroup));
  arena.take(acts.lift, rows * (ld / kGroup));
  arena.take(acts.halves, halves ? rows * ld : 0);
  arena.take(acts.floats, floats ? rows * ld : 0);
}

}  // namespace

// y[rows, n] = x[rows, k] w^T
static void multiply(const Matrix& w, const float* x, int64_t ldx, int32_t rows, float* y,
                     int64_t ldy, int32_t threads) {
  Arena arena;
  LinearJob job{&w, x, y, ldx, ldy, rows, {}};
  do {
    arena.begin();
    take_acts(arena, job.acts, rows, w.k, true, true);
  } while (!arena.fits());
  run_region(threads, chosen()->linear, &job);
}

// A model and the buffers of its passes. Passes of one plan take turns.
struct Plan {
  Model model;
  std::vector<Layer> layers;
  std::mutex turn;
  Arena arena;
  std::vector<RowPath> path;
  std::vector<int32_t> past;
  std::vector<AttentionTile> tiles;
  std::vector<int32_t> tile_bound;
  std::vector<ThreadBuffers> threads;

  // The cache rows that each row sees, in the order of their positions.
  void find_paths(const Pass& pass) {
    path.assign((size_t)pass.rows, RowPath{});
    past.clear();
    std::vector<size_t> start((size_t)pass.rows);
    for (int s = 0; s < pass.segments; s++) {
      const Segment& segment = pass.segment[s];
      int base = segment.cached + segment.prefix;
      for (int i = 0; i < segment.rows; i++) {
        int row = segment.first_row + i, node = i - segment.prefix;
        start[row] = past.size();
        if (segment.chain || node < 0) {
          path[row] = {s, segment.cached + i + 1, segment.cached + i + 1, nullptr};
          continue;
        }
        int parent = pass.parents[row];
        if (parent >= 0) {
          int above = segment.first_row + segment.prefix + parent;
          int depth = path[above].visible - base;
          for (int d = 0; d < depth; d++) past.push_back(past[start[above] + d]);
        }
        past.push_back(base + node);
        path[row] = {s, base + (int)(past.size() - start[row]), base, nullptr};
      }
    }
    for (int row = 0; row < pass.rows; row++)
      if (path[row].plain < path[row].visible) path[row].past = past.data() + start[row];
  }

  // Cuts all (row, head) pairs into tiles, and the tiles into equal shares of work.
  void cut_tiles(const Pass& pass, int count) {
    int group = model.heads / model.kv_heads;
    int largest = group < kTilePairs ? kTilePairs / group * group : kTilePairs;
    int64_t total = 0;
    for (const RowPath& p : path) total += (int64_t)p.visible * model.heads;
    tiles.clear();
    tile_bound.assign(1, 0);
    int64_t done = 0;
    for (int s = 0; s < pass.segments; s++)
      for (int kv = 0; kv < model.kv_heads; kv++) {
        const Segment& segment = pass.segment[s];
        int first = 0, pairs = segment.rows * group;
        for (int i = 0; i < pairs; i++) {
          done += path[segment.first_row + i / group].visible;
          bool share_full = (int)tile_bound.size() < count &&
                            done * count >= total * (int64_t)tile_bound.size();
          if (i + 1 - first == largest || i + 1 == pairs || share_full) {
            tiles.push_back({s, kv, first, i + 1 - first});
            first = i + 1;
          }
          if (share_full) tile_bound.push_back((int32_t)tiles.size());
        }
      }
    while ((int)tile_bound.size() <= count) tile_bound.push_back((int32_t)tiles.size());
    tile_bound[(size_t)count] = (int32_t)tiles.size();
  }

  void take_buffers(Job& job, const Pass& pass, int count) {
    int64_t rows = pass.rows, attention = (int64_t)model.heads * model.head_dim;
    int64_t widest = model.width > model.mlp ? model.width : model.mlp;
    widest = widest > attention ? widest : attention;
    bool floats = false, halves = false;
    auto look = [&](const Matrix& m) {
      floats |= m.kind == kFloat32;
      halves |= m.kind == kBfloat16;
    };
    look(model.head);
    for (const Layer& l : layers) {
      look(l.qkv), look(l.output), look(l.gate_up), look(l.down);
      widest = widest > l.qkv.k ? widest : l.qkv.k;
    }
    threads.resize((size_t)count);
    do {
      arena.begin();
      arena.take(job.hidden, rows * model.width);
      arena.take(job.qkv, rows * (attention + 2 * (int64_t)model.kv_heads * model.head_dim));
      arena.take(job.mixed, rows * attention);
      arena.take(job.gated, rows * model.mlp);
      take_acts(arena, job.acts, rows, widest, floats, halves);
      for (ThreadBuffers& t : threads) {
        take_acts(arena, t.acts, rows < job.alone_rows ? rows : job.alone_rows, widest, floats,
                  halves);
        arena.take(t.row, up(widest, 64));
        arena.take(t.keys, (int64_t)model.head_dim * 16);
        arena.take(t.scores, kTilePairs * up(job.most_visible, 16));
      }
    } while (!arena.fits());
  }

  void run(const Pass& pass) {
    std::lock_guard<std::mutex> guard(turn);
    find_paths(pass);
    execute(pass);
  }

  // A pass whose paths are known.
  void execute(const Pass& pass) {
    int count = pass.threads < 1 ? 1 : pass.threads > kMostThreads ? kMostThreads : pass.threads;
    cut_tiles(pass, count);
    Job job{};
    job.model = &model;
    job.pass = &pass;
    job.path = path.data();
    job.tile = tiles.data();
    job.alone_rows = count == 1 ? pass.rows : 2;
    for (const RowPath& p : path)
      job.most_visible = job.most_visible > p.visible ? job.most_visible : p.visible;
    take_buffers(job, pass, count);
    job.tile_bound = tile_bound.data();
    job.thread = threads.data();
    run_region(count, chosen()->pass, &job);
  }

  void draft(Draft& draft) {
    std::lock_guard<std::mutex> guard(turn);
    Growth tree;
    tree.add(draft.tokens[draft.prefix], -1, 1.0);
    int width = model.width, first_rows = draft.prefix + 1;
    std::vector<int32_t> tokens(draft.tokens, draft.tokens + first_rows);
    std::vector<float> states(draft.states, draft.states + (size_t)first_rows * width);
    std::vector<int32_t> row_of(1, draft.cached + draft.prefix);  // cache row of each node
    std::vector<int> level(1, 0);                                 // the nodes of this pass
    std::vector<float> logits, features, inputs;
    std::vector<Choice> choices;
    int written = draft.cached;
    while (true) {
      int rows = (int)tokens.size(), nodes = (int)level.size();
      Segment segment{draft.slot, written, 0, rows, rows - nodes, 0};
      set_paths(draft, tree, level, row_of, segment);
      logits.resize((size_t)nodes * model.vocab);
      features.resize((size_t)rows * width);
      std::vector<int32_t> logit_row, unused((size_t)rows, -1);
      for (int i = 0; i < nodes; i++) logit_row.push_back(rows - nodes + i);
      int32_t last = model.layers;
      const float* start = draft.fc ? joined(draft, tokens, states, inputs) : states.data();
      execute(Pass{rows, 1, nodes, 1, draft.threads, draft.cosine, draft.sine, tokens.data(),
                   unused.data(), &segment, logit_row.data(), &last, draft.keys, draft.values,
                   draft.layer_stride, draft.slot_stride, draft.head_stride, start, logits.data(),
                   features.data()});
      written += rows;
      int made = (int)tree.token.size();
      for (int i = 0; i < nodes; i++) {
        int depth = tree.depth[(size_t)level[(size_t)i]];
        choose(draft, logits.data() + (size_t)i * model.vocab, model.vocab, depth, choices);
        for (const Choice& c : choices)
          tree.add(draft.ids ? draft.ids[c.token] : c.token, level[(size_t)i], c.chance);
      }
      tree.advance(draft, made);
      if (tree.frontier.empty()) break;
      next_level(draft, tree, level, row_of, written, features, rows, tokens, states);
    }
    draft.count = (int32_t)std::min<size_t>(tree.token.size(), (size_t)draft.capacity);
    std::copy_n(tree.token.begin(), draft.count, draft.token);
    std::copy_n(tree.parent.begin(), draft.count, draft.parent);
    std::copy_n(tree.confidence.begin(), draft.count, draft.confidence);
  }

  // What the rows of a draft's pass see: the rows before them, or their ancestors in the tree.
  void set_paths(const Draft& draft, const Growth& tree, const std::vector<int>& level,
                 const std::vector<int32_t>& row_of, const Segment& segment) {
    path.assign((size_t)segment.rows, RowPath{});
    past.clear();
    int base = draft.cached + draft.prefix;
    for (int i = 0; i < segment.prefix; i++) {
      int visible = segment.cached + i + 1;
      path[(size_t)i] = {0, visible, visible, nullptr};
    }
    std::vector<size_t> start;
    for (size_t i = 0; i < level.size(); i++) {
      start.push_back(past.size());
      for (int node = level[i]; node >= 0; node = tree.parent[(size_t)node])
        past.push_back(row_of[(size_t)node]);
      std::reverse(past.begin() + (long)start[i], past.end());
      int visible = base + (int)(past.size() - start[i]);
      path[(size_t)segment.prefix + i] = {0, visible, base, nullptr};
    }
    for (size_t i = 0; i < level.size(); i++)
      path[(size_t)segment.prefix + i].past = past.data() + start[i];
  }

  // The frontier becomes the level: its tokens, its parents' states and its cache rows.
  void next_level(const Draft& draft, const Growth& tree, std::vector<int>& level,
                  std::vector<int32_t>& row_of, int written, const std::vector<float>& features,
                  int rows, std::vector<int32_t>& tokens, std::vector<float>& states) {
    int width = model.width, first = rows - (int)level.size();
    tokens.clear();
    states.resize(tree.frontier.size() * (size_t)width);
    row_of.resize(tree.token.size(), -1);
    for (size_t i = 0; i < tree.frontier.size(); i++) {
      int node = tree.frontier[i];
      int parent = tree.parent[(size_t)node];
      size_t at = (size_t)(std::find(level.begin(), level.end(), parent) - level.begin());
      const float* from = features.data() + ((size_t)first + at) * width;
      float* to = states.data() + i * width;
      std::copy_n(from, width, to);
      if (draft.norm_output && model.final_norm) {
        double squares = 0;
        for (int c = 0; c < width; c++) squares += (double)from[c] * from[c];
        float scale = 1.0f / std::sqrt((float)(squares / width) + model.epsilon);
        for (int c = 0; c < width; c++) to[c] = from[c] * scale * model.final_norm[c];
      }
      tokens.push_back(tree.token[(size_t)node]);
      row_of[(size_t)node] = written + (int32_t)i;
    }
    level = tree.frontier;
  }

  // fc [embedding, state] + bias of every row.
  const float* joined(const Draft& draft, const std::vector<int32_t>& tokens,
                      const std::vector<float>& states, std::vector<float>& out) {
    size_t width = (size_t)model.width, rows = tokens.size();
    std::vector<float> x(rows * 2 * width);
    for (size_t r = 0; r < rows; r++) {
      float* to = x.data() + r * 2 * width;
      size_t at = (size_t)tokens[r] * width;
      for (size_t c = 0; c < width; c++) {
        if (model.embedding_float32) {
          to[c] = ((const float*)model.embedding)[at + c];
        } else {
          uint32_t bits = (uint32_t)((const uint16_t*)model.embedding)[at + c] << 16;
          std::memcpy(to + c, &bits, 4);
        }
      }
      std::copy_n(states.data() + r * width, width, to + width);
    }
    out.resize(rows * width);
    multiply(*draft.fc, x.data(), (int64_t)(2 * width), (int32_t)rows, out.data(),
             (int64_t)width, draft.threads);
    for (size_t r = 0; r < rows; r++)
      for (size_t c = 0; c < width; c++) out[r * width + c] += draft.fc_bias[c];
    return out.data();
  }
};

}  // namespace outrider

using namespace outrider;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Every function returns 0, or 1 when memory ran out.
template <class Body>
static int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (...) {
    return 1;
  }
}

EXPORT int outrider_abi_version() { return 3; }

// The instruction set in use, or an empty string where there is none for this machine.
EXPORT const char* outrider_isa() { return chosen() ? chosen()->name : ""; }

// For tests: use another instruction set of this machine. 0 when it cannot be used.
EXPORT int outrider_use_isa(const char* name) {
  const Kernels* found = find_kernels(name[0] ? name : nullptr);
  if (found) chosen() = found;
  return found != nullptr;
}

EXPORT void outrider_pin_workers(int on) { pin_workers(on != 0); }

EXPORT int64_t outrider_packed_bytes(int32_t kind, int64_t n, int64_t k) {
  return packed_bytes(kind, n, k);
}
EXPORT void outrider_pack_float32(const float* w, int64_t n, int64_t k, float* out) {
  pack_float32(w, n, k, out);
}
EXPORT void outrider_pack_bfloat16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out) {
  pack_bfloat16(w, n, k, out);
}
EXPORT void outrider_pack_int8(const int8_t* w, int64_t n, int64_t k, uint8_t* out) {
  pack_int8(w, n, k, out);
}
EXPORT void outrider_pack_int4_groups(const uint8_t* q, const uint16_t* scale,
                                      const uint16_t* minimum, int64_t n, int64_t k,
                                      uint8_t* out) {
  pack_int4_groups(q, scale, minimum, n, k, out);
}
EXPORT void outrider_pack_int8_groups(const int8_t* w, const uint16_t* scale, int64_t n, int64_t k,
                                      uint8_t* out) {
  pack_int8_groups(w, scale, n, k, out);
}

EXPORT int outrider_linear(const Matrix* w, const float* x, int64_t ldx, int32_t rows, float* y,
                           int64_t ldy, int32_t threads) {
  return guarded([&] { multiply(*w, x, ldx, rows, y, ldy, threads); });
}

EXPORT Plan* outrider_plan_new(const Model* model) {
  Plan* plan = new (std::nothrow) Plan;
  if (!plan) return nullptr;
  plan->model = *model;
  plan->layers.assign(model->layer, model->layer + model->layers);
  plan->model.layer = plan->layers.data();
  return plan;
}
EXPORT void outrider_plan_free(Plan* plan) { delete plan; }

EXPORT int outrider_plan_draft(Plan* plan, Draft* draft) {
  return guarded([&] { plan->draft(*draft); });
}
EXPORT int outrider_plan_run(Plan* plan, const Pass* pass) {
  return guarded([&] { plan->run(*pass); });
}
