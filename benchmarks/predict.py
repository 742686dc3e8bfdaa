"""Predictions of `explain(layer, x, predict=True)` against what runs at full size.

For each cell of the zoo that Newton takes a layer is made, trained for some steps to average what
it has read, and its recurrent weights are scaled towards chaos. Of each stage the predicted pair is
held against the one that is fastest at full size, forward + backward, and the predicted sweeps of
Newton against those that it takes. Pairs run in turns, the least time of each counts; one that is
predicted to take eight times the fastest's time does not run. With one thread on a CPU times are
those of the process, which other processes do not lengthen.

Writes results/predict_<cpu or gpu>.csv and prints the share of right predictions.

    python benchmarks/predict.py [--device cuda] [--only gru lstm] [--sizes 1,32768,64] [--rounds 2]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from common import Record, new_parser, provenance
from torch import Tensor, nn

import pararnn
from pararnn import Cell
from pararnn.engines import newton_torch
from pararnn.engines.arguments import totals
from pararnn.engines.rule import Size
from pararnn.engines.table import find
from pararnn.engines.tuned import Workload
from pararnn.program.program import program_of
from pararnn.tune.explain import workload_of
from pararnn.tune.predict import HOPELESS, Pair, Run
from pararnn.tune.timing import least_seconds
from pararnn.zoo import CELLS, MATRIX_CELLS

Row = dict[str, Any]
INPUTS = 16
SIZES: dict[str, list[Size]] = {
    "cpu": [(4, 2048, 256), (1, 2048, 64)],
    "cuda": [(4, 2048, 1024), (1, 16384, 1024), (1, 2048, 64)],
}
COUPLED_SIZES: list[Size] = [(1, 2048, 16)]
"""(B, T, D) of cells whose channels couple: Jacobians of more channels make no contest."""
KEYS = ("cell", "stage", "backend", "B", "T", "D")
"""Columns that tell rows apart."""
REQUESTS = ("auto", "torch")
"""Backends that are asked for."""
SCALES = (2, 4)
"""Factors of the trained recurrent weights."""
TIE = 1.1
"""Ratio of two times up to which either pair is the fastest."""


def layer_of(name: str, channels: int, device: str) -> pararnn.ParaRNN:
    heads = 2 if name in MATRIX_CELLS else 1
    cell = {**CELLS, **MATRIX_CELLS}[name]
    return pararnn.ParaRNN(cell, INPUTS, channels, num_heads=heads, device=device)


def fields_of(cell: Cell, x: Tensor) -> dict[str, Tensor]:
    """Return a cell's fields for an input: random times."""
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(x.shape[:2], generator=generator).to(x) + 0.5 for name in cell.fields}


