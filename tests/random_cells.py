"""Random cells, by hypothesis."""

import torch
from hypothesis import strategies as st

import pararnn

# Random cells: expressions over what a step sees, out of the op table. All are bounded and smooth
# almost everywhere, so that a wrong derivative shows and rounding does not.
UNARY = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "abs": torch.abs,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "elu": torch.nn.functional.elu,
    "bump": lambda x: torch.exp(-x * x),
    "root": lambda x: torch.sqrt(1 + x * x),
    "log1p": lambda x: torch.log1p(x.abs()),
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "halve": lambda x: 0.5 * x,
    "flip": lambda x: 1 - x,
    "asinh": torch.asinh,
    "expm1": lambda x: torch.expm1(x.clamp(max=1)),
    "square": lambda x: x.clamp(-2, 2) ** 2,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x < y, x, 0.3 * y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "quotient": lambda x, y: x / (1.5 + y.abs()),
    "hypot": lambda x, y: torch.hypot(x, y + 3),
    "atan2": lambda x, y: torch.atan2(x, 2 + y.abs()),
}


@st.composite
def recipes(draw):
    """(states, gates, params, fields, one expression tree a state)."""
    counts = draw(st.tuples(*(st.integers(*r) for r in ((1, 4), (1, 3), (0, 3), (0, 1)))))
    leaves = [(kind, i) for kind, n in zip("sgpf", counts, strict=True) for i in range(n)]
    trees = st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(UNARY)), inner),
            st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
        ),
        max_leaves=6,
    )
    return counts, [draw(trees) for _ in range(counts[0])]


def random_cell(counts, trees):
    """The cell of a recipe."""

    def evaluate(tree, sources):
        if tree[0] in sources:
            return sources[tree[0]][tree[1]]
        if tree[0] in UNARY:
            return UNARY[tree[0]](evaluate(tree[1], sources))
        return BINARY[tree[0]](evaluate(tree[1], sources), evaluate(tree[2], sources))

    num_states, num_gates, num_params, num_fields = counts

    class Random(pararnn.Cell):
        states = tuple(f"s{i}" for i in range(num_states))
        gates = tuple(f"g{i}" for i in range(num_gates))
        fields = tuple(f"f{i}" for i in range(num_fields))
        params = {f"p{i}": pararnn.Param(std=0.5) for i in range(num_params)}

        def step(self, state, gate, param):
            sources = {"s": state, "g": gate[:num_gates], "f": gate[num_gates:], "p": param}
            new = [torch.tanh(evaluate(tree, sources)) for tree in trees]
            return tuple(0.5 * h + 0.5 * gate.g0 * old for h, old in zip(new, state, strict=True))

    return Random
