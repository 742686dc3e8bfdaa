// Instructions on 8 x 8 tiles of 16-bit numbers, and memory that a launch sizes.
//
// In memory the rows of a tile, of 16 bytes, follow each other. A fragment is a warp's share of a tile: lane i
// holds numbers 2 (i % 4) and the next of row i / 4, in one word.
#pragma once
#include "machine.h"

#define PARARNN_LAUNCH_MEMORY(name) extern __shared__ __align__(16) char name[]

namespace pararnn {

constexpr int tile_bytes = 128, lanes = 32;

PARARNN_FUNCTION int lane() { return threadIdx.x % lanes; }
PARARNN_FUNCTION int warp() { return threadIdx.x / lanes; }

// Loads the fragments of two tiles that follow each other.
PARARNN_FUNCTION void load_tiles(unsigned tiles, unsigned (&fragment)[2]) {
  const unsigned row = tiles + threadIdx.x % 16 * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(fragment[0]), "=r"(fragment[1]) : "r"(row) : "memory");
}

// Loads those of two such pairs of tiles.
PARARNN_FUNCTION void load_pairs(unsigned tiles, unsigned (&first)[2], unsigned (&second)[2]) {
  const unsigned row = tiles + lane() * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(first[0]), "=r"(first[1]), "=r"(second[0]), "=r"(second[1]) : "r"(row) : "memory");
}

// Stores a fragment as the columns of a tile.
PARARNN_FUNCTION void store_transposed(unsigned tile, unsigned fragment) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(tile + lane() % 8 * 16),
               "r"(fragment) : "memory");
#else
  const unsigned first = tile + lane() % 4 * 2 * 16 + lane() / 4 * 2;
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(first), "h"((unsigned short)fragment) : "memory");
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(first + 16), "h"((unsigned short)(fragment >> 16))
               : "memory");
#endif
}

// Returns a fragment of the transposed tile.
PARARNN_FUNCTION unsigned transpose(unsigned fragment) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// Adds a product of bfloat16 matrices: (16, 16) in four fragments (rows 0-7, rows 8-15, then columns 8-15 of
// both) by (16, 8), whose columns are the rows of two fragments. A lane's sums: two columns of row i / 4, then
// of row 8 + i / 4.
PARARNN_FUNCTION void add_product(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace pararnn
