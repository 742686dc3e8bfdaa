"""Tracing finds the structure, refuses what it cannot stand for, and says what things cost."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from fresh import run_fresh
from table import CELLS, check_contract

import pararnn
from pararnn.check.contract import check_solve
from pararnn.program import derive
from pararnn.program.derive import example, linearise
from pararnn.program.program import make_program, program_by_key
from pararnn.program.structure import BlockDiagonal, Dense, Diagonal


def make_cell(step, states=("h",), structure=None, **attributes):
    """A cell class around a step given as a function."""
    body = {"states": states, "gates": ("x",), "structure": structure, "step": step, **attributes}
    return type("Made", (pararnn.Cell,), body)


@pytest.mark.parametrize(
    ("step", "affine"),
    [
        (lambda self, s, x, p: torch.sigmoid(x.x) * s.h + torch.tanh(x.x), True),
        (lambda self, s, x, p: 0.5 * s.h + x.x, True),
        (lambda self, s, x, p: torch.where(x.x > 0, s.h, x.x), True),
        (lambda self, s, x, p: x.x, True),
        (lambda self, s, x, p: torch.where(s.h > 0, s.h, x.x), False),
        (lambda self, s, x, p: s.h * s.h + x.x, False),
        (lambda self, s, x, p: s.h.abs() + x.x, False),
    ],
)
def test_affine_steps_are_known(step, affine):
    assert make_program(make_cell(step), {}).affine == affine


def test_structures_of_the_librarys_cells():
    reference = {
        "gru": Diagonal(1),
        "lstm": BlockDiagonal(2),
        "elman": Diagonal(1),
        "lem": BlockDiagonal(2),
        "slstm": BlockDiagonal(3),
        "lrc": Diagonal(1),
        "dense-gru": Dense(1),
    }
    for name, cell in CELLS.items():
        assert pararnn.program_of(cell(4)).structure == reference[name]


def test_structure_is_inferred():
    one = make_cell(lambda self, state, gate, param: torch.tanh(state.h + gate.x))
    two = make_cell(
        lambda self, state, gate, param: (state.c + gate.x, torch.sin(state.h)), ("h", "c")
    )
    assert pararnn.program_of(one(3)).structure == Diagonal(1)
    assert pararnn.program_of(two(3)).structure == BlockDiagonal(2)


MIXING = {
    "roll": lambda h: torch.roll(h, 1, -1),
    "flip": lambda h: torch.flip(h, (-1,)),
    "softmax": lambda h: torch.softmax(h, -1),
    "cumsum": lambda h: torch.cumsum(h, -1),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "sort": lambda h: torch.sort(h, -1).values,
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
}

HAS_KERNELS = {"softmax", "mean", "layer_norm"}

if torch.__version__ < "2.13":  # whose gradient of sort begins with zeros on a device by name
    del MIXING["sort"]


@pytest.mark.parametrize("op", sorted(MIXING))
@pytest.mark.thorough
def test_ops_that_keep_shapes_and_mix_channels_are_dense(op):
    def step(self, state, gate, param):
        return torch.tanh(0.5 * MIXING[op](state.h) + gate.x)

    if op in HAS_KERNELS:
        program = pararnn.program_of(make_cell(step)(3))
    else:
        with pytest.warns(pararnn.CellCostWarning, match=f"{op}.*D\\^3"):
            program = pararnn.program_of(make_cell(step)(3))
    assert program.family == ("heads" if op in HAS_KERNELS else None)
    assert program.structure == Dense(1)
    with pytest.raises(
        pararnn.StructureError, match=f"declares structure = 'diagonal', but .*{op}"
    ):
        pararnn.program_of(make_cell(step, structure="diagonal")(3))
    cell = make_cell(step, structure="dense")(6)
    check_contract(cell, torch.randn(2, 30, 1, 6, dtype=torch.float64), solver="newton")


def test_a_dense_cell_of_two_states():
    class Pair(pararnn.Cell):
        states = ("h", "c")
        gates = ("x", "y")
        params = {"W": pararnn.Param("D,D"), "a": pararnn.Param("D"), "g": pararnn.Param("")}
        structure = "dense"

        def step(self, state, gate, param):
            c = torch.tanh(gate.x + state.h @ param.W.mT + param.a * state.c)
            return torch.sigmoid(gate.y + param.g * state.h) * c, c

    for size in (1, 2, 5):
        gates = torch.randn(2, 33, 2, size, dtype=torch.float64)
        check_contract(Pair(size, dtype=torch.float64), gates, solver="newton")


def _branching(self, state, gate, param):
    return -gate.x if state.h.sum() > 0 else gate.x + 0.5 * state.h


def _reading(self, state, gate, param):
    return gate.x * float(state.h.sum())


@pytest.mark.parametrize("step", [_branching, _reading])
def test_branches_on_values_are_sequential_only(step):
    cell = make_cell(step)(3)
    with pytest.warns(pararnn.CellCostWarning, match="sequential solver on the torch backend only"):
        program = pararnn.program_of(cell)
    assert program.structure is None
    gates = torch.randn(1, 80, 1, 3, requires_grad=True)
    states, _ = pararnn.solve(cell, gates)
    states.sum().backward()
    assert gates.grad.isfinite().all()
    with pytest.raises(pararnn.EngineError, match=r"sequential-only.*Pairs that can: \(sequential"):
        pararnn.solve(cell, gates, solver="newton")
    with pytest.raises(pararnn.StructureError, match="reads a tensor's value"):
        pararnn.program_of(make_cell(step, structure="diagonal")(3))
    pararnn.program_of(make_cell(step, structure="sequential")(3))  # declared: no warning


def _branching_on_size(product):
    def step(self, state, gate, param):
        y = 0.8 * product(state.h, param) + gate.x
        return torch.tanh(y) if y.shape[-1] > 4 else torch.sin(y)

    return step


def test_an_elementwise_step_may_not_branch_on_its_number_of_channels():
    make = make_cell(_branching_on_size(lambda h, param: h))
    pararnn.program_of(make(8))  # a trace on 8 and on 24 sees one branch
    for _ in range(2):
        with pytest.raises(pararnn.CellError, match=r"on the number of channels.*on 4 than"):
            pararnn.program_of(make(4))


def test_a_branch_on_sizes_that_moves_is_seen():
    """Its trace on 8 channels stays the same."""

    def make(limit):
        def step(self, state, gate, param):
            y = 0.8 * state.h + gate.x
            return torch.tanh(y) if y.shape[-1] < limit else torch.sin(y)

        return make_cell(step)

    before, after = make(100), make(30)
    for _ in range(2):
        pararnn.program_of(before(40))
    pararnn.program_of(after(8))
    with pytest.raises(pararnn.CellError, match=r"on the number of channels.*on 40 than"):
        pararnn.program_of(after(40))


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.parametrize("solver", ["auto", "newton"])
@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda h, param: h @ param.R, id="products"),
        pytest.param(lambda h, param: h.cumsum(-1) @ param.R, id="dense"),
    ],
)
def test_a_step_that_mixes_channels_may_branch_on_their_number(product, solver):
    make = make_cell(_branching_on_size(product), params={"R": pararnn.Param("D,D")})
    for size in (8, 4, 12):
        cell = make(size, dtype=torch.float64)
        gates = torch.randn(2, 9, 1, size, dtype=torch.float64)
        check_contract(cell, gates, solver=solver)


def test_large_steps_are_compared_at_one_point(monkeypatch):
    monkeypatch.setattr(derive, "LARGE", 8)
    make = make_cell(
        _branching_on_size(lambda h, param: h @ param.R), params={"R": pararnn.Param("D,D")}
    )
    for size in (8, 4):
        cell = make(size, dtype=torch.float64)
        check_contract(cell, torch.randn(2, 9, 1, size, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
def test_gradients_of_one_size_are_traced_on_the_layers_own_channels():
    """PyTorch's derivative of `cumprod` multiplies by tensors as long as those of the trace."""
    make = make_cell(lambda self, state, gate, param: torch.tanh((state.h + gate.x).cumprod(-1)))
    for size in (8, 4, 12):
        gates = torch.randn(2, 9, 1, size, dtype=torch.float64)
        check_contract(make(size, dtype=torch.float64), gates, solver="newton")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its gradient of sort has any size")
