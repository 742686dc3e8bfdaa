"""`solve`: boundaries mean what they say, and wrong arguments are named."""

import pytest
import torch
from call_results import as_tuple
from table import PAIRS, ROWS, VARIANTS, cell_of, make_case, needs_compiler

import pararnn


@pytest.mark.parametrize(("name", "pair"), ROWS)
@pytest.mark.one_in(3)
def test_packed_sequences_equal_separate_ones(name, pair):
    case = make_case(cell_of(name), torch.float64, 40, batch=1)
    lengths = [13, 0, 1, 20]  # and 6 steps of padding
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    initial = tuple(torch.randn(4, 4, dtype=torch.float64) for _ in case.cell.states)
    engine = {"solver": pair[0], "backend": pair[1]}
    for reverse in (False, True):
        joint, final = pararnn.solve(
            case.cell,
            case.gates,
            initial,
            cu_seqlens=cuts,
            reverse=reverse,
            **case.options,
            **engine,
        )
        joint, final = as_tuple(joint), as_tuple(final)
        assert not joint[0][:, sum(lengths) :].any()
        for s, length in enumerate(lengths):
            part = slice(int(cuts[s]), int(cuts[s]) + length)
            fields = {k: v[:, part] for k, v in case.options.get("fields", {}).items()}
            separate, end = pararnn.solve(
                case.cell,
                case.gates[:, part],
                [h[s : s + 1] for h in initial],
                fields=fields,
                reverse=reverse,
                **engine,
            )
            for whole, single in zip(joint, as_tuple(separate), strict=True):
                assert torch.allclose(whole[:, part], single, atol=1e-13)
            for whole, single in zip(final, as_tuple(end), strict=True):
                assert torch.allclose(whole[s], single[0], atol=1e-13)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_resets_start_from_zero(pair):
    case = make_case(pararnn.LSTMCell, torch.float64, 30, "initial")
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[0, 11] = reset[1, 0] = True
    engine = {"solver": pair[0], "backend": pair[1]}
    (h, _), _ = pararnn.solve(case.cell, case.gates, case.initial, reset=reset, **engine)
    (tail, _), _ = pararnn.solve(case.cell, case.gates[:, 11:], **engine)
    (head, _), _ = pararnn.solve(case.cell, case.gates[:, :11], case.initial, **engine)
    (fresh, _), _ = pararnn.solve(case.cell, case.gates, **engine)
    assert torch.allclose(h[0, 11:], tail[0], atol=1e-13)
    assert torch.allclose(h[0, :11], head[0], atol=1e-13)
    assert torch.allclose(h[1], fresh[1], atol=1e-13)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_reverse_is_a_flip(pair):
    case = make_case(pararnn.GRUCell, torch.float64, 30, "initial")
    engine = {"solver": pair[0], "backend": pair[1]}
    backward, end = pararnn.solve(case.cell, case.gates, case.initial, reverse=True, **engine)
    forward, last = pararnn.solve(case.cell, case.gates.flip(1), case.initial, **engine)
    assert torch.equal(backward, forward.flip(1))
    assert torch.equal(end, last)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_chunks_equal_one_run(pair):
    case = make_case(pararnn.SLSTMCell, torch.float64, 60)
    engine = {"solver": pair[0], "backend": pair[1]}
    whole, end = pararnn.solve(case.cell, case.gates, **engine)
    first, middle = pararnn.solve(case.cell, case.gates[:, :25], **engine)
    second, last = pararnn.solve(case.cell, case.gates[:, 25:], middle, **engine)
    for a, b, c in zip(whole, first, second, strict=True):
        assert torch.allclose(a, torch.cat([b, c], 1), atol=1e-13)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(end, last, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@torch.no_grad()
def test_what_is_written_into_a_result_changes_no_other(pair, variant):
    """A residual in place (`states += x`), or a final state that is set to zero."""
    case = make_case(pararnn.LSTMCell, torch.float32, 7, variant)
    engine = {"solver": pair[0], "backend": pair[1], **case.options}
    states, final = pararnn.solve(case.cell, case.gates, case.initial, **engine)
    arguments = (case.gates, *(case.initial or ()))
    tensors = (*arguments, *states, *final)
    values = [tensor.clone() for tensor in tensors]
    for target in (*states, *final):
        value = target.clone()
        target.fill_(7.0)
        for tensor, old in zip(tensors, values, strict=True):
            assert tensor is target or torch.equal(tensor, old)
        target.copy_(value)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_dtypes_of_results(pair):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        case = make_case(pararnn.LSTMCell, dtype, 20)
        initial = [torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 4, dtype=torch.float64)]
        states, final = pararnn.solve(
            case.cell, case.gates, initial, solver=pair[0], backend=pair[1]
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert {s.dtype for s in states} == {dtype}
        assert {f.dtype for f in final} == {wide}


def test_heads_layout_equals_flat_layout():
    cell = pararnn.GRUCell(6, num_heads=3, dtype=torch.float64)
    gates = torch.randn(2, 90, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    for solver, backend in PAIRS:
        split, _ = pararnn.solve(cell, gates, solver=solver, backend=backend)
        flat, _ = pararnn.solve(cell, gates.flatten(3), solver=solver, backend=backend)
        assert torch.equal(split, flat)
        (grad,) = torch.autograd.grad(split.sum(), gates)
        assert grad.shape == gates.shape


GATES = torch.zeros(2, 5, 3, 4)
WRONG = {
    "gates must be a tensor": (TypeError, {"gates": [1.0]}),
    "gates must have one of the dtypes": (TypeError, {"gates": GATES.long()}),
    r"gates of GRUCell must be \(B, T, 3, 4\)": (ValueError, {"gates": GATES[0]}),
    r"got \(2, 5, 2, 4\)": (ValueError, {"gates": GATES[:, :, :2]}),
    r"got \(2, 5, 3, 3\)": (ValueError, {"gates": GATES[..., :3]}),
    r"initial state 'h' must be \(2, 4\), got \(2, 5\)": (
        ValueError,
        {"initial_state": torch.zeros(2, 5)},
    ),
    "must hold 1 tensor": (ValueError, {"initial_state": (torch.zeros(2, 4),) * 2}),
    "floating-point tensor, got torch.int64": (
        TypeError,
        {"initial_state": torch.zeros(2, 4).long()},
    ),
    "initial state 'h' is on meta": (
        ValueError,
        {"initial_state": torch.zeros(2, 4, device="meta")},
    ),
    r"takes the fields \[\], got \['dt'\]": (ValueError, {"fields": {"dt": 1.0}}),
    r"reset must be bool \(2, 5\), got torch.float32": (ValueError, {"reset": torch.zeros(2, 5)}),
    r"got torch.bool \(5, 2\)": (ValueError, {"reset": torch.zeros(5, 2).bool()}),
    "cu_seqlens must be int32 or int64": (ValueError, {"cu_seqlens": torch.zeros(3)}),
    "packs all sequences into one row: got B = 2": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 5])},
    ),
    "unknown solver 'newtn'": (pararnn.EngineError, {"solver": "newtn"}),
    "unknown backend 'cuda'": (pararnn.EngineError, {"backend": "cuda"}),
    r"\(sequential, scan\) cannot run GRUCell on cpu: .*no such engine for cpu.* can: .*fused": (
        pararnn.EngineError,
        {"solver": "sequential", "backend": "scan"},
    ),
    "on_failure must be one of": (ValueError, {"on_failure": "ignore"}),
}


