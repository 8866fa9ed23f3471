#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <mutex>

namespace outrider {
namespace {

constexpr int kSpins = 400;  // some microseconds; longer waits mean that a processor is taken
// Then something else has a thread's core, such as the event loop of a server for a fraction of a
// millisecond: giving way is cheaper than to sleep and be woken (docs/log.md).
constexpr int kYields = 1000;

void futex_sleep(uint32_t* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake_all(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

struct Pool {
  std::mutex turn;
  Crew crew{};
  uint32_t order = 0;  // generation << 8 | threads - 1; what the workers sleep on
  Region region = nullptr;
  void* argument = nullptr;
  int workers = 0;  // started so far
  pid_t owner = 0;
  bool pinned = false;
};

Pool& pool() {
  static Pool* one = new Pool;  // never destroyed: workers may outlive static destructors
  return *one;
}

struct Hello {
  int index;
  uint32_t seen;
};

void* work(void* p) {
  Hello hello = *static_cast<Hello*>(p);
  delete static_cast<Hello*>(p);
  Pool& shared = pool();
  uint32_t seen = hello.seen;
  for (;;) {
    uint32_t order = __atomic_load_n(&shared.order, __ATOMIC_ACQUIRE);
    if (order == seen) {
      futex_sleep(&shared.order, seen);
      continue;
    }
    seen = order;
    int threads = (int)(order & 0xff) + 1;
    if (hello.index >= threads) continue;
    Team team{&shared.crew, threads, hello.index, 0};
    shared.region(shared.argument, team);
    team.barrier();
  }
  return nullptr;
}

void pin(pthread_t thread, int index) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int count = CPU_COUNT(&allowed), wanted = index % (count > 0 ? count : 1);
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || wanted-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(thread, sizeof one, &one);
    return;
  }
}

void start_workers(Pool& shared, int wanted) {
  if (shared.owner != getpid()) {  // first use, or a child after fork: its workers are gone
    shared.owner = getpid();
    shared.workers = 0;
    shared.crew = Crew{};
  }
  while (shared.workers < wanted) {
    pthread_t thread;
    auto* hello = new Hello{shared.workers + 1, shared.order};
    if (pthread_create(&thread, nullptr, work, hello) != 0) {
      delete hello;
      return;
    }
    if (shared.pinned) pin(thread, hello->index);
    pthread_detach(thread);
    shared.workers++;
  }
}

}  // namespace

void barrier_wait(Crew& crew, int threads) {
  uint32_t phase = __atomic_load_n(&crew.phase, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&crew.arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)threads) {
    __atomic_store_n(&crew.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&crew.phase, phase + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&crew.sleepers, __ATOMIC_SEQ_CST)) futex_wake_all(&crew.phase);
    return;
  }
  for (int i = 0; i < kSpins; i++) {
    if (__atomic_load_n(&crew.phase, __ATOMIC_ACQUIRE) != phase) return;
    pause();
  }
  for (int i = 0; i < kYields; i++) {
    if (__atomic_load_n(&crew.phase, __ATOMIC_ACQUIRE) != phase) return;
    sched_yield();
  }
  __atomic_fetch_add(&crew.sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&crew.phase, __ATOMIC_SEQ_CST) == phase) futex_sleep(&crew.phase, phase);
  __atomic_fetch_sub(&crew.sleepers, 1, __ATOMIC_SEQ_CST);
}

void run_region(int threads, Region region, void* argument) {
  Pool& shared = pool();
  std::lock_guard<std::mutex> turn(shared.turn);
  threads = threads < 1 ? 1 : threads > kMostThreads ? kMostThreads : threads;
  if (threads > 1) {
    start_workers(shared, threads - 1);
    threads = threads <= shared.workers ? threads : shared.workers + 1;
  }
  Team team{&shared.crew, threads, 0, 0};
  if (threads == 1) return region(argument, team);
  for (Line& line : shared.crew.queue) line.value = 0;
  shared.region = region;
  shared.argument = argument;
  uint32_t next = ((shared.order >> 8) + 1) << 8 | (uint32_t)(threads - 1);
  __atomic_store_n(&shared.order, next, __ATOMIC_SEQ_CST);
  futex_wake_all(&shared.order);
  region(argument, team);
  team.barrier();
}

void pin_workers(bool on) { pool().pinned = on; }

}  // namespace outrider
