// Products of a slice's own operands, for all units of the head: their sums go to the slices that have these units,
// which add them up. Of many operands and few sums, fewer bytes are sent than if slices sent operands.
//
// Two rounds have memory of their own. A slot is written again two rounds later, when all warps of all slices have
// read it: they send the round between after that.
#pragma once
#include "products.h"

namespace pararnn {

template <class Tables, int first, int last> struct ScatteredProducts {
  static constexpr int first_product = Tables::first_product[first];
  static constexpr int products = Tables::first_product[last] - first_product;
  static constexpr int own_depth = slice_units / 16;  // tiles of 16 own units, which a sum runs over
  static constexpr int head_tiles = slices * own_depth;
  static constexpr int tiles = (head_tiles + warps - 1) / warps;  // of 16 units of the head: a warp's
  static constexpr int words = tiles * products * own_depth * matrix_words;  // of a warp's matrices
  static constexpr int layer_bytes = slice_units / 8 * tile_bytes, operand_bytes = layers * layer_bytes;
  static constexpr int operand_slots = most_operands<Tables>(first, last);
  static constexpr int operands_bytes = 2 * operand_slots * operand_bytes;
  static constexpr int matrix_bytes = matrix_bytes_of(words / (lanes * 4));
  static constexpr int sum_bytes = slice_units / 8 * sides * lanes * 4;  // of a sum, from one slice
  // The number of sums of a stage's products from `begin` on that come before product p.
  static constexpr int sums_before(int begin, int p) {
    int count = 0;
    for (int i = begin; i < p; ++i) count += Tables::sum_of_product[i] == i;
    return count;
  }
  static constexpr int most_sums() {
    int most = 0;
    for (int s = first; s < last; ++s) {
      const int count = sums_before(Tables::first_product[s], Tables::first_product[s + 1]);
      if (count > most) most = count;
    }
    return most;
  }
  static constexpr int sums_bytes = 2 * most_sums() * slices * sum_bytes;
  static constexpr int sums_start = operands_bytes + matrix_bytes, barriers_start = sums_start + sums_bytes;
  static constexpr int bytes = barriers_start + 2 * barrier_bytes;
  static_assert(slice_units % 16 == 0 && !wide);

  const Inputs& in;
  char* memory;
  const unsigned* source;  // the warp's packed matrices, from this lane's words on
  unsigned matrix[at_least_one(register_fragments)][4];
  unsigned receiver[tiles];  // the sums of a tile's units
  int round = 0;

  PARARNN_FUNCTION ScatteredProducts(const Inputs& in, int head, const unsigned* packed, char* memory)
      : in(in), memory(memory),
        source(packed + (((int64)head * slices + slice()) * warps + warp()) * words + lane() * 4) {
    source = place_matrices<words / (lanes * 4)>(source, memory + operands_bytes, matrix);
    each<tiles>([&](int i) {
      const int tile = min(warp() * tiles + i, head_tiles - 1);
      receiver[i] = in_block(memory, tile / own_depth) + sums_start + slice() * sum_bytes +
                    (tile % own_depth * 2 * sides * lanes + lane()) * 4;
    });
    open_slices(memory + barriers_start);
    meet_block();
  }

  PARARNN_FUNCTION char* slot(int operand) const {
    return memory + (round % 2 * operand_slots + operand) * operand_bytes;
  }

  // Writes an operand of a stage, by its number in the stage.
  PARARNN_FUNCTION void write(int operand, const Numbers& x) const {
    if (splits > 1 && split_of(warp()) > 0) return;
    const unsigned target = shared_address(slot(operand)) + first_own_tile() * tile_bytes;
    each_part(x, [&](int layer, int tile, unsigned word) {
      store_transposed(target + layer * layer_bytes + tile * tile_bytes, word);
    });
  }
  // The first of the slice's tiles of 8 units that the warp has numbers of.
  static PARARNN_FUNCTION int first_own_tile() { return group_of(warp()) * warp_tiles * units / 8; }

  // Multiplies the operands of a stage, which all warps have written, and adds up what all slices have sent.
  // `rest`: none. `meanwhile`, `between`: see Products.
  template <int stage, int count, class Work, class Between>
  PARARNN_FUNCTION void multiply(real (&product)[count][per_lane], real (&rest)[count][per_lane], const Work& meanwhile,
                                 const Between& between) {
    constexpr int begin = Tables::first_product[stage], own = Tables::first_product[stage + 1] - begin;
    constexpr int most = matrix_parts > operand_parts ? matrix_parts : operand_parts, parts_of_layer = 3 - sides;
    constexpr bool apart = ways_of(tiles, own) > 1 || tiles == 1;  // each product has a sum of its own
    float sum[tiles][own][2][4];
    each<tiles * own * 2>([&](int i) {
      each<4>([&](int j) { sum[i / (own * 2)][i / 2 % own][i % 2][j] = 0.0f; });
    });
    meet_warps();
    between();
    each<own>([&](int p) {
      const int operand = Tables::products[begin + p].operand - Tables::first_operand[stage];
      const int target = apart ? p : Tables::sum_of_product[begin + p] - begin;
      each<own_depth>([&](int k) {
        unsigned x[layers][2];
        each<layers>([&](int layer) {
          load_tiles(shared_address(slot(operand)) + layer * layer_bytes + k * 2 * tile_bytes, x[layer]);
        });
        each<tiles>([&](int tile) {
          float part_sum[4];
          each<4>([&](int j) { part_sum[j] = 0.0f; });
          each<matrix_parts>([&](int part) {
            const int at = ((tile * products + begin - first_product + p) * own_depth + k) * matrix_parts + part;
            unsigned loaded_fragments[4];
            if (at >= register_fragments) load_fragments(source, at, loaded_fragments);
            each<layers>([&](int layer) {
              const int order = part + layer * parts_of_layer;
              if (order >= most) return;
              float(&own_sum)[4] = adds_floats && order == 0 ? part_sum : sum[tile][target][order > 0];
              add_product_of(own_sum, matrix, at, loaded_fragments, x[layer]);
            });
          });
          if constexpr (adds_floats) each<4>([&](int j) { sum[tile][target][0][j] += part_sum[j]; });
        });
      });
    });
    meanwhile();
    const int slot_start = round % 2 * (sums_bytes / 2);
    each<tiles>([&](int tile) {
      if (head_tiles % warps != 0 && warp() * tiles + tile >= head_tiles) return;
      const int owner = (warp() * tiles + tile) / own_depth;
      const unsigned barrier = in_block(memory, owner) + barriers_start + round % 2 * barrier_bytes;
      each<own>([&](int p) {
        if (Tables::sum_of_product[begin + p] != begin + p) return;
        const unsigned target = receiver[tile] + slot_start + sums_before(begin, begin + p) * slices * sum_bytes;
        each<2 * sides>([&](int i) {
          const int j = sides == 2 ? i : 2 * i;
          float total = 0.0f;
          each<own>([&](int q) {
            if (q != p && (!apart || Tables::sum_of_product[begin + q] != begin + p)) return;
            total += sum[tile][q][0][j] + sum[tile][q][1][j];
            if (sides == 1) total += sum[tile][q][0][j + 1] + sum[tile][q][1][j + 1];
          });
          send_bits(target + i * lanes * 4, __float_as_uint(total), barrier);
        });
      });
    });
    constexpr int sums_count = sums_before(begin, begin + own);
    wait_for_slices(memory + barriers_start, round, sums_count * slices * sum_bytes);
    const float* sums = reinterpret_cast<const float*>(memory + sums_start + slot_start) + lane();
    each<own>([&](int p) {
      const bool has_sum = Tables::sum_of_product[begin + p] == begin + p;  // others are added to that one
      each<per_lane>([&](int c) {
        const int tile = first_own_tile() + tile_of(c) * units / 8 + half_of(c);
        const float* own_sums = sums + sums_before(begin, begin + p) * slices * (sum_bytes / 4) + (tile * sides + side_of(c)) * lanes;
        float total = 0.0f;
        if (has_sum) each<slices>([&](int i) { total += own_sums[i * (sum_bytes / 4)]; });
        product[begin + p][c] = total;
      });
    });
    ++round;
  }

  // Where fragments of packed matrices are: [tile of the warp][product][depth].
  static PARARNN_FUNCTION Fragments fragments(int head, int slice, int warp, int index) {
    const int k = index % own_depth, product = first_product + index / own_depth % products;
    const int unit = (warp * tiles + index / own_depth / products) * 16;
    return {head, slice * slice_units + k * 16, {product, product}, {unit, unit + 8}};
  }
};

}  // namespace pararnn