def test_steps_of_one_number_of_rows_are_sequential_only():
    def step(self, state, gate, param):
        y = torch.tanh(state.h + gate.x)
        return y.take_along_dim(y.argsort(-1), -1)

    cell = make_cell(step)(4, dtype=torch.float64)
    with pytest.warns(pararnn.CellCostWarning, match="for one size alone. Write it by other"):
        pararnn.program_of(cell)
    gates = torch.randn(2, 9, 1, 4, dtype=torch.float64)
    check_contract(cell, gates)
    with pytest.raises(pararnn.EngineError, match=r"Pairs that can: \(sequential, torch\)"):
        pararnn.solve(cell, gates, solver="newton")


REFUSED = {
    "draws random numbers": lambda h, x: h + x * torch.rand_like(h),
    "random numbers .aten.bernoulli": lambda h, x: F.dropout(h, 0.5) + x,
    "complex numbers": lambda h, x: torch.fft.fft(h + x).real,
    "reads a tensor of shape": lambda h, x: h + x * h.new_tensor([1.0, 2.0] * (len(h) // 2)),
    "turns torch.float64 into torch.float32 .torch.tensor": lambda h, x: h + torch.tensor([0.1]),
    "turns torch.float64 into torch.float32": lambda h, x: (h.float() + x.float()).to(h.dtype),
    "depends on the number of channels": lambda h, x: h / h.shape[-1] + x,
    "must return states of the shape": lambda h, x: torch.tanh(torch.tensor(0.5)),
    "must broadcast over leading dimensions": lambda h, x: (h.outer(x)).sum(-1),
    "independent rows": lambda h, x: h.cumsum(0) + x,
    "Made.step fails": lambda h, x: h + x.missing,
}


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.parametrize("message", sorted(REFUSED))
def test_steps_that_break_the_contract_raise(message):
    function = REFUSED[message]
    cell = make_cell(lambda self, state, gate, param: function(state.h, gate.x))
    with pytest.raises(pararnn.CellError, match=message):
        pararnn.program_of(cell(8))


def halve(tensor):
    if tensor.requires_grad:  # as one writes it, and as a trace without gradients passes by it
        tensor.register_hook(lambda grad: 0.5 * grad)
    return tensor


def keep_grad(tensor):
    if tensor.requires_grad:
        tensor.retain_grad()
    return tensor


def halved_before(tensor):
    if tensor.grad_fn is not None:
        tensor.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (0.5 * grad_inputs[0],))
    return tensor


GRADIENTS_OF_THEIR_OWN = {
    "hook on the state": ("uses register_hook", lambda h, x: torch.tanh(0.9 * halve(h) + x)),
    "hook on the result": ("uses register_hook", lambda h, x: halve(torch.tanh(0.9 * h + x))),
    "hook in any mode": (
        "step uses register_hook",
        lambda h, x: h.register_hook(lambda grad: None) and torch.tanh(h + x),
    ),
    "kept gradient": ("uses retain_grad", lambda h, x: keep_grad(torch.tanh(0.9 * h + x))),
    "node": ("uses grad_fn", lambda h, x: torch.tanh(0.9 * halved_before(h) + x)),
}


@pytest.mark.parametrize("structure", [None, "dense"])
@pytest.mark.parametrize("name", list(GRADIENTS_OF_THEIR_OWN))
def test_hooks_and_gradients_of_a_steps_own_are_refused(name, structure):
    message, function = GRADIENTS_OF_THEIR_OWN[name]

    def step(self, state, gate, param):
        return function(state.h, gate.x)

    with pytest.raises(pararnn.CellError, match=f"{message}.*structure = 'sequential'"):
        pararnn.program_of(make_cell(step, structure=structure)(3))
    gates = torch.randn(1, 9, 1, 3, requires_grad=True)
    if name != "hook in any mode":
        states, _ = pararnn.solve(make_cell(step, structure="sequential")(3), gates)
        assert torch.autograd.grad(states.sum(), gates)[0].isfinite().all()


def test_a_step_may_read_nothing_but_config():
    def reads_param(self, state, gate, param):
        return state.h * self.a + gate.x

    def reads_other(self, state, gate, param):
        return state.h * self.scale + gate.x

    with pytest.raises(pararnn.CellError, match=r"read it as param\.a"):
        pararnn.program_of(make_cell(reads_param, params={"a": pararnn.Param()})(3))
    with pytest.raises(pararnn.CellError, match=r"declare it in Made\.config"):
        pararnn.program_of(make_cell(reads_other)(3))


@pytest.mark.parametrize("result", [(), "two", None])
def test_wrong_number_of_states(result):
    def step(self, state, gate, param):
        return (state.h, gate.x) if result == "two" else result

    with pytest.raises(pararnn.CellError, match="must return 1 tensor"):
        pararnn.program_of(make_cell(step)(3))


def test_more_general_declarations_are_accepted():
    cell = make_cell(
        lambda self, state, gate, param: torch.tanh(state.h + gate.x), structure="dense"
    )
    assert pararnn.program_of(cell(3)).structure == Dense(1)
    two = make_cell(
        lambda self, state, gate, param: (state.c, state.h), ("h", "c"), structure="diagonal"
    )
    with pytest.raises(pararnn.StructureError, match="takes one state"):
        pararnn.program_of(two(3))


def test_in_place_code_and_constants():
    def step(self, state, gate, param):
        out = gate.x.clone()
        out.mul_(0.5).add_(state.h)
        out += torch.ones_like(out) * torch.tensor(2.0) + torch.zeros(())
        kink = torch.where(state.h > 0, state.h, 0.5 * state.h)
        return 0.2 * (torch.sin(out) * kink + F.logsigmoid(-out))

    cell = make_cell(step)(3)
    assert pararnn.program_of(cell).structure == Diagonal(1)
    check_contract(cell, torch.randn(2, 20, 1, 3, dtype=torch.float64), solver="newton")


def test_subexpressions_are_shared_and_constants_folded():
    text = pararnn.program_of(pararnn.GRUCell(3)).graphs[torch.float32].jacobian.text
    lines = [line.split(" = ", 1)[1] for line in text.splitlines()]
    assert len(lines) == len(set(lines)) + sum(line.startswith("placeholder") for line in lines) - 1
    assert text.count("aten.sigmoid.default") == 2
    assert text.count("aten.tanh.default") == 1
    assert "full" not in text
    assert "ones" not in text


class HandWritten(pararnn.GRUCell):
    """The paper's eq. GRU_jac by hand."""

    def jacobian(self, state, gate, param):
        h = state.h
        z = torch.sigmoid(gate.z + param.a_z * h)
        r = torch.sigmoid(gate.r + param.a_r * h)
        c = torch.tanh(gate.c + param.a_c * (h * r))
        inner = r + h * r * (1 - r) * param.a_r
        return 1 - z + (c - h) * z * (1 - z) * param.a_z + z * (1 - c * c) * param.a_c * inner


def test_hand_written_jacobian_is_used_and_checked():
    result = check_solve(HandWritten(4), torch.randn(2, 50, 3, 4), solver="newton")
    assert result.passed
    own = pararnn.program_of(HandWritten(4)).graphs[torch.float32]
    plain = pararnn.program_of(pararnn.GRUCell(4)).graphs[torch.float32]
    assert own.by_hand.text != plain.jacobian.text
    assert (own.jacobian.text, own.vjp.text) == (plain.jacobian.text, plain.vjp.text)

    class Misprint(HandWritten):
        def jacobian(self, state, gate, param):
            z = torch.sigmoid(gate.z + param.a_z * state.h)
            return super().jacobian(state, gate, param) + 1e-3 * z

    with pytest.raises(
        pararnn.StructureError, match=r"Misprint.jacobian is wrong: d h\[\d\] / d h"
    ):
        pararnn.program_of(Misprint(4))


def test_hand_written_blocks():
    class Two(pararnn.Cell):
        states = ("h", "c")
        gates = ("x",)

        def step(self, state, gate, param):
            return torch.sin(state.c) + gate.x, 0.5 * state.h * state.c

        def jacobian(self, state, gate, param):
            return (0.0 * state.h, torch.cos(state.c)), (0.5 * state.c, 0.5 * state.h)

    check_contract(Two(3), torch.randn(2, 40, 1, 3, dtype=torch.float64) / 4, solver="newton")


def test_programs_are_shared_by_class_and_config():
    first, second = pararnn.GRUCell(3), pararnn.GRUCell(50, dtype=torch.float64)
    assert pararnn.program_of(first) is pararnn.program_of(second)
    other = pararnn.GRUCell(3, state_nonlinearity="relu")
    assert pararnn.program_of(other) is not pararnn.program_of(first)
    assert pararnn.program_of(other).key != pararnn.program_of(first).key
    assert program_by_key(pararnn.program_of(first).key) is pararnn.program_of(first)


def test_subclass_with_another_step():
    class Leaky(pararnn.ElmanCell):
        def step(self, state, gate, param):
            return 0.5 * state.h + 0.5 * super().step(state, gate, param)

    gates = torch.randn(1, 9, 1, 3)
    torch.manual_seed(0)
    plain = pararnn.ElmanCell(3)
    torch.manual_seed(0)
    leaky = Leaky(3)
    one, _ = pararnn.solve(plain, gates, solver="newton")
    two, _ = pararnn.solve(leaky, gates, solver="newton")
    assert torch.allclose(two[:, 0], one[:, 0] / 2)


def test_cells_survive_copies_and_new_processes(tmp_path):
    cell = pararnn.LSTMCell(3, state_nonlinearity="hardtanh")
    gates = torch.randn(1, 70, 3, 3)
    (h, _), _ = pararnn.solve(cell, gates, solver="newton")
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert torch.equal(pararnn.solve(other, gates, solver="newton")[0][0], h)
    key = pararnn.program_of(cell).key
    torch.save((cell, gates, h, key), tmp_path / "cell.pt")
    code = f"""
import torch, pararnn
from pararnn.program.program import program_by_key
cell, gates, h, key = torch.load({str(tmp_path / "cell.pt")!r}, weights_only=False)
assert program_by_key(key).key == key
assert torch.allclose(pararnn.solve(cell, gates, solver="newton")[0][0], h, atol=1e-6)
"""
    process = run_fresh(code)
    assert process.returncode == 0, process.stderr


def test_a_key_that_cannot_be_found_says_why():
    config = "|{}|0123456789abcdef"
    with pytest.raises(pararnn.CellError, match="cannot import the cell nowhere:Cell"):
        program_by_key(f"nowhere:Cell{config}")
    with pytest.raises(pararnn.CellError, match="has changed since"):
        program_by_key(f"pararnn.zoo.elman:ElmanCell{config}")


def test_tracing_ignores_the_callers_modes():
    class Fresh(pararnn.DenseGRUCell):
        pass

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        program = make_program(Fresh, {})
    assert "bfloat16" not in program.graphs[torch.float32].step.text
    result = check_solve(Fresh(3), torch.randn(1, 20, 3, 3), solver="newton")
    assert result.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(CELLS))
