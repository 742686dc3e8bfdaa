"""Commands of other packages with our folders, by `pararnn run`."""

import contextlib
import io
import json
import random
import sys
import threading
import time

import pytest
from table import HANGS_AFTER
from test_serving import running, write_model

from pararnn.lab import cli

TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.mark.thorough
def test_lm_eval_runs_by_its_own_command_line(tmp_path, monkeypatch):
    folder, out = write_model(tmp_path, end="<end>"), tmp_path / "out"
    questions = [
        {"question": "one?", "choices": ["yes", "no"], "gold": 0},
        {"question": "two?", "choices": ["ab", "c"], "gold": 1},
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "mine.yaml").write_text(TASK.format(file))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    arguments = ["--model", "hf", "--model_args", f"pretrained={folder},max_length=64"]
    arguments += ["--tasks", "mine", "--include_path", str(folder), "--device", "cpu"]
    assert cli.main(["run", "lm_eval", "run", *arguments, "--output_path", str(out)]) == 0
    (report,) = out.rglob("*.json")
    assert json.loads(report.read_text())["results"]["mine"]["acc,none"] in (0.0, 0.5, 1.0)


@pytest.mark.thorough
def test_lm_eval_asks_our_server(tmp_path, monkeypatch):
    """Its local-completions asks for echoed prompts' log-probabilities: those that hf computes."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")  # what lm-eval needs to ask servers, its extra "api"
    folder = write_model(tmp_path, end="<end>")
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz ?"
    text = lambda size: "".join(generator.choices(letters, k=size))  # noqa: E731
    questions = [
        {"question": text(20 + i), "choices": [text(3), text(9)], "gold": 0} for i in range(6)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "mine.yaml").write_text(TASK.format(file))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tasks = lm_eval.tasks.TaskManager(include_path=str(folder))
    with running(folder, name="tiny", rows=4) as (url, service):
        remote = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": str(folder)}
        options = {"local-completions": remote | {"num_concurrent": 2, "max_length": 64}}
        options["hf"] = {"pretrained": str(folder), "max_length": 64, "device": "cpu"}
        results = [
            lm_eval.simple_evaluate(model, arguments, tasks=["mine"], task_manager=tasks)
            for model, arguments in options.items()
        ]
        assert service.engine.prefixes.counts.states > 0
    ours, theirs = (
        [
            tuple(answer)
            for sample in result["samples"]["mine"]
            for answer in sample["filtered_resps"]
        ]
        for result in results
    )
    assert len(ours) == 12
    for (one, is_greedy), (other, was_greedy) in zip(ours, theirs, strict=True):
        assert float(one) == pytest.approx(float(other), abs=1e-3)
        assert str(is_greedy) == str(was_greedy)


def test_transformers_serve_finds_the_class(tmp_path, monkeypatch):
    """Its command makes a `ModelManager`, which looks for the class in transformers itself."""
    pytest.importorskip("fastapi")
    folder = write_model(tmp_path)

    def command():
        from transformers.cli.serving.model_manager import ModelManager

        name = ModelManager.process_model_name(str(folder))
        model, processor = ModelManager(device="cpu").load_model_and_processor(name)
        assert type(model).__name__ == "ParaRNNForCausalLM"
        assert processor("a")["input_ids"] == [97]
        assert sys.argv == ["transformers", "serve", str(folder), "--port", "1"]
        return 3

    monkeypatch.setattr("importlib.metadata.EntryPoint.load", lambda self: command)
    assert cli.main(["run", "transformers", "serve", str(folder), "--port", "1"]) == 3


@pytest.mark.thorough
def test_transformers_chat_talks_to_transformers_serve(tmp_path, monkeypatch, capsys):
    """The two commands of transformers: the server by `pararnn run`, and the client as it is."""
    for module in ("fastapi", "rich"):
        pytest.importorskip(module)
    uvicorn = pytest.importorskip("uvicorn")
    folder = write_model(tmp_path)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    servers, run = [], uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda own: [servers.append(own), run(own)])
    serve = ["run", "transformers", "serve", "--host", "127.0.0.1", "--port", "0"]

    def command():
        with contextlib.suppress(SystemExit):
            cli.main([*serve, "--device", "cpu"])

    thread = threading.Thread(target=command, daemon=True)
    thread.start()
    try:
        while not (servers and servers[0].started):
            assert thread.is_alive()
            time.sleep(0.05)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        from transformers.cli.chat import Chat

        # A line to the model, "no" to going on after the last token, and the end.
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nn\n!exit\n"))
        Chat(str(folder), f"http://127.0.0.1:{port}/v1", ["max_new_tokens=9"], user="me")
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(HANGS_AFTER)
    assert not thread.is_alive()
    assert "9 tokens in" in capsys.readouterr().out


def test_a_command_that_is_not_there_gives_one_line(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["run", "no-such-command", "--help"])
    assert error.value.code == 2
    assert "there is no command 'no-such-command' in this environment" in capsys.readouterr().err
