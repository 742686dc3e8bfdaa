import json
import math
import sys

import numpy as np
import pytest
import torch
from lm_kinds import hugging
from overrides import plain

from pararnn.base.errors import EvaluationError, TrainingError
from pararnn.lab import cli
from pararnn.lab.train.corpus.tokenizer import train_tokenizer
from pararnn.lm import save_byte_tokenizer

transformers = pytest.importorskip("transformers")
lm_eval_tasks = pytest.importorskip("lm_eval.tasks")

import datasets  # noqa: E402
import huggingface_hub  # noqa: E402

from pararnn.lab.evaluation import harness, texts  # noqa: E402
from pararnn.lab.evaluation.run import run_evaluation  # noqa: E402

END = "<|endoftext|>"
DOCUMENTS = ["A long text, of some words. " * 2, "x", "", f"Ünder {END} ☃", "Another one, shorter."]
ARC = [
    {
        "query": f"Question: What is {n}?",
        "choices": [f"it is {n}", "no", f"so, {n}!"],
        "gold": n % 3,
    }
    for n in range(7)
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Use no network, and few of lm-eval's tasks: an index of all takes seconds."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    few = lm_eval_tasks.TaskManager(include_defaults=False)
    monkeypatch.setattr(harness.evaluator, "TaskManager", lambda *_, **__: few)


def bytes_model(folder, kind="gru", end=END):
    """Save a model on bytes and its tokenizer in a folder."""
    hugging(kind, vocab_size=257).save_pretrained(folder)
    save_byte_tokenizer(folder, end=end)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bytes_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model_pair(folder):
    return load(folder)


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def log_chances(model, ids):
    """Of each token after the first, from all before it, in one pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def by_hand(model, documents=DOCUMENTS):
    return -sum(log_chances(model, [256, *text.encode()]).sum() for text in documents if text)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("kind", "length"), [("gru", 7), ("gru", 1), ("no convolution", 5), ("lstm", 2048)]
)
def test_states_are_carried_over_whole_documents(kind, length, batch, tmp_path):
    model, tokenizer = load(bytes_model(tmp_path, kind))
    result = texts.score_texts(model, tokenizer, DOCUMENTS, batch=batch, length=length)
    size = len("".join(DOCUMENTS).encode())
    assert (result.documents, result.tokens, result.bytes) == (5, size, size)
    nats = float(by_hand(model))
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.nats_per_token == pytest.approx(nats / size, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nats / size), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-6)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_attention_reads_windows_that_overlap(kind, tmp_path):
    model, tokenizer = load(bytes_model(tmp_path, kind))
    whole = texts.score_texts(model, tokenizer, DOCUMENTS, batch=3, length=512)
    assert whole.nats == pytest.approx(float(by_hand(model)), rel=1e-6)
    text, length, nats = DOCUMENTS[0], 8, 0.0
    ids = [256, *text.encode()]
    for token in range(1, len(ids)):
        # The first window has 8 tokens before the last of its targets, each next one 4 new ones.
        begin = max(0, (token - 1 - 4) // 4 * 4)
        nats -= float(log_chances(model, ids[begin : token + 1])[-1])
    for batch in (1, 2):
        result = texts.score_texts(model, tokenizer, [text, "x"], batch=batch, length=length)
        single = texts.score_texts(model, tokenizer, ["x"])
        assert result.nats == pytest.approx(nats + single.nats, rel=1e-6)


def test_without_an_end_the_first_token_has_uniform_probability(tmp_path):
    model, tokenizer = load(bytes_model(tmp_path, end=None))
    result = texts.score_texts(model, tokenizer, ["abcd", "é"], length=3)
    nats = -log_chances(model, [*b"abcd"]).sum() - log_chances(model, [*"é".encode()]).sum()
    assert result.tokens == 6
    assert result.nats == pytest.approx(float(nats) + 2 * math.log(257), rel=1e-6)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path):
    texts_ = ["snowman ☃ and snowman ☃", "snow"]
    end = train_tokenizer(texts_ * 3, 270, tmp_path).end
    hugging("gru", vocab_size=270).save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path)
    result = texts.score_texts(model, tokenizer, texts_, batch=2, length=3)
    ids = [tokenizer(text)["input_ids"] for text in texts_]
    nats = -sum(float(log_chances(model, [end, *row]).sum()) for row in ids)
    assert result.tokens == sum(map(len, ids)) < result.bytes == len("".join(texts_).encode())
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / result.bytes, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nats / result.tokens), rel=1e-5)


def test_logits_are_made_in_chunks(model_pair, monkeypatch):
    rows = []
    monkeypatch.setitem(texts.CHUNK_LOGITS, "cpu", 257 * 3)
    hook = model_pair[0].lm_head.register_forward_hook(lambda *args: rows.append(len(args[1][0])))
    result = texts.score_texts(*model_pair, DOCUMENTS, batch=4)
    hook.remove()
    assert max(rows) == 3
    assert result.nats == pytest.approx(float(by_hand(model_pair[0])), rel=1e-6)


def test_a_text_without_text_raises(model_pair):
    with pytest.raises(EvaluationError, match="no text in 2 documents"):
        texts.score_texts(*model_pair, ["", ""])


def test_windows_overlap_as_requested():
    assert list(texts.windows(10, 4, 0)) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    assert list(texts.windows(9, 4, 2)) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]
    assert list(texts.windows(4, 4, 2)) == [(0, 0, 4)]


def test_another_model_of_transformers_is_read_in_windows(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, end=END)
    model, tokenizer = load(tmp_path)
    tokenizer.bos_token = None
    assert texts.length_of(model) == 64
    result = texts.score_texts(model, tokenizer, DOCUMENTS, batch=2)
    assert result.nats == pytest.approx(float(by_hand(model)), rel=1e-6)
    assert run_evaluation(str(tmp_path), tasks=[task_file(tmp_path)])


YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def task_file(folder, name="mine", rows=ARC):
    path, file = folder / f"{name}.yaml", lines(folder / f"{name}.jsonl", rows)
    text = YAML.format(name=name, file=file, cache=folder / "cache")
    path.write_text(text, encoding="utf-8")
    return str(path)


def accuracy(model, rows):
    """The share of rows whose likeliest choice is right."""

    def chance(context, continuation):
        chances = log_chances(model, [*(context + continuation).encode()])
        return float(chances[-len(continuation.encode()) :].sum())

    best = [np.argmax([chance(row["query"], " " + c) for c in row["choices"]]) for row in rows]
    return np.mean([index == row["gold"] for index, row in zip(best, rows, strict=True)])


def results_of(out):
    """Return results.json as JSON's standard has it, without NaN and Infinity."""
    return json.loads((out / "results.json").read_text("utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize(("batch", "end"), [(1, END), (8, None)])
def test_a_task_file_is_asked(folder, model_pair, batch, end, tmp_path):
    folder = folder if end else bytes_model(tmp_path / "model", end=end)
    run_evaluation(str(folder), tasks=[task_file(tmp_path)], out=str(tmp_path), batch=batch)
    (answers,) = results_of(tmp_path)["tasks"]
    reference = pytest.approx(accuracy(model_pair[0], ARC))
    assert answers["results"]["mine"]["acc,none"] == reference
    assert answers["n-samples"]["mine"]["effective"] == len(ARC)


def test_the_report_has_texts_and_lm_evals_table(folder, tmp_path, capsys, monkeypatch):
    evaluate = harness.evaluator.simple_evaluate
    noisy = lambda *args, **kwargs: (print("noise"), evaluate(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(harness.evaluator, "simple_evaluate", noisy)
    (tmp_path / "text").mkdir()
    lines(tmp_path / "text" / "a.jsonl", [{"words": text} for text in DOCUMENTS])
    out = tmp_path / "out"
    command = f"eval {folder} --tasks {task_file(tmp_path)} {task_file(tmp_path, 'other')}"
    command += f" --texts {tmp_path / 'text'} --column words"
    options = f"--limit 2 --shots 0 --batch 3 --device cpu --dtype float32 --seed 5 --out {out}"
    assert cli.main([*command.split(), *options.split()]) == 0
    output = capsys.readouterr().out
    assert output == (out / "results.md").read_text(encoding="utf-8")
    results = results_of(out)
    assert sorted(path.name for path in out.iterdir()) == ["results.json", "results.md"]
    model, tokenizer = load(folder)
    score = texts.score_texts(model, tokenizer, DOCUMENTS[:2])
    (text,) = results["texts"]
    assert text["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-6)
    (answers,) = results["tasks"]
    assert {name: n["effective"] for name, n in answers["n-samples"].items()} == {
        "mine": 2,
        "other": 2,
    }
    assert {"device": "cpu", "dtype": "float32", "seed": 5, "limit": 2}.items() <= results.items()
    assert set(results["versions"]) == {"pararnn", "torch", "transformers", "lm-eval"}
    assert f"| {score.bits_per_byte:.4f} |" in output
    assert "Only the first 2 documents" in output
    assert output.count("|acc") == 2


def test_the_preset_has_the_papers_shots(folder, tmp_path, monkeypatch):
    asked = []

    def record(lm, tasks, shots, limit, seed):
        asked.append((shots, tasks))
        return {}, ""

    monkeypatch.setattr(harness, "ask", record)
    run_evaluation(str(folder), preset="paper", tasks=["arc_easy"], shots=7, out=str(tmp_path))
    assert dict(asked)[7] == ["arc_easy"]
    assert dict(asked)[0] == ["hellaswag", "openbookqa", "winogrande", "piqa", "mmlu"]
    assert sum(len(tasks) for _, tasks in asked) == 11


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    return str(path)


def test_the_report_is_in_the_models_folder(text, tmp_path):
    bytes_model(tmp_path)
    path = run_evaluation(str(tmp_path), texts=[text])
    assert path == tmp_path / "eval" / "results.md"
    assert "|acc" not in path.read_text(encoding="utf-8")
    assert run_evaluation(str(tmp_path), texts=[text]) == path


def test_a_report_does_not_replace_other_files(folder, text, tmp_path):
    (tmp_path / "results.md").write_text("mine")
    with pytest.raises(TrainingError, match=r"results\.md is there, and not by an earlier call"):
        run_evaluation(str(folder), texts=[text], out=str(tmp_path))
    assert (tmp_path / "results.md").read_text() == "mine"
    with pytest.raises(TrainingError, match=r"cannot write to .*; name another folder \(--out\)"):
        run_evaluation(str(folder), texts=[text], out=str(tmp_path / "results.md" / "report"))


def error_of(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    return plain(streams.err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{model}", "there is nothing to evaluate: give tasks (--tasks, --preset paper) or texts"),
        ("{model} --tasks arc_chalenge", "lm-eval cannot ask arc_chalenge"),
        ("{model} --tasks {empty}/a.yaml", "lm-eval cannot ask"),
        ("{model} --texts {empty}", "has no files"),
        ("{model} --preset papers", "papers"),
        ("{model} --texts {text} --limit 0", "must be at least 1, got '0'"),
        ("{empty} --texts {text}", "there is no model in"),
        ("{empty}/none/at/all --texts {text}", "has no config.json"),
        ("no-such/model --texts {text}", "there is no folder 'no-such/model', and no model of"),
    ],
)
def test_errors_say_what_is_wrong(options, message, folder, text, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    command = "eval " + options.format(model=folder, empty=tmp_path / "empty", text=text)
    assert message in error_of(command, capsys)


def test_the_report_counts_files_that_are_left_out(folder, tmp_path, capsys):
    (tmp_path / "a.md").write_text("some text")
    (tmp_path / "b.md").write_bytes(b"\xff")
    command = f"eval {folder} --texts {tmp_path} --suffixes .md --out {tmp_path / 'eval'}"
    assert cli.main(command.split()) == 0
    streams = capsys.readouterr().out
    assert "left out 1 documents without text in UTF-8, the first: " in streams
    (result,) = results_of(tmp_path / "eval")["texts"]
    assert (result["documents"], len(result["left_out"])) == (1, 1)


def test_infinite_numbers_are_null(folder, tmp_path, monkeypatch):
    """JSON has no Infinity: other programs do not read it."""
    model, tokenizer = load(folder)
    head, never = model.lm_head.forward, torch.zeros(257)
    never[ord("x")] = -torch.inf
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: head(hidden) + never)
    monkeypatch.setattr("pararnn.lab.evaluation.run.load_model", lambda *_: (model, tokenizer))
    (tmp_path / "a.txt").write_text("no x")
    report = run_evaluation("m", texts=[str(tmp_path / "a.txt")], out=str(tmp_path))
    (result,) = results_of(tmp_path)["texts"]
    assert result["perplexity"] is result["nats"] is None
    assert "| inf | inf | inf |" in report.read_text()


def test_a_model_with_nan_logits_raises(folder, text, tmp_path, monkeypatch):
    """The argmax of NaN has an accuracy too."""
    model, tokenizer = load(folder)
    model.lm_head.register_forward_hook(lambda *parts: parts[-1] * torch.nan)
    monkeypatch.setattr("pararnn.lab.evaluation.run.load_model", lambda *_: (model, tokenizer))
    for source_options in ({"texts": [text]}, {"tasks": [task_file(tmp_path)]}):
        with pytest.raises(EvaluationError, match="the model's logits are NaN"):
            run_evaluation("m", out=str(tmp_path), **source_options)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("command", ["eval {} --texts {}", "generate --model {} --prompt {}"])
def test_weights_that_are_nan_are_not_loaded(command, text, tmp_path, capsys):
    model = hugging("gru", vocab_size=257)
    model.model.backbone.blocks[0].mlp.up_proj.weight.data[1, 2] = torch.inf
    model.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, end=END)
    error = error_of(command.format(tmp_path, text), capsys)
    assert "up_proj.weight is NaN or infinite, as its training diverged" in error


def test_tasks_need_lm_eval_and_texts_do_not(folder, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "pararnn.lab.evaluation.harness")
    arc = lines(tmp_path / "arc_easy.jsonl", ARC)
    assert "pip install -e '.[eval]'" in error_of(f"eval {folder} --tasks {arc}", capsys)
    assert cli.main(f"eval {folder} --texts {text} --out {tmp_path}".split()) == 0
