// Has memory that a thread keeps from call to call.
#pragma once
#include <cstdlib>

namespace pdserve {

enum class Keep { kInputs, kQuery, kParts, kPartial, kKeys, kValues, kScores, kWeights, kRows, kPlaces, kGiven, kOperands, kMiddle, kSums, kWidened, kCount };

// Each use has memory of its own, which grows when more is needed.
inline void* kept(Keep use, size_t bytes) {
  struct Memory {
    void* at = nullptr;
    size_t bytes = 0;
    ~Memory() { std::free(at); }
  };
  static thread_local Memory memories[size_t(Keep::kCount)];
  Memory& memory = memories[size_t(use)];
  if (memory.bytes < bytes) {
    std::free(memory.at);
    memory.bytes = (bytes + 4095) / 4096 * 4096;
    memory.at = std::aligned_alloc(4096, memory.bytes);
    if (!memory.at) std::abort();
  }
  return memory.at;
}

template <class T>
T* kept(Keep use, long count) {
  return (T*)kept(use, size_t(count) * sizeof(T));
}

}  // namespace pdserve
