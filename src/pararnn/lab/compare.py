"""Training runs next to each other: a table and curves, at equal tokens and at equal seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pararnn.base.atomic import write_text, write_whole
from pararnn.base.errors import TrainingError
from pararnn.base.extras import require
from pararnn.lab.folders import make_folder
from pararnn.lab.palette import looks
from pararnn.lab.progress import amount, duration
from pararnn.lab.records import flat
from pararnn.lab.train.log import LOG, read_rows

if TYPE_CHECKING:
    import pandas as pd

SAME_RUN = (
    *("seed", "name", "out", "report_to", "save_every", "keep", "valid_every", "log_every"),
    *("verify_every", "data.cache"),
)
"""Keys of a config that do not separate groups: seed, names, and when files are written."""
MEASURED = ("data.sequence_length", "data.resets", "data.stateful", "valid_rows")
"""Keys, in addition to the data, that held-out bits depend on."""
REPORT, CURVES = "comparison.md", "comparison.png"
X = {"tokens": (1e6, "million tokens"), "seconds": (1.0, "seconds of training")}


def compare_runs(folders: Iterable[Path], out: Path) -> str:
    """Write a table and curves of runs into a folder, comparison.md and .png; return the table.

    folders: of runs, or of sweeps. Runs that differ in their seed only are a group: its figures are
    means over seeds, with the least and the largest. Bits per byte are of held-out text; seconds
    are those of training steps, and are compared on one kind of device only. Runs whose bits were
    not measured alike, on other data or other rows, have separate tables.

    Raises TrainingError where there is no such folder or no run with a validation, and where the
    report cannot be written; MissingExtra without pandas or matplotlib.
    """
    require("matplotlib.figure")
    frame = validations(folders)
    tables = [_table(group) for _, group in frame.groupby("measure", sort=False)]
    text = "\n\n".join(tables) + f"\n\n![Bits per byte]({CURVES})\n"
    make_folder(out)
    _plot(frame, out / CURVES)
    write_text(out / REPORT, text)
    return text


def validations(folders: Iterable[Path]) -> pd.DataFrame:
    """Return the validations of all runs: group, run, seed, measure, device, parameters, tokens,
    seconds and bits (per byte).

    Raises as `compare_runs`.
    """
    pd = require("pandas")
    folders = [*dict.fromkeys(folders)]
    missing = next((folder for folder in folders if not folder.exists()), None)
    if missing is not None:
        raise TrainingError(f"there is no folder {missing}: name those of runs, or of sweeps")
    records = {run: _read(run) for folder in folders for run in _runs_in(folder)}
    configs = {run: flat(config) for run, (config, _, _) in records.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    differ = [k for k in keys if len({str(c.get(k)) for c in configs.values()}) > 1]
    differ = [key for key in differ if key not in SAME_RUN]
    frames = []
    for run, (_, start, content) in records.items():
        config, points = configs[run], _points(read_rows(run / LOG))
        if not points:  # a frame without rows would make the columns of all others objects
            continue
        label = [f"{key.rpartition('.')[2]} {config.get(key)}" for key in differ]
        data = content or tuple(str(config[key]) for key in config if key.startswith("data."))
        about = {
            "group": ", ".join([str(config["name"]), *label]),
            "run": str(run),
            "seed": config["seed"],
            "measure": str((data, *(config.get(key) for key in MEASURED))),
            "device": f"{start.get('processes', 1)} x {start.get('device', 'unknown')}",
            "parameters": start.get("parameters"),
        }
        frames.append(pd.DataFrame(points, columns=["tokens", "seconds", "bits"]).assign(**about))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    if frame.empty:
        names = ", ".join(map(str, folders)) or "no folder"
        raise TrainingError(
            f"there is no run with a validation in {names}: name folders of runs of `pararnn "
            "train`, or of sweeps"
        )
    return frame


def _runs_in(folder: Path) -> Iterator[Path]:
    """Yield a folder that is a run's, or those in it that are."""
    inner = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in (folder, *inner):
        if (path / LOG).is_file() and (path / "config.json").is_file():
            yield path


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return a run's config, the facts of its last start, and the hash of its tokens."""
    files = [run / name for name in ("config.json", "record.json", "data.json")]
    try:
        config, record, data = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in files
        )
    except ValueError as error:
        raise TrainingError(f"{run} has a record that cannot be read: {error}") from error
    records = (config, record, data)
    if not (all(isinstance(r, dict) for r in records) and {"name", "seed"} <= {*config}):
        raise TrainingError(f"{run} has records that no run of `pararnn train` has written")
    return config, (record.get("starts") or [{}])[-1], str(data.get("content", ""))


