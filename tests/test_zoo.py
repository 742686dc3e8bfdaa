"""The zoo: each cell is the published recurrence, by a plain loop of its paper's equations."""

import ast
import inspect
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import matrix_cells
import memory_cells
import pytest
import torch
import world_cells
from call_results import as_tuple
from table import (
    ALL_PAIRS,
    BY_HEADS,
    CELLS,
    FUSED,
    KERNEL_PAIRS,
    NEWTON_FUSED,
    PAIRS,
    broken,
    make_case,
    with_checks,
)

import pararnn
from pararnn import zoo
from pararnn.engines.table import why_never
from pararnn.lm import LanguageModel, LMConfig

ROOT = Path(__file__).parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCH, STEPS, HEADS, WIDTH = 2, 20, 2, 3
layer_norm = torch.nn.functional.layer_norm
sigmoid, tanh, exp = torch.sigmoid, torch.tanh, torch.exp


# The loops: one step each, of gates and fields x, states s, parameters p and config c by name.


def times(weight, h):
    """Return a matrix times each row of h; a vector stands for its diagonal."""
    return torch.einsum("ij,bj->bi", torch.diag(weight) if weight.ndim == 1 else weight, h)


def gates_of(x, p, prefix, h):
    """Return each gate's input plus its weights times h, by name."""
    return SimpleNamespace(
        **{name: x[name] + times(p[f"{prefix}_{name}"], h) for name in x if f"{prefix}_{name}" in p}
    )


def gru(prefix):
    def step(x, s, p, c):
        g = gates_of(x, p, prefix, s["h"])
        z = sigmoid(g.z)
        candidate = tanh(x["c"] + times(p[f"{prefix}_c"], sigmoid(g.r) * s["h"]))
        return (s["h"] - z * s["h"] + z * candidate,)

    return step


def gru_of_torch(x, s, p, c):
    g = gates_of(x, p, "R", s["h"])
    n = tanh(x["n"] + sigmoid(g.r) * (times(p["R_n"], s["h"]) + p["b_n"]))
    return (n + sigmoid(g.z) * (s["h"] - n),)


def gru_of_keras(x, s, p, c):
    g = gates_of(x, p, "R", s["h"])
    n = tanh(x["n"] + times(p["R_n"], sigmoid(g.r) * s["h"]))
    return (n + sigmoid(g.z) * (s["h"] - n),)


def block_gru(x, s, p, c):
    g = gates_of(x, p, "R", s["h"])
    update = sigmoid(g.u - 1)
    return (update * tanh(sigmoid(g.r) * g.c) + (1 - update) * s["h"],)


def min_gru(x, s, p, c):
    z = sigmoid(x["z"])
    return ((1 - z) * s["h"] + z * x["c"],)


def min_lstm(x, s, p, c):
    f, i = sigmoid(x["f"]), sigmoid(x["i"])
    return (f / (f + i) * s["h"] + i / (f + i) * x["c"],)


def lstm_of_the_paper(x, s, p, c):
    f = sigmoid(x["f"] + p["a_f"] * s["h"] + p["c_f"] * s["c"])
    new = f * s["c"] + (1 - f) * tanh(x["z"] + p["a_z"] * s["h"])
    return sigmoid(x["o"] + p["a_o"] * s["h"] + p["c_o"] * new) * tanh(new), new


def lstm(x, s, p, c):
    g = gates_of(x, p, "R", s["h"])
    new = sigmoid(g.f) * s["c"] + sigmoid(g.i) * tanh(g.g)
    return sigmoid(g.o) * tanh(new), new


def slstm(prefix):
    def step(x, s, p, c):
        g = gates_of(x, p, prefix, s["h"])
        normaliser = exp(s["n"])
        cell = sigmoid(g.f) * normaliser * s["c"] + exp(g.i) * tanh(g.z)
        normaliser = sigmoid(g.f) * normaliser + exp(g.i)
        return sigmoid(g.o) * cell / normaliser, cell / normaliser, normaliser.log()

    return step


