// Numbers that a warp posts in global memory for others to collect. Each travels in one word with the
// number of the round that it belongs to, so that who waits for it needs no fence.
#pragma once
#include "linear.h"

namespace pararnn {

constexpr int boundary_numbers = num_states * per_lane;  // a lane's states where two segments meet
constexpr int end_numbers = 2 * boundary_numbers;  // and their sizes
constexpr int words_a_number = wide ? 2 : 1;

template <int count> constexpr int post_words = count * words_a_number * lanes;

PARARNN_FUNCTION void post_word(Word* to, unsigned half, unsigned tag) {
  write_word(to, (Word)tag << 32 | half);
}

// Every lane posts numbers of its own; tag 0 is for memory that nothing has been posted to.
template <int count> PARARNN_FUNCTION void post(Word* to, const real (&x)[count], unsigned tag) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    Word* place = to + i * words_a_number * lanes + lane();
    if constexpr (wide) {
      const Word bits = (Word)__double_as_longlong(x[i]);
      post_word(place, (unsigned)bits, tag);
      post_word(place + lanes, (unsigned)(bits >> 32), tag);
    } else {
      post_word(place, __float_as_uint((float)x[i]), tag);
    }
  }
}

// Waits for the posts of `some` others, `apart` words from one to the next.
template <int most, int count>
PARARNN_FUNCTION void collect(const Word* from, int64 apart, int some, unsigned tag,
                              real (&x)[most][count]) {
  for (bool all = false; !all;) {
    all = true;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (k >= some) continue;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const Word* place = from + k * apart + i * words_a_number * lanes + lane();
        const Word low = read_word(place), high = wide ? read_word(place + lanes) : low;
        all &= low >> 32 == tag && high >> 32 == tag;
        x[k][i] = wide ? (real)__hiloint2double((int)(unsigned)high, (int)(unsigned)low)
                       : (real)__uint_as_float((unsigned)low);
      }
    }
  }
  __syncwarp();
}

}  // namespace pararnn
