// Requests large pages for large outputs. Touching fresh memory page by page can cost more than the
// computation.
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
  // Ignores a refusal: it only costs time.
  (void)madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

}  // namespace pararnn