def _points(rows: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return (tokens, seconds, bits) of a log's validations.

    Seconds are those of training only, by the rows' tokens/s. The first row's time is that of the
    second one's speed: it holds what is done once, such as compilation.
    """
    speeds = [(r["tokens"], r["tokens_per_second"]) for r in rows if r.get("tokens_per_second")]
    if len(speeds) > 1:
        speeds[0] = speeds[0][0], speeds[1][1]
    tokens, seconds = [0], [0.0]
    for count, speed in speeds:
        seconds.append(seconds[-1] + (count - tokens[-1]) / speed)
        tokens.append(count)
    last = speeds[-1][1] if speeds else float("inf")
    found = {r["tokens"]: r["valid_bits_per_byte"] for r in rows if r.get("valid_bits_per_byte")}
    return [
        (count, float(np.interp(count, tokens, seconds)) + max(0, count - tokens[-1]) / last, bits)
        for count, bits in sorted(found.items())
    ]


def _table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of groups that were measured alike, fewest bits first."""
    runs = dict(iter(frame.groupby("run", sort=False)))
    limits = {name: min(log[name].max() for log in runs.values()) for name in X}
    one_device = frame["device"].nunique() == 1
    names = {
        f"at {amount(limits['tokens']).strip()} tokens": lambda p: _bits_at(p, "tokens", limits),
        f"at {duration(limits['seconds'])}": lambda p: (
            _bits_at(p, "seconds", limits) if one_device else float("nan")
        ),
        "at the end": lambda p: p["bits"].iloc[-1],
    }
    lines = []
    for group, log in frame.groupby("group", sort=False):
        of_group = [runs[run] for run in log["run"].unique()]
        bits = [[float(read(p)) for p in of_group] for read in names.values()]
        last = [p.iloc[-1] for p in of_group]
        speed = np.mean([row["tokens"] / max(row["seconds"], 1e-9) for row in last])
        size = log["parameters"].iloc[0]
        cells = [
            str(group),
            "-" if size is None else amount(size).strip(),
            str(len(of_group)),
            *map(_spread, bits),
            amount(max(row["tokens"] for row in last)).strip(),
            f"{speed:,.0f}",
        ]
        lines.append((np.mean(bits[0]), cells))
    head = ["group", "parameters", "seeds", *names, "tokens", "tokens/s"]
    rows = [head, ["---"] * len(head), *(cells for _, cells in sorted(lines, key=lambda x: x[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bits_at(log: pd.DataFrame, name: str, limits: dict[str, float]) -> float:
    """Return the bits at a number of tokens or seconds, linear between two validations."""
    inside = log[name].iloc[0] <= limits[name]
    return float(np.interp(limits[name], log[name], log["bits"])) if inside else float("nan")


def _spread(values: list[float]) -> str:
    """Return the mean of seeds, with the least and the largest; "-" where one has no value."""
    if not np.isfinite(values).all():
        return "-"
    spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def _plot(frame: pd.DataFrame, path: Path) -> None:
    """Draw each group's mean over seeds, shaded from the least to the largest."""
    figure = require("matplotlib.figure").Figure(figsize=(11, 4.2), layout="constrained")
    colours = looks(frame["group"].unique())
    for axes, (name, (unit, label)) in zip(
        figure.subplots(1, 2, sharey=True), X.items(), strict=True
    ):
        for group, log in frame.groupby("group", sort=False):
            runs = [run.sort_values(name) for _, run in log.groupby("run")]
            first, last = (op(r[name].iloc[i] for r in runs) for op, i in ((max, 0), (min, -1)))
            across = np.unique(np.clip(runs[0][name], first, max(first, last)))
            bits = np.stack([np.interp(across, run[name], run["bits"]) for run in runs])
            colour, style = colours[group]
            axes.plot(across / unit, bits.mean(0), style, color=colour, label=group, marker=".")
            axes.fill_between(across / unit, bits.min(0), bits.max(0), color=colour, alpha=0.2)
        axes.set(xlabel=label, ylabel="bits per byte, held out")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with write_whole(path) as new:
        figure.savefig(new, dpi=150, format="png")
