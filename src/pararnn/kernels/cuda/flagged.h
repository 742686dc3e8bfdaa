// Numbers that a warp publishes in global memory for others to wait for. Each travels in one word with a
// flag, the number of the round that it belongs to, so that no fence is needed: a decoupled look-back.
#pragma once
#include "linear.h"

namespace pararnn {

constexpr int words_a_number = wide ? 2 : 1;

// What is published is a struct of nothing but reals.
template <class T> constexpr int numbers_in = sizeof(T) / sizeof(real);
template <class T> constexpr int words_of = numbers_in<T> * words_a_number * lanes;

template <class T> PARARNN_FUNCTION real* numbers_of(T& x) { return reinterpret_cast<real*>(&x); }
template <class T> PARARNN_FUNCTION const real* numbers_of(const T& x) {
  return reinterpret_cast<const real*>(&x);
}

PARARNN_FUNCTION void write_flagged(Word* to, unsigned half, unsigned flag) {
  write_word(to, (Word)flag << 32 | half);
}

// Every lane publishes numbers of its own; flag 0 is for memory that nothing has been written to.
template <class T> PARARNN_FUNCTION void publish(Word* to, const T& x, unsigned flag) {
  each<numbers_in<T>>([&](int i) {
    const real number = numbers_of(x)[i];
    Word* place = to + i * words_a_number * lanes + lane();
    if constexpr (wide) {
      const Word bits = (Word)__double_as_longlong(number);
      write_flagged(place, (unsigned)bits, flag);
      write_flagged(place + lanes, (unsigned)(bits >> 32), flag);
    } else {
      write_flagged(place, __float_as_uint((float)number), flag);
    }
  });
}

// Waits for what `count` others publish, `stride` words from one to the next; for `most` of them at most.
template <int most, class T>
PARARNN_FUNCTION void wait_for(const Word* from, int64 stride, int count, unsigned flag,
                               T (&x)[most]) {
  for (bool all = false; !all;) {
    all = true;
    each<most>([&](int k) {
      if (k >= count) return;
      each<numbers_in<T>>([&](int i) {
        const Word* place = from + k * stride + i * words_a_number * lanes + lane();
        const Word low = read_word(place), high = wide ? read_word(place + lanes) : low;
        all &= low >> 32 == flag && high >> 32 == flag;
        numbers_of(x[k])[i] = wide ? (real)__hiloint2double((int)(unsigned)high, (int)(unsigned)low)
                                   : (real)__uint_as_float((unsigned)low);
      });
    });
  }
  __syncwarp();
}

// The same for one other, if there is one.
template <class T>
PARARNN_FUNCTION void wait_for(const Word* from, bool exists, unsigned flag, T& x) {
  wait_for(from, 0, exists, flag, reinterpret_cast<T(&)[1]>(x));
}

}  // namespace pararnn
