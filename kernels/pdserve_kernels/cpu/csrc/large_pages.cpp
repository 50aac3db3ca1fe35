// Asks the system for large pages.
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

// Asks for large pages in memory that is not written yet. A system that has none goes on with small ones.
extern "C" void pdserve_ask_for_large_pages(void* from, long bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t first = ((uintptr_t)from + 4095) & ~uintptr_t(4095), end = (uintptr_t)from + bytes;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}
