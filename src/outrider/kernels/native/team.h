// What a thread sees of the others while a pass runs: a barrier and loops with stealing.
//
// Only compiler built-ins, no standard templates: this file is compiled once per instruction set.
#pragma once
#include <cstdint>

namespace outrider {

constexpr int kMostThreads = 256;

struct alignas(64) Line {
  uint64_t value;
};

// Shared by the threads of one region.
struct Crew {
  alignas(64) uint32_t arrived;
  alignas(64) uint32_t phase;
  alignas(64) uint32_t sleepers;
  Line queue[kMostThreads];  // loop number << 32 | next index
};

void barrier_wait(Crew& crew, int threads);  // pool.cpp: spin, yield, then sleep

struct Team {
  Crew* crew;
  int threads, thread;
  uint32_t loops;

  void barrier() {
    if (threads > 1) barrier_wait(*crew, threads);
  }

  // Calls body(i) for i in [0, count), each once, spread over the threads; thread t begins with
  // its own range [bound(t), bound(t + 1)) and then helps the others. A barrier must follow before
  // the next loop.
  template <class Bound, class Body>
  void loop_over(Bound&& bound, Body&& body) {
    uint64_t number = (uint64_t)++loops << 32;
    if (threads == 1) {
      for (uint32_t i = bound(0); i < (uint32_t)bound(1); i++) body((int)i);
      return;
    }
    __atomic_store_n(&crew->queue[thread].value, number | (uint32_t)bound(thread),
                     __ATOMIC_RELEASE);
    for (int v = 0; v < threads; v++) {
      int victim = thread + v < threads ? thread + v : thread + v - threads;
      uint64_t* next = &crew->queue[victim].value;
      uint32_t end = (uint32_t)bound(victim + 1);
      for (;;) {
        uint64_t now = __atomic_load_n(next, __ATOMIC_ACQUIRE);
        if ((now ^ number) >> 32 || (uint32_t)now >= end) break;
        uint32_t mine = (uint32_t)__atomic_fetch_add(next, 1, __ATOMIC_ACQ_REL);
        if (mine >= end) break;
        body((int)mine);
      }
    }
  }

  template <class Body>
  void loop(int count, Body&& body) {
    loop_over([&](int t) { return (int)((int64_t)count * t / threads); }, body);
  }
};

}  // namespace outrider
