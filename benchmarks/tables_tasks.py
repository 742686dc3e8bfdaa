"""Table of the synthetic tasks."""

from __future__ import annotations

from common import RESULTS

from pararnn.tasks.report import table
from pararnn.tasks.results import read_results


def tasks() -> str:
    """Return the paper's Table 6 and ours."""
    results = read_results(RESULTS / "tasks" / "table6")
    sources = dict.fromkeys(
        f"{each['device']}, PyTorch {each['versions']['torch']}, commit {each['commit']}"
        for each in results
    )
    most = max(results, key=lambda result: result["steps"])
    return (
        f"({'; '.join(sources)}; `benchmarks/results/tasks/table6`):\n\n{table(results)} Most "
        f"steps of a training: {most['steps']:,} ({most['task']}, {most['mixer']})."
    )
