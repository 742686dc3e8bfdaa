"""CUDA kernels of steps that mix channels inside heads, compiled for a CPU."""

from functools import partial
from typing import NamedTuple

import emulated
import pytest
import torch
from emulated import gpu, install, recorded
from mixing_cells import CELLS, Elman, HeadGRU, HeadLSTM, HeadSLSTM, ResetAfter
from mixing_runs import KERNELS, LOOP, check_agreement, run_case
from table import DTYPES, by_head, check_case, dtype_name, gate_layouts, make_case, needs_compiler

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.codegen import mixing_cuda
from pararnn.engines.fused import mixing_cuda as fused_mixing

pytestmark = needs_compiler

MANY_CORES, ONE_CORE = 64, 1
"""Multiprocessors of a GPU where a block runs 4 rows, and 8 rows."""


class Row(NamedTuple):
    """Size of a case whose kernels are compiled once, and engine it runs."""

    kind: str
    width: int
    heads: int
    batch: int
    cores: int


ROWS = {
    "plain": Row("plain", 16, 2, 3, MANY_CORES),
    "events": Row("events", 20, 2, 5, MANY_CORES),
    "reverse": Row("reverse", 5, 3, 1, ONE_CORE),
    "strided": Row("strided", 33, 2, 9, ONE_CORE),
}
WIDTHS = (16, 5, 33, 20, 1, 3)


def _install(device, monkeypatch):
    """Run CUDA kernels on a CPU as on this device; with one core by blocks of 8 rows."""
    install(device, monkeypatch)
    if device.cores(torch.device("cpu")) == ONE_CORE:
        monkeypatch.setattr(fused_mixing, "FEW_WARPS", 0)