def elman(weight, function):
    return lambda x, s, p, c: (function(x["h_in"] + times(p[weight], s["h"])),)


def lem(x, s, p, c):
    d1 = c["dt"] * sigmoid(x["dt1"] + p["a_1"] * s["y"])
    d2 = c["dt"] * sigmoid(x["dt2"] + p["a_2"] * s["y"])
    z = (1 - d1) * s["z"] + d1 * tanh(x["z_in"] + p["a_z"] * s["y"])
    return (1 - d2) * s["y"] + d2 * tanh(x["y_in"] + p["a_y"] * z), z


def lrc(x, s, p, c):
    synapse = sigmoid(p["a"] * s["h"] + p["b"])
    f, u = sigmoid(p["g_f"] * synapse + x["f_in"]), p["g_u"] * synapse + x["u_in"]
    slope = -f * s["h"] + tanh(u) * p["leak"]
    return (s["h"] + x["dt"] * sigmoid(x["e_in"] + p["w_e"] * s["h"]) * slope,)


def parts(h):
    return h.real, h.imag


def lru(x, s, p, c):
    decay = exp(torch.complex(-exp(p["nu"]), exp(p["theta"])))
    h, u = torch.complex(s["re"], s["im"]), torch.complex(x["re"], x["im"])
    return parts(decay * h + (1 - decay.abs() ** 2).sqrt() * u)


def modrelu(x, s, p, c):
    h, u = torch.complex(s["re"], s["im"]), torch.complex(x["re"], x["im"])
    u = torch.polar(torch.ones_like(p["theta"]), p["theta"]) * h + u
    size = (u.abs() ** 2 + c["epsilon"]).sqrt()
    return parts(torch.where(size + p["b"] > 0, (size + p["b"]) * u / size, 0))


def cornn(x, s, p, c):
    force = tanh(times(p["R_y"], s["y"]) + times(p["R_z"], s["z"]) + x["x"])
    z = s["z"] + c["dt"] * force - c["dt"] * c["gamma"] * s["y"] - c["dt"] * c["epsilon"] * s["z"]
    return s["y"] + c["dt"] * z, z


def unicornn(x, s, p, c):
    step = c["dt"] * (0.5 + 0.5 * tanh(p["c"] / 2))
    z = s["z"] - step * (tanh(p["w"] * s["y"] + x["x"]) + c["alpha"] * s["y"])
    return s["y"] + step * z, z


def cfc(x, s, p, c):
    f, g, k = (x[name] + p[f"a_{name}"] * s["h"] for name in ("f", "g", "k"))
    share = sigmoid(-f * x["dt"])
    return (share * tanh(g) + (1 - share) * tanh(k),)


def rg_lru(x, s, p, c):
    r, i = (sigmoid(x[name] + p[f"a_{name}"] * s["h"]) for name in ("r", "i"))
    a = sigmoid(p["decay"]) ** (c["c"] * r)
    return (a * s["h"] + (1 - a**2).sqrt() * (i * x["x"]),)


def lif(x, s, p, c):
    u = c["beta"] * s["u"] + s["i"] - s["s"]
    soft = (u - 1) / (1 + c["sharpness"] * (u - 1).abs())  # a fast sigmoid, for its slope
    spikes = (u > 1).to(u.dtype) + soft - soft.detach()
    return spikes, u, c["alpha"] * s["i"] + x["x"]


def _normed(vectors, p, names, eps):
    """A layer norm of vectors next to each other, with its weights and biases."""
    values = torch.cat(vectors, -1)
    weight, bias = (torch.cat([p[f"{kind}_{n}"] for n in names]) for kind in ("w", "b"))
    return layer_norm(values, values.shape[-1:], weight, bias, eps).chunk(len(names), -1)


