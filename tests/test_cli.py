import io
import json
import re
import sys
import types
from dataclasses import asdict, replace

import pytest
import torch
from fresh import run_fresh
from overrides import plain

import pararnn
from pararnn.lab import cli
from pararnn.lab.commands import _texts
from pararnn.lab.tasks import TextError
from pararnn.lab.train import demo
from pararnn.lab.train.recipes import RECIPES, recipe
from pararnn.lm import LanguageModel, LMConfig, sample, save_byte_tokenizer, save_checkpoint


def test_the_demo_is_the_recipe_with_other_values(monkeypatch):
    configs = []

    def record(config):
        configs.append(config)
        return {"verified": len(configs) < 2}

    monkeypatch.setattr(demo, "run_demo", record)
    assert cli.main(["demo", "--model.cell", "lrc", "--steps", "7"]) == 0
    assert cli.main(["demo"]) == 1  # a check that failed
    own, default = configs
    assert default == demo.demo_config()
    assert own == replace(default, steps=7, model=replace(default.model, cell="lrc"))


def test_without_a_command_it_prints_the_help(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: pararnn")
    assert "Train a language model by a recipe" in out


def test_the_version_by_the_module():
    by_the_module = "import runpy; runpy.run_module('pararnn', run_name='__main__')"
    assert run_fresh(by_the_module, "--version").stdout == f"pararnn {pararnn.__version__}\n"


def test_a_reader_that_ends_is_no_error():
    """As in `pararnn tasks list | head -1`."""
    code = "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
    code += "sys.argv = ['pararnn', 'train', '--list']\n"
    code += "import runpy; runpy.run_module('pararnn', run_name='__main__')"
    done = run_fresh(code)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("trian", "there is no command 'trian': did you mean train?"),
        ("demo --steps 0", "steps must be positive, got 0"),
        ("demo --steps 1.5", "Error parsing --steps"),
        ("train steps=3", "there is no recipe 'steps=3'"),
        ("train gru-400", "there is no recipe 'gru-400': did you mean gru-400m"),
        ("train mamba2-1b", "transformers.Trainer trains it"),
        ("train tiny --stepz 3", "Perhaps you meant: --steps"),
        ("train tiny --steps", "Missing"),
        ("train tiny --model.hidden-size 0", "hidden_size must be a positive integer, got 0"),
        ("train tiny --sweep seed=0,x", "Error parsing --seed"),
        ("train tiny --sweep seed=0,,1", "must be a new key=value,value"),
        ("train tiny --sweep seed=1 seed=2", "must be a new key=value,value"),
        ("train tiny --sweep seed=1,01", "have the same values, seed-1"),
        ("train tiny --sweep --steps 3", "--sweep needs one or more of key=value,value"),
        ("train tiny --optimiser.learning-rate inf", "learning_rate must be positive and finite"),
        ("train tiny --optimiser.z-loss inf", "z_loss must be 0 or positive, and finite"),
        ("train tiny --sweep out=a,b", "out is the folder of all runs"),
        ("train tiny --model.cell-config 3", "must be a JSON object"),
        ("generate --prompt a", "--model"),
        ("generate --model m", "give one of --prompt and --prompts"),
        ("generate --model m --prompt a --prompts b", "give one of --prompt and --prompts"),
        ("generate --model m --prompts nowhere", "nowhere cannot be read: No such file"),
        ("generate --model m --prompts .", "must be a file of texts, one a line: . cannot be read"),
        ("generate --model m --prompt a --stop=", "and one is empty: leave it out"),
        ("generate --model m --prompts /dev/null", "must have lines of text: /dev/null has none"),
        ("generate --model m --prompt a --samples 0", "must be at least 1, got '0'"),
        ("generate --model m --prompt=", "--prompt must have some text"),
        ("generate --model m --prompt \udcff", "must be UTF-8"),
        ("generate --model m --prompt a --temperature -1", "must be 0 or positive"),
        ("generate --model m --prompt a --temperature nan", "must be 0 or positive"),
        ("generate --model m --prompt a --top-p 0", "must be above 0 and at most 1, got '0'"),
        ("generate --model m --prompt a --dtype float8", "float8"),
        ("generate --model m --prompt a --device tpu", "'tpu' is not a device"),
        ("serve m --port 65536", "must be from 0 to 65535"),
        ("tasks run nope --mixer gru", "there is no task 'nope'"),
        ("tasks run parity", "--mixer"),
    ],
)
def test_bad_values_say_what_is_wrong_and_exit_with_2(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(options.split(" "))
    assert error.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in plain(output.err)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"", "is empty"), (b"x" * 99, "too few")]
)
def test_bad_texts_give_one_line_and_exit_code_2(content, message, tmp_path, capsys):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as error:
        cli.main(["demo", "--data.train", str(path), "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("package", ["tyro", "transformers"])
def test_a_missing_extra_gives_one_line(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as error:
        cli.main(["generate", "--model", "m", "--prompt", "a"])
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert "pip install -e '.[demo]'" in err or "pip install -e '.[hf]'" in err
    assert err.count("\n") == 1


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The configs that reach training, which is not run."""
    configs_of_runs = []

    def record(config):
        configs_of_runs.append(config)
        return tmp_path / "run"

    module = types.ModuleType("pararnn.lab.train.run")
    module.run_training = record
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return configs_of_runs


def test_train_runs_a_recipe_with_other_values(runs, tmp_path, capsys):
    options = ["--data.train", "my text.txt", "--steps", "7", "--model.cell", "lstm"]
    options += ["--model.num-hidden-layers", "3", "--model.cell-config", '{"dt": 0.5}']
    assert cli.main(["train", "tiny", *options, "--optimiser.clip", "none"]) == 0
    tiny = recipe("tiny")
    sizes = {"num_hidden_layers": 3, "mixers": ("rnn",) * 3, "cell_config": {"dt": 0.5}}
    assert runs == [
        replace(
            tiny,
            data=replace(tiny.data, train="my text.txt"),
            steps=7,
            model=replace(tiny.model, cell="lstm", **sizes),
            optimiser=replace(tiny.optimiser, clip="none"),
        )
    ]
    assert capsys.readouterr().out == f"{tmp_path / 'run'}\n"


def test_sizes_follow_the_width_unless_they_are_given(runs):
    cli.main(["train", "tiny", "--model.hidden-size", "512", "--model.mixers", "attention"])
    cli.main(["train", "tiny", "--model.hidden-size", "512", "--model.intermediate-size", "8"])
    assert [run.model.intermediate_size for run in runs] == [1536, 8]
    assert runs[0].model.mixers == ("attention", "attention")


def test_a_sweep_runs_all_combinations_in_folders_of_their_own(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = ["optimiser.learning-rate=1e-3,.002", "seed=1,0"]
    assert cli.main(["train", "tiny", "--sweep", *sweep, "--steps", "3"]) == 0
    names = [f"learning_rate-{rate}-seed-{seed}" for rate in (0.001, 0.002) for seed in (1, 0)]
    assert [run.out for run in runs] == [f"runs/tiny/{name}" for name in names]
    assert {run.steps for run in runs} == {3}
    assert runs[2].optimiser.learning_rate == 0.002
    assert runs[2].seed == 1


def test_a_sweep_takes_lists_and_records(runs):
    """A list was one name with commas, and records raised a KeyError."""
    sweep = ["model.mixers=rnn,rnn|rnn,attention", 'model.cell-config={"a": 1}|{"a": 2}']
    assert cli.main(["train", "tiny", "--sweep", *sweep]) == 0
    mixers = [("rnn", "rnn"), ("rnn", "attention")]
    assert [run.model.mixers for run in runs] == [names for names in mixers for _ in "12"]
    assert [run.model.cell_config for run in runs] == [{"a": 1}, {"a": 2}] * 2
    assert len({run.out for run in runs}) == 4


@pytest.mark.parametrize("options", ["--print --steps 7", "--steps 7 --print"])
def test_train_print_trains_nothing(options, runs, capsys):
    assert cli.main(["train", "tiny", *options.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(asdict(replace(recipe("tiny"), steps=7))))
    assert runs == []


def test_train_list_names_every_recipe_in_a_line(runs, capsys):
    assert cli.main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert all(len(line.split()) > 5 for line in lines)
    assert runs == []


def test_errors_of_training_give_one_line(monkeypatch, runs, capsys):
    def fail(config):
        raise TextError("the text is empty")

    monkeypatch.setattr(sys.modules["pararnn.lab.train.run"], "run_training", fail)
    with pytest.raises(SystemExit) as error:
        cli.main(["train", "tiny"])
    assert error.value.code == 2
    assert capsys.readouterr().err == "pararnn: error: the text is empty\n"


def test_a_bug_in_training_is_not_taken_for_a_bad_value(monkeypatch, runs):
    def fail(config):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(sys.modules["pararnn.lab.train.run"], "run_training", fail)
    with pytest.raises(ValueError, match="shapes do not fit"):
        cli.main(["train", "tiny"])


@pytest.fixture
def model(tmp_path):
    """A model of ASCII letters in a folder, with its tokenizer."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LanguageModel(LMConfig(vocab_size=256, **sizes)).eval()
    with torch.no_grad():
        model.lm_head.weight[:65] = model.lm_head.weight[91:] = 0
    save_checkpoint(model, tmp_path)
    save_byte_tokenizer(tmp_path)
    return model


def output_of(options: str, folder, capsys) -> str:
    assert cli.main(["generate", "--model", str(folder), "--device", "cpu", *options.split()]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_generate_writes_the_prompt_and_what_follows(model, tmp_path, capsys, monkeypatch):
    prompt = "hé你"
    tokens = torch.tensor([list(prompt.encode())])
    reference = prompt + bytes(sample(model, tokens, 30, 0)[0].tolist()).decode() + "\n"
    greedy = "--max-new-tokens 30 --temperature 0"
    assert output_of(f"--prompt {prompt} {greedy}", tmp_path, capsys) == reference
    stdin = io.TextIOWrapper(io.BytesIO(prompt.encode()), "ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert output_of(f"--prompt - {greedy}", tmp_path, capsys) == reference
    options = f"--prompt {prompt} --max-new-tokens 30"
    assert output_of(f"{options} --top-k 1 --seed 3", tmp_path, capsys) == reference
    assert output_of(f"{options} --top-p 1e-6", tmp_path, capsys) == reference
    assert output_of(f"{options} --temperature 1e-44 --top-p 0.9", tmp_path, capsys) == reference
    assert output_of(f"{options} --temperature 1e300 --top-k 1", tmp_path, capsys) == reference
    first = output_of(f"{options} --temperature 2", tmp_path, capsys)
    assert first == output_of(f"{options} --temperature 2", tmp_path, capsys)
    assert first != output_of(f"{options} --temperature 2 --seed 1", tmp_path, capsys)
    assert output_of(f"{options} --dtype bfloat16", tmp_path, capsys).startswith(prompt)


def test_generate_stops_where_the_tokenizer_alone_names_the_end(model, tmp_path, capsys):
    """As in folders of earlier versions and of other tools."""
    greedy = "--prompt a --max-new-tokens 30 --temperature 0"
    whole = output_of(greedy, tmp_path, capsys)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"eos_token": whole[3]}  # a letter that it says
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert output_of(greedy, tmp_path, capsys) == whole[: whole.index(whole[3], 1)] + "\n"


def test_generate_ends_before_a_stop_text(model, tmp_path, capsys):
    greedy = "--prompt a --max-new-tokens 30 --temperature 0"
    whole = output_of(greedy, tmp_path, capsys)
    stop = whole[8:11]
    cut = whole[: whole.index(stop, 1)] + "\n"
    assert output_of(f"{greedy} --stop ### {stop}", tmp_path, capsys) == cut
    assert output_of(f"{greedy} --stop ###", tmp_path, capsys) == whole


def test_generate_writes_samples_of_the_prompts_in_a_file(model, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")  # as on Windows
    options = "--max-new-tokens 9 --temperature 1"
    texts = output_of(f"--prompts {file} --samples 2 --seed 5 {options}", tmp_path, capsys)
    alone = [
        f"==> prompt {number}, sample {seed - 4} <==\n"
        + output_of(f"--prompt {prompt} --seed {seed} {options}", tmp_path, capsys)
        for number, prompt in enumerate(("one", "two"), 1)
        for seed in (5, 6)
    ]
    assert texts == "".join(alone)
    assert len(set(alone)) == 4


def test_prompts_end_with_their_lines_alone(tmp_path):
    (tmp_path / "file").write_text("a\u2028b\x0cc\n\nd", encoding="utf-8")
    assert _texts(None, str(tmp_path / "file")) == ["a\u2028b\x0cc", "d"]


def test_generate_reads_a_prompt_in_chunks(model, tmp_path, capsys, monkeypatch):
    greedy = "--prompt abcdefghijk --max-new-tokens 9 --temperature 0"
    whole = output_of(greedy, tmp_path, capsys)
    cls = pararnn.lm.ParaRNNForCausalLM
    lengths, forward = [], cls.forward

    def record(self, input_ids, *args, **kwargs):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", record)
    assert output_of(f"{greedy} --prefill-chunk 4", tmp_path, capsys) == whole
    assert lengths == [4, 4, 3, *[1] * 8]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "there is no model in"),
        ("config.json", "{", "is no JSON"),
        ("config.json", '{"model_type": "unheard-of"}', "cannot be loaded"),
        ("config.json", '{"model_type": "pararnn", "num_hidden_layers": 0}', "cannot be loaded"),
        ("config.json", '{"model_type": "pararnn", "cell": "a.b:C"}', "cannot be imported"),
        ("config.json", '{"model_type": "pararnn", "hidden_size": "8"}', "cannot be loaded"),
        ("model.safetensors", None, "cannot be loaded"),
        ("model.safetensors", "no weights", "cannot be loaded"),
        ("config.json", '{"model_type": "pararnn", "hidden_size": 8}', "cannot be loaded"),
        ("tokenizer.json", None, "cannot be loaded"),
    ],
)
def test_folders_without_a_model_give_one_line(name, content, message, model, tmp_path, capsys):
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    if name == "tokenizer.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(SystemExit) as error:
        cli.main(["generate", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu"])
    assert error.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1


def test_weights_that_are_missing_are_not_drawn(model, tmp_path, capsys):
    torch_files = pytest.importorskip("safetensors.torch")
    weights = torch_files.load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    torch_files.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as error:
        cli.main(["generate", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu"])
    assert error.value.code == 2
    assert "misses the weight lm_head.weight" in capsys.readouterr().err


def test_weights_that_the_model_has_not_are_not_left_out(model, tmp_path, capsys):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"conv_kernel_size": 1}))
    with pytest.raises(SystemExit) as exit_error:
        cli.main(["generate", "--model", str(tmp_path), "--prompt", "a", "--device", "cpu"])
    assert exit_error.value.code == 2
    error = capsys.readouterr().err
    assert re.search(r"holds a weight that the model has not: \S+\.conv\.bias, \d in all", error)


def test_the_command_runs_as_a_program():
    as_a_program = "import runpy; runpy.run_module('pararnn.lab.cli', run_name='__main__')"
    refusal = run_fresh(as_a_program, "demo", "--steps", "0")
    assert refusal.returncode == 2
    help_text = run_fresh(as_a_program, "demo", "--help")
    assert help_text.returncode == 0
    assert "--model.cell" in help_text.stdout
