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
extern const Kernels kernels_avx512, kernels_avx512_vnni;
#endif
#if defined(OUTRIDER_AVX2)
extern const Kernels kernels_avx2;
#endif

namespace {

// The best kernels that this processor can run, or those of a name; null where it cannot.
const Kernels* find_kernels(const char* name) {
  auto wanted = [name](const char* isa) { return !name || !std::strcmp(name, isa); };
  (void)wanted;
#if defined(OUTRIDER_AVX512)
  bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512vnni");
  bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (bf16 && wanted("avx512")) return &kernels_avx512;
  if (vnni && wanted("avx512_vnni")) return &kernels_avx512_vnni;
#endif
#if defined(OUTRIDER_AVX2)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && wanted("avx2")) return &kernels_avx2;
#endif
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
    link_past(start);
  }

  // Lets every row that skips positions find its own in `past`, which has stopped growing.
  void link_past(const std::vector<size_t>& start) {
    for (size_t row = 0; row < path.size(); row++)
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
    job.tiles = (int)tiles.size();
    job.alone_rows = count == 1 ? pass.rows : 2;
    for (const RowPath& p : path)
      job.most_visible = job.most_visible > p.visible ? job.most_visible : p.visible;
    take_buffers(job, pass, count);
    job.tile_bound = tile_bound.data();
    job.thread = threads.data();
    run_region(count, chosen()->pass, &job);
  }

  // A draft on its way: its tree, and the rows of its next pass.
  struct Sapling {
    Draft* draft;
    Growth tree;
    std::vector<int> level;                // the nodes of the pass
    std::vector<int32_t> tokens, row_of;   // row_of: the cache row of each node
    std::vector<float> states;
    int written;

    Sapling(Draft* d, int width) : draft(d), level(1, 0), written(d->cached) {
      tree.add(d->tokens[d->prefix], -1, 1.0);
      tokens.assign(d->tokens, d->tokens + d->prefix + 1);
      states.assign(d->states, d->states + (size_t)(d->prefix + 1) * width);
      row_of.assign(1, d->cached + d->prefix);
    }
  };

  // Drafts of one head for several sequences: a pass carries a level of every tree that grows.
  void draft(Draft* drafts, int count) {
    std::lock_guard<std::mutex> guard(turn);
    std::vector<Sapling> saplings;
    for (int i = 0; i < count; i++) saplings.emplace_back(drafts + i, model.width);
    std::vector<Sapling*> growing;
    for (Sapling& s : saplings) growing.push_back(&s);
    while (!growing.empty()) {
      grow(growing);
      growing.erase(std::remove_if(growing.begin(), growing.end(),
                                   [](const Sapling* s) { return s->tree.frontier.empty(); }),
                    growing.end());
    }
    for (Sapling& s : saplings) {
      Draft& d = *s.draft;
      d.count = (int32_t)std::min<size_t>(s.tree.token.size(), (size_t)d.capacity);
      std::copy_n(s.tree.token.begin(), d.count, d.token);
      std::copy_n(s.tree.parent.begin(), d.count, d.parent);
      std::copy_n(s.tree.confidence.begin(), d.count, d.confidence);
    }
  }

  // One pass for all trees; each grows by a level.
  void grow(const std::vector<Sapling*>& growing) {
    std::vector<Segment> segments;
    std::vector<int32_t> tokens, logit_row;
    std::vector<float> states, inputs;
    for (const Sapling* s : growing) {
      int first = (int)tokens.size(), rows = (int)s->tokens.size(), nodes = (int)s->level.size();
      segments.push_back({s->draft->slot, s->written, first, rows, rows - nodes, 0});
      for (int i = rows - nodes; i < rows; i++) logit_row.push_back(first + i);
      tokens.insert(tokens.end(), s->tokens.begin(), s->tokens.end());
      states.insert(states.end(), s->states.begin(), s->states.end());
    }
    set_paths(growing, segments);
    const Draft& common = *growing[0]->draft;
    std::vector<float> logits(logit_row.size() * (size_t)model.vocab);
    std::vector<float> features(tokens.size() * (size_t)model.width);
    std::vector<int32_t> unused(tokens.size(), -1);
    int32_t last = model.layers;
    const float* start = common.fc ? joined(common, tokens, states, inputs) : states.data();
    execute(Pass{(int32_t)tokens.size(), (int32_t)segments.size(), (int32_t)logit_row.size(), 1,
                 common.threads, common.cosine, common.sine, tokens.data(), unused.data(),
                 segments.data(), logit_row.data(), &last, common.keys, common.values,
                 common.layer_stride, common.slot_stride, common.head_stride, start,
                 logits.data(), features.data()});
    const float* row = logits.data();
    for (size_t i = 0; i < growing.size(); i++) {
      const Segment& segment = segments[i];
      size_t node_row = (size_t)(segment.first_row + segment.prefix);
      size_t nodes = growing[i]->level.size();
      extend(*growing[i], row, features.data() + node_row * (size_t)model.width);
      row += nodes * (size_t)model.vocab;
    }
  }

