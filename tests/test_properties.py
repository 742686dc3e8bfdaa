"""Every row of the table obeys both claims of the numerics contract, outputs and all gradients."""

import pytest
import torch
from table import (
    CELLS,
    COUPLED,
    DTYPES,
    FAST_PAIRS,
    LATCHES,
    LENGTHS,
    MIXING,
    NEWTON_FUSED,
    PAIRS,
    PEAKS,
    ROWS,
    SCAN,
    VARIANTS,
    broken,
    case_of,
    cell_of,
    covering,
    dtype_name,
    make_case,
    mixing_covering,
    needs_compiler,
    pairs_of,
    passed,
    peak_case,
    with_checks,
)

import pararnn
from pararnn.engines.fused import host

pytestmark = pytest.mark.two_dtypes

LONG = LENGTHS[-1]
# (newton, scan) is (newton, torch) with another scan: what is longer repeats that one's rows.
# (newton, fused) has long sequences in test_newton_fused.py.
NOT_LONG = (SCAN, NEWTON_FUSED)


def variants_of(name, dtype, length):
    """Return some variants, other ones in the next dtype and at the next length.

    Each cell meets each variant at each length and in each dtype. Of long sequences the variants
    are two, and each dtype and cell meets one.
    """
    turn = list(CELLS).index(name) + DTYPES.index(dtype)
    if length == LONG:
        return [("packed", "reverse")[turn % 2]]
    first = 2 * turn + LENGTHS.index(length)
    return [VARIANTS[(first + k) % len(VARIANTS)] for k in range(2)]


def _solves():
    """Return (cell, dtype, length); coupled cells, which take longest, meet no long sequences."""
    return [
        pytest.param(name, dtype, length, id=f"{name}-{dtype_name(dtype)}-{length}")
        for name in CELLS
        for dtype in DTYPES
        for length in LENGTHS
        if not (name in COUPLED and length == LONG)
    ]


@pytest.mark.parametrize(("name", "dtype", "length"), _solves())
@pytest.mark.one_in(11)
def test_solves_obey_the_contract(name, dtype, length):
    pairs = [pair for pair in pairs_of(name) if length < LONG or pair not in NOT_LONG]
    for variant in variants_of(name, dtype, length):
        case = make_case(pararnn.CELLS[name], dtype, length, variant)
        results = with_checks(case, pairs, segments=5)
        assert not broken(results), variant
        assert not any(result.expanding for result in results), variant


@pytest.mark.parametrize(("row", "name", "dtype"), covering())
@pytest.mark.one_in(11)
def test_rows_obey_the_contract(row, name, dtype, monkeypatch):
    # Threads that would idle: with them (newton, scan) cuts the time of its scan, too.
    monkeypatch.setattr(host, "threads_as_constant", lambda: 64)
    results = with_checks(case_of(row, name, dtype), pairs_of(name), row.segments)
    assert not broken(results)
    # Near its smallest numbers float16 has no digits to spare, and says so as rounding that counts.
    assert dtype == torch.float16 or not any(result.expanding for result in results)


@needs_compiler
@pytest.mark.parametrize(("row", "name", "dtype"), mixing_covering())
@pytest.mark.one_in(19)
def test_rows_of_mixing_cells_obey_the_contract(row, name, dtype):
    assert not broken(with_checks(case_of(row, name, dtype), FAST_PAIRS, row.segments))


@pytest.mark.filterwarnings("ignore::pararnn.ConvergenceWarning")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)],
    ids=dtype_name,
)
@pytest.mark.parametrize("peak", PEAKS)
@pytest.mark.parametrize("name", LATCHES)
def test_values_that_come_late_large_and_rare(name, peak, dtype):
    """Errors are relative to what came before, in each pair."""
    for result in with_checks(peak_case(name, peak, dtype, 256), PAIRS, segments=8):
        passed(result)


@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(5)
def test_gradcheck(name, pair):
    solver, backend = pair
    sizes = {"channels": 4, "num_heads": 2} if name in MIXING else {"channels": 2}
    case = make_case(cell_of(name), torch.float64, 5, "resets", batch=2, **sizes)
    fields = case.options.pop("fields", {})
    names, params = list(fields), dict(case.cell.named_parameters())
    leaves = [case.gates, *case.initial, *fields.values(), *params.values()]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    states = len(case.cell.states)

    def run(gates, *others):
        initial, fields_by_name = others[:states], dict(zip(names, others[states:], strict=False))
        weights = dict(zip(params, others[states + len(names) :], strict=True))

        class Call(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = case.cell

            def forward(self):
                return pararnn.solve(
                    self.cell,
                    gates,
                    initial,
                    fields=fields_by_name,
                    solver=solver,
                    backend=backend,
                    **case.options,
                )

        out, final = torch.func.functional_call(
            Call(), {f"cell.{key}": value for key, value in weights.items()}, ()
        )
        return (*out, *final) if states > 1 else (out, final)

    # Jacobians along random directions: entry by entry takes ten times as long.
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
