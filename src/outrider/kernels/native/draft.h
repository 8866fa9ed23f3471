// Growing a draft tree from a head's logits: the twin of drafters/growth.py for plain requests.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "abi.h"

namespace outrider {

// Tokens this much less likely than the likeliest are not worth a guess.
constexpr double kFar = 10.0;

struct Choice {
  int token;      // in the draft vocabulary
  double chance;  // of the draft's own distribution
  double order;   // the larger one comes first
};

inline uint64_t mix(uint64_t x) {  // as core/noise.py
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline double uniform(uint64_t key, int64_t id) {
  uint64_t bits = mix((uint64_t)(id + 1) * 0x9E3779B97F4A7C15ull + key);
  return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

// The best guesses of a row: the likeliest at temperature 0, else the first to arrive.
inline void choose(const Draft& draft, const float* logits, int vocab, int depth,
                   std::vector<Choice>& all) {
  float peak = *std::max_element(logits, logits + vocab);
  double warmth = draft.temperature > 0 ? draft.temperature : 1.0, sum = 0;
  double edge = peak - kFar * warmth;
  all.clear();
  for (int i = 0; i < vocab; i++) {
    if (!(logits[i] >= edge)) continue;
    double weight = std::exp((logits[i] - peak) / warmth);
    sum += weight;
    all.push_back({i, weight, weight});
  }
  if (draft.temperature > 0)
    for (Choice& c : all) {
      int64_t id = draft.ids ? draft.ids[c.token] : c.token;
      c.order = std::log(uniform(draft.noise[depth], id)) / c.chance;  // minus the time
    }
  for (Choice& c : all) c.chance /= sum;
  size_t count = std::min<size_t>((size_t)draft.branching, all.size());
  std::partial_sort(all.begin(), all.begin() + (long)count, all.end(),
                    [](const Choice& a, const Choice& b) {
                      return a.order != b.order ? a.order > b.order : a.token < b.token;
                    });
  all.resize(count);
}

// The nodes of one tree, in the order they were made.
struct Growth {
  std::vector<int32_t> token, parent, depth;
  std::vector<double> chance, confidence;
  std::vector<int> frontier;

  int add(int32_t t, int32_t p, double c) {
    token.push_back(t);
    parent.push_back(p);
    depth.push_back(p < 0 ? 0 : depth[(size_t)p] + 1);
    confidence.push_back(c);
    chance.push_back(p < 0 ? 1.0 : chance[(size_t)p] * c);
    return (int)token.size() - 1;
  }

  // Which of the nodes from `first` on to expand next: see Growth._promising in growth.py.
  void advance(const Draft& draft, int first) {
    frontier.clear();
    int size = (int)token.size();
    if (first == size || depth[(size_t)first] >= draft.depth) return;
    double edge = draft.branching > 1 ? draft.hopeless : 0.0;
    if (size > draft.nodes) {
      std::vector<double> sorted(chance.begin() + 1, chance.end());
      std::nth_element(sorted.begin(), sorted.begin() + draft.nodes - 1, sorted.end(),
                       [](double a, double b) { return a > b; });
      edge = std::max(edge, sorted[(size_t)draft.nodes - 1]);
    }
    for (int node = first; node < size; node++) {
      bool ends = std::find(draft.end, draft.end + draft.ends, token[(size_t)node]) !=
                  draft.end + draft.ends;
      if (chance[(size_t)node] >= edge && !ends) frontier.push_back(node);
    }
    std::stable_sort(frontier.begin(), frontier.end(),
                     [&](int a, int b) { return chance[(size_t)a] > chance[(size_t)b]; });
    if ((int)frontier.size() > draft.beam) frontier.resize((size_t)draft.beam);
  }
};

}  // namespace outrider
