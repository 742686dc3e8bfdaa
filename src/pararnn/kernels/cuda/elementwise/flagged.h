// Numbers that a warp publishes in global memory for others to wait for. Each number travels in one word with
// a flag, the number of its round, so that no fence is needed.
#pragma once
#include "linear.h"

namespace pararnn {

constexpr int words_a_number = wide ? 2 : 1;

// T: a struct of reals only.
template <class T> constexpr int numbers_in = sizeof(T) / sizeof(real);
template <class T> constexpr int words_of = numbers_in<T> * words_a_number * lanes;

template <class T> PARARNN_FUNCTION real* numbers_of(T& x) { return reinterpret_cast<real*>(&x); }
template <class T> PARARNN_FUNCTION const real* numbers_of(const T& x) {
  return reinterpret_cast<const real*>(&x);
}

PARARNN_FUNCTION void write_flagged(Word* target, unsigned half, unsigned flag) {
  write_word(target, (Word)flag << 32 | half);
}

// Publishes each lane's numbers. Flag 0 means that nothing has been written yet.
template <class T> PARARNN_FUNCTION void publish(Word* target, const T& x, unsigned flag) {
  each<numbers_in<T>>([&](int i) {
    const real number = numbers_of(x)[i];
    Word* address = target + i * words_a_number * lanes + lane();
    if constexpr (wide) {
      const Word bits = (Word)__double_as_longlong(number);
      write_flagged(address, (unsigned)bits, flag);
      write_flagged(address + lanes, (unsigned)(bits >> 32), flag);
    } else {
      write_flagged(address, __float_as_uint((float)number), flag);
    }
  });
}

// Waits for what `count` warps publish, at most `most`, `stride` words apart.
template <int most, class T>
PARARNN_FUNCTION void wait_for(const Word* source, int64 stride, int count, unsigned flag,
                               T (&x)[most]) {
  for (bool all = false; !all;) {
    all = true;
    each<most>([&](int k) {
      if (k >= count) return;
      each<numbers_in<T>>([&](int i) {
        const Word* address = source + k * stride + i * words_a_number * lanes + lane();
        const Word low = read_word(address), high = wide ? read_word(address + lanes) : low;
        all &= low >> 32 == flag && high >> 32 == flag;
        numbers_of(x[k])[i] = wide ? (real)__hiloint2double((int)(unsigned)high, (int)(unsigned)low)
                                   : (real)__uint_as_float((unsigned)low);
      });
    });
  }
  __syncwarp();
}

// The same for one warp, if it exists.
template <class T>
PARARNN_FUNCTION void wait_for(const Word* source, bool exists, unsigned flag, T& x) {
  wait_for(source, 0, exists, flag, reinterpret_cast<T(&)[1]>(x));
}

}  // namespace pararnn
