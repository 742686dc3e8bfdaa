// What steps read and write, through slots of shared memory where there is room for them.
//
// Without helpers a warp copies what it reads itself, steps ahead, to slots of its own, and writes results where
// they belong. That takes it time: a warp's instructions run in order, and one that changes the address of an access
// waits until the access has read it. Helping warps copy for the whole block, up to 16 adjacent bytes a lane: a slot
// is filled by them (barrier `full`), read and written by the warps that compute (barrier `empty`), then stored and
// filled again.
#pragma once
#include "block.h"

namespace pararnn {

PARARNN_FUNCTION constexpr int at_least(int x, int low) { return x > low ? x : low; }

constexpr bool has_helpers = helpers > 0, reads_slots = slots > 0;
constexpr int ports_bytes = slot_bytes - (has_helpers ? 2 * barrier_bytes : 0);  // of a slot; its barriers follow
constexpr int ring_bytes = slots * slot_bytes, rings_bytes = (has_helpers ? 1 : warps) * ring_bytes;
constexpr int row_units = has_helpers ? slice_units : warp_tiles * units;  // of a slot's column

// The slots of a warp; `memory`: those of the block.
PARARNN_FUNCTION char* ring_of(char* memory) { return has_helpers ? memory : memory + warp() * ring_bytes; }

// Where the numbers of a port are. first: that of the block's first column, of the head's first unit, in the first
// step. column, item, time: elements from one to the next.
template <class T> struct Layout {
  T* first;
  int64 column, item, time;
};

// Columns of a block that are rows of the batch.
PARARNN_FUNCTION bool column_exists(const Inputs& in, int64 first_row, int column) {
  return whole || first_row + column < in.rows;
}

struct AllItems {
  static PARARNN_FUNCTION constexpr int number(int item) { return item; }
};

// The numbers of a step that a pass reads or writes at one place: `items` of each column and unit, at `begin` of a
// slot unless they are accessed in place. Items::number: of an item in its layout.
template <class Of, int items, int begin, bool in_slots, class Items = AllItems> struct Port {
  using T = Of;
  using Numbering = Items;
  static constexpr int count = items, start = begin, row_bytes = row_units * (int)sizeof(T);
  // Bytes from one column to the next: for a block's columns, without bank conflicts of a warp's accesses.
  static constexpr int spread = (sizeof(T) > 2 || units == 16) && sides == 1 ? 32 : 16, period = 2 * spread;
  static constexpr int stride = row_bytes + (has_helpers ? (period + spread - row_bytes % period) % period : 0);
  static constexpr int bytes = in_slots ? items * columns * stride : 0, end = begin + bytes;

  T* address[sides];  // in place: of the lane's first number of item 0, in the first step
  bool there[sides];
  // Elements from an item to the next, from a step to the next, and from the first step to this one. No address is
  // changed: a warp would wait for the accesses that read it.
  int64 item, time, passed;
  int own;  // in slots: bytes from the port's start to the lane's first number

  PARARNN_FUNCTION void open(const Layout<T>& layout, const Inputs& in, int64 first_row) {
    item = layout.item;
    time = layout.time;
    passed = 0;
    each<sides>([&](int side) {
      const int column = column_of_side(side);
      there[side] = column_exists(in, first_row, column);
      address[side] = layout.first + column * layout.column + unit_of(0);
    });
    own = column_of_side(0) * stride + ((has_helpers ? group_of(warp()) * warp_tiles * units : 0) + unit_in_tile(0, lane() / 4)) * (int)sizeof(T);
    keep(own);
  }
  PARARNN_FUNCTION T* find(const char* slot, int index, int c) const {
    const int unit = tile_of(c) * units + half_of(c);
    if constexpr (in_slots) {
      const int offset = begin + (index * columns + side_of(c)) * stride + unit * (int)sizeof(T);
      return reinterpret_cast<T*>(const_cast<char*>(slot) + own + offset);
    } else {
      return address[side_of(c)] + passed + Items::number(index) * item + unit;
    }
  }
  // A lane's numbers of both halves of a tile are adjacent: one instruction accesses them where they are aligned.
  static constexpr bool pairs = units == 16 && (in_slots || (chunk >= 2 * (int)sizeof(T) && !ragged));
  using Two = Pack<T, 2>;
  // The first number of such a pair; the other one is `sides` later.
  static PARARNN_FUNCTION constexpr int first_of(int pair) { return pair / sides * 2 * sides + pair % sides; }

  PARARNN_FUNCTION void read(const char* slot, int index, Numbers& x) const {
    if constexpr (pairs) {
      each<per_lane / 2>([&](int pair) {
        const int c = first_of(pair);
        real both[2] = {constant(0), constant(0)};
        if (in_slots || there[side_of(c)]) unpack(*reinterpret_cast<const Two*>(find(slot, index, c)), both);
        x[c] = both[0];
        x[c + sides] = both[1];
      });
    } else {
      each<per_lane>([&](int c) {
        const bool reads = in_slots || (there[side_of(c)] && exists(c));
        x[c] = reads ? widen(*find(slot, index, c)) : constant(0);
      });
    }
  }
  PARARNN_FUNCTION void write(char* slot, int index, const Numbers& x) const {
    if constexpr (pairs) {
      each<per_lane / 2>([&](int pair) {
        const int c = first_of(pair);
        const real both[2] = {x[c], x[c + sides]};
        if (in_slots || (there[side_of(c)] && stores(c))) *reinterpret_cast<Two*>(find(slot, index, c)) = packed<T>(both);
      });
    } else {
      each<per_lane>([&](int c) {
        if (in_slots || (there[side_of(c)] && stores(c))) *find(slot, index, c) = narrow<T>(x[c]);
      });
    }
  }
  // Goes on by a step, if there are more.
  PARARNN_FUNCTION void next(bool more = true) { passed += more ? time : 0; }
};
template <class T, int items, int begin, class Items = AllItems> using Reads = Port<T, items, begin, reads_slots, Items>;
template <class T, int items, int begin, class Items = AllItems> using Writes = Port<T, items, begin, has_helpers, Items>;

// Copies bytes whose addresses are multiples of their number.
template <int bytes> PARARNN_FUNCTION void copy_bytes(char* target, const char* source) {
  if constexpr (bytes >= 4) {
    using Words = Pack<unsigned, bytes / 4>;
    *reinterpret_cast<Words*>(target) = *reinterpret_cast<const Words*>(source);
  } else {
    *reinterpret_cast<unsigned short*>(target) = *reinterpret_cast<const unsigned short*>(source);
  }
}

// A lane's share of the copies of a port between slots and memory: of a helper's lane, or of one for its own warp.
template <class Port> struct Copies {
  using T = typename Port::T;
  static constexpr int widest = at_least(chunk, (int)sizeof(T));
  static constexpr int own_chunk = widest < Port::row_bytes ? widest : Port::row_bytes;
  static constexpr int row_chunks = Port::row_bytes / own_chunk, workers = (has_helpers ? helpers : 1) * lanes;
  static constexpr int chunks = Port::bytes > 0 ? Port::count * columns * row_chunks : 0;
  static constexpr int parts = (chunks + workers - 1) / workers;
  static constexpr bool all_exist = whole && !ragged && chunks % workers == 0;

  char* place[at_least(parts, 1)];  // in the first step; null for none
  int64 time, passed;               // bytes from a step to the next, and from the first step to this one

  static PARARNN_FUNCTION int index_of(int part) {
    return part * workers + (has_helpers ? (int)threadIdx.x - warps * lanes : lane());
  }
  static PARARNN_FUNCTION int start_of(int part) {
    return Port::start + index_of(part) / row_chunks * Port::stride + index_of(part) % row_chunks * own_chunk;
  }

  PARARNN_FUNCTION void open(const Layout<T>& layout, const Inputs& in, int64 first_row) {
    time = layout.time * (int64)sizeof(T);
    passed = 0;
    const int first = has_helpers ? slice() * slice_units : first_unit(0);
    each<parts>([&](int part) {
      const int index = index_of(part), row = index / row_chunks, column = row % columns;
      const int unit = first + index % row_chunks * own_chunk / (int)sizeof(T);
      const int64 offset = column * layout.column + Port::Numbering::number(row / columns) * layout.item + unit;
      const bool there = index < chunks && unit < head_width && column_exists(in, first_row, column);
      place[part] = there ? (char*)(layout.first + offset) : nullptr;
    });
  }
  // Copies a step into a slot, and goes on by a step if there are more.
  PARARNN_FUNCTION void load(char* slot, bool more) {
    each<parts>([&](int part) {
      if (!all_exist && place[part] == nullptr) return;
      copy_async<own_chunk>(shared_address(slot) + start_of(part), place[part] + passed);
    });
    passed += more ? time : 0;
  }
  // Copies a step out of a slot, and goes on by a step.
  PARARNN_FUNCTION void store(const char* slot) {
    each<parts>([&](int part) {
      if (!all_exist && place[part] == nullptr) return;
      copy_bytes<own_chunk>(place[part] + passed, slot + start_of(part));
    });
    passed += time;
  }
};

// A slot, and the parity of the times that all slots have been used before: steps take turns.
struct Turn {
  char* ring;
  int start = 0;  // of the slot, in bytes from the first one
  int number = 0;