def layer_norm_lstm(x, s, p, c):
    names = ("i", "f", "g", "o")
    products = [s["h"] @ p[f"R_{n}"].T for n in names]
    if c["norm_of_sum"]:
        sums = [x[n] + r for n, r in zip(names, products, strict=True)]
        gates = _normed(sums, p, names, c["eps"])
    else:
        normed = _normed(products, p, names, c["eps"])
        gates = [x[n] + u for n, u in zip(names, normed, strict=True)]
    i, f, g, o = gates
    memory = sigmoid(f) * s["c"] + sigmoid(i) * tanh(g)
    memory = layer_norm(memory, memory.shape[-1:], p["w_c"], p["b_c"], c["eps"])
    return sigmoid(o) * tanh(memory), memory


def layer_norm_gru(x, s, p, c):
    names = ("r", "c", "u")
    sums = [x[n] + s["h"] @ p[f"R_{n}"].T for n in names]
    reset, candidate, update = _normed(sums, p, names, c["eps"])
    update = sigmoid(update + c["update_bias"])
    return (update * tanh(sigmoid(reset) * candidate) + (1 - update) * s["h"],)


def gru_d(prefix, candidate):
    """By a decay of the base e^-1 to the power of the rate, which is never negative."""

    def step(x, s, p, c):
        h = s["h"] * torch.e ** torch.where(x["d"] > 0, -x["d"], 0)
        g = gates_of(x, p, prefix, h)
        new = tanh(x[candidate] + times(p[f"{prefix}_{candidate}"], sigmoid(g.r) * h))
        return (h + sigmoid(g.z) * (new - h),)

    return step


def gru_ode(x, s, p, c):
    """Euler's method, of which each small step adds the slope times the time."""
    h = s["h"]
    for _ in range(c["substeps"]):
        inner, outer = (sigmoid(p[f"u_{name}"] * h + p[f"b_{name}"]) for name in ("p", "s"))
        slope = (1 - outer) * (tanh(p["b_u"] + p["u_u"] * inner * h) - h)
        h = h + x["dt"] / c["substeps"] * slope
    return gru("a")(x, {"h": h}, p, c)


LOOPS = {
    "gru": gru("a"),
    "lstm": lstm_of_the_paper,
    "elman": elman("a_h", tanh),
    "lem": lem,
    "slstm": slstm("a"),
    "lrc": lrc,
    "dense-gru": gru("A"),
    "head-gru": gru_of_torch,
    "head-gru-reset-first": gru_of_keras,
    "head-lstm": lstm,
    "head-elman": elman("R_h", tanh),
    "head-slstm": slstm("R"),
    "block-gru": block_gru,
    "layer-norm-lstm": layer_norm_lstm,
    "layer-norm-gru": layer_norm_gru,
    "min-gru": min_gru,
    "min-lstm": min_lstm,
    "lru": lru,
    "rg-lru": rg_lru,
    "indrnn": elman("a_h", torch.relu),
    "modrelu": modrelu,
    "cornn": cornn,
    "unicornn": unicornn,
    "cfc": cfc,
    "lif": lif,
    "gru-d": gru_d("a", "c"),
    "head-gru-d": gru_d("R", "n"),
    "gru-ode": gru_ode,
}
CONFIG = {
    "layer-norm-lstm": {"eps": 0.1},
    "layer-norm-gru": {"eps": 0.1, "update_bias": 0.5},
    "lem": {"dt": 0.5},
    "cornn": {"dt": 0.3},
    "rg-lru": {"c": 4.0},
    "modrelu": {"epsilon": 0.01},
    "gru-ode": {"substeps": 3},
}
"""Config in which a mistake would show, where the default hides it."""


EVERY = zoo.CELLS | zoo.MATRIX_CELLS | zoo.WORLD_CELLS | zoo.MEMORY_CELLS
"""Those whose states are matrices have their loops in matrix_cells.py, world_cells.py and
memory_cells.py."""


def test_every_cell_has_a_loop():
    assert list(LOOPS) == list(zoo.CELLS)
    assert list(matrix_cells.LOOPS) == list(zoo.MATRIX_CELLS)
    assert list(world_cells.LOOPS) == list(zoo.WORLD_CELLS)
    assert {*zoo.MEMORY_CELLS} <= {*memory_cells.LOOPS}
    classes = {cell.__name__ for cell in EVERY.values()}
    tables = {"CELLS", "MATRIX_CELLS", "WORLD_CELLS", "MEMORY_CELLS"}
    assert set(zoo.__all__) == {*tables, *classes}


