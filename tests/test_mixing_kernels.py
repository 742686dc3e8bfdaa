"""Kernels of steps that mix channels inside heads, on a CPU: contract, layouts, rows, threads."""

import emulated
import pytest
import torch
from mixing_cells import CELLS, Coupled, Elman, HeadGRU, HeadLSTM, ResetAfter
from mixing_runs import KERNELS, LOOP, check_agreement, check_layouts, run_case
from table import FUSED, make_case, needs_compiler

import pararnn

pytestmark = needs_compiler

EXACT = 1e-12


def _name(value):
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize("length", [0, 1, 2, 70])
@pytest.mark.parametrize("cell_class", CELLS, ids=_name)
@pytest.mark.one_in(7)
def test_any_length(cell_class, length):
    for variant in ("initial", "packed"):
        case = make_case(cell_class, torch.float64, length, variant, channels=24, num_heads=3)
        check_agreement(case, EXACT)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 17, 37])
def test_any_number_of_rows(batch):
    for cell_class in (HeadGRU, HeadLSTM):
        sizes = {"batch": batch, "channels": 20, "num_heads": 2}
        check_agreement(make_case(cell_class, torch.float64, 5, "initial", **sizes), EXACT)


@pytest.mark.parametrize("width", [1, 3, 8, 15, 16, 33, 64])
def test_any_width_of_a_head(width):
    for cell_class in (ResetAfter, Coupled):
        case = make_case(cell_class, torch.float64, 6, "initial", channels=2 * width, num_heads=2)
        check_agreement(case, EXACT)


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_of_a_batch_end_at_their_own_steps(reverse):
    torch.manual_seed(0)
    options = {"num_heads": 2, "dtype": torch.float64, "bidirectional": reverse}
    layer = pararnn.ParaRNN(HeadLSTM, 4, 16, batch_first=True, **options)
    x = torch.randn(4, 9, 4, dtype=torch.float64, requires_grad=True)
    reset = torch.rand(4, 9) < 0.2

    def run(pair):
        with pararnn.using(**pair):
            out, final = layer(x, lengths=[9, 1, 4, 2], reset=reset)
        loss = out.sin().sum() + sum(s.sin().sum() for s in final)
        return [out, *final, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    for own, truth in zip(run(KERNELS), run(LOOP), strict=True):
        torch.testing.assert_close(own, truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_layouts_of_gates(heads):
    """Heads of the projection that are not those of the matrices, too."""
    case = make_case(HeadGRU, torch.float64, 7, batch=2, channels=32, num_heads=heads)
    check_layouts(case, torch.float64, KERNELS, rtol=1e-13, atol=1e-13)


def test_bits_of_states_do_not_depend_on_threads_or_rows():
    case = make_case(HeadLSTM, torch.float32, 40, "initial", batch=19, channels=96, num_heads=2)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(run_case(case, torch.float32, KERNELS, ()))
    part = case._replace(gates=case.gates[3:4], initial=tuple(h[3:4] for h in case.initial))
    results.append(run_case(part, torch.float32, KERNELS, ()))
    for other in results[1:3]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert all(torch.equal(a[3:4], b) for a, b in zip(results[0], results[3], strict=True))


def test_non_finite_inputs_spread_as_in_the_loop():
    case = make_case(HeadGRU, torch.float32, 8, batch=3, channels=24, num_heads=3)
    case.gates[1, 4, 0, 2] = torch.nan
    case.gates[2, 2, 1, 9] = torch.inf
    own, truth = (run_case(case, torch.float32, pair, ()) for pair in (KERNELS, LOOP))
    for a, b in zip(own, truth, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert a[0].isfinite().all()


def test_frozen_parameters_leave_other_gradients_alone():
    case = make_case(ResetAfter, torch.float64, 6, "initial", channels=16, num_heads=2)
    whole = run_case(case, torch.float64, KERNELS)
    case.cell.R_z.requires_grad_(False)
    check_agreement(case, EXACT)
    for param in case.cell.parameters():
        param.requires_grad_(False)
    for own, truth in zip(run_case(case, torch.float64, KERNELS), whole, strict=False):
        torch.testing.assert_close(own, truth)


def test_auto_takes_the_kernels_and_says_why():
    case = make_case(HeadGRU, torch.float32, 5, channels=16, num_heads=2)
    program = pararnn.program_of(case.cell)
    choice = pararnn.engines.table.choose(
        program, (2, 5, 16), torch.float32, torch.device("cpu"), "auto", "auto"
    )
    assert choice.pair == FUSED
    assert pararnn.engines.table.why_never(program, FUSED, torch.device("cuda")) is None
    with pytest.raises(pararnn.EngineError, match="'newton' has no kernels"):
        pararnn.solve(case.cell, case.gates, solver="newton", backend="fused")


@pytest.mark.parametrize("cell_class", [HeadGRU, HeadLSTM, Coupled], ids=_name)
def test_layers_take_mixing_cells(cell_class):
    torch.manual_seed(0)
    options = {"num_heads": 4, "dtype": torch.float64}
    layer = pararnn.RecurrentLayer(cell_class, 8, 32, **options)
    again = pararnn.RecurrentLayer(cell_class, 8, 32, recompute_gates=True, **options)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True)
    fields = {name: torch.rand(3, 11, dtype=torch.float64) for name in cell_class.fields}
    own = [
        torch.autograd.grad(
            module(x, fields=fields or None)[0].sin().sum(), [x, *module.parameters()]
        )
        for module in (layer, again)
    ]
    for a, b in zip(*own, strict=True):
        torch.testing.assert_close(a, b)
    assert layer.choice.pair == FUSED
    with pararnn.using(**LOOP):
        loop = torch.autograd.grad(
            layer(x, fields=fields or None)[0].sin().sum(), [x, *layer.parameters()]
        )
    for a, b in zip(own[0], loop, strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_steps_and_compiles():
    torch.manual_seed(0)
    layer = pararnn.RecurrentLayer(HeadLSTM, 6, 16, num_heads=2, dtype=torch.float64)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    whole, _ = layer(x)
    state = None
    for t in range(6):
        out, state = layer.step(x[:, t], state)
        torch.testing.assert_close(out, whole[:, t])
    torch.compiler.reset()
    compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled_layer(x)[0], whole)


MUTANTS = {
    "a transposed matrix": ("products.h", "    transpose(square);", ""),
    "a column too few": ("products.h", "j < width; ++j", "j + 1 < width; ++j"),
    "a row too few": ("products.h", "j < height; ++j", "j + 1 < height; ++j"),
    "a vector too few": (
        "products.h", "for (; v < vectors; ++v)", "for (; v + 1 < vectors; ++v)"
    ),
    "no reset": ("mixing/forward.h", "sequence < 0 || p.is_reset(row, l)", "sequence < 0"),
    "an adjoint through a reset": (
        "mixing/backward.h", "if (sequence < 0 || p.is_reset(row, l))", "if (sequence < 0)"
    ),
    "sums of another step": (
        "mixing/group.h", "(row * p.length + t) * num_sums", "(row * p.length + t / 2) * num_sums"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_a_wrong_kernel_is_seen(name, tmp_path):
    """The agreement that the tests above rest on fails for a kernel that is wrong."""
    file, right, wrong = MUTANTS[name]
    case = make_case(HeadGRU, torch.float64, 30, "resets", batch=3, channels=18, num_heads=2)
    folder = emulated.wrong_headers(tmp_path, f"cpp/{file}", right, wrong)
    with emulated.compiled_from(folder), pytest.raises(AssertionError):
        check_agreement(case, 1e-6)


def test_a_cell_of_narrow_heads_is_one_vector():
    case = make_case(Elman, torch.float64, 12, "resets", channels=6, num_heads=6)
    check_agreement(case, EXACT)


def test_emitted_source_has_stages():
    source = pararnn.emitted(HeadGRU(8, num_heads=2))
    assert "void forward_2(" in source
    assert "void backward_3(" in source