  PARARNN_FUNCTION char* slot() const { return ring + start; }
  PARARNN_FUNCTION Barrier& full() const { return *reinterpret_cast<Barrier*>(slot() + ports_bytes); }
  PARARNN_FUNCTION Barrier& empty() const { return *reinterpret_cast<Barrier*>(slot() + ports_bytes + barrier_bytes); }
  PARARNN_FUNCTION void next() {
    if constexpr (!reads_slots) return;
    const bool last = start == ring_bytes - slot_bytes;
    start = last ? 0 : start + slot_bytes;
    number ^= last;
  }
  // Waits until the step's numbers are there, and all lanes have read those of the step before; `early`: steps before
  // the step runs.
  template <int early = 1> PARARNN_FUNCTION void wait_for_numbers() const {
    if constexpr (has_helpers) {
      while (!has_arrived(full(), number)) {}
    } else if constexpr (reads_slots) {
      wait_for_copies<slots - 1 - early>();
      __syncwarp();
    }
  }
  // Waits until the step's numbers have been used, and its results are there.
  PARARNN_FUNCTION void wait_for_results() const {
    while (!has_arrived(empty(), number)) {}
  }
  // Gives the slot, whose numbers this lane has read and written, to helpers.
  PARARNN_FUNCTION void release() const {
    if constexpr (has_helpers) arrive(empty());
  }
};

// Clears the slots of a block, those of a warp without helpers, and opens their barriers; by those who copy, before
// the block meets. Barriers are not cleared: another helper may have opened them.
PARARNN_FUNCTION void open_slots(char* memory) {
  constexpr int workers = (has_helpers ? helpers : 1) * lanes;
  const int own = has_helpers ? (int)threadIdx.x - warps * lanes : lane();
  char* ring = ring_of(memory);
  for (int i = own * 4; i < ring_bytes; i += workers * 4)
    if (i % at_least(slot_bytes, 1) < ports_bytes) *reinterpret_cast<int*>(ring + i) = 0;
  __syncwarp();
  if (!has_helpers || own > 0) return;
  Turn turn{ring};
  for (int i = 0; i < slots; ++i) {
    open_barrier(turn.full(), workers);
    open_barrier(turn.empty(), warps * lanes);
    turn.next();
  }
}

// Copies the next step of a warp without helpers. `load(slot, more)` copies; `more`: there is one after it.
template <class Load> PARARNN_FUNCTION void copy_ahead(Turn& turn, const Load& load, bool more) {
  if constexpr (has_helpers || !reads_slots) return;
  load(turn.slot(), more);
  end_group_of_copies();
  turn.next();
}
// Copies the first steps.
template <class Load> PARARNN_FUNCTION void copy_first(Turn& turn, const Load& load, int length) {
  for (int j = 0; j < slots - 1; ++j) copy_ahead(turn, load, j + 1 < length);
}

// Copies for `length` steps, and fills one more slot with nothing, for which the last step waits; by helpers.
// `load(slot, more)` copies the next step in, `store(slot)` out.
template <class Load, class Store>
PARARNN_FUNCTION void serve_steps(char* ring, int length, const Load& load, const Store& store) {
  const auto fill = [&](const Turn& turn, bool more) {
    if (more) load(turn.slot(), true);
    if constexpr (chunk >= 4) {
      arrive_after_copies(turn.full());
    } else {  // not all copies are asynchronous
      end_group_of_copies();
      wait_for_copies<0>();
      arrive(turn.full());
    }
  };
  Turn turn{ring};
  for (int j = 0; j < slots && j <= length; ++j) {
    fill(turn, j < length);
    turn.next();
  }
  turn = Turn{ring};
  for (int j = 0; j < length; ++j) {
    turn.wait_for_results();
    store(turn.slot());
    if (j + slots <= length) fill(turn, j + slots < length);
    turn.next();
  }
  end_group_of_copies();
  wait_for_copies<0>();
}

}  // namespace pararnn
