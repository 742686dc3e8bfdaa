"""`pararnn train` under torchrun: a rank is killed, and other numbers of ranks go on."""

import os
import shutil
from functools import partial
from signal import SIGKILL

import pytest
from processes import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from test_train_trainer import losses

from pararnn.lab import cli
from pararnn.lab.train import checkpoints, trainer

TEXT = "".join(f"{n} times {n} is {n * n}, which {n} divides.\n" for n in range(200))


def train(folder, out, device_batch):
    request = {
        "data.train": folder / "text.txt",
        "data.cache": folder / "tokens",
        "data.holdout": 0.1,
        "data.sequence_length": 24,
        "model.hidden_size": 16,
        "model.intermediate_size": 32,
        "steps": 6,
        "batch": 4,
        "device_batch": device_batch,
        "save_every": 3,
        "valid_every": 1000,
        "log_every": 1,
        "verify_every": 0,
        "report_to": "none",
        "out": out,
    }
    code = cli.main(["train", "tiny", *(f"--{key}={value}" for key, value in request.items())])
    assert code == 0


def dies(folder, out):
    log_row = trainer.RunTrainer.log

    def dying(self, *args):
        log_row(self, *args)
        if os.environ["RANK"] == "1" and self.step == 5:
            os.kill(os.getpid(), SIGKILL)

    trainer.RunTrainer.log = dying
    train(folder, out, 2)


@pytest.fixture(scope="module")
def runs_after_kill(tmp_path_factory):
    """The losses of a run of one process, and the folder of one of two that lost its second."""
    folder = tmp_path_factory.mktemp("lost")
    (folder / "text.txt").write_text(TEXT)
    train(folder, folder / "whole", 4)
    out = folder / "two"
    with pytest.raises(ChildFailedError):  # a run that does not end fails by its own clock
        launch(partial(dies, folder, out), folder / "first")
    assert checkpoints.last_complete(out) == (3, out / "checkpoint-3")
    assert 4 in losses(out)
    return folder, losses(folder / "whole"), out


# Rows of a step are on other ranks and in other parts each time.
@pytest.mark.parametrize(("ranks", "device_batch"), [(1, 2), (4, 1)])
@pytest.mark.one_in(2)
def test_a_killed_run_goes_on_with_other_ranks(runs_after_kill, ranks, device_batch):
    folder, reference, copy = runs_after_kill
    out = folder / f"on-{ranks}"
    shutil.copytree(copy, out)
    work = partial(train, folder, out, device_batch)
    output = launch(work, folder / f"again-{ranks}", ranks)
    assert f"goes on from {out / 'checkpoint-3'}" in output
    assert losses(out).keys() == reference.keys() == set(range(1, 7))
    for step, loss in losses(out).items():
        assert float(loss) == pytest.approx(float(reference[step]), abs=2e-5), step
