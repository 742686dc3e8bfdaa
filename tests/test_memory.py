"""Cells that read a memory of their sequence: against plain loops, by PyTorch and by kernels."""

import emulated
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cells import LOOPS, Adapted, Covered, loop, make_call
from table import needs_compiler
from test_matrix import TOLERANCES, _close

import pararnn
import pararnn.zoo as zoo
from pararnn.base.errors import CellError
from pararnn.codegen import clusters, cpp
from pararnn.engines import tuned
from pararnn.engines.fused import matrix
from pararnn.engines.table import why_not
from pararnn.program.program import program_of

pytestmark = needs_compiler
NAMES = list(LOOPS)
BACKENDS = ["torch", "fused"]
OF_CLUSTERS = [
    pytest.param(name, marks=pytest.mark.thorough)
    for name in NAMES
    if name not in ("attention-lstm", "adapted")
]
"""Cells with a state that is as long as a memory, two axes of calls, and square memories."""


def _sequential(backend):
    return {"solver": "sequential", "backend": backend}


def _compare(call, backend, dtype=torch.float64, **options):
    """Compare outputs, final states and all gradients with the loop's."""
    results = call.solve(**_sequential(backend), **options)
    references = loop(call, **options)
    _close(results, references, dtype)
    torch.manual_seed(1)
    incoming = [torch.randn(r.shape, dtype=torch.float64).to(r.dtype) for r in results]
    leaves = call.leaves()
    grads = torch.autograd.grad(results, leaves, incoming, allow_unused=True)
    both = [(r, x.double()) for r, x in zip(references, incoming, strict=True) if r.requires_grad]
    results, incoming = zip(*both, strict=True)
    wanted = torch.autograd.grad(results, leaves, incoming, allow_unused=True)
    grads, wanted = _filled(grads, leaves), _filled(wanted, leaves)
    scale = max(float(w.abs().max()) for w in wanted if w.numel())
    for actual, expected in zip(grads, wanted, strict=True):
        # Gradients through a softmax of one entry are zero but for rounding.
        largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 0.05 * scale)
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=0, atol=TOLERANCES[dtype] * largest
        )
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]


