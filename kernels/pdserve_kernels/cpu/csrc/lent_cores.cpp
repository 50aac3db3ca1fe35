// Borrows cores of sleeping engines, and has the helpers that compute there.
#include "lent_cores.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core_ledger.h"

namespace pdserve {

std::atomic<int> helpers_at_hand{0};

namespace {

using Word = std::atomic<uint32_t>;

// A helper without a loop spins so long, and then sleeps until the next one. Between the loops of a step it spins.
constexpr int64_t kSpinNs = 200'000;
// A caller waits so long, or twice as long as its own pieces have taken, for a helper in the middle of a piece. Then
// somebody else has taken the helper's core, and the caller has the helper end its piece on its own core, and sleeps
// meanwhile.
constexpr int64_t kLateNs = 30'000;
constexpr int64_t kLookAgainNs = 1'000'000;
// A loop is divided into one share for each thread, so that each reads memory from end to end, and a share into so many
// pieces: who has no share left takes pieces of the others'.
constexpr long kPieces = 32, kMostShares = 64;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000L + time.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_on(Word& word, uint32_t seen, const timespec* timeout = nullptr) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
}
void wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }

// The thread on one core of another engine. It computes there only while it is engaged.
struct Helper {
  CoreEntry* core;
  cpu_set_t place;
  pthread_t thread;
  Word engaged{0};
  std::atomic<bool> inside{false};  // perhaps in the middle of a piece
  std::atomic<pid_t> id{0};
  bool started = false, refused = false;
  std::atomic<int64_t> since{0};
};

// The gate of a loop: its number, whether it is closed, and how many helpers are inside. A helper touches a loop only
// between its entering and its leaving, and the loop ends when the gate is closed and nobody is inside.
constexpr uint32_t kClosed = 1 << 15, kInside = kClosed - 1, kNumber = 1 << 16;

struct Loop {
  struct alignas(64) Share {
    std::atomic<long> next;
    long end;
  };

  long shares, piece;
  void (*run)(const void*, long);
  const void* body;
  std::atomic<long> entered;  // who has entered, and so the share with which the next one begins
  Share share[kMostShares];

  void divide(long count, long threads, long all) {
    shares = std::min(all, kMostShares);
    piece = std::max(1L, count / (shares * kPieces));
    for (long s = 0; s < shares; s++) {
      share[s].next.store(count * s / shares, std::memory_order_relaxed);
      share[s].end = count * (s + 1) / shares;
    }
    entered.store(threads, std::memory_order_relaxed);
  }

  // Computes pieces until none is left, or `may` says no, and begins with share number `at`. Returns how many.
  template <class May>
  long work(long at, const May& may) {
    long pieces = 0;
    for (long s = 0; s < shares; s++) {
      Share& some = share[(at + s) % shares];
      while (true) {
        if (!may()) return pieces;
        const long first = some.next.fetch_add(piece, std::memory_order_relaxed);
        if (first >= some.end) break;
        for (long i = first; i < std::min(first + piece, some.end); i++) run(body, i);
        pieces++;
      }
    }
    return pieces;
  }
};

class Borrower {
 public:
  Borrower(CoreEntry* cores, long count, uint16_t engine, const int* own, long own_count) : engine_(engine) {
    for (long i = 0; i < own_count; i++) {
      if (own[i] >= count) continue;
      own_.push_back(&cores[own[i]]);
      claim(*own_.back(), engine);
    }
    for (long core = 0; core < std::min(count, long(CPU_SETSIZE)); core++) {
      if (std::find(own, own + own_count, core) != own + own_count) continue;
      auto helper = std::make_unique<Helper>();
      helper->core = &cores[core];
      CPU_ZERO(&helper->place);
      CPU_SET(core, &helper->place);
      helpers_.push_back(std::move(helper));
    }
  }

  ~Borrower() {
    release();
    for (CoreEntry* core : own_) forget(*core, engine_);
    stopping_.store(true);
    for (auto& helper : helpers_) {
      if (!helper->started) continue;
      helper->engaged.store(1);
      wake(helper->engaged);
      bell_.fetch_add(1);
      wake(bell_);
      pthread_join(helper->thread, nullptr);
    }
    helpers_at_hand.store(0);
  }

  // Takes what this engine owns, and borrows what is free.
  void begin_step() {
    if (asleep_) {
      for (CoreEntry* core : own_) claim(*core, engine_);
      asleep_ = false;
    }
    for (auto& helper : helpers_) {
      const CoreWord word = helper->core->read();
      if (helper->engaged.load(std::memory_order_relaxed)) {
        if (word.state != CoreState::kLent || word.borrower != engine_) leave(*helper);
      } else if (word.state == CoreState::kFree && !helper->refused) {
        engage(*helper);
      }
    }
    if (has_helpers()) ring();
  }

