// Products of a head's matrices with the operands of 8 columns.
//
// An operand goes through shared memory, by tiles of 8 units: (tile, column, unit of the tile). In single precision it is split into bfloat16 numbers
// that add up to it, as matrices are, and the matrix units multiply these: operand_parts and matrix_parts say
// how many, and products of parts i and j count where i + j < the larger number. All parts have the range of a
// float. A block of 4 rows has two parts of an operand as columns of one tile. In double precision every lane
// multiplies its own units.
//
// Rows of matrices and operands are in the order of tiles of 8. Where a warp's tiles have 16 units, the first 8 are the
// even ones, so that a lane's numbers of both halves are adjacent.
//
// The slices of a head send each other the operands of their units. A slot is written again two rounds later:
// a slice sends then only what follows from the round between, which it gets from warps that have read the slot.
#pragma once
#include "block.h"

namespace pararnn {

constexpr int depth = ((head_width + 15) / 16 + splits - 1) / splits;  // tiles of 16 units of a warp's sums
constexpr int sum_units = splits * depth * 16;
constexpr int operand_units = slices > 1 && slices * slice_units > sum_units ? (slices * slice_units + 15) / 16 * 16 : sum_units;
constexpr int wide_row = operand_units + 8;  // numbers of a column in double precision: without bank conflicts
constexpr int layers = sides == 2 ? operand_parts : (operand_parts + 1) / 2;  // tiles of an operand
constexpr int matrix_words = matrix_parts * lanes * 4;  // of a tile of 16 x 16

constexpr int at_least_one(int x) { return x > 1 ? x : 1; }
template <int n> struct Count { static constexpr int value = n; };

// A tile of matrices: 16 units of one product, or 8 units of one or two products of the same operand.
struct Item {
  int product, halves, operand;
};

template <class Tables> struct Tiling {
  static constexpr int stages = Tables::stages, count = Tables::first_product[stages];
  struct List {
    Item items[count + 1];
    int first[stages + 1], most_products;
  };
  static constexpr List make() {
    List list{};
    int next = 0;
    for (int s = 0; s < stages; ++s) {
      list.first[s] = next;
      const int products = Tables::first_product[s + 1] - Tables::first_product[s];
      if (products > list.most_products) list.most_products = products;
      for (int p = Tables::first_product[s]; p < Tables::first_product[s + 1]; ++next) {
        const int operand = Tables::products[p].operand;
        const bool pair = units == 8 && p + 1 < Tables::first_product[s + 1] &&
                          Tables::products[p + 1].operand == operand;
        list.items[next] = {p, pair ? 2 : 1, operand};
        p += pair ? 2 : 1;
      }
    }
    list.first[stages] = next;
    return list;
  }
  static constexpr List list = make();
};

// The most operands of a stage from `first` on, to `last` - 1.
template <class Tables> constexpr int most_operands(int first, int last) {
  int most = 0;
  for (int s = first; s < last; ++s) {
    const int operands = Tables::first_operand[s + 1] - Tables::first_operand[s];
    if (operands > most) most = operands;
  }
  return most;
}

template <class Tables> PARARNN_FUNCTION constexpr int tiles_before(int stage) {
  return Tiling<Tables>::list.first[stage];
}

// Where the halves of a tile of matrices are: a product, its first column, and the first of 8 units of each half.
// Product -1: none.
struct Fragments {
  int head, column, product[2], unit[2];
};

// Matrix units truncate as they add: sums of float32 gates are added up outside of them.
constexpr bool adds_floats = operand_parts > 2;

// Returns into how many each of `count` sums of `terms` is divided, so that four are under way: a sum waits longer
// for its last term than a matrix unit is busy with one. Where units are busy anyway, that takes time.
constexpr int ways_of(int count, int terms) {
  if (sides == 2 || adds_floats || terms == 1 || count > 2) return 1;
  return terms == 2 || count == 2 ? 2 : 4;
}

// Calls f(layer, tile, word) for the parts of a lane's numbers: words of fragments, by the warp's tiles of 8 units.
template <class F> PARARNN_FUNCTION void each_part(const Numbers& x, const F& f) {
  Numbers left;
  each<per_lane>([&](int c) { left[c] = exists(c) ? x[c] : constant(0); });
  each<layers>([&](int layer) {
    each<per_lane / sides>([&](int pair) {
      const int c = pair * sides;
      const real second = sides == 2 ? left[c + sides - 1] : rest_of(left[c], to_bfloat16s((float)left[c], 0.0f) << 16);
      const unsigned word = to_bfloat16s((float)left[c], (float)second);
      f(layer, tile_of(c) * units / 8 + half_of(c), word);
      if (layer + 1 == layers) return;
      left[c] = rest_of(sides == 2 ? left[c] : second, sides == 2 ? word << 16 : word & 0xffff0000u);
      if (sides == 2) left[c + 1] = rest_of(left[c + 1], word & 0xffff0000u);
    });
  });
}

// Loads the fragments of a tile, by its index.
PARARNN_FUNCTION void load_fragments(const unsigned* source, int index, unsigned (&fragments)[4]) {
  const Pack<unsigned, 4> pack = *reinterpret_cast<const Pack<unsigned, 4>*>(source + (int64)index * lanes * 4);
  each<4>([&](int i) { fragments[i] = pack.items[i]; });
}

constexpr int fragments_bytes = lanes * 16;
// Bytes of a block's shared memory with the matrices that registers do not hold; a warp has `count` fragments.
constexpr int matrix_bytes_of(int count) { return shared_matrices && !wide ? warps * (count - register_fragments) * fragments_bytes : 0; }

// Loads a warp's first packed matrices into registers, the others into `memory` of the block. Returns where to read
// the latter.
template <int count> PARARNN_FUNCTION const unsigned* place_matrices(const unsigned* source, char* memory,
                                                                     unsigned (&matrix)[at_least_one(register_fragments)][4]) {
  each<register_fragments>([&](int i) { load_fragments(source, i, matrix[i]); });
  if constexpr (!shared_matrices) return source;
  unsigned* copy = reinterpret_cast<unsigned*>(memory + warp() * (count - register_fragments) * fragments_bytes) + (lane() - register_fragments * lanes) * 4;
  for (int i = register_fragments; i < count; ++i) {
    unsigned fragments[4];
    load_fragments(source, i, fragments);
    each<4>([&](int j) { copy[i * lanes * 4 + j] = fragments[j]; });
  }
  return copy;
}

// Adds the product of a warp's matrices number `at` and an operand.
PARARNN_FUNCTION void add_product_of(float (&sum)[4], const unsigned (&matrix)[at_least_one(register_fragments)][4], int at,
                                     const unsigned (&loaded_fragments)[4], const unsigned (&x)[2]) {
  if (at < register_fragments) add_product(sum, matrix[at < register_fragments ? at : 0], x);
  else add_product(sum, loaded_fragments, x);
}

#if PARARNN_CLUSTER
// Waits for all slices: no block may send before barriers are open, or leave while others send.
PARARNN_FUNCTION void meet_slices() {
  arrive_in_cluster();
  wait_for_cluster();
}

PARARNN_FUNCTION Barrier& barrier_of(char* barriers, int round) {
  return *reinterpret_cast<Barrier*>(barriers + round % 2 * barrier_bytes);
}

// Opens the barriers of two rounds.
PARARNN_FUNCTION void open_slices(char* barriers) {
  if (threadIdx.x > 0) return;
  each<2>([&](int i) { open_barrier(barrier_of(barriers, i), 1); });
  show_barriers();
}

// Waits for the bytes of a round from all slices.
PARARNN_FUNCTION void wait_for_slices(char* barriers, int round, int bytes) {
  Barrier& barrier = barrier_of(barriers, round);
  if (threadIdx.x == 0) expect_bytes(barrier, bytes);
  while (!has_arrived(barrier, round / 2)) {}
  __syncwarp();
}
#endif

// All threads of the blocks of a head meet: when their memory is ready, and after the last round.
PARARNN_FUNCTION void meet_block() {
  __syncthreads();
#if PARARNN_CLUSTER
  meet_slices();
#endif
}

// The stages of a pass from `first` on, to `last` - 1, whose products a kernel computes.
template <class Tables, int first, int last> struct Products {
  static constexpr int tiles = tiles_before<Tables>(last) - tiles_before<Tables>(first);
  static constexpr int words = warp_tiles * tiles * depth * matrix_words;  // of a warp's matrices
  static constexpr int operand_slots = most_operands<Tables>(first, last);
  static constexpr bool fits = slices * slice_units <= operand_units;  // no warp has tiles beyond an operand
  static constexpr int layer_bytes = wide ? columns * wide_row * (int)sizeof(real) : operand_units / 8 * tile_bytes;
  static constexpr int operand_bytes = (wide ? 1 : layers) * layer_bytes;
  static constexpr int operands_bytes = 2 * operand_slots * operand_bytes;  // one round is read, the next one written
  static constexpr int matrix_bytes = matrix_bytes_of(words / (lanes * 4));
  static constexpr int round_sums = warps * lanes * Tiling<Tables>::list.most_products * per_lane * (has_rests ? 2 : 1);
  static constexpr int sums_bytes = splits > 1 ? 2 * round_sums * 4 : 0;  // one round is read, the next one written
  static constexpr int sums_start = operands_bytes + matrix_bytes, barriers_start = sums_start + sums_bytes;
  static constexpr int bytes = barriers_start + (slices > 1 ? 2 * barrier_bytes : 0);
  static constexpr int receivers = at_least_one(slices / splits);  // of a warp: the splits share the slices

  const Inputs& in;
  const int head;
  char* memory;  // operands
  const unsigned* source;  // the warp's packed matrices, from this lane's words on
  unsigned matrix[at_least_one(register_fragments)][4];
  unsigned receiver[receivers];  // their memory
  int round = 0;

  PARARNN_FUNCTION Products(const Inputs& in, int head, const unsigned* packed, char* memory)
      : in(in), head(head), memory(memory),
        source(packed + (((int64)head * slices + slice()) * warps + warp()) * words + lane() * 4) {
    if constexpr (!wide && tiles > 0)
      source = place_matrices<words / (lanes * 4)>(source, memory + operands_bytes, matrix);
    for (int i = threadIdx.x * 4; i < operands_bytes; i += warps * lanes * 4) *reinterpret_cast<int*>(memory + i) = 0;
#if PARARNN_CLUSTER
    each<receivers>([&](int i) {
      receiver[i] = in_block(memory, (slice() + i * splits + split_of(warp())) % slices);
    });
    open_slices(memory + barriers_start);
#endif
    meet_block();
  }

  PARARNN_FUNCTION char* slot(int operand) const {
    return memory + (round % 2 * operand_slots + operand) * operand_bytes;
  }

  // Writes an operand of a stage, by its number in the stage.
  PARARNN_FUNCTION void write(int operand, const Numbers& x) const {
    if constexpr (wide) {
      real* target = reinterpret_cast<real*>(slot(operand));
      each<per_lane>([&](int c) {
        if (exists(c)) target[column_of_side(side_of(c)) * wide_row + unit_of(c)] = x[c];
      });
    } else {
      const unsigned target = shared_address(slot(operand)) + first_unit(0) / 8 * tile_bytes;
      each_part(x, [&](int layer, int tile, unsigned word) {
        const unsigned at = target + layer * layer_bytes + tile * tile_bytes;
#if PARARNN_CLUSTER
        const unsigned bits = transpose(word), own = at - shared_address(memory) + lane() * 4;
        each<receivers>([&](int i) {
          send_bits(receiver[i] + own, bits, receiver[i] + barriers_start + round % 2 * barrier_bytes);
        });
#else
        if (fits || first_unit(0) + tile * 8 < operand_units) store_transposed(at, word);
#endif
      });
    }
  }

  // Multiplies the operands of a stage, which all warps have written. `rest`: if there are rests, the products of what
  // operands have in addition to their first parts. `between`: other work, for the time that matrix units need, without
  // branches; `meanwhile`: the same with branches, which wait until units have begun all products.
  template <int stage, int count, class Work, class Between>
  PARARNN_FUNCTION void multiply(real (&product)[count][per_lane], real (&rest)[count][per_lane], const Work& meanwhile,
                                 const Between& between) {
#if PARARNN_CLUSTER
    constexpr int own = Tables::first_operand[stage + 1] - Tables::first_operand[stage];
    wait_for_slices(memory + barriers_start, round, own * layers * (slices * slice_units / 8) * tile_bytes);
#else
    meet_warps();
#endif
    between();
    if constexpr (wide) {
      meanwhile();
      multiply_wide<stage>(product);
    } else {
      multiply_parts<stage>(product, rest, meanwhile);
    }
    ++round;
  }
  template <int stage, int count, class Work>
  PARARNN_FUNCTION void multiply(real (&product)[count][per_lane], real (&rest)[count][per_lane], const Work& meanwhile) {
    multiply<stage>(product, rest, meanwhile, [] {});
  }

  template <int stage, int count> PARARNN_FUNCTION void multiply_wide(real (&product)[count][per_lane]) {
    constexpr int begin = Tables::first_product[stage], own = Tables::first_product[stage + 1] - begin;
    each<own>([&](int i) {
      const Product& one = Tables::products[begin + i];
      const real* x = reinterpret_cast<const real*>(slot(one.operand - Tables::first_operand[stage]));
      const matrix_io* m = reinterpret_cast<const matrix_io*>(in.params[one.matrix]) +
                           (int64)head * head_width * head_width;
      const int down = one.transposed ? 1 : head_width, right = one.transposed ? head_width : 1;
      each<per_lane>([&](int c) { product[begin + i][c] = constant(0); });
#pragma unroll 4
      for (int k = 0; k < head_width; ++k)
        each<per_lane>([&](int c) {
          const real factor = load_or(m + k * down + unit_of(c) * right, exists(c), constant(0));
          product[begin + i][c] = multiply_add(factor, x[column_of_side(side_of(c)) * wide_row + k],
                                               product[begin + i][c]);
        });
    });
  }

  template <int stage, int count, class Work>
  PARARNN_FUNCTION void multiply_parts(real (&product)[count][per_lane], real (&rest)[count][per_lane], const Work& meanwhile) {
    constexpr int begin = tiles_before<Tables>(stage), own = tiles_before<Tables>(stage + 1) - begin;
    constexpr int skipped = begin - tiles_before<Tables>(first);
    constexpr int most = matrix_parts > operand_parts ? matrix_parts : operand_parts;
    // Sums that do not wait for each other: of a matrix unit's instructions, and of those of small parts.
    constexpr int ways = ways_of(own * warp_tiles, depth), small = (matrix_parts > 1 || layers > 1 ? 2 : 1) * ways;
    constexpr bool rests_apart = has_rests && sides == 2;  // the last sum; with one side they are columns
    constexpr int chains = small + rests_apart;
    float sum[own * warp_tiles][chains][4];
    each<own * warp_tiles>([&](int i) {
      each<chains>([&](int chain) { each<4>([&](int j) { sum[i][chain][j] = 0.0f; }); });
    });
    constexpr int operands = Tables::first_operand[stage + 1] - Tables::first_operand[stage];
    constexpr int parts_of_layer = 3 - sides;
    const int first_tile = split_of(warp()) * depth;
    // Multiplies `together` tiles of 16 units, from the warp's tile k on.
    const auto multiply_tiles = [&](int k, auto together) {
      constexpr int tiles_of_units = decltype(together)::value;
      unsigned x[operands][layers][tiles_of_units][2];
      each<operands>([&](int o) {
        each<layers>([&](int layer) {
          const unsigned tile = shared_address(slot(o)) + layer * layer_bytes + (first_tile + k) * 2 * tile_bytes;
          if constexpr (tiles_of_units == 2) load_pairs(tile, x[o][layer][0], x[o][layer][1]);
          else load_tiles(tile, x[o][layer][0]);
        });
      });
      float part_sum[adds_floats ? own * warp_tiles : 1][4];
      each<adds_floats ? own * warp_tiles : 1>([&](int i) { each<4>([&](int j) { part_sum[i][j] = 0.0f; }); });
      each<tiles_of_units>([&](int extra) {
        each<own>([&](int i) {
          each<warp_tiles>([&](int tile) {
            const int at = ((tile * tiles + skipped + i) * depth + k + extra) * matrix_parts;
            const int o = Tiling<Tables>::list.items[begin + i].operand - Tables::first_operand[stage];
            each<matrix_parts>([&](int part) {
              unsigned loaded_fragments[4];
              if (at + part >= register_fragments) load_fragments(source, at + part, loaded_fragments);
              each<layers>([&](int layer) {
                const int order = part + layer * parts_of_layer;
                if (order >= most) return;
                const int way = ((register_fragments > 0 ? k : 0) + extra + part) % ways;
                float(&target)[4] = adds_floats && order == 0 ? part_sum[adds_floats ? i * warp_tiles + tile : 0]
                                                          : sum[i * warp_tiles + tile][rests_apart && layer > 0 ? small : order == 0 ? way : small - 1 - way];
                add_product_of(target, matrix, at + part, loaded_fragments, x[o][layer][extra]);
              });
            });
          });
        });
      });
      if constexpr (adds_floats)
        each<own * warp_tiles>([&](int i) { each<4>([&](int j) { sum[i][0][j] += part_sum[i][j]; }); });
    };
    if constexpr (register_fragments > 0) {
      each<depth / 2>([&](int pair) { multiply_tiles(pair * 2, Count<2>()); });
    } else {
#pragma unroll 1
      for (int k = 0; k + 1 < depth; k += 2) multiply_tiles(k, Count<2>());
    }
    if constexpr (depth % 2 == 1) multiply_tiles(depth - 1, Count<1>());
    meanwhile();
    each<own>([&](int i) {
      const Item& item = Tiling<Tables>::list.items[begin + i];
      each<warp_tiles>([&](int tile) {
        each<4>([&](int j) {
          real total = sum[i * warp_tiles + tile][0][j];
          each<chains - 1>([&](int chain) { total += sum[i * warp_tiles + tile][chain + 1][j]; });
          const int half = units == 8 ? j / 2 : 0, side = j % 2;
          const int number = tile * numbers_of_tile + (units == 8 ? 0 : j / 2 * sides) + (sides == 2 ? side : 0);
          if (half >= item.halves) return;
          real& result = product[item.product + half][number];
          result = sides == 2 || side == 0 ? total : result + total;
          if (has_rests && (sides == 2 || side == 1))
            rest[item.product + half][number] = sides == 2 ? sum[i * warp_tiles + tile][chains - 1][j] : total;
        });
      });
    });
    if constexpr (splits > 1) add_splits<stage>(product, rest);
  }

  // Adds up the sums of a stage's products over the splits, in the same order in all of them.
  template <int stage, int count>
  PARARNN_FUNCTION void add_splits(real (&product)[count][per_lane], real (&rest)[count][per_lane]) const {
    constexpr int begin = Tables::first_product[stage], own = (Tables::first_product[stage + 1] - begin) * per_lane;
    constexpr int numbers = own * (has_rests ? 2 : 1);
    const auto number = [&](int i) -> real& { return (i < own ? product : rest)[begin + i % own / per_lane][i % per_lane]; };
    float* const sums = reinterpret_cast<float*>(memory + sums_start) + round % 2 * round_sums + lane();
    const auto index = [&](int split, int i) { return ((split * groups + group_of(warp())) * numbers + i) * lanes; };
    each<numbers>([&](int i) {
      sums[index(split_of(warp()), i)] = (float)number(i);
    });
    meet_warps();
    each<numbers>([&](int i) {
      float total = sums[index(0, i)];
      each<splits - 1>([&](int j) { total += sums[index(j + 1, i)]; });
      number(i) = total;
    });
  }

  // Where fragments of packed matrices are: [tile of the warp][tile of the stages][depth].
  static PARARNN_FUNCTION Fragments fragments(int head, int slice, int warp, int index) {
    constexpr int stage_tiles = tiles > 0 ? tiles : 1;
    const Item item = Tiling<Tables>::list.items[tiles_before<Tables>(first) + index / depth % stage_tiles];
    const int tile = index / depth / stage_tiles, column = (split_of(warp) * depth + index % depth) * 16;
    const int unit = slice * slice_units + (group_of(warp) * warp_tiles + tile) * units;
    if (units == 16) return {head, column, {item.product, item.product}, {unit, unit + 8}};
    return {head, column, {item.product, item.halves == 2 ? item.product + 1 : -1}, {unit, unit}};
  }
};

// Packs the matrices of `Own` products: [head][slice][warp][fragments][part][lane][word].
template <class Tables, class Own> PARARNN_FUNCTION void pack(const PackProblem& p) {
  constexpr int warp_fragments = Own::words / matrix_words, divisor = warp_fragments > 0 ? warp_fragments : 1;
  const int64 count = (int64)heads * slices * warps * warp_fragments * lanes;
  for (int64 i = (int64)blockIdx.x * 256 + threadIdx.x; i < count; i += (int64)gridDim.x * 256) {
    const int own_lane = i % lanes, owner = i / lanes / divisor % warps, block = i / lanes / divisor / warps;
    const Fragments own = Own::fragments(block / slices, block % slices, owner, i / lanes % divisor);
    unsigned* target = p.packed + (i / lanes * matrix_parts * lanes + own_lane) * 4;
    for (int word = 0; word < 4; ++word) {
      const int half = word % 2, unit = own.unit[half] - half * 8 + unit_in_tile(half, own_lane / 4);
      float left[2];
      for (int j = 0; j < 2; ++j) {
        const int column = own.column + unit_in_tile(word / 2, own_lane % 4 * 2 + j);
        const bool there = own.product[half] >= 0 && unit < head_width && column < head_width;
        const Product one = Tables::products[there ? own.product[half] : 0];
        const matrix_io* m = reinterpret_cast<const matrix_io*>(p.params[one.matrix]) +
                             (int64)own.head * head_width * head_width;
        const int64 index = one.transposed ? (int64)unit * head_width + column
                                           : (int64)column * head_width + unit;
        left[j] = there ? (float)widen(m[index]) : 0.0f;
      }
      for (int part = 0; part < matrix_parts; ++part) {
        const unsigned bits = to_bfloat16s(left[0], left[1]);
        target[part * lanes * 4 + word] = bits;
        left[0] = rest_of(left[0], bits << 16);
        left[1] = rest_of(left[1], bits & 0xffff0000u);
      }
    }
  }
}

}  // namespace pararnn