def _leaves(name, dtype):
    """A cell, and its gates, initial states and fields."""
    torch.manual_seed(0)
    cell = zoo.CELLS[name](HEADS * WIDTH, num_heads=HEADS, dtype=dtype, **CONFIG.get(name, {}))
    gates = torch.randn(BATCH, STEPS, len(cell.gates), HEADS * WIDTH, dtype=dtype)
    initial = [torch.randn(BATCH, HEADS * WIDTH, dtype=dtype) for _ in cell.states]
    fields = {f: torch.rand(BATCH, STEPS, dtype=dtype) for f in cell.fields}
    for leaf in (gates, *initial, *fields.values()):
        leaf.requires_grad_()
    return cell, gates, initial, fields


def _loop(name, cell, params, gates, initial, fields):
    """All states (N, B, T, D) and the final ones, by the plain loop."""
    p = {n: torch.block_diag(*v) if v.ndim == 3 else v for n, v in params.items()}
    states, outputs = tuple(initial), []
    for t in range(STEPS):
        x = dict(zip(cell.gates, gates[:, t].unbind(1), strict=True))
        x |= {f: value[:, t, None] for f, value in fields.items()}
        s = dict(zip(cell.states, states, strict=True))
        states = LOOPS[name](x, s, p, cell.config_values())
        outputs.append(torch.stack(states))
    return torch.stack(outputs, 2), torch.stack(states)