def test_graphs_keep_their_dtype(name, dtype):
    cell = pararnn.CELLS[name](4)
    program = pararnn.program_of(cell)
    tensors = example(program.step, (3,), 4, dtype)
    states = tensors[: program.num_states]
    graphs = program.graphs[dtype]
    new, jacobian = linearise(program.step, program.structure, graphs, tensors)
    results = [*new, jacobian, *graphs.step(*tensors), *graphs.vjp(*tensors, *states)]
    assert {r.dtype for r in results if isinstance(r, torch.Tensor)} == {dtype}


def test_the_first_use_may_be_within_transforms_and_devices():
    class First(pararnn.ElmanCell):
        pass

    class Second(pararnn.ElmanCell):
        pass

    gates = torch.randn(1, 5, 1, 4, dtype=torch.float64)
    first, second = (cls(4, dtype=torch.float64) for cls in (First, Second))

    def loss(cell, gates):
        return pararnn.solve(cell, gates, solver="sequential", backend="torch")[0].sum()

    _, slope = torch.func.jvp(lambda g: loss(first, g), (gates,), (torch.ones_like(gates),))
    with torch.device("meta"):
        program = pararnn.program_of(second)
    assert isinstance(program.structure, pararnn.Diagonal)
    leaf = gates.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(first, leaf), leaf)
    torch.testing.assert_close(slope, grad.sum())