@pytest.mark.parametrize("message", sorted(WRONG))
def test_wrong_arguments_are_named(message):
    error, arguments = WRONG[message]
    with pytest.raises(error, match=message):
        pararnn.solve(pararnn.GRUCell(4), arguments.pop("gates", GATES), **arguments)


@pytest.mark.parametrize("cuts", [[1, 5], [0, 4, 3], [0, 6]])
def test_wrong_cu_seqlens(cuts):
    with pytest.raises(ValueError, match="must start at 0, not fall, and end at 5"):
        pararnn.solve(pararnn.GRUCell(4), GATES[:1], cu_seqlens=torch.tensor(cuts))


def test_wrong_fields():
    cell, gates = pararnn.LRCCell(4), torch.zeros(2, 5, 3, 4)
    with pytest.raises(ValueError, match=r"takes the fields \['dt'\], got \[\]"):
        pararnn.solve(cell, gates)
    with pytest.raises(TypeError, match=r"fields must be given by name, .* got Tensor"):
        pararnn.solve(cell, gates, fields=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"field 'dt' must be \(2, 5\) or \(2, 5, 4\)"):
        pararnn.solve(cell, gates, fields={"dt": torch.ones(2, 4)})
    with pytest.raises(ValueError, match="field 'dt' is on meta"):
        pararnn.solve(cell, gates, fields={"dt": torch.ones(2, 5, device="meta")})
    mask = pararnn.solve(cell, gates + 1, fields={"dt": torch.ones(2, 5, dtype=torch.bool)})
    ones = pararnn.solve(cell, gates + 1, fields={"dt": torch.ones(2, 5, 4)})
    assert torch.equal(mask[0], ones[0])


