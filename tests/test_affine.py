"""Affine forms of steps: replayed, they are the loop; what has none is told by its operation."""

import pytest
import torch
from affine_cells import AFFINE, REFUSED, ZOO, random_cell
from affine_loop import pull_back, replay
from call_results import as_tuple

import pararnn
from pararnn.program.derive import gradients
from pararnn.program.program import program_of
from pararnn.zoo import MATRIX_CELLS

CELLS = {name: MATRIX_CELLS[name] for name in ZOO} | AFFINE
CLASSES = {
    "gated-delta": "S: R = 1, r = 1, n = 1, reads along K",
    "rwkv7": "S: R = 2, r = 1, n = 1, reads along K",
    "mlstm": "m: by entries; C: R = 1, r = 0, n = 1; n: R = 1, r = 0, n = 1",
    "titans": "M, S: R = 1, r = 1, n = 2, reads along K",
    "kda": "S: R = 1, r = 1, n = 1, reads along K",
    "gated-delta-product": "S: R = 2, r = 2, n = 1, reads along K",
    "comba": "S: R = 1, r = 1, n = 1, reads along K",
    "mamba2": "h: R = 1, r = 0, n = 1",
    "mamba3": "B_re: by entries; B_im: by entries; x: by entries; h_re, h_im: R = 3, r = 0, n = 2",
    "NormedProduct": "S: R = 2, r = 2, n = 1, reads along K",
    "ThreeSteps": "S: R = 3, r = 3, n = 1, reads along K",
    "ScalarDecay": "h: R = 1, r = 0, n = 1",
    "MomentumDelta": "S, M: R = 1, r = 1, n = 2, reads along K",
    "AlongValues": "S: R = 1, r = 1, n = 1, reads along V",
    "Filters": "A, B: R = 2, r = 0, n = 2",
    "Shift": "last: by entries; z: by entries; S: R = 2, r = 1, n = 1, reads along K; "
    "y: R = 1, r = 0, n = 1",
    "Selects": "S: R = 1, r = 1, n = 1, reads along K",
    "Masks": "S: R = 3, r = 1, n = 1, reads along K",
    "Resets": "S: R = 1, r = 1, n = 1, reads along K",
    "ManyStates": "u, w: by entries; m, l: by entries; S, D: R = 1, r = 0, n = 2; "
    "P: R = 0, r = 0, n = 1; Z: R = 0, r = 0, n = 1",
    "Spellings": "S: R = 1, r = 1, n = 1, reads along K",
    "UnitAndKey": "S: R = 3, r = 0, n = 1",
    "Means": "S: R = 1, r = 1, n = 1, reads along K",
    "TwoSides": "S: R = 1, r = 1, n = 1, reads along K; R: R = 1, r = 1, n = 1, reads along V",
    "VectorAlone": "h: R = 1, r = 0, n = 1",
}


def make(cls, keys=7, values=6, heads=2):
    torch.manual_seed(0)
    return cls(heads * values, num_heads=heads, K=keys, dtype=torch.float64)


def form_of(cell, dtype=torch.float64):
    form = program_of(cell).affine_form(dtype)
    assert not isinstance(form, str), form
    return form


def inputs_of(cell, rows=2, steps=9, seed=0):
    """Random gates and initial states, as leaves."""
    generator = torch.Generator().manual_seed(seed)
    sizes = cell.head_sizes

    def draw(*size, gain=1.0):
        x = gain * torch.randn(*size, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    gates = draw(rows, steps, sizes.heads, sizes.width)
    return gates, tuple(draw(rows, *size, gain=0.5) for size in sizes.state_sizes)


def close(actual, reference, tolerance=1e-12):
    """Compare tensors over the largest entry of each."""
    for a, e in zip(actual, reference, strict=True):
        scale = float(e.detach().abs().max()) if e.numel() else 0.0
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(scale, 1e-30))


def compare(cell, steps=9, tolerance=1e-12):
    """Compare a cell's form with its loop: outputs, final states, and gradients of all inputs, by
    autograd through the form and by its backward statements."""
    form, (gates, initial) = form_of(cell), inputs_of(cell, steps=steps)
    leaves = [gates, *initial, *cell.parameters()]
    output, final = pararnn.solve(cell, gates, initial, solver="sequential", backend="torch")
    final = as_tuple(final)
    replayed, states = replay(cell, form, gates, initial)
    close([replayed, *states[-1]], [output, *final], tolerance)
    arriving = [torch.randn_like(x) for x in (output, *final)]
    expected = gradients([output, *final], leaves, arriving)
    by_autograd = gradients([replayed, *states[-1]], leaves, arriving)
    close(by_autograd, expected, tolerance)
    close(pull_back(cell, form, gates, initial, arriving[0], arriving[1:]), expected, tolerance)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.one_in(2)
def test_a_form_is_its_step(name):
    compare(make(CELLS[name]))


@pytest.mark.parametrize("name", CELLS)
def test_a_form_has_few_columns_and_reads(name):
    for dtype in (torch.float32, torch.float64):
        assert form_of(make(CELLS[name]), dtype).description == CLASSES[name]


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_leaves_the_class_is_named(cls):
    assert program_of(make(cls)).affine_form() == REFUSED[cls]


def test_components_share_slots():
    """The kernels of mLSTM's memory and of its normaliser have decays, columns and queries once."""
    memory, normaliser = form_of(make(MATRIX_CELLS["mlstm"])).components[1:]
    assert memory.decay == normaliser.decay
    assert memory.column == normaliser.column
    assert memory.query == normaliser.query
    assert normaliser.value == (1.0,)


def test_solved_states_are_inputs_of_gates():
    """The stabiliser's step is not computed again."""
    form = form_of(make(MATRIX_CELLS["mlstm"]))
    assert {("state", 2), ("new_state", 2)} <= {*form.gates.inputs}
    assert all(
        value.node.target is not torch.ops.aten.maximum.default for value in form.gates.values
    )


def test_gradients_of_parameters_are_sums():
    """Those of other inputs are not."""
    form = form_of(make(AFFINE["ScalarDecay"]))
    targets = [target for target, _ in form.gates_backward.writes + form.readout_backward.writes]
    assert {target.kind for target in targets if target.adds} == {"grad_param"}
    assert {target.kind for target in targets if not target.adds} == {"grad_gate", "grad_answer"}


def test_nan_in_gates_that_are_not_selected_stays_out():
    """Gates of a step that another gate turns off may be NaN and infinite."""
    cell = make(AFFINE["Selects"])
    gates, initial = inputs_of(cell)
    gates = gates.detach().clone()
    _, k, v, _, b, _ = cell.head_sizes.split(gates[:, 4])
    b.fill_(-1.0)
    k[..., 0], v[..., 1] = float("nan"), float("inf")
    output, final = pararnn.solve(cell, gates, initial, solver="sequential", backend="torch")
    replayed, states = replay(cell, form_of(cell), gates, initial)
    assert output[:, 4:].isfinite().all()
    close([replayed, *states[-1]], [output, final])


def test_a_program_that_has_no_matrix_states_says_so():
    program = program_of(pararnn.zoo.GRUCell(8))
    assert program.affine_form() == "a step without matrix states"


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.one_in(17)
@pytest.mark.parametrize("seed", range(100))
def test_random_affine_steps(seed):
    compare(make(random_cell(seed), keys=4, values=3), steps=4, tolerance=1e-11)
