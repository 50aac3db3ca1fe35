// Shares loops between this engine's own threads and the cores that sleeping engines of this machine have lent to it.
//
// Own threads are those of OpenMP. A lent core has a thread of ours, a helper. Who takes part in a loop claims pieces of
// it until none is left, so a helper that comes late or leaves early changes nothing but the time. Every loop gives each
// of its results from one call of its body: no result depends on who has computed it.
#pragma once
#include <omp.h>

#include <atomic>

namespace pdserve {

// The helpers that may take part in the next loop. Only the thread that begins steps makes them more.
extern std::atomic<int> helpers_at_hand;

inline bool has_helpers() { return helpers_at_hand.load(std::memory_order_relaxed) > 0; }

// Calls run(body, i) for each i below count, here, in the other own threads and in the helpers.
void share(long count, void (*run)(const void* body, long i), const void* body);

// Calls body(i) for each i below count. Within `together`, all threads of a team call this. `uneven` says that some calls
// take much longer than others.
template <bool uneven = false, class Body>
void each(long count, const Body& body) {
  if (omp_in_parallel()) {
    if constexpr (uneven) {
#pragma omp for schedule(dynamic)
      for (long i = 0; i < count; i++) body(i);
    } else {
#pragma omp for schedule(static)
      for (long i = 0; i < count; i++) body(i);
    }
  } else if (has_helpers() && count > 1) {
    share(count, [](const void* at, long i) { (*(const Body*)at)(i); }, &body);
  } else if (omp_get_max_threads() == 1) {
    for (long i = 0; i < count; i++) body(i);
  } else if constexpr (uneven) {
#pragma omp parallel for schedule(dynamic)
    for (long i = 0; i < count; i++) body(i);
  } else {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < count; i++) body(i);
  }
}

// The same, alone in this thread if the loop is not `worth` more.
template <class Body>
void each_if(bool worth, long count, const Body& body) {
  if (worth) return each(count, body);
  for (long i = 0; i < count; i++) body(i);
}

// Runs parts that consist of loops of `each`, in one team of own threads, or each loop by itself if helpers share them.
template <class Parts>
void together(const Parts& parts) {
  if (has_helpers() || omp_get_max_threads() == 1) return parts();
#pragma omp parallel
  parts();
}

}  // namespace pdserve
