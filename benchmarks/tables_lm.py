"""Steps of language models next to the paper's ratios."""

from __future__ import annotations

from markdown_tables import Row, digits, read, source, table

PAPER_MS: dict[str, dict[str, float]] = {
    "400M": {"gru": 95.7, "lstm": 116, "mamba2": 115, "transformer": 81.0},
    "1B": {"gru": 192, "lstm": 235, "mamba2": 221, "transformer": 157},
    "2.9B": {"gru": 326, "lstm": 400, "mamba2": 393, "transformer": 267},
    "7B": {"gru": 613, "lstm": 715, "transformer": 520},
}
"""Milliseconds of a step in Table 3, without the 7B Mamba2 (9,475), which fits no other."""


def steps() -> dict[tuple[str, str], Row]:
    """Return the steps at T = 2,048 by model and scale."""
    rows = {}
    for row in read("lm_step.csv"):
        if (row["T"], row["packed"]) == ("2048", "False"):
            rows[row["model"].lower()] = row | {"on": "1 GPU, no optimizer"}
    for row in read("lm_scale.csv"):
        same = (row["T"], row["way"], row["overrides"], row["note"]) == ("2048", "plain", "", "")
        if same and row["recipe"] not in rows:
            on = f"{row['gpus']} GPU{'s' * (row['gpus'] != '1')}, `pararnn train`"
            rows[row["recipe"]] = row | {"on": on}
    return {
        (name, scale): rows[f"{name}-{scale.lower()}"]
        for scale in PAPER_MS
        for name in PAPER_MS["1B"]
    }


def lm_ratios() -> str:
    """Return the table of steps over the Transformer's, next to the paper's ratios."""
    by_model = steps()
    body = []
    for (name, scale), row in by_model.items():
        paper, base = PAPER_MS[scale], by_model["transformer", scale]
        body.append(
            [
                f"{name}-{scale}",
                row["on"],
                f"{float(row['median_ms']):.1f}",
                f"{int(row['tokens_per_s']):,}",
                f"{float(row['mfu_percent']):.0f}%",
                digits(row["peak_GiB"]),
                f"{float(row['median_ms']) / float(base['median_ms']):.2f}",
                f"{paper[name] / paper['transformer']:.2f}" if name in paper else "",
            ]
        )
    head = ["model", "on", "ms", "tokens/s", "MFU", "GiB a GPU", "over the Transformer"]
    about = source(list(by_model.values()), "lm_step.csv")
    about = about.replace("csv`", "csv` and `lm_scale.csv`")
    return f"T = 2,048 {about}:\n\n{table([*head, 'the paper'], body)}"
