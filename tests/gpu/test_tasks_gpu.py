"""Steps of synthetic tasks as one CUDA graph, against the same steps on a CPU."""

import pytest
import torch
from overrides import task_run

from pararnn.lab.tasks.folded import make_folded
from pararnn.lab.tasks.results import read_result
from pararnn.lab.tasks.run import run_all, run_task
from pararnn.lab.tasks.training import Stepper


@pytest.mark.parametrize("mixer", ["gru", "lstm", "mamba2", "deltanet", "transformer", "attention"])
@pytest.mark.parametrize("name", ["keep-nth", "2-hop", "adding"])
def test_steps_of_a_graph_are_steps(name, mixer):
    options = ["length=20", "vocab=8"] if name != "adding" else ["length=20"]
    config = task_run(name, mixer, [*options, "rows=64", "batch=8", "steps=30"])
    steppers = []
    for device in ("cpu", "cuda"):
        model = make_folded(config.task, config.model, (0, 1, 2), device)
        steppers.append(Stepper(model, config.task, config.train))
    for step in range(20):
        for stepper in steppers:
            stepper()
        one, other = (stepper.losses.cpu() for stepper in steppers)
        assert torch.allclose(one, other, rtol=1e-2), step
    one, other = (stepper.model.weights for stepper in steppers)
    for key, weight in one.items():
        assert (weight - other[key].cpu()).abs().max() < 4e-3, key  # of steps of 5e-4


def _steppers(name, mixer, options, variants):
    for variant in variants:
        config = task_run(name, mixer, [*options, *variant])
        model = make_folded(config.task, config.model, (0, 1, 2), "cuda")
        yield Stepper(model, config.task, config.train)


@pytest.mark.parametrize(
    ("name", "mixer", "more"),
    [("2-hop", "gru", []), ("mqar", "lstm", []), ("s3", "head-lstm", ["start=2", "heads=1"])],
)
def test_a_graph_has_the_losses_of_calls(name, mixer, more):
    """Bit for bit: the same kernels run. Compiled ones round otherwise."""
    options = [*more, "length=20", "width=32", "rows=64", "batch=8", "steps=60", "lr=0.002"]
    variants = [["graph=false"], [], ["compile=true"]]
    calls, graph, inductor = _steppers(name, mixer, options, variants)
    for step in range(50):
        for stepper in (calls, graph, inductor):
            stepper()
        assert torch.equal(calls.losses, graph.losses), step
        assert torch.equal(calls.horizons, graph.horizons), step
        if step < 20:  # rounding grows with the steps
            assert torch.allclose(calls.losses, inductor.losses, rtol=1e-3), step
    assert (calls.horizons > 2).all()
    for key, weight in calls.model.weights.items():
        assert torch.equal(weight, graph.model.weights[key]), key


def test_trainings_side_by_side_are_trainings(tmp_path):
    """On streams of their own; each result is that of a run alone."""
    options = ["length=30", "rows=256", "steps=200", "every=100", "test=500", "lr=0.002"]
    configs = [
        task_run("s3", mixer, options, device="cuda")
        for mixer in ("head-lstm", "gru", "lstm", "head-gru")
    ]
    run_all(configs, tmp_path, at_once=3)
    for config in configs:
        result, alone = read_result(tmp_path / config.file_name()), run_task(config)
        assert result["accuracies"] == pytest.approx(alone["accuracies"], abs=0.02)
        for one, other in zip(result["history"], alone["history"], strict=True):
            assert one[1] == pytest.approx(other[1], rel=0.02)


def test_a_run_reaches_its_accuracy():
    options = ["length=16", "lr=0.01", "batch=32", "every=50", "steps=1000", "test=2000"]
    result = run_task(task_run("parity", "gru", options, device="cuda"))
    assert result["best"] == 1