def test_devices_must_agree():
    with pytest.raises(ValueError, match="the cell is on cpu and gates on meta"):
        pararnn.solve(pararnn.GRUCell(4), GATES.to("meta"))


@needs_compiler
def test_auto_depends_on_sizes_and_cell_only():
    from pararnn.engines.table import choose

    program = pararnn.program_of(pararnn.GRUCell(4))
    dense = pararnn.program_of(pararnn.DenseGRUCell(4))
    cpu = torch.device("cpu")

    def chosen(program, *size, backend="auto"):
        engine = choose(program, size, torch.float32, cpu, "auto", backend).engine()
        return engine.solver, engine.backend

    assert chosen(program, 1, 2048, 64) == ("sequential", "fused")
    assert chosen(program, 1, 2048, 64, backend="torch") == ("newton", "torch")
    assert chosen(program, 8, 512, 256, backend="torch") == ("sequential", "torch")
    assert chosen(program, 1, 8, 64, backend="torch") == ("sequential", "torch")
    assert chosen(dense, 1, 2048, 256) == ("sequential", "fused")
    assert chosen(dense, 1, 2048, 256, backend="torch") == ("sequential", "torch")
    assert chosen(dense, 1, 2048, 8, backend="torch") == ("newton", "torch")


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 2048, 8), (1, 65536, 64), (64, 512, 256)])
@pytest.mark.parametrize("cell", [pararnn.GRUCell, pararnn.LSTMCell, pararnn.DenseGRUCell])
def test_pairs_that_are_asked_first_rank_first(cell, size):
    """`auto` asks the others about sizes only where none of these can run."""
    from pararnn.engines.table import FIRST, TABLE
    from pararnn.engines.tuned import Workload

    program, cpu = pararnn.program_of(cell(4)), torch.device("cpu")
    ranks: dict[bool, list[int]] = {True: [], False: []}
    for (_, backend, device), engine in TABLE.items():
        if device != "cuda":
            rank, _ = engine.rank(program, Workload(program.key, size, torch.float32, cpu))
            ranks[backend == FIRST].append(rank)
    assert min(ranks[True]) > max(ranks[False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fields_that_are_numbers_are_not_rounded(dtype):
    cell, gates = pararnn.LRCCell(3), torch.randn(1, 300, 3, 3, dtype=dtype)
    gap = torch.full((1, 300), 0.1003)
    reference = pararnn.solve(cell, gates, fields={"dt": gap})[1]
    assert torch.equal(pararnn.solve(cell, gates, fields={"dt": 0.1003})[1], reference)
    steps = torch.full((1, 300), 257)  # 256 or 258 in bfloat16
    reference = pararnn.solve(cell, gates, fields={"dt": steps.float()})[1]
    assert torch.equal(pararnn.solve(cell, gates, fields={"dt": steps})[1], reference)