def train(layer: pararnn.ParaRNN, steps: int) -> float:
    """Train a layer to say the mean of the last 16 inputs; return the last loss."""
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(layer.hidden_size, INPUTS, device=device)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(8, 128, INPUTS, generator=generator).to(device)
        mean = x.cumsum(1)
        mean = (mean - nn.functional.pad(mean, (0, 0, 16, 0))[:, :-16]) / 4
        loss = (head(layer(x, fields=fields_of(layer.cell, x))[0]) - mean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def stages(layer: pararnn.ParaRNN, train_steps: int) -> Iterator[str]:
    """Yield the name of each stage, at which the layer stands then."""
    yield "fresh"
    train(layer, train_steps)
    yield "trained"
    weights = list(layer.cell.recurrent_parameters())
    factor = 1
    for scale in SCALES if weights else ():
        with torch.no_grad():
            for weight in weights:
                weight.mul_(scale / factor)
        factor = scale
        yield f"x {scale}"


def measure(layer: pararnn.ParaRNN, x: Tensor, backend: str, rounds: int) -> Row:
    """Predict, run all candidates at full size, and compare."""
    fields, begin = fields_of(layer.cell, x), time.perf_counter()
    explanation = pararnn.explain(layer, x, backend=backend, predict=True, fields=fields)
    seconds, said = time.perf_counter() - begin, explanation.prediction
    assert said is not None
    program, size, _, device, heads = workload_of(layer, x.shape, None, None)
    args = layer.first_call(x, fields=fields).map(Tensor.detach)
    workload = Workload(program.key, size, args.gates.dtype, device, heads)
    # In turns, without those that are hopeless by the prediction.
    pairs = sorted(said.times, key=lambda pair: said.times[pair])
    times: dict[Pair, float] = {}
    calls = {}
    for pair in pairs:
        engine = find(*pair, device)
        assert engine is not None
        if said.times[pair] <= HOPELESS * said.times[pairs[0]]:
            calls[pair] = Run(engine, workload, args, True, 0.0).call(size[1])
    for _ in range(rounds):
        for pair, call in calls.items():
            ms = 1e3 * sum(least_seconds(call.phases, device, 0.0))
            times[pair] = min(ms, times.get(pair, ms))
    fastest = min(times, key=times.__getitem__)
    sweeps, mended = "", ""
    if newton_torch.ENGINE.why_not(program) is None and ("newton", "torch") in calls:
        sweeps, mended = totals(calls["newton", "torch"].solution.info).tolist()
    return {
        "exponent": round(said.exponent, 4),
        "expanding": round(said.expanding, 4),
        "predicted_sweeps": said.sweeps,
        "converges": said.converges,
        "sweeps": sweeps,
        "mended": mended,
        "rule": f"{explanation.solver}, {explanation.backend}",
        "predicted": ", ".join(said.pair),
        "predicted_ms": round(said.times[said.pair], 3),
        "fastest": ", ".join(fastest),
        "fastest_ms": round(times[fastest], 3),
        "predicted_pair_ms": round(times[said.pair], 3),
        "of_fastest": round(times[said.pair] / times[fastest], 3),
        "others": "; ".join(
            f"{', '.join(pair)}: {said.times[pair]:.3f}, {times[pair]:.3f} ms"
            if pair in times
            else f"{', '.join(pair)}: {said.times[pair]:.3f} ms, hopeless"
            for pair in pairs
            if pair != said.pair
        ),
        "prediction_ms": round(1e3 * seconds, 1),
        "at_full_size_ms": round(sum(times.get(pair, said.times[pair]) for pair in pairs), 1),
    }


def takes_newton(name: str) -> bool:
    """Return True for cells that Newton takes."""
    program = program_of(layer_of(name, INPUTS, "cpu").cell)
    return newton_torch.ENGINE.why_not(program) is None


def sizes_of(name: str, device: str) -> list[Size]:
    """Return (B, T, D) of a cell's layers."""
    couples = program_of(layer_of(name, INPUTS, "cpu").cell).couples_channels
    return COUPLED_SIZES if couples else SIZES[device]


def cell_rows(
    name: str, sizes: Sequence[Size], device: str, rounds: int, train_steps: int
) -> Iterator[Row]:
    for size in sizes:
        torch.manual_seed(0)
        layer = layer_of(name, size[2], device)
        x = torch.randn(*size[:2], INPUTS).to(device)
        for stage in stages(layer, train_steps):
            for backend in REQUESTS:
                row = measure(layer, x, backend, rounds)
                batch, steps, channels = size
                about = {"cell": name, "stage": stage, "backend": backend}
                yield about | {"B": batch, "T": steps, "D": channels} | row


def summary(rows: Sequence[Row]) -> str:
    """Return the shares of right predictions, of those with a choice."""
    lines, rows = [], [row for row in rows if row["others"]]
    for backend in (*REQUESTS, None):
        some = [row for row in rows if backend in (None, row["backend"])]
        right = sum(row["predicted"] == row["fastest"] for row in some)
        ties = sum(row["of_fastest"] <= TIE for row in some)
        rule = sum(row["rule"] == row["fastest"] for row in some)
        lines.append(
            f"backend {backend or 'any'}: {right} of {len(some)} right, {ties} within "
            f"{TIE - 1:.0%} of the fastest; the rule of auto: {rule} right"
        )
    counted = [row for row in rows if row["sweeps"] != "" and row["predicted_sweeps"] is not None]
    off = [abs(row["predicted_sweeps"] - row["sweeps"]) for row in counted]
    fails = [row["converges"] == (not row["mended"]) for row in counted]
    lines.append(
        f"sweeps: {sum(x == 0 for x in off)} of {len(off)} right, {sum(x <= 2 for x in off)} to 2; "
        f"whether it converges: {sum(fails)} right"
    )
    return "\n".join(lines)


def size_of(text: str) -> Size:
    """Parse B,T,D."""
    batch, steps, channels = map(int, text.split(","))
    return batch, steps, channels


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in (*CELLS, *MATRIX_CELLS) if takes_newton(name)]
    parser.add_argument("--only", nargs="*", default=names, choices=[*CELLS, *MATRIX_CELLS])
    parser.add_argument("--sizes", nargs="*", type=size_of, help="B,T,D, others than the usual")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each pair")
    parser.add_argument("--train-steps", type=int, default=40)
    args = parser.parse_args()
    about = provenance(args.device) | {"threads": torch.get_num_threads()}
    # On one thread: what others do on the machine does not count.
    alone = args.device == "cpu" and about["threads"] == 1
    clock = time.process_time if alone else time.perf_counter
    file = args.out / f"predict_{'gpu' if args.device == 'cuda' else args.device}.csv"
    record = Record(file, about | {"clock": clock.__name__}, KEYS)
    with mock.patch.object(time, "perf_counter", clock):
        for name in args.only:
            sizes = args.sizes or sizes_of(name, args.device)
            for row in cell_rows(name, sizes, args.device, args.rounds, args.train_steps):
                record.add(row)
    print(summary(record.rows))


if __name__ == "__main__":
    main()