def _with_gradients(states, final, leaves):
    """States, final states, and the gradients of a loss of both."""
    generator = torch.Generator().manual_seed(1)
    loss = 0.0
    for t in (states, final):
        loss = loss + (t * torch.randn(t.shape, generator=generator, dtype=torch.float64)).sum()
    return [states.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


def _stack(states):
    return torch.stack(as_tuple(states))


ADDED = [name for name in zoo.CELLS if name not in (*CELLS, *BY_HEADS)]
"""Cells that no other table of tests has."""
SPLIT = ["lru", "cfc", "lif"]
"""Those of ADDED whose kernels in segments are compiled: pairs of states, a field, and jumps."""


def _pairs(name):
    """The pairs that take a cell, and are tested here."""
    program = pararnn.program_of(zoo.CELLS[name](HEADS * WIDTH, num_heads=HEADS))
    takes = [pair for pair in PAIRS if why_never(program, pair, CPU) is None]
    return [p for p in takes if p != NEWTON_FUSED or name not in ADDED or name in SPLIT]


def _dtype(name, pair):
    """float32 for kernels, but for those that test_head_cells.py compiles in float64 too."""
    return torch.float32 if pair in KERNEL_PAIRS and name not in BY_HEADS else torch.float64


@pytest.fixture
def quickly_built(request, monkeypatch):
    """Compile kernels that no other test has in a third of the time."""
    if request.node.callspec.params["name"] in ADDED:
        monkeypatch.setenv("PARARNN_CXXFLAGS", "-O0")


@pytest.mark.usefixtures("quickly_built")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.one_in(7)
def test_cells_are_the_published_recurrences(name):
    """States, final states and all gradients, in float64 by PyTorch and in float32 by kernels."""
    for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        pairs = [pair for pair in _pairs(name) if _dtype(name, pair) == dtype]
        if not pairs:
            continue
        cell, gates, initial, fields = _leaves(name, dtype)
        leaves = [gates, *initial, *fields.values(), *cell.parameters()]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        rows = iter(exact)
        x, start = next(rows), [next(rows) for _ in initial]
        inputs = {field: next(rows) for field in fields}
        params = dict(zip(cell.params, rows, strict=True))
        reference = _with_gradients(*_loop(name, cell, params, x, start, inputs), exact)
        assert all(t.abs().max() > 1e-3 for t in reference)
        for pair in pairs:
            with pararnn.using(segments=3, burn_in=2):
                solution = pararnn.solve(
                    cell, gates, initial, fields=fields, solver=pair[0], backend=pair[1]
                )
            got = _with_gradients(*map(_stack, solution), leaves)
            for mine, true in zip(got, reference, strict=True):
                error = (mine.double() - true).abs().max() / true.abs().max()
                assert error <= limit, (pair, mine.shape, error)


@pytest.mark.usefixtures("quickly_built")
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.one_in(3)
def test_cells_obey_the_contract(name):
    sizes = {"channels": HEADS * WIDTH, "num_heads": HEADS}  # as traced for `_pairs`
    for variant in ("packed", "reverse"):
        case = make_case(zoo.CELLS[name], torch.float32, 60, variant, **sizes)
        assert not broken(with_checks(case, _pairs(name), segments=4)), variant


@torch.no_grad()
@pytest.mark.parametrize("name", ADDED)
def test_language_models_decode_with_them(name):
    """Token by token through the cache, as all at once."""
    torch.manual_seed(0)
    config = LMConfig(HEADS * WIDTH, 1, vocab_size=9, cell=name, num_heads=HEADS)
    model = LanguageModel(config).double().eval()
    tokens, cache = torch.randint(0, 9, (2, 6)), model.new_cache()
    with pararnn.using(backend="torch"):
        outputs = [model(tokens[:, t : t + 1], cache) for t in range(6)]
        assert torch.allclose(torch.cat(outputs, 1), model(tokens), rtol=1e-10, atol=1e-12)


def test_rg_lru_without_weights_of_the_state_is_griffins():
    case = make_case(zoo.RGLRUCell, torch.float64, 30)
    torch.nn.init.zeros_(case.cell.a_r)
    torch.nn.init.zeros_(case.cell.a_i)
    r, i, x = case.gates.unbind(2)
    a = sigmoid(case.cell.decay) ** (8 * sigmoid(r))
    u = (1 - a**2).sqrt() * sigmoid(i) * x
    reference = pararnn.scan(a, u, backend="torch")
    h, _ = pararnn.solve(case.cell, case.gates, backend="torch")
    assert torch.allclose(h, reference, rtol=1e-11, atol=1e-12)


def test_ttt_linear_learns_to_reconstruct():
    """The paper's f(x) = x + LN(W x) is taught to give v for k, and then asked for q."""
    torch.manual_seed(0)
    size, steps = 4, 6
    cell = zoo.TTTLinearCell(size, K=size, dtype=torch.float64)
    q, k, v = torch.randn(3, steps, size, dtype=torch.float64)
    e = torch.randn(steps, 1, dtype=torch.float64)
    gates = torch.cat([q, k, v - k, q, e], -1)[None, :, None]
    output, _ = pararnn.solve(cell, gates, backend="torch")

    def f(memory, x):
        return x + torch.nn.functional.layer_norm(memory @ x, (size,), cell.w[0], cell.b[0], 1e-6)

    memory = cell.W_0[0].mT
    for t in range(steps):
        loss = (f(memory, k[t]) - v[t]).square().sum() / 2
        memory = memory - sigmoid(e[t]) / size * torch.autograd.grad(loss, memory)[0]
        assert torch.allclose(output[0, t, 0], f(memory, q[t]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["min-lstm", "rg-lru", "modrelu"])
def test_extreme_gates_give_finite_states_and_gradients(name):
    """Where equations as printed are 0 / 0 or have an infinite slope."""
    cell = zoo.CELLS[name](4)
    gates = (500 * torch.randn(1, 9, len(cell.gates), 4)).requires_grad_()
    with torch.no_grad():
        gates[:, :2] = 0.0
        gates[:, 2:4] = -500.0
    states, _ = pararnn.solve(cell, gates, backend="torch")
    (grad,) = torch.autograd.grad(sum(h.sum() for h in as_tuple(states)), gates)
    assert all(h.isfinite().all() for h in as_tuple(states))
    assert grad.isfinite().all()


# The files and the page.


FIELD = r"^:{}: (.+(?:\n +.+)*)"
PAGE = ROOT / "docs" / "writing-a-cell.md"
BLOCK = re.compile(r"(?<=<!-- zoo -->\n\n).*?(?=\n<!-- end zoo -->)", re.DOTALL)
MOST_LINES = 40


def _field(cell, name):
    """The text of a field of a cell's docstring, on one line."""
    match = re.search(FIELD.format(name), inspect.cleandoc(cell.__doc__), re.MULTILINE)
    assert match, f"{cell.__name__}'s docstring names no {name}: ':{name}: ...'"
    return re.sub(r"\s+", " ", match[1])


@pytest.mark.parametrize(("name", "cell"), EVERY.items(), ids=EVERY)
def test_a_cell_is_one_short_file_that_says_what_it_is(name, cell):
    path = Path(inspect.getfile(cell))
    assert path == Path(zoo.__file__).parent / f"{name.replace('-', '_')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node):
            del node.body[0]
    assert len(ast.unparse(tree).split("\n")) <= MOST_LINES
    assert re.search(r"\b(19|20)\d\d\b", _field(cell, "source"))
    assert "``" in _field(cell, "equation")


def _runs(name, cell):
    """What engines do for a cell on a CPU, and on a GPU where that is something else."""
    if name in zoo.WORLD_CELLS:
        program = pararnn.program_of(world_cells.make_cell(name))
    else:
        axes = {} if cell.head_axes is None else {"K": 4}
        program = pararnn.program_of(cell(HEADS * WIDTH, num_heads=HEADS, **axes))
    on_cpu, on_gpu = (_runs_on(program, device) for device in (CPU, CUDA))
    return on_cpu if on_cpu == on_gpu else f"on a CPU: {on_cpu}; on a GPU: {on_gpu}"


def _runs_on(program, device):
    takes = {pair for pair in ALL_PAIRS if why_never(program, pair, device) is None}
    means = "kernels" if FUSED in takes else "PyTorch"
    parallel = ("newton", "fused" if FUSED in takes else "torch") in takes
    return f"{means}, {'parallel in time too' if parallel else 'step after step'}"


def _names(names):
    """Names, of matrix cells with their axes in a head."""
    axes = {}
    if isinstance(names, Mapping):
        axes = {name: f" ({','.join(own) or 'a number'})" for name, own in names.items()}
    return ", ".join(f"`{name}`{axes.get(name, '')}" for name in names) or "none"


def _row(name, cell):
    equation = _field(cell, "equation").replace("``", "`").replace("|", r"\|")
    by_shape = itertools.groupby(cell.params, lambda param: cell.params[param].kind.name)
    params = [f"{_names(names)} ({shape or 'a number'})" for shape, names in by_shape]
    gates = _names(cell.gates) + "".join(f"; field `{field}`" for field in cell.fields)
    gates += f"; memory {_names(cell.memory)}" if cell.memory else ""
    return (
        f"| `{name}` `{cell.__name__}` | {equation} | {_field(cell, 'source')} | "
        f"{_names(cell.states)} | {gates} | {', '.join(params) or 'none'} | {_runs(name, cell)} |\n"
    )


def test_the_page_lists_every_cell():
    """Rewrite it with PARARNN_WRITE_GOLDENS=1, and read the difference."""
    columns = "cell", "equation", "source", "states", "gates", "parameters", "runs as"
    table = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    table += "".join(_row(name, cell) for name, cell in EVERY.items())
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("PARARNN_WRITE_GOLDENS"):
        PAGE.write_text(BLOCK.sub(lambda _: table, text), encoding="utf-8")
    assert BLOCK.findall(PAGE.read_text(encoding="utf-8")) == [table]
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"autoclass:: (?:pararnn\.zoo\.)?(\w+)$", api, re.MULTILINE)
    assert {cell.__name__ for cell in EVERY.values()} <= set(entries)


def test_cells_that_were_asked_for_are_in_the_zoo():
    section = PAGE.read_text(encoding="utf-8").partition("## Cells that were asked for")[2]
    rows = re.findall(r"^\| .* \|$", section, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert len(names) > 20
    assert names <= {*EVERY}, names - {*EVERY}
