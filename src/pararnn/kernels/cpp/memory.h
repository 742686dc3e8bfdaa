// Large outputs are fresh memory from the system. Touching it page by page can cost more than the
// computation, so ask for large pages.
#pragma once
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pararnn {

inline void expect_writes(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t page = 1 << 21, worthwhile = 1 << 24;
  if (bytes < worthwhile) return;
  const uintptr_t first = ((uintptr_t)start + page - 1) / page * page;
  const uintptr_t last = ((uintptr_t)start + bytes) / page * page;
  // A refusal only costs time.
  (void)madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

}  // namespace pararnn