  // This engine has nothing to compute.
  void sleep() {
    release();
    for (CoreEntry* core : own_) lend(*core, engine_);
    asleep_ = true;
  }

  double seconds() {
    int64_t sum = total_ns_.load();
    for (auto& helper : helpers_) {
      if (helper->engaged.load()) sum += now() - helper->since;
    }
    // A helper that leaves just now is in neither, and a counter never falls.
    told_ns_ = std::max(told_ns_, sum);
    return told_ns_ / 1e9;
  }

  long pieces() { return pieces_.load(); }

  bool share(long count, void (*run)(const void*, long), const void* body) {
    if (sharing_.exchange(true, std::memory_order_acquire)) return false;
    const long threads = omp_get_max_threads(), all = threads + helpers_at_hand.load(std::memory_order_relaxed);
    loop_.divide(count, threads, all);
    loop_.run = run;
    loop_.body = body;
    number_ += kNumber;
    gate_.store(number_);
    ring();
    const int64_t began = now();
    const auto always = [] { return true; };
    long pieces = 0;
    if (threads == 1) {
      pieces = loop_.work(0, always);
    } else {
#pragma omp parallel
      {
        const long own = loop_.work(omp_get_thread_num(), always);
        if (omp_get_thread_num() == 0) pieces = own;
      }
    }
    if (gate_.fetch_or(kClosed) & kInside) wait_for_helpers((now() - began) / std::max(1L, pieces));
    sharing_.store(false, std::memory_order_release);
    return true;
  }

 private:
  void ring() {
    bell_.fetch_add(1);
    if (sleepers_.load()) wake(bell_);
  }

  void engage(Helper& helper) {
    if (!borrow(*helper.core, engine_)) return;
    const int error = helper.started ? place(helper, helper.place) : start(helper);
    if (error) {
      // The core is not one that this process may use. Other errors, as too many threads, may pass.
      helper.refused = error == EINVAL;
      give_back(*helper.core, engine_);
      return;
    }
    helper.since = now();
    helpers_at_hand.fetch_add(1);
    helper.engaged.store(1);
    wake(helper.engaged);
  }

  // Only the caller's thread moves helpers: a helper gets no time on a core where the caller computes. Returns an error
  // number or 0.
  int place(Helper& helper, const cpu_set_t& place) {
    const pid_t id = helper.id.load();
    // A thread without a number yet has not left the core on which it was started.
    return id == 0 || sched_setaffinity(id, sizeof place, &place) == 0 ? 0 : errno;
  }

