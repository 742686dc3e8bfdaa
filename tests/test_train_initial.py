"""Runs that start from weights of another: where these come from, and what does not fit."""

import json
import shutil

import pytest
import torch
from lm_kinds import options

pytest.importorskip("transformers")

from test_train_trainer import Packed, config, losses, run_until, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab import cli
from pararnn.lab.train import checkpoints
from pararnn.lab.train.config import OptimiserConfig
from pararnn.lab.train.folder import record_of
from pararnn.lab.train.initial import check_tokenizer, load_initial, source_of
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import run_training
from pararnn.lab.train.setup import bare_model, prepare_model
from pararnn.lab.train.sharding import process_group
from pararnn.lab.train.trainer import RunTrainer
from pararnn.lm import LanguageModel, LMConfig, save_checkpoint
from pararnn.lm.tokens import save_byte_tokenizer

STILL = OptimiserConfig(learning_rate=1e-12, weight_decay=0.0, clip="none")
"""AdamW that leaves weights as they are, to float32's eyes."""
QUICK = {"steps": 2, "save_every": 2, "valid_every": 2, "report_to": "none"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose weights others start from."""
    out = tmp_path_factory.mktemp("first") / "run"
    run_training(config(out, steps=4, save_every=2, report_to="none"), Packed())
    return out


@pytest.mark.parametrize("part", ["", "checkpoint-4", "model"])
def test_a_run_starts_from_a_run_a_checkpoint_or_a_model(first, tmp_path, part):
    request = config(tmp_path, init_from=str(first / part), optimiser=STILL, **QUICK)
    run_training(request, Packed())
    source, result = weights(first / "model"), weights(tmp_path / "model")
    for name, weight in result.items():
        assert torch.allclose(weight, source[name], rtol=0, atol=1e-7), name
    assert float(losses(tmp_path)[1]) < float(losses(first)[1]) - 0.1
    (start,) = record_of(tmp_path)["starts"]
    assert start["weights"] == str(first / (part or "checkpoint-4"))
    assert json.loads((tmp_path / "config.json").read_text())["init_from"] == str(first / part)


def test_an_earlier_checkpoint_has_its_own_weights(first, tmp_path):
    requests = [
        config(tmp_path / name, init_from=str(first / name), optimiser=STILL, **QUICK)
        for name in ("checkpoint-2", "checkpoint-4")
    ]
    early, late = (losses(run_training(request, Packed()).parent) for request in requests)
    assert float(late[1]) < float(early[1])


def test_the_optimizer_and_its_rates_start_anew(first, tmp_path, monkeypatch):
    sizes, learn = [], RunTrainer.learn

    def look(self, parts):
        sizes.append(len(self.optimizer.state))
        return learn(self, parts)

    monkeypatch.setattr(RunTrainer, "learn", look)
    run_training(config(tmp_path / "drawn", **QUICK), Packed())
    run_training(config(tmp_path / "run", init_from=str(first), **QUICK), Packed())
    assert sizes[0] == sizes[2] == 0
    rates = [
        read_rows(tmp_path / name / "log.jsonl")[0]["learning_rate"] for name in ("drawn", "run")
    ]
    assert rates[0] == rates[1]


def test_a_killed_run_goes_on_without_its_source(first, tmp_path, monkeypatch):
    source = shutil.copytree(first, tmp_path / "source")
    more = {"init_from": str(source), "save_every": 2, "report_to": "none"}
    run_training(config(tmp_path / "whole", **more), Packed())
    for step in (1, 3):  # before its first checkpoint, and behind it
        run_until(monkeypatch, step, config(tmp_path / "run", **more))
    shutil.rmtree(source)
    run_training(config(tmp_path / "run", **more), Packed())
    same_bits(weights(tmp_path / "run" / "model"), weights(tmp_path / "whole" / "model"))
    begins = [start["weights"] for start in record_of(tmp_path / "run")["starts"]]
    assert begins == [str(source / "checkpoint-4")] * 2 + [str(tmp_path / "run" / "checkpoint-2")]
    with pytest.raises(TrainingError, match=r"init_from = '.*source', and this run ''"):
        run_training(config(tmp_path / "run", save_every=2), Packed())


def test_a_run_whose_checkpoints_are_damaged_starts_from_its_source_again(first, tmp_path):
    request = config(tmp_path / "run", init_from=str(first), **QUICK)
    run_training(request, Packed())
    (tmp_path / "run" / "checkpoint-2" / ".metadata").unlink()
    run_training(request, Packed())
    begins = [start["weights"] for start in record_of(tmp_path / "run")["starts"]]
    assert begins == [str(first / "checkpoint-4"), str(first)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 32}, "has model.hidden_size = 16, and this run 32"),
        ({"num_hidden_layers": 3}, "has model.num_hidden_layers = 2, and this run 3"),
        ({"cell": "lstm"}, "has model.cell = 'gru', and this run 'lstm'"),
        ({"mixers": ("rnn", "attention")}, r"has model.mixers = \['rnn', 'rnn'\], and this run"),
        ({"num_heads": 4}, "has model.num_heads = 2, and this run 4"),
        ({"vocab_size": 64}, "has model.vocab_size = 48, and this run 64"),
        ({"tie_word_embeddings": True}, "has model.tie_word_embeddings = False, and this run True"),
    ],
)
@pytest.mark.parametrize("part", ["checkpoint-4", "model"])
def test_the_first_size_that_does_not_fit_is_named(first, tmp_path, model, message, part):
    request = config(
        tmp_path / "run", model=LMConfig(**options("gru") | model), init_from=str(first / part)
    )
    with pytest.raises(TrainingError, match=message):
        run_training(request, Packed())
    assert not (tmp_path / "run").exists()


def test_a_weight_of_another_shape_is_named(first, tmp_path):
    folder = shutil.copytree(first, tmp_path / "source")
    for path in (folder / "model" / "config.json", folder / "config.json"):
        path.write_text(
            path.read_text().replace('"intermediate_size": 24', '"intermediate_size": 8')
        )
    model = LMConfig(**options("gru") | {"intermediate_size": 8})
    for part in ("checkpoint-4", "model"):
        request = config(tmp_path / "run", model=model, init_from=str(folder / part))
        message = (
            r"holds a weight of another shape: model\.\S+proj\.weight \(\d+, \d+\), which must be"
        )
        with pytest.raises(TrainingError, match=message):
            run_training(request, Packed())


def test_values_without_weights_may_differ(first, tmp_path):
    model = LMConfig(**options("gru") | {"solver": "sequential", "recurrent_clip": 0.25})
    run_training(config(tmp_path, model=model, init_from=str(first), **QUICK), Packed())
    assert record_of(tmp_path)["starts"][0]["weights"] == str(first / "checkpoint-4")


def broken(folder, part):
    """A folder without the weights that its name promises."""
    if part == "empty":
        return folder / "nowhere"
    if part == "unfinished":
        (folder / "checkpoint-4" / checkpoints.MARK).unlink()
        return folder / "checkpoint-4"
    if part == "damaged":
        file = next((folder / "checkpoint-4").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-9] + b"\0" * 9)
        return folder / "checkpoint-4"
    if part == "without checkpoints":
        for _, path in checkpoints.checkpoints(folder):
            shutil.rmtree(path)
        return folder
    config = {"model_type": "llama" if part == "of others" else "pararnn", "hidden_size": "8"}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("empty", "nowhere has no weights to start from .*: name the folder of a run"),
        ("unfinished", "checkpoint-4 has no weights to start from"),
        ("damaged", "checkpoint-4 is damaged, .*distcp has changed since"),
        ("without checkpoints", "has no complete checkpoint to start from"),
        ("of others", "is a model of type 'llama': runs start from those of type 'pararnn'"),
        ("of nothing", r"model/config\.json describes no model: KeyError\('layer_types'\)"),
    ],
)
def test_folders_without_weights_say_so(first, tmp_path, part, message):
    folder = broken(shutil.copytree(first, tmp_path / "source"), part)
    with pytest.raises(TrainingError, match=message):
        run_training(config(tmp_path / "run", init_from=str(folder), **QUICK), Packed())


def test_weights_of_another_tokenizer_are_refused(first, tmp_path):
    class Bytes:
        vocabulary = 16

        def save(self, folder):
            save_byte_tokenizer(folder)

    data = Packed()._replace(tokenizer=Bytes())
    source = source_of(str(first))._replace(tokenizer=tmp_path)
    check_tokenizer(source, data)  # there is none to compare with
    Bytes().save(tmp_path)
    check_tokenizer(source, data)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"], content["model"]["vocab"]["b"] = 98, 97
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TrainingError, match=rf"another tokenizer .* set data.tokenizer={tmp_path}"):
        check_tokenizer(source, data)
    folder = shutil.copytree(first, tmp_path / "run")
    shutil.copy(tmp_path / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    with pytest.raises(TrainingError, match="another tokenizer"):
        run_training(config(tmp_path / "new", init_from=str(folder), **QUICK), data)


@pytest.mark.parametrize("kind", ["hybrid", "tied"])
def test_models_of_other_kinds(kind, tmp_path):
    """Also as plain PyTorch saves them, in 16 bits."""
    torch.manual_seed(3)
    plain = LanguageModel(LMConfig(**options(kind)), dtype=torch.bfloat16)
    save_checkpoint(plain, tmp_path / "model")
    request = config(tmp_path / "run", model=plain.config, init_from=str(tmp_path / "model"))
    reference = {name: weight.float() for name, weight in plain.state_dict().items()}
    with process_group():
        model = prepare_model(bare_model(request), request, CPU)
        load_initial(request, model)
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor()
            assert torch.equal(whole, reference[name.removeprefix("model.")]), name


def test_the_command_takes_the_key(first, tmp_path, capsys):
    assert cli.main(["train", "tiny", "--print", f"--init_from={first}"]) == 0
    assert json.loads(capsys.readouterr().out)["init_from"] == str(first)
    with pytest.raises(SystemExit):
        cli.main(
            ["train", "tiny", f"--init_from={first}", "--data.train=x", f"--out={tmp_path / 'run'}"]
        )
    assert "has model.hidden_size = 16, and this run 128" in capsys.readouterr().err
