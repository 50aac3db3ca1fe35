// Has the word of each core in the memory that the engines of one machine share. pdserve/machine/core_ledger.py makes its file.
//
// An engine OWNs its cores while it computes, and sets them FREE when it goes to sleep. Another engine may then take
// them (LENT). An owner that wakes up finds them OWNED again, or says that they are WANTED, and begins without waiting:
// the borrower looks at the word before each piece of work, and leaves. SHARED is a core that two engines own, `owner`
// and `borrower`: nobody lends it until one of them has gone, and the other then has it alone. A core of no engine is
// NOBODYS.
#pragma once
#include <atomic>
#include <cstdint>

namespace pdserve {

enum class CoreState : uint8_t { kNobodys, kFree, kOwned, kLent, kWanted, kShared };

// Engines have numbers from 1 on; no engine is 0.
struct CoreWord {
  CoreState state;
  uint16_t owner, borrower;

  static CoreWord of(uint64_t word) {
    return {CoreState(word & 0xff), uint16_t(word >> 16), uint16_t(word >> 32)};
  }
  uint64_t packed() const { return uint64_t(state) | uint64_t(owner) << 16 | uint64_t(borrower) << 32; }
  bool lent() const { return state == CoreState::kLent || state == CoreState::kWanted; }
};

struct alignas(64) CoreEntry {
  std::atomic<uint64_t> word;

  CoreWord read() const { return CoreWord::of(word.load(std::memory_order_acquire)); }

  // Replaces the word by what `next` makes of it, until no other engine has changed it meanwhile. `next` returns whether
  // there is anything to change. Returns that, too.
  template <class Next>
  bool change(const Next& next) {
    uint64_t seen = word.load(std::memory_order_acquire);
    while (true) {
      CoreWord to = CoreWord::of(seen);
      if (!next(to)) return false;
      if (word.compare_exchange_weak(seen, to.packed(), std::memory_order_acq_rel, std::memory_order_acquire)) return true;
    }
  }
};
static_assert(sizeof(CoreEntry) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// What an engine may do with a core. Each returns whether it has.

// The engine owns the core and computes there: it starts, or wakes up. Where two own it already, it is not entered, and
// tries again when it next wakes up.
inline bool claim(CoreEntry& core, uint16_t engine) {
  return core.change([&](CoreWord& word) {
    if (word.state == CoreState::kShared) return false;
    if (word.owner && word.owner != engine) word = {CoreState::kShared, word.owner, engine};
    else if (word.state == CoreState::kLent) word.state = CoreState::kWanted;
    else if (word.state == CoreState::kFree || !word.owner) word = {CoreState::kOwned, engine, 0};
    else return false;
    return true;
  });
}

inline bool lend(CoreEntry& core, uint16_t engine) {
  return core.change([&](CoreWord& word) {
    if (word.owner != engine) return false;
    if (word.state == CoreState::kOwned) word.state = CoreState::kFree;
    else if (word.state == CoreState::kWanted) word.state = CoreState::kLent;
    else return false;
    return true;
  });
}

inline bool borrow(CoreEntry& core, uint16_t engine) {
  return core.change([&](CoreWord& word) {
    if (word.state != CoreState::kFree || word.owner == engine) return false;
    word.state = CoreState::kLent;
    word.borrower = engine;
    return true;
  });
}

inline bool may_use(const CoreEntry& core, uint16_t engine) {
  const CoreWord word = CoreWord::of(core.word.load(std::memory_order_relaxed));
  return word.state == CoreState::kLent && word.borrower == engine;
}

inline bool give_back(CoreEntry& core, uint16_t engine) {
  return core.change([&](CoreWord& word) {
    if (!word.lent() || word.borrower != engine) return false;
    word.state = word.state == CoreState::kLent ? CoreState::kFree : CoreState::kOwned;
    word.borrower = 0;
    return true;
  });
}

// The engine is gone: what it has borrowed is given back, what it shared is the other owner's, and the rest nobody's.
inline bool forget(CoreEntry& core, uint16_t engine) {
  const bool gave = give_back(core, engine);
  return core.change([&](CoreWord& word) {
    const bool second = word.state == CoreState::kShared && word.borrower == engine;
    if (word.owner != engine && !second) return false;
    if (word.state == CoreState::kShared) word = {CoreState::kOwned, second ? word.owner : word.borrower, 0};
    else word = {CoreState::kNobodys, 0, 0};
    return true;
  }) || gave;
}

}  // namespace pdserve