  // Returns an error number or 0.
  int start(Helper& helper) {
    struct Start {
      Borrower* borrower;
      Helper* helper;
    };
    pthread_attr_t how;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&how);
    pthread_attr_setaffinity_np(&how, sizeof helper.place, &helper.place);
    // Signals are for the threads of Python.
    pthread_sigmask(SIG_SETMASK, &all, &before);
    auto* start = new Start{this, &helper};
    const auto main = [](void* given) -> void* {
      const std::unique_ptr<Start> start((Start*)given);
      start->borrower->help(*start->helper);
      return nullptr;
    };
    const int error = pthread_create(&helper.thread, &how, main, start);
    helper.started = !error;
    if (!helper.started) delete start;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&how);
    return error;
  }

  // Ends the use of a core; the helper and the caller's thread may both find that it has to end.
  void leave(Helper& helper) {
    const int64_t since = helper.since;
    if (!helper.engaged.exchange(0)) return;
    helpers_at_hand.fetch_sub(1);
    total_ns_.fetch_add(now() - since);
    give_back(*helper.core, engine_);
  }

  void release() {
    for (auto& helper : helpers_) leave(*helper);
  }

  // ---------------------------------------------------------------- in a helper's thread

  void help(Helper& helper) {
    // A helper has the priority of all: under SCHED_IDLE it would leave its core at once to whoever wants that, but a
    // piece that it has begun could then wait for seconds on a machine that has much else to do.
    helper.id.store(pid_t(syscall(SYS_gettid)));
    uint32_t last = kClosed;
    while (!stopping_.load()) {
      if (!helper.engaged.load()) {
        sleep_on(helper.engaged, 0);
        continue;
      }
      const uint32_t rung = bell_.load();
      const int64_t until = now() + kSpinNs;
      do {
        for (int i = 0; i < 64; i++) {
          if (is_open(last)) {
            helper.inside.store(true);
            if (enter(last)) {
              const long at = loop_.entered.fetch_add(1, std::memory_order_relaxed);
              pieces_.fetch_add(loop_.work(at, [&] { return may_use(*helper.core, engine_); }));
              exit();
            }
            helper.inside.store(false);
            break;
          }
          pause();
        }
        if (!may_use(*helper.core, engine_)) leave(helper);
      } while (helper.engaged.load() && bell_.load() == rung && now() < until);
      if (!helper.engaged.load() || bell_.load() != rung) continue;
      sleepers_.fetch_add(1);
      sleep_on(bell_, rung);
      sleepers_.fetch_sub(1);
    }
  }

  // A loop that a helper has entered once has no more to do for it.
  bool is_open(uint32_t last) {
    const uint32_t gate = gate_.load(std::memory_order_relaxed);
    return !(gate & kClosed) && (gate & ~kInside) != last;
  }

  bool enter(uint32_t& last) {
    uint32_t gate = gate_.load();
    const uint32_t number = gate & ~(kClosed | kInside);
    if (gate & kClosed || !gate_.compare_exchange_strong(gate, gate + 1)) return false;
    last = number;
    return true;
  }

  void exit() {
    const uint32_t left = gate_.fetch_sub(1) - 1;
    if (left & kClosed && !(left & kInside) && waits_.load()) wake(gate_);
  }

  // ---------------------------------------------------------------- in the caller's thread

  void wait_for_helpers(int64_t piece_ns) {
    const int64_t late = now() + std::max(kLateNs, 2 * piece_ns);
    do {
      for (int i = 0; i < 64; i++) {
        if (!(gate_.load(std::memory_order_acquire) & kInside)) return;
        pause();
      }
    } while (now() < late);
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    std::vector<Helper*> moved;
    waits_.store(true);
    for (uint32_t gate; (gate = gate_.load()) & kInside;) {
      for (auto& helper : helpers_) {
        if (!helper->inside.load() || std::find(moved.begin(), moved.end(), helper.get()) != moved.end()) continue;
        if (!place(*helper, here)) moved.push_back(helper.get());
      }
      const timespec soon{0, kLookAgainNs};
      sleep_on(gate_, gate, &soon);
    }
    waits_.store(false);
    for (Helper* helper : moved) {
      // This process may not use the core any more, and the helper would stay on the caller's.
      if (place(*helper, helper->place)) leave(*helper);
    }
  }

  const uint16_t engine_;
  std::vector<CoreEntry*> own_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  bool asleep_ = false;
  uint32_t number_ = 0;
  int64_t told_ns_ = 0;
  std::atomic<bool> sharing_{false}, waits_{false}, stopping_{false};
  std::atomic<int64_t> total_ns_{0}, pieces_{0};
  alignas(64) Word gate_{kClosed};
  alignas(64) Word bell_{0};
  std::atomic<int> sleepers_{0};
  Loop loop_;
};

// A process is one engine.
Borrower* borrower = nullptr;

}  // namespace

void share(long count, void (*run)(const void*, long), const void* body) {
  if (borrower && borrower->share(count, run, body)) return;
  for (long i = 0; i < count; i++) run(body, i);
}

}  // namespace pdserve

using namespace pdserve;

// Makes engine number `engine` the owner of the cores `own`, whose words are among the `count` that begin at `words`.
// Returns 0 if this process is an engine already.
extern "C" int pdserve_cores_open(void* words, long count, int engine, const int* own, long own_count) {
  if (borrower) return 0;
  borrower = new Borrower((CoreEntry*)words, count, uint16_t(engine), own, own_count);
  return 1;
}

extern "C" void pdserve_cores_begin_step() { borrower->begin_step(); }
extern "C" void pdserve_cores_sleep() { borrower->sleep(); }
extern "C" int pdserve_cores_borrowed() { return helpers_at_hand.load(); }
extern "C" double pdserve_cores_borrowed_seconds() { return borrower->seconds(); }
extern "C" long pdserve_cores_pieces() { return borrower->pieces(); }

extern "C" void pdserve_cores_close() {
  delete borrower;
  borrower = nullptr;
}

// An engine has ended without closing. The caller holds its number.
extern "C" void pdserve_cores_forget(void* words, long count, int engine) {
  for (long core = 0; core < count; core++) forget(((CoreEntry*)words)[core], uint16_t(engine));
}