def _filled(grads, leaves):
    """Gradients, zero where nothing depends on a leaf."""
    pairs = zip(grads, leaves, strict=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(
    rows=st.integers(1, 3),
    steps=st.sampled_from([0, 1, 2, 15, 17, 33]),
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    by_head=st.booleans(),
    reverse=st.booleans(),
    resets=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.one_in(5)
def test_solve_is_the_loop(name, backend, rows, steps, lengths, by_head, reverse, resets, seed):
    call = make_call(name, rows, steps, lengths, by_head=by_head, seed=seed)
    reset = torch.rand(rows, steps) < 0.3 if resets else None
    _compare(call, backend, reset=reset, reverse=reverse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.one_in(11)
def test_dtypes(name, backend, dtype):
    call = make_call(name, 2, 20, (33, 17), dtype=dtype)
    _compare(call, backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    reverse=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.one_in(7)
def test_packed_sequences_have_a_memory_each(name, backend, lengths, reverse, seed):
    """Several in a chunk of steps, some of no step, and padding."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    call = make_call(name, 1, ends[-1] + 3, (5, 3), sequences=len(lengths), seed=seed)
    _compare(call, backend, reverse=reverse, cu_seqlens=ends)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_of_sequences(backend):
    call = make_call("attention-lstm", 1, 4, sequences=0)
    output, *final = call.solve(cu_seqlens=[0], **_sequential(backend))
    assert output.eq(0).all()
    assert [h.shape[0] for h in final] == [0, 0, 0]
    grads = torch.autograd.grad(output.sum(), call.leaves(), allow_unused=True)
    assert all(g is None or g.eq(0).all() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_entries_are_as_if_absent(backend):
    """Whatever finite numbers they hold: same results, and gradients of zero and not NaN."""
    short = make_call("attention-lstm", 2, 20, (5,))
    long = make_call("attention-lstm", 2, 20, (9,))
    with torch.no_grad():
        for key in ("keys", "values"):
            long.memory[key][:, :5] = short.memory[key]
            long.memory[key][:, 5:] = 1e4
        short.memory["mask"].zero_()
        long.memory["mask"].zero_()
        long.memory["mask"][:, 5:] = -torch.inf
    long.memory["mask"].requires_grad_()
    long.cell, long.gates, long.initial = short.cell, short.gates, short.initial
    results = [call.solve(**_sequential(backend)) for call in (short, long)]
    _close(*results)
    grads = [
        torch.autograd.grad(sum(r.square().sum() for r in result), call.leaves())
        for result, call in zip(results, (short, long), strict=True)
    ]
    keys, values, mask = grads[1][-3:]
    assert all(g[:, 5:].eq(0).all() for g in (keys, values, mask))
    _close([*grads[1][:-3], keys[:, :5], values[:, :5]], grads[0])


def _layer(cls=zoo.AttentionLSTMCell, **options):
    torch.manual_seed(0)
    sizes = {"num_heads": 2, "dtype": torch.float64}
    axes = {"K": 4, "E": 5} if cls is zoo.AttentionLSTMCell else {}
    return pararnn.ParaRNN(cls, 6, 6, **(sizes | axes | options))


def _memory(rows, length=7, dtype=torch.float64):
    torch.manual_seed(1)
    mask = torch.zeros(rows, length, dtype=dtype).index_fill(
        1, torch.tensor(length - 1), -torch.inf
    )
    sizes = {"keys": 4, "values": 5}
    return {k: torch.randn(rows, length, n, dtype=dtype) for k, n in sizes.items()} | {"mask": mask}


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_a_layer_are_its_sequence(backend):
    layer, memory = _layer(backend=backend), _memory(3)
    x = torch.randn(3, 6, 6, dtype=torch.float64)
    output, h_n = layer(x, memory=memory)
    state, outputs = None, []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state, memory=memory)
        outputs.append(y_t)
    _close([torch.stack(outputs, 1), *state], [output, *h_n])
    alone, _ = layer(x[1], memory={key: m[1] for key, m in memory.items()})
    _close([alone], [output[1]])
    y_1, _ = layer.step(x[1, 0], memory={key: m[1] for key, m in memory.items()})
    _close([y_1], [output[1, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_batches_and_packed_sequences(backend):
    layer, memory = _layer(backend=backend, num_layers=2, bidirectional=True), _memory(3)
    lengths = [4, 0, 6]
    x = torch.randn(3, 6, 6, dtype=torch.float64)
    output, h_n = layer(x, memory=memory, lengths=lengths)
    for row, length in enumerate(lengths):
        of_row = {key: m[row : row + 1] for key, m in memory.items()}
        alone, end = layer(x[row : row + 1, :length], memory=of_row)
        _close(
            [output[row, :length], *(h[:, row] for h in h_n)], [alone[0], *(h[:, 0] for h in end)]
        )
        assert output[row, length:].eq(0).all()
    pack = torch.nn.utils.rnn.pack_padded_sequence(
        x[::2], torch.tensor([4, 6]), batch_first=True, enforce_sorted=False
    )
    packed, ends = layer(pack, memory={key: m[::2] for key, m in memory.items()})
    unpacked, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    _close([unpacked, *ends], [output[::2], *(h[:, ::2] for h in h_n)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_resets_to_given_states_keep_the_memory(backend, reverse):
    """As the pieces alone, each from its state; in a padded batch, of which a row has no reset."""
    layer, memory = _layer(backend=backend), _memory(3)
    layer.layers[0].reverse = reverse
    x = torch.randn(3, 8, 6, dtype=torch.float64)
    reset = torch.zeros(3, 8, dtype=torch.bool)
    reset[0, 3] = reset[2, 1] = reset[2, 5] = True
    starts = tuple(torch.randn(1, 3, 2, n, dtype=torch.float64) for n in (3, 3, 5))
    leaves = [m.requires_grad_() for m in (*memory.values(), *starts)]
    lengths = [8, 6, 7]
    arguments = {"memory": memory, "reset": reset, "reset_states": starts, "lengths": lengths}
    output, _ = layer(x, **arguments)
    pieces = []
    for row, length in enumerate(lengths):
        inside = [t for t in range(length) if reset[row, t]]
        ends = [t + 1 for t in inside] if reverse else inside
        for begin, end in zip([0, *ends], [*ends, length], strict=True):
            first = end - 1 if reverse else begin
            number = int(reset.flatten()[: row * 8 + first].sum())
            start = tuple(h[:, number : number + 1] for h in starts) if reset[row, first] else None
            of_row = {key: m[row : row + 1] for key, m in memory.items()}
            pieces.append(layer(x[row : row + 1, begin:end], start, memory=of_row)[0][0])
        pieces.append(x.new_zeros(8 - length, 6))
    reference = torch.cat(pieces).unflatten(0, (3, 8))
    _close([output], [reference])
    _close(*[torch.autograd.grad(y.square().sum(), leaves) for y in (output, reference)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_verify_checks_gradients_of_memories(dtype, monkeypatch):
    layer, x = _layer().to(dtype), torch.randn(2, 40, 6, dtype=dtype)
    memory = _memory(2, dtype=dtype)
    report = pararnn.verify(layer, x, memory=memory, lengths=[40, 33])
    assert report.passed, report
    assert {"grad memory keys", "grad memory values"} <= {
        check.name for check in report.layers[0][2].checks
    }
    backward = matrix.MatrixSchedule.backward

    def wrong(*args):
        grads = backward(*args)
        *params, keys, values, mask = grads.params
        return grads._replace(params=(*params, 1.1 * keys, values, mask))

    monkeypatch.setattr(matrix.MatrixSchedule, "backward", wrong)
    assert not pararnn.verify(layer, x, memory=memory)


def test_another_length_needs_nothing_new():
    call = make_call("attention-lstm")
    call.solve(**_sequential("fused"))
    kernels, parameters = len(cpp._KERNELS), [*call.cell.parameters()]
    for length in (1, 8, 300):
        memory = make_call("attention-lstm", lengths=(length,)).memory
        output, *_ = call.solve(memory=memory, **_sequential("fused"))
        reference, *_ = call.solve(memory=memory, **_sequential("torch"))
        _close([output], [reference])
    assert len(cpp._KERNELS) == kernels
    assert [*call.cell.parameters()] == parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_as_long_as_a_memory_of_the_call(backend):
    """From given states, by steps, at resets, with padding; another length in the next call."""
    layer = _layer(Covered, backend=backend, num_layers=2)
    x = torch.randn(3, 6, 6, dtype=torch.float64)
    for length in (5, 9):
        values = torch.randn(3, length, 3, dtype=torch.float64)
        memory = {"values": values, "mask": torch.zeros(3, length, dtype=torch.float64)}
        sizes = (3,), (length,)
        start = tuple(torch.rand(2, 3, 2, *size, dtype=torch.float64) for size in sizes)
        output, h_n = layer(x, start, memory=memory, lengths=[6, 4, 0])
        assert h_n[1].shape == (2, 3, 2, length)
        state, outputs = start, []
        for x_t in x.unbind(1):
            y_t, state = layer.step(x_t, state, memory=memory)
            outputs.append(y_t)
        _close([output[0], *(h[:, 0] for h in h_n)],
               [torch.stack(outputs, 1)[0], *(h[:, 0] for h in state)])  # fmt: skip
        _close([h[:, 2] for h in h_n], [h[:, 2] for h in start])
        alone, _ = layer(x[1], memory={key: m[1] for key, m in memory.items()})
        reset = torch.zeros(3, 6, dtype=torch.bool)
        reset[1, 2] = reset[1, 5] = True
        given = tuple(torch.rand(2, 2, 2, *size, dtype=torch.float64) for size in sizes)
        output, _ = layer(x, memory=memory, reset=reset, reset_states=given)
        of_row = {key: m[1:2] for key, m in memory.items()}
        piece, _ = layer(x[1:2, 2:5], tuple(h[:, :1] for h in given), memory=of_row)
        _close([output[1, :2], output[1, 2:5]], [alone[:2], piece[0]])
    with pytest.raises(ValueError, match=r"Expected hidden states .*\(2, 3, 2, 9\)"):
        layer(x, tuple(h[..., :2] for h in start), memory=memory)
    with pytest.raises(ValueError, match=r"as long as a call's memory along S: pass memory="):
        layer(x, start)
    with pytest.raises(ValueError, match=r"along S: pass memory="):
        assert layer.cell.state_sizes


class Fixed(Covered):
    """With an axis S that is an argument of the cell."""

    config = {"S": 4}


def test_an_axis_in_config_is_of_fixed_length():
    layer = _layer(Fixed, S=9)
    x, results = torch.randn(2, 20, 6, dtype=torch.float64), []
    memory = {"values": torch.randn(2, 9, 3), "mask": torch.zeros(2, 9)}
    leaf = memory["values"] = memory["values"].double().requires_grad_()
    for backend in BACKENDS:
        output, (_, seen) = layer(x, memory=memory, backend=backend)
        assert seen.shape == (1, 2, 2, 9)
        results.append([output, seen, *torch.autograd.grad(output.square().sum(), leaf)])
    _close(*results)
    with pytest.raises(ValueError, match=r"'values' .* \(2, 2, 9, 3\), or \(2, 9, 3\) for all"):
        layer(x, memory={"values": torch.randn(2, 8, 3), "mask": torch.zeros(2, 8)})


class Shifted(pararnn.Cell):
    """A memory that is added: its gradient is the sum of the incoming ones."""

    states = {"h": "V"}
    gates = {"x": "V"}
    memory = {"b": "V"}

    def step(self, state, gate, param, memory):
        return gate.x + memory.b + 0.0 * state.h


def test_long_sums_are_accurate():
    """Of gradients of equal steps, in float32: in parts, as those of parameters."""
    b = torch.zeros(1, 3, requires_grad=True)
    gates, steps = torch.zeros(1, 40_000, 1, 3), 40_000
    output, _ = pararnn.solve(Shifted(3), gates, memory={"b": b}, **_sequential("fused"))
    incoming = torch.full_like(output, 0.1)
    (grad,) = torch.autograd.grad(output, b, incoming)
    exact = torch.full_like(grad, steps, dtype=torch.float64) * incoming[0, 0, 0].double()
    torch.testing.assert_close(grad.double(), exact, rtol=5e-5, atol=0)


def test_threads_change_no_bit():
    call = make_call("attention-lstm", 5, 100, (16,), values=16, dtype=torch.float32)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        output, *_ = call.solve(**_sequential("fused"))
        grads = torch.autograd.grad(output.sum(), [call.gates, call.memory["keys"]])
        results.append([output, *grads])
    assert all(map(torch.equal, *results))


def test_autotune_makes_a_memory(tmp_path, monkeypatch, no_caches):
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path)
    tuning = pararnn.autotune(_layer(), (2, 5, 6), backward=True)
    assert ("sequential", "fused") in {(row.solver, row.backend) for row in tuning.measured}


def test_what_runs_a_memory():
    """Kernels on a CPU, PyTorch's loop elsewhere; nothing that splits time or looks for chunks."""
    layer = _layer()
    layer(torch.randn(2, 5, 6, dtype=torch.float64), memory=_memory(2))
    assert layer.layers[0].choice.pair == ("sequential", "fused")
    text = str(pararnn.explain(layer, (2, 5, 6)))
    assert "(newton, fused) steps of AttentionLSTMCell read a memory of their sequence" in text
    assert "affine in its matrix states, and here is a memory" in text
    program = program_of(layer.cell)
    reason = why_not(program, ("newton", "torch"), torch.float32, torch.device("cpu"))
    assert "Jacobians of a head's tensors" in reason
    assert "memory of their sequence" in layer.layers[0].why_no_context()


class Mean(Adapted):
    """Divides by the length of a memory, which kernels of all lengths cannot."""

    memory = {"A": ("R", "V")}

    def step(self, state, gate, param, memory):
        return torch.tanh(gate.x + 0.5 * state.h + memory.A.mean(-2))


class Shape(Adapted):
    """Divides by a length that it reads off a memory."""

    memory = {"A": ("R", "V")}

    def step(self, state, gate, param, memory):
        return torch.tanh(gate.x + 0.5 * state.h + memory.A.sum(-2) / memory.A.shape[-2])


class Branch(Adapted):
    """Does something else for long memories."""

    memory = {"A": ("R", "V")}
    border = 35

    def step(self, state, gate, param, memory):
        found = memory.A.sum(-2) if memory.A.shape[-2] < self.border else memory.A.amax(-2)
        return torch.tanh(gate.x + 0.5 * state.h + found)


class BranchOfShort(Branch):
    border = 5


class BranchOfLong(Branch):
    border = 500


class Broadcast(Adapted):
    """Sums what lacks the axis of a memory along it, in the gradient."""

    memory = {"A": ("R", "V")}

    def step(self, state, gate, param, memory):
        return torch.tanh((memory.A + (0.5 * state.h + gate.x)[..., None, :]).sum(-2))


@pytest.mark.parametrize("cls", [Mean, Shape, Branch, BranchOfShort, BranchOfLong, Broadcast])
def test_numbers_by_the_length_of_a_memory_are_left_to_pytorch(cls):
    cell = cls(6, num_heads=2, dtype=torch.float64)
    with pytest.warns(pararnn.CellCostWarning, match="by the length of R, which differs between"):
        program_of(cell)
    gates = torch.randn(2, 3, 2, 3, dtype=torch.float64)
    for length in (1, 2, 9):
        memory = torch.randn(2, length, 3, dtype=torch.float64)
        output, _ = pararnn.solve(cell, gates, memory={"A": memory})
        h = torch.zeros(2, 2, 3, dtype=torch.float64)
        of_row = memory.sum(1) if issubclass(cls, (Branch, Broadcast)) else memory.mean(1)
        if length >= getattr(cls, "border", 10):
            of_row = memory.amax(1)
        times = length if cls is Broadcast else 1
        for t in range(3):
            inside = 0.5 * h + gates[:, t]
            h = torch.tanh(times * inside + of_row[:, None])
        _close([output[:, -1]], [h])


class Left(pararnn.Cell):
    """Multiplies a matrix state by a matrix of the row from the left."""

    states = {"S": ("K", "V")}
    gates = {"k": "K", "v": "V"}
    memory = {"U": ("K", "K")}

    def step(self, state, gate, param, memory):
        return torch.tanh(memory.U @ state.S + gate.k[..., :, None] * gate.v[..., None, :])

    def readout(self, state, gate, param, memory):
        return state.S.sum(-2)


def test_products_by_a_memory_from_the_left_are_left_to_pytorch():
    with pytest.warns(
        pararnn.CellCostWarning, match="by a memory along another axis than the last"
    ):
        layer = pararnn.ParaRNN(Left, 6, 6, num_heads=2, K=4)
    layer(torch.randn(2, 3, 6), memory={"U": torch.randn(2, 4, 4)})
    assert layer.layers[0].choice.pair == ("sequential", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped_memories_are_more_rows(backend):
    call = make_call("attention-lstm")
    many = torch.randn(3, *call.memory["keys"].shape, dtype=torch.float64)

    def run(keys):
        return call.solve(memory=call.memory | {"keys": keys}, **_sequential(backend))[0]

    _close(torch.func.vmap(run)(many), [run(keys) for keys in many])


def test_compilers_see_one_operator():
    layer, x = _layer(), torch.randn(2, 20, 6, dtype=torch.float64)
    by_compiler = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, by_compiler):
        memory = {key: m.clone().requires_grad_() for key, m in _memory(2).items()}
        output, h_n = run(x, memory=memory)
        (output.square().sum() + sum(h.sum() for h in h_n)).backward()
        results.append([output, *h_n, *(m.grad for m in memory.values())])
    _close(*results)


WRONG = {
    r"takes the memory \['keys', 'values', 'mask'\], by name, got \[\]": lambda m: None,
    r"by name, got \['keys'\]": lambda m: {"keys": m["keys"]},
    "by name, got Tensor": lambda m: m["keys"],
    r"'keys' .* \(2, 2, S, 4\), or \(2, S, 4\) for all": lambda m: m | {"keys": m["values"]},
    r"'mask' .* S = 7 .*got \(2, 2, 6\)": lambda m: m | {"mask": m["mask"][:, 1:]},
    "one for each of 2 sequences": lambda m: {key: x[:1] for key, x in m.items()},
    "1 or more": lambda m: {key: x[:, :0] for key, x in m.items()},
    "memory 'mask' must be a tensor": lambda m: m | {"mask": [0.0] * 7},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_memories_say_what_to_do(message):
    with pytest.raises((TypeError, ValueError), match=message):
        _layer()(torch.randn(2, 5, 6, dtype=torch.float64), memory=WRONG[message](_memory(2)))


def test_wrong_calls_say_what_to_do():
    x, memory = torch.randn(2, 5, 6, dtype=torch.float64), _memory(3)
    reset = torch.ones(2, 5, dtype=torch.bool)
    starts = tuple(torch.zeros(1, 10, 2, n, dtype=torch.float64) for n in (3, 3, 5))
    with pytest.raises(ValueError, match="'keys' must have an entry for each of 2 sequences"):
        _layer()(x, memory=memory, reset=reset, reset_states=starts)
    with torch.no_grad(), pytest.raises(ValueError, match=r"by name, got \[\]"):
        _layer().step(x[:, 0])
    with pytest.raises(ValueError, match=r"GRUCell takes the memory \[\]"):
        pararnn.ParaGRU(6, 6)(x.float(), memory=memory)


DECLARATIONS = {
    "which cells have whose states and gates are dicts": {"states": ("h",), "gates": ("x",)},
    "must be a dict of each name's axes": {"memory": ("keys",)},
    "a number for each head": {"memory": {"A": ("R", "S", "V")}},
    "memories must be identifiers": {"memory": {"A B": ("R", "V")}},
    "4 axes that only memories have": {"memory": {"A": ("R", "S"), "B": ("T", "U")}},
    r"step must take \(self, state, gate, param, memory\)": {
        "step": lambda self, state, gate, param: state.h
    },
    r"readout must take \(self, state, gate, param, memory\)": {
        "readout": lambda self, state, gate, param: state.h
    },
    "reads self.R.*as long as a call's memory": {
        "step": lambda self, state, gate, param, memory: state.h * self.R
    },
    "memory.C is not there: it has A, B": {
        "step": lambda self, state, gate, param, memory: state.h + memory.C.sum(-2)
    },
}


@pytest.mark.parametrize("message", DECLARATIONS)
def test_wrong_declarations_say_what_to_do(message):
    with pytest.raises((CellError, AttributeError), match=message):
        pararnn.ParaRNN(type("Wrong", (Adapted,), DECLARATIONS[message]), 6, 6)


@needs_compiler
@pytest.mark.parametrize("name", ["attention-lstm", "adapted", *OF_CLUSTERS])
@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.one_in(2)
def test_clusters_of_a_gpu_are_the_loop(monkeypatch, name, blocks):
    """Compiled for a CPU, for lengths below and above the fewest lines, and packed rows."""
    monkeypatch.setattr(clusters, "BLOCK_NUMBERS", 10**9)
    monkeypatch.setattr(clusters, "slices_of", lambda program, cluster: blocks)
    monkeypatch.setattr("pararnn.engines.fused.clusters.slices_of", clusters.slices_of)
    emulated.install(emulated.gpu(), monkeypatch)
    reset = torch.zeros(3, 4, dtype=torch.bool).index_fill(1, torch.tensor(2), True)
    _compare(make_call(name, 3, 4, (40, 70)), "fused", reset=reset, reverse=True)
    if blocks == 1:
        _compare(make_call(name, 2, 3, (70, 5), by_head=True), "fused")
        _compare(make_call(name, 1, 7, (5, 3), sequences=3), "fused", cu_seqlens=[0, 3, 4, 7])