  // Adds the children that a pass promises, and makes the best of them the next level.
  void extend(Sapling& s, const float* logits, const float* features) {
    const Draft& draft = *s.draft;
    int made = (int)s.tree.token.size();
    std::vector<Choice> choices;
    for (size_t i = 0; i < s.level.size(); i++) {
      int depth = s.tree.depth[(size_t)s.level[i]];
      choose(draft, logits + i * (size_t)model.vocab, model.vocab, depth, choices);
      for (const Choice& c : choices)
        s.tree.add(draft.ids ? draft.ids[c.token] : c.token, s.level[i], c.chance);
    }
    s.written += (int)s.tokens.size();
    s.tree.advance(draft, made);
    if (!s.tree.frontier.empty()) next_level(s, features);
  }

  // What the rows of a pass see: the rows before them, or their ancestors in the tree.
  void set_paths(const std::vector<Sapling*>& growing, const std::vector<Segment>& segments) {
    path.clear();
    past.clear();
    std::vector<size_t> start;
    for (size_t at = 0; at < growing.size(); at++) {
      const Sapling& s = *growing[at];
      const Segment& segment = segments[at];
      int base = s.draft->cached + s.draft->prefix;
      for (int i = 0; i < segment.prefix; i++) {
        int visible = segment.cached + i + 1;
        path.push_back({(int)at, visible, visible, nullptr});
        start.push_back(0);
      }
      for (int leaf : s.level) {
        start.push_back(past.size());
        for (int node = leaf; node >= 0; node = s.tree.parent[(size_t)node])
          past.push_back(s.row_of[(size_t)node]);
        std::reverse(past.begin() + (long)start.back(), past.end());
        int visible = base + (int)(past.size() - start.back());
        path.push_back({(int)at, visible, base, nullptr});
      }
    }
    link_past(start);
  }

  // The frontier becomes the level: its tokens, its parents' states and its cache rows.
  void next_level(Sapling& s, const float* features) {
    size_t width = (size_t)model.width;
    s.tokens.clear();
    s.states.resize(s.tree.frontier.size() * width);
    s.row_of.resize(s.tree.token.size(), -1);
    for (size_t i = 0; i < s.tree.frontier.size(); i++) {
      int node = s.tree.frontier[i];
      int parent = s.tree.parent[(size_t)node];
      size_t at = (size_t)(std::find(s.level.begin(), s.level.end(), parent) - s.level.begin());
      const float* from = features + at * width;
      float* to = s.states.data() + i * width;
      std::copy_n(from, width, to);
      if (s.draft->norm_output && model.final_norm) {
        double squares = 0;
        for (size_t c = 0; c < width; c++) squares += (double)from[c] * from[c];
        float scale = 1.0f / std::sqrt((float)(squares / (double)width) + model.epsilon);
        for (size_t c = 0; c < width; c++) to[c] = from[c] * scale * model.final_norm[c];
      }
      s.tokens.push_back(s.tree.token[(size_t)node]);
      s.row_of[(size_t)node] = s.written + (int32_t)i;
    }
    s.level = s.tree.frontier;
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

EXPORT int outrider_abi_version() { return 4; }

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

EXPORT int outrider_plan_draft(Plan* plan, Draft* drafts, int32_t count) {
  return guarded([&] { plan->draft(drafts, count); });
}
EXPORT int outrider_plan_run(Plan* plan, const Pass* pass) {
  return guarded([&] { plan->run(*pass); });
}