def _table():
    """Return (cell, dtype, row): each cell has two dtypes, and a kind of its own with each.

    All cells have all dtypes on a GPU (tests/gpu/test_mixing_gpu.py); here compilers take long.
    """
    table = []
    for c, cell_class in enumerate(CELLS):
        for d, dtype in list(enumerate(DTYPES))[c // 2 % 2 :: 2]:
            kind, width = list(ROWS)[(c + d) % len(ROWS)], WIDTHS[(c + 2 * d + 1) % len(WIDTHS)]
            name = f"{cell_class.__name__}-{dtype_name(dtype)}-{kind}-{width}"
            row = ROWS[kind]._replace(width=width)
            table.append(pytest.param(cell_class, dtype, row, id=name))
    return table


_check = partial(check_case, **KERNELS)


def _with_channels(case):
    """Return the case with fields of a number for each channel."""
    names, shape = case.cell.fields, (*case.gates.shape[:2], case.gates.shape[-1])
    fields = {name: torch.rand(shape).to(case.gates.dtype) for name in names}
    return case._replace(options={**case.options, "fields": fields} if names else case.options)


@pytest.mark.parametrize(("cell_class", "dtype", "row"), _table())
@pytest.mark.one_in(13)
def test_kernels_obey_the_contract(cell_class, dtype, row, monkeypatch):
    _install(gpu(cores=row.cores), monkeypatch)
    sizes = {"channels": row.width * row.heads, "num_heads": row.heads, "batch": row.batch}

    def case_of(length, variant):
        return make_case(cell_class, dtype, length, variant, **sizes)

    bias = torch.randn(len(cell_class.gates), sizes["channels"]).to(dtype)
    if row.kind == "plain":
        for length in (0, 1, 2):
            check_agreement(case_of(length, "initial"), FORWARD_TOLERANCE[dtype])
        _check(case_of(9, "plain"), loss_scale=1e-3 if dtype == torch.float16 else 1e-9, bias=bias)
    elif row.kind == "events":
        _check(case_of(9, "resets"), bias=bias)
        check_agreement(case_of(1, "resets"), FORWARD_TOLERANCE[dtype])
        _check(case_of(9, "packed"))
    elif row.kind == "reverse":
        _check(case_of(9, "reverse"))
        rows_in_one = case_of(8, "packed")
        _check(rows_in_one, reverse=True)
    else:
        case = _with_channels(case_of(9, "initial"))
        layouts = gate_layouts(by_head(case.gates, row.heads))
        _check(case._replace(gates=layouts["time first"]))
        if dtype == torch.float32:
            _check(case._replace(gates=layouts["channels not adjacent"]), bias=bias)


def _case(cell_class, dtype=torch.float32, length=9, variant="resets", **sizes):
    sizes = {"channels": 40, "num_heads": 2, "batch": 3, **sizes}
    return make_case(cell_class, dtype, length, variant, **sizes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=str)
@pytest.mark.thorough
def test_older_gpus_run_the_same_kernels(capability, monkeypatch):
    _install(gpu(capability, MANY_CORES), monkeypatch)
    check_agreement(_case(HeadGRU))


@pytest.mark.thorough
def test_helpers_hand_on_steps_of_any_number(monkeypatch):
    """Tiles have 16 units here, and both passes helpers."""
    _install(gpu(cores=MANY_CORES), monkeypatch)
    for length in (1, 2, 9, 10):
        case = _case(HeadLSTM, torch.bfloat16, length, "initial", channels=64)
        check_agreement(case, FORWARD_TOLERANCE[torch.bfloat16])
        if length > 2:
            _check(case)


@pytest.mark.thorough
def test_gradients_arrive_at_some_states_only(monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    case = _case(HeadLSTM)
    for arriving in ([1, 2], [0, 3]):  # c and the last h; h and the last c
        check_agreement(case, arriving=arriving)


@pytest.mark.thorough
def test_frozen_parameters_leave_other_gradients_alone(monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    case = _case(HeadGRU)
    whole = run_case(case, torch.float32, KERNELS)
    case.cell.R_z.requires_grad_(False)
    check_agreement(case)
    for parameter in case.cell.parameters():
        parameter.requires_grad_(False)
    for own, reference in zip(run_case(case, torch.float32, KERNELS), whole, strict=False):
        assert torch.equal(own, reference)


@pytest.mark.thorough
def test_a_launch_serves_calls_of_one_signature(monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    for seed in (1, 2):
        check_agreement(_case(HeadGRU, seed=seed))


@pytest.mark.parametrize(("batch", "cores"), [(4, MANY_CORES), (3, MANY_CORES), (8, ONE_CORE)])
@pytest.mark.thorough
def test_training_launches_the_variants_that_are_compiled_ahead(batch, cores, monkeypatch):
    device, variants = recorded(gpu(cores=cores))
    _install(device, monkeypatch)
    layer = pararnn.RecurrentLayer(ResetAfter, 4, 32, num_heads=2, backend="fused")
    layer(torch.randn(batch, 3, 4))[0].sum().backward()
    program = pararnn.program_of(layer.cell)
    float32, newest = torch.float32, (9, 0)
    usual = mixing_cuda.variants_of(program, layer.cell, float32, float32, newest, "sequential")
    assert {variant.direction for variant in variants} == {"forward", "backward"}
    assert set(variants) <= set(usual)


def test_non_finite_inputs_spread_as_in_the_loop(monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    case = _case(HeadGRU)
    case.gates[1, 4, 0, 2] = torch.nan
    case.gates[2, 2, 1, 9] = torch.inf
    case.gates[2, 3, 2, 30] = -torch.inf
    states, reference = (
        pararnn.solve(case.cell, case.gates, case.initial, **engine)[0]
        for engine in (KERNELS, LOOP)
    )
    assert torch.equal(states.isnan(), reference.isnan())
    assert states.isnan().any()
    assert states[0].isfinite().all()
    assert torch.allclose(states, reference, atol=1e-5, equal_nan=True)


@pytest.mark.thorough
def test_matrices_in_single_precision_with_gates_in_bfloat16(monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    case = _case(HeadSLSTM, torch.bfloat16)
    case.cell.float()
    with torch.no_grad():
        for parameter in case.cell.parameters():
            parameter.mul_(1.001)  # no numbers of bfloat16
    _check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.thorough
def test_matrices_come_from_memory_where_registers_are_few(dtype, monkeypatch):
    monkeypatch.setattr(mixing_cuda, "MAX_REGISTERS", 75)
    monkeypatch.setattr(emulated, "kernels_of", emulated.kernels_of.__wrapped__)
    _install(gpu(cores=ONE_CORE), monkeypatch)
    sizes_in_use, plan = set(), mixing_cuda.tiles_of

    def tiles_of(program, variant):
        tiles = plan(program, variant)
        sizes_in_use.add((tiles.register_fragments, tiles.units))
        return tiles

    monkeypatch.setattr(mixing_cuda, "tiles_of", tiles_of)
    _check(_case(HeadGRU, dtype, variant="initial", channels=34))
    assert {fragments for fragments, _ in sizes_in_use} == {0}


class Slices(NamedTuple):
    """Case of a head of 72 channels on a GPU whose blocks have few registers and warps, and the
    slices and splits of its forward and backward passes."""

    cell_class: type
    dtype: torch.dtype
    registers: int
    warps: int
    variant: str
    cores: int
    forward: tuple[int, int]
    backward: tuple[int, int]


SLICES = {
    "warps that split sums": Slices(
        HeadLSTM, torch.bfloat16, 120, 8, "resets", MANY_CORES, (4, 2), (4, 2)
    ),
    "rounds that follow each other": Slices(
        HeadGRU, torch.bfloat16, 160, 4, "initial", ONE_CORE, (2, 1), (2, 1)
    ),
    "matrices in three parts": Slices(
        HeadGRU, torch.float32, 160, 4, "packed", MANY_CORES, (4, 2), (4, 1)
    ),
    "time reversed": Slices(
        ResetAfter, torch.float16, 160, 4, "reverse", MANY_CORES, (4, 2), (4, 1)
    ),
}


def _with_slices(row, monkeypatch):
    """Give blocks the registers and warps of a row. Tiles depend on them: no kernels are shared."""
    monkeypatch.setattr(mixing_cuda, "MAX_REGISTERS", row.registers)
    monkeypatch.setattr(mixing_cuda, "OTHER_WITH_HELPERS", mixing_cuda.OTHER_REGISTERS)
    monkeypatch.setattr(mixing_cuda, "MAX_WARPS", row.warps)
    monkeypatch.setattr(emulated, "kernels_of", emulated.kernels_of.__wrapped__)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.one_in(4)
def test_wide_heads_are_sliced_over_a_cluster(name, monkeypatch):
    row, cuts, plan = SLICES[name], {}, mixing_cuda.tiles_of
    _with_slices(row, monkeypatch)

    def tiles_of(program, variant):
        tiles = plan(program, variant)
        cuts[variant.direction] = tiles.slices, tiles.splits
        return tiles

    monkeypatch.setattr(mixing_cuda, "tiles_of", tiles_of)
    install(gpu(cores=row.cores), monkeypatch)
    case = make_case(row.cell_class, row.dtype, 7, row.variant, channels=72, num_heads=1, batch=3)
    _check(case)
    assert (cuts["forward"], cuts["backward"]) == (row.forward, row.backward)


def test_a_head_that_is_too_wide_is_named_with_the_cure(monkeypatch):
    _install(gpu((8, 6)), monkeypatch)
    case = make_case(Elman, torch.float64, 1, channels=2048, batch=1)
    with pytest.raises(
        pararnn.EngineError,
        match=r"Elman with heads of 2048 channels needs [\d,]+ bytes of shared memory in its "
        r"forward pass; this GPU has 101,376. Use more heads, or backend='torch'",
    ):
        pararnn.solve(case.cell, case.gates, **KERNELS)


class Mutant(NamedTuple):
    """Replacement in a header, and the case that must see it."""

    direction: str
    file: str
    right: str
    wrong: str
    cell_class: type = HeadGRU
    variant: str = "resets"
    cores: int = MANY_CORES
    dtype: torch.dtype = torch.float32


MUTANTS = {
    "a product of parts is left out": Mutant(
        "forward", "products.h", "order >= most", "order >= most - 1"
    ),
    "a half of a tile is the other one": Mutant(
        "forward", "products.h", "units == 8 ? j / 2 : 0", "units == 8 ? 1 - j / 2 : 0", HeadLSTM
    ),
    "rows of a tile are the other half's": Mutant(
        "forward", "products.h", ": j / 2 * sides)", ": (1 - j / 2) * sides)", Elman,
        cores=ONE_CORE,
    ),
    "a matrix is transposed": Mutant(
        "backward", "products.h", "one.transposed ? (int64)unit", "!one.transposed ? (int64)unit"
    ),
    "an operand is read before it is written": Mutant(
        "forward", "products.h", "#else\n    meet_warps();\n#endif", "#endif"
    ),
    "a reset does not reset": Mutant(
        "forward", "forward.h", "event.pad(side) || event.reset(side)", "event.pad(side)"
    ),
    "an adjoint crosses a reset": Mutant(
        "backward", "backward.h", "pad || (events && event.reset(side))", "pad"
    ),
    "a state before a reset is read": Mutant(
        "backward", "backward.h", "if (in.reset != nullptr && in.reset[t]) return;", ""
    ),
    "a ring's slot is another one": Mutant(
        "forward", "ring.h", "j < slots - 1; ++j) copy", "j < slots - 2; ++j) copy"
    ),
    "a step is read before it arrives": Mutant(
        "forward", "ring.h", "wait_for_copies<slots - 1 - early>", "wait_for_copies<slots>"
    ),
    "a step is read before helpers have copied it": Mutant(
        "backward", "ring.h", "while (!has_arrived(full(), number)) {}", "", dtype=torch.bfloat16
    ),
    "helpers store a step before its results are there": Mutant(
        "backward", "ring.h", "turn.wait_for_results();", "", dtype=torch.bfloat16
    ),
    "a number of a pair is the other one": Mutant(
        "forward", "ring.h", "x[c + sides] = both[1]", "x[c + sides] = both[0]", Elman,
        cores=ONE_CORE,
    ),
    "helpers store another step": Mutant(
        "backward", "backward.h", "first_pulled && j > 0", "first_pulled", dtype=torch.bfloat16
    ),
    "a sum loses its blocks but the last": Mutant(
        "backward", "backward.h", "= total[i][c] + recent[i][c];", "= recent[i][c];", ResetAfter
    ),
    "the last state of a row is not stored": Mutant(
        "forward", "forward.h", "row < in.rows) store", "row < 2) store", Elman, "initial"
    ),
}  # fmt: skip


EXCHANGE_MUTANTS = {
    "operands are read before they arrive": Mutant(
        "forward", "products.h", "    wait_for_slices(", "    if (round < 0) wait_for_slices("
    ),
    "a split is added twice": Mutant(
        "forward", "products.h", "total += sums[index(j + 1, i)]", "total += sums[index(j, i)]"
    ),
    "a slice's matrices are another one's": Mutant(
        "forward", "products.h", "slice * slice_units +", "(slice ^ 1) * slice_units +"
    ),
    "a slice's sum is left out": Mutant(
        "backward", "scatter.h", "each<slices>([&](int i) { total", "each<2>([&](int i) { total"
    ),
    "sums go to another slice": Mutant(
        "backward", "scatter.h", "in_block(memory, tile / own_depth)",
        "in_block(memory, tile / own_depth ^ 1)"
    ),
    "own operands are read before they are written": Mutant(
        "backward", "scatter.h", "    meet_warps();\n    between();", "    between();"
    ),
}  # fmt: skip
"""Faults of the exchange between slices."""


def _mutant_of(mutant, tmp_path, monkeypatch):
    """Return a GPU whose kernels of one direction are compiled from a header with a fault."""
    fault = emulated.Fault(mutant.direction, f"mixing/{mutant.file}", mutant.right, mutant.wrong)
    return emulated.with_fault(gpu(cores=mutant.cores), fault, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_a_wrong_kernel_is_seen(name, tmp_path, monkeypatch):
    """The agreement that the tests above rest on fails for a kernel that is wrong."""
    mutant = MUTANTS[name]
    case = _case(mutant.cell_class, mutant.dtype, variant=mutant.variant)
    _install(_mutant_of(mutant, tmp_path, monkeypatch), monkeypatch)
    arriving = [] if mutant.direction == "forward" else None
    with pytest.raises(AssertionError):
        check_agreement(case, _tolerance(mutant.dtype), arriving=arriving)


def _tolerance(dtype):
    return 2e-6 if dtype == torch.float32 else FORWARD_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("cell_class", "dtype"),
    [*((own, torch.float32) for own in (HeadGRU, HeadLSTM, Elman, ResetAfter)),
     (HeadGRU, torch.bfloat16)],
    ids=str,
)  # fmt: skip
@pytest.mark.thorough
def test_kernels_without_a_fault_agree(cell_class, dtype, monkeypatch):
    _install(gpu(cores=MANY_CORES), monkeypatch)
    check_agreement(_case(cell_class, dtype, variant="resets"), _tolerance(dtype))


def test_sums_are_those_of_returned_states(tmp_path, monkeypatch):
    """Those of the states that a kernel carries do not pass, at one length or another: which one
    depends on the numbers."""
    mutant = Mutant("forward", "forward.h", "rounded ? rest[i][c] : constant(0)", "constant(0)")
    _install(_mutant_of(mutant, tmp_path, monkeypatch), monkeypatch)
    cases = [_case(HeadLSTM, torch.bfloat16, length, "initial") for length in (3, 5, 9)]
    with pytest.raises(AssertionError):
        [_check(case) for case in cases]


@pytest.mark.parametrize("name", EXCHANGE_MUTANTS)
@pytest.mark.thorough
def test_a_wrong_exchange_is_seen(name, tmp_path, monkeypatch):
    mutant = EXCHANGE_MUTANTS[name]
    _with_slices(SLICES["matrices in three parts"], monkeypatch)
    install(_mutant_of(mutant, tmp_path, monkeypatch), monkeypatch)
    case = make_case(HeadGRU, torch.float32, 5, "initial", channels=72, num_heads=1, batch=2)
    with pytest.raises(AssertionError):
        check_agreement(case, arriving=[] if mutant.direction == "forward" else None)
