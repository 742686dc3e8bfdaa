"""Faults in kernels over chunks, each of which the comparison with the loop must see."""

from typing import NamedTuple

import emulated
import pytest
import torch
from chunk_cases import CELLS, assert_close, counts_of_loops, in_variant, make_call
from emulated import Fault
from table import needs_compiler

import pararnn

pytestmark = [needs_compiler, pytest.mark.thorough]


class Mutant(NamedTuple):
    """A fault, and the case that must see it. keys: of a head. cores: of the GPU."""

    fault: Fault
    cell: str
    variant: str = "plain"
    dtype: torch.dtype = torch.float32
    keys: int = 32
    cores: int = 1


def _mutant(direction, file, right, wrong, *case, **options):
    return Mutant(Fault(direction, f"chunks/{file}", right, wrong), *case, **options)


MUTANTS = {
    "corrections of the chunk are left out": _mutant(
        "forward", "chunk.h", "sum += memory[at(c, t, d, s)] * x[k][d][s]", "sum += 0",
        "gated-delta",
    ),
    "a state decays by that of another": _mutant(
        "forward", "ring.h", "(back ? j * num_states + i : i * num_states + j)",
        "(back ? i * num_states + j : j * num_states + i)", "titans",
    ),
    "adjoint states decay as states do": _mutant(
        "reverse", "reverse.h", "decay_states(adjoint, stage + at_full, true)",
        "decay_states(adjoint, stage + at_full, false)", "titans",
    ),
    "a step reads what it writes": _mutant(
        "forward", "chunk.h", "bool is_before(int t, int s) { return s < t; }",
        "bool is_before(int t, int s) { return s <= t; }", "rwkv7",
    ),
    "gradients of decays lack those of reads": _mutant(
        "gradients", "number_gradients.h",
        "add_scaled(y, mixed_back(decays.mask_before[a][i], before), of.before[j][b]);", "",
        "gated-delta",
    ),
    "gradients overlap operands of other keys": _mutant(
        "gradients", "number_decays.h", "constexpr int gradient_stride = operand_bytes<chunk>",
        "constexpr int gradient_stride = tile_bytes_of<chunk>", "gated-delta", keys=64,
    ),
    "columns do not decay": _mutant(
        "forward", "vector_decays.h", "    columns.decay(t);\n", "", "kda"
    ),
    "queries decay as reads do": _mutant(
        "forward", "vector_decays.h", "scale(of.query(q, 0), 1)", "scale(of.query(q, 0), 0)", "kda"
    ),
    "gradients of decays end at a step": _mutant(
        "gradients", "vector_gradients.h", "      through *= decay[i];\n", "", "kda"
    ),
    "resets keep the state": _mutant(
        "forward", "inputs.h", "x = !valid[h] ? constant(i == j) : fresh[h] ? constant(0) : x;",
        "x = !valid[h] ? constant(i == j) : x;", "gated-delta", "resets",
    ),
    "gates are copied in the wrong order": _mutant(
        "forward", "inputs.h", "(span.reverse ? -in.gate_time : in.gate_time)", "in.gate_time",
        "gated-delta", "reverse",
    ),
    "blocks have the values of the first": _mutant(
        "forward", "ring.h", "if (v / readers == split)", "if (v / readers == 0)", "gated-delta",
        cores=8,
    ),
    "a warp's share is left out": _mutant(
        "gradients", "contract.h", "for (int w = 1; w < warps; ++w) {\n    const Square",
        "for (int w = 2; w < warps; ++w) {\n    const Square", "gated-delta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name, tmp_path, monkeypatch):
    mutant = MUTANTS[name]
    rows, heads = (1, 1) if mutant.cores > 1 else (2, 2)
    call = make_call(CELLS[mutant.cell], rows, 50, heads, mutant.keys, 32, mutant.dtype)
    call, options = in_variant(call, mutant.variant)
    device = emulated.gpu(cores=mutant.cores)
    emulated.install(emulated.with_fault(device, mutant.fault, tmp_path, monkeypatch), monkeypatch)
    pararnn.clear_caches()
    by_loop = counts_of_loops(monkeypatch)

    def check():
        assert_close(call, **options)
        assert not any(by_loop)  # heads that are not finite run again, and are then right

    with pytest.raises(AssertionError):
        check()
