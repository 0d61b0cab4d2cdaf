// Memory that a call works in, and the pages of what it makes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

// Asks for pages of 2 MB where an array is fresh memory: each page costs a fault when it is first
// written, and a large array has thousands of the usual 4 KB. A large page may hold the end of one
// array and the beginning of the next, if both ask. Where the system has none to give, or the
// memory has its pages, nothing changes.
inline void ask_for_large_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kLeast = 1 << 20;
  static const uintptr_t kPage = sysconf(_SC_PAGESIZE);  // madvise takes whole pages
  if (bytes < kLeast) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(data), begin = at / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), at + bytes - begin, MADV_HUGEPAGE);
#endif
}

// Up to kMostKept bytes stay with the thread for its next call: a short call takes longer to be
// given fresh pages than for all that it does with them.
class Scratch {
 public:
  static constexpr int64_t kMostKept = 1 << 26, kLine = 64;

  explicit Scratch(int64_t floats) {
    const int64_t least = std::max<int64_t>(floats, 1) * sizeof(float);
    const int64_t bytes = (least + kLine - 1) / kLine * kLine;
    if (bytes > kMostKept) {
      data_ = own_ = fresh(bytes);
      return;
    }
    static thread_local Kept kept;
    if (kept.bytes < bytes) {
      std::free(kept.data);
      kept.data = nullptr, kept.bytes = 0;
      kept.data = fresh(bytes), kept.bytes = bytes;
    }
    data_ = kept.data;
  }
  ~Scratch() { std::free(own_); }
  Scratch(const Scratch&) = delete;
  float* data() const { return data_; }

 private:
  struct Kept {
    float* data = nullptr;
    int64_t bytes = 0;
    ~Kept() { std::free(data); }
  };
  static float* fresh(int64_t bytes) {
    void* data = std::aligned_alloc(kLine, bytes);
    if (data == nullptr) throw std::bad_alloc();
    ask_for_large_pages(data, bytes);
    return static_cast<float*>(data);
  }
  float *data_, *own_ = nullptr;
};

}  // namespace
