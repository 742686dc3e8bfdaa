"""A run's order of rows from any step on, and what is looked at on the way."""

import itertools
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers")

from lm_kinds import options
from test_train_trainer import Packed, config, losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train import reports, telemetry
from pararnn.lab.train import trainer as trainer_module
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.feed import StepSampler, batches, make_loader, steps_of_epoch
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import run_training
from pararnn.lm.config import LMConfig

MANY = 5_000_003


class Virtual(Dataset):
    """Rows that say their own index, and how many were read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return MANY

    def __getitem__(self, index):
        self.read += 1
        return {"input_ids": torch.tensor([index])}


def rows_of(request, count, rank=0, world=1, first=0):
    return list(StepSampler(request, count, rank, world, first))


def join(lists):
    return list(itertools.chain.from_iterable(lists))


def test_after_200_000_batches_no_row_before_is_read(tmp_path):
    request = config(tmp_path, steps=300_000, batch=16, device_batch=16, seed=7)
    rows = Virtual()
    loader = make_loader(request, rows, 0, 1, 200_000)
    got = [batch["input_ids"].flatten() for batch in itertools.islice(loader, 3)]
    assert rows.read == 3 * 16
    order = itertools.islice(batches(request, MANY, 0, 0), 200_000, 200_003)
    assert torch.stack(got).tolist() == list(order)


@pytest.mark.parametrize("stateful", [False, True])
def test_the_order_goes_on_in_any_epoch(tmp_path, stateful):
    data = DataConfig(sequence_length=12, stateful=stateful)
    request = config(tmp_path, steps=17, batch=4, device_batch=2, data=data)
    whole = rows_of(request, 22)
    assert len(whole) == 17 * 2
    assert steps_of_epoch(request, 22) == 5
    for step in range(18):
        assert rows_of(request, 22, first=step) == whole[2 * step :]
    epochs = [join(whole[at : at + 10]) for at in (0, 10, 20)]
    assert all(len(set(rows)) == 20 for rows in epochs)
    assert (whole[:10] == whole[10:20]) == stateful


def test_ranks_share_each_batch_in_any_number(tmp_path):
    request = config(tmp_path, steps=6, batch=8, device_batch=2)
    single = rows_of(request, 20)
    batches_alone = [join(single[at : at + 4]) for at in range(0, 24, 4)]
    for world in (2, 4):
        ranks = [rows_of(request, 20, rank, world) for rank in range(world)]
        parts = 4 // world
        for step, batch in enumerate(batches_alone):
            at = range(step * parts, step * parts + parts)
            assert join(ranks[r][m] for m in at for r in range(world)) == batch


def test_batches_draw_nothing_from_the_global_generator(tmp_path):
    old = torch.get_rng_state()
    next(iter(make_loader(config(tmp_path), Virtual(), 0, 1, 3)))
    assert torch.equal(torch.get_rng_state(), old)


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("watched") / "run"
    run_training(config(out, verify_every=2, report_to="auto"), Packed())
    return out


def test_checks_of_the_solvers_are_logged_and_change_no_bit(logged_run, tmp_path):
    run_training(config(tmp_path, verify_every=0), Packed())
    same_bits(weights(logged_run / "model"), weights(tmp_path / "model"))
    assert losses(logged_run) == losses(tmp_path)
    assert not any("defect" in row for row in read_rows(tmp_path / "log.jsonl"))
    rows = [row for row in read_rows(logged_run / "log.jsonl") if "defect" in row]
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    for row in rows:
        parts = row["defect"]
        assert len(parts) == len(row["sweeps"]) == len(row["mended"]) == 2
        assert all(0 < part <= 1 for part in parts)


@pytest.mark.parametrize("kind", ["lstm", "user's", "hybrid", "attention"])
def test_any_model_is_checked_in_autocast(tmp_path, kind):
    model = LMConfig(**options(kind))
    request = config(tmp_path, steps=2, verify_every=1, precision="bfloat16", model=model)
    run_training(request, Packed())
    rows = [row["defect"] for row in read_rows(tmp_path / "log.jsonl") if "defect" in row]
    recurrent = (model.mixers or ()).count("rnn")
    assert len(rows) == (2 if recurrent else 0)
    for row in rows:
        assert len(row) == recurrent
        assert all(0 < float(part) <= 1 for part in row)


def test_random_numbers_and_records_stay(logged_run, monkeypatch):
    from pararnn.lm.hf import ParaRNNForCausalLM

    model = ParaRNNForCausalLM.from_pretrained(logged_run / "model")
    ids = torch.arange(12)[None]
    model(ids)
    old_counts = [part.counts for part in model.modules() if hasattr(part, "counts")]
    assert len(old_counts) == 2
    assert all(counts is not None for counts in old_counts)

    def drawing(*args):
        torch.rand(1)
        return 0.5, 1, 0

    monkeypatch.setattr(telemetry, "defect", drawing)
    state = torch.get_rng_state()
    results = telemetry.check_solves(model, {"input_ids": ids})
    assert results == {"defect": [0.5, 0.5], "sweeps": [1, 1], "mended": [0, 0]}
    assert torch.equal(torch.get_rng_state(), state)
    new_counts = [part.counts for part in model.modules() if hasattr(part, "counts")]
    assert all(a is b for a, b in zip(new_counts, old_counts, strict=True))


def test_a_wrong_state_has_a_defect(logged_run, monkeypatch):
    from pararnn.lm.hf import ParaRNNForCausalLM

    module = sys.modules["pararnn.check.verify"]  # pararnn.verify itself is the function
    model = ParaRNNForCausalLM.from_pretrained(logged_run / "model")
    solve = module.run

    def wrong(*call):
        solution = solve(*call)
        solution.states[0][0, 5, 3] *= 1 + 1e-4
        return solution

    checks = SimpleNamespace(passed=False, fraction=math.inf)
    monkeypatch.setattr(module, "run", wrong)
    monkeypatch.setattr(
        module, "_check", lambda *args: (None, None, SimpleNamespace(checks=[checks]))
    )
    results = telemetry.check_solves(model, {"input_ids": torch.arange(12)[None]})
    assert results["defect"] == [math.inf, math.inf]  # as the full check says, which was asked


def test_an_infinite_defect_is_logged(tmp_path, monkeypatch):
    results = {"defect": [math.inf, 0.5], "sweeps": [1, 1], "mended": [0, 0]}
    monkeypatch.setattr(trainer_module, "check_solves", lambda *_: results)
    run_training(config(tmp_path, steps=3, verify_every=1), Packed())
    defects = [row["defect"] for row in read_rows(tmp_path / "log.jsonl") if "defect" in row]
    assert defects == [[None, 0.5]] * 3
    assert "Infinity" not in (tmp_path / "log.jsonl").read_text()


@pytest.mark.thorough
def test_compiled_blocks_are_checked_too(logged_run):
    from pararnn.lm.hf import ParaRNNForCausalLM

    model = ParaRNNForCausalLM.from_pretrained(logged_run / "model")
    for block in model.model.backbone.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    ids = torch.arange(12)[None]
    model(ids, use_cache=False)
    results = telemetry.check_solves(model, {"input_ids": ids})
    assert len(results["defect"]) == 2
    assert all(0 < part <= 1 for part in results["defect"])


def test_tensorboard_has_the_scalars(logged_run):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(str(logged_run / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    wanted = {"loss", "grad_norm", "tokens_per_second", "defect"}
    assert names >= wanted | {"valid_loss", "sweeps"}
    steps = {event.step: event.value for event in events.Scalars("loss")}
    assert steps == pytest.approx({step: float(loss) for step, loss in losses(logged_run).items()})


def test_tensorboard_repeats_no_step_after_a_kill(tmp_path, monkeypatch):
    """It had the points behind the checkpoint twice."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    log = trainer_module.RunTrainer.log

    def kill_in_step(self, logs, *args):
        log(self, logs, *args)
        if self.step == 5:
            raise KeyboardInterrupt

    request = config(tmp_path, report_to="tensorboard", save_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.RunTrainer, "log", kill_in_step)
        with pytest.raises(KeyboardInterrupt):
            run_training(request, Packed())
    (file,) = (tmp_path / "tensorboard").iterdir()  # names of one second have no order
    file.rename(file.with_name("events.out.tfevents.0"))
    run_training(request, Packed())
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    assert steps == sorted(set(steps)) == [*range(1, request.steps + 1)]


def test_without_tensorboard_auto_is_none(monkeypatch):
    monkeypatch.setattr(reports.importlib.util, "find_spec", lambda name: name == "wandb" or None)
    assert reports.tracker_of("auto") == "none"
    assert reports.tracker_of("none") == "none"
    assert reports.tracker_of("wandb") == "wandb"
    with pytest.raises(TrainingError, match=r"is installed \(wandb\), got 'trackio'"):
        reports.tracker_of("trackio")


def test_a_service_gets_the_config_and_the_figures(tmp_path, monkeypatch):
    """By the functions that wandb and trackio share."""
    calls = []
    service = types.ModuleType("wandb")
    service.init = lambda **options: calls.append(options["config"]["steps"])
    service.log = lambda logs, step: calls.append((step, set(logs)))
    service.finish = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, "wandb", service)
    reports_of_run = reports.Reports("wandb", config(tmp_path, steps=7), 0, [])
    reports_of_run.log(1, {"loss": 2.0})
    reports_of_run.close()
    assert calls == [7, (1, {"loss"}), "end"]


def test_negative_steps_between_checks_raise(tmp_path):
    with pytest.raises(ValueError, match="verify_every must be positive, or 0 for never, got -1"):
        config(tmp_path, verify_every=-1)
