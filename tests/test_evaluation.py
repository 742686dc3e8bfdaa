import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_kinds import hugging

from pararnn.base.errors import EvaluationError, TrainingError
from pararnn.lab import cli
from pararnn.lab.evaluation import paper, report
from pararnn.lab.evaluation.jobs import Job, plan
from pararnn.lab.evaluation.questions import read_questions
from pararnn.lab.train.corpus.sources import DataError
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
WINO = [
    {"context_options": [f"Ann {n}", f"Bob {n}"], "continuation": f"won {w}.", "gold": w}
    for n in range(3)
    for w in range(2)
]
LAMBADA = [{"context": f"Once {n} was a", "continuation": "cat"} for n in range(4)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Use no network, and few of lm-eval's tasks: an index of all takes seconds."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    tasks = Path(lm_eval_tasks.__file__).parent / "arc"
    manager = lm_eval_tasks.TaskManager(include_defaults=False, include_path=tasks)
    monkeypatch.setattr(harness, "_manager", lambda: manager)


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
    assert texts.own_length(model) == 64
    result = texts.score_texts(model, tokenizer, DOCUMENTS, batch=2)
    assert result.nats == pytest.approx(float(by_hand(model)), rel=1e-6)
    assert run_evaluation(str(tmp_path), tasks=[str(lines(tmp_path / "arc_easy.jsonl", ARC))])


def answers(model, rows):
    """Log-likelihoods of each row's (context, continuation) pairs, (rows, pairs)."""

    def answer(context, continuation):
        chances = log_chances(model, [*(context + continuation).encode()])
        return float(chances[-len(continuation.encode()) :].sum())

    return np.array([[answer(*pair) for pair in pairs] for pairs in rows])


def accuracy(chances, rows):
    """Return the metric of choosing each row's largest number."""
    right = (chances.argmax(1) == [row["gold"] for row in rows]).astype(float)
    error = right.std(ddof=1) / math.sqrt(len(right))
    return {"value": pytest.approx(right.mean()), "stderr": pytest.approx(error)}


def results_of(out):
    """Return results.json as JSON's standard has it, without NaN and Infinity."""
    return json.loads((out / "results.json").read_text("utf-8"), parse_constant=pytest.fail)


def ask_file(folder, file, out, **options):
    run_evaluation(str(folder), tasks=[str(file)], out=str(out), **options)
    (result,) = results_of(out)["tasks"]
    return result


@pytest.mark.parametrize(("batch", "end"), [(1, END), (8, END), (8, None)])
def test_accuracies_of_choices_are_right(folder, model_pair, batch, end, tmp_path):
    folder = folder if end else bytes_model(tmp_path, end=end)
    result = ask_file(folder, lines(tmp_path / "arc_easy.jsonl", ARC), tmp_path, batch=batch)
    rows = [[(row["query"] + "\nAnswer:", " " + each) for each in row["choices"]] for row in ARC]
    chances = answers(model_pair[0], rows)
    by_length = chances / [[len(each) for each in row["choices"]] for row in ARC]
    assert (chances.argmax(1) != by_length.argmax(1)).any()
    reference = {"acc": accuracy(chances, ARC), "acc_norm": accuracy(by_length, ARC)}
    assert result["metrics"] == reference
    assert (result["task"], result["shots"], result["questions"]) == ("arc_easy", 0, 7)


def test_accuracies_of_options_are_right(folder, model_pair, tmp_path):
    result = ask_file(folder, lines(tmp_path / "winogrande.jsonl", WINO), tmp_path)
    rows = [
        [(option, " " + row["continuation"]) for option in row["context_options"]] for row in WINO
    ]
    assert result["metrics"] == {"acc": accuracy(answers(model_pair[0], rows), WINO)}


def test_perplexity_of_last_words_is_right(folder, model_pair, tmp_path):
    result = ask_file(folder, lines(tmp_path / "lambada_openai.jsonl", LAMBADA), tmp_path)
    rows = [[(row["context"], " " + row["continuation"])] for row in LAMBADA]
    mean = np.mean(answers(model_pair[0], rows))
    assert result["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=1e-5)
    assert result["metrics"]["perplexity"]["stderr"] > 0
    assert result["metrics"]["acc"]["value"] == 0


def prompts(job):
    """Return question, context and continuation of a job's requests."""
    task = harness.load_task(job, seed=0)["tasks"][job.name]
    task.build_all_requests(rank=0, world_size=1)
    return [(each.doc["question"], *each.args) for each in task.instances]


def test_prompts_are_those_of_lm_eval(tmp_path):
    piqa = {"query": "Question: dresser\n", "choices": ["a", "b"], "gold": 1}
    stem = {"query": "Fog is around: ", "choices": ["a marsh", "a desert"], "gold": 0}
    result = prompts(Job("piqa", file=lines(tmp_path / "piqa.jsonl", [piqa, stem])))
    assert [each[1:] for each in result] == [
        ("Question: dresser\nAnswer:", " a"),
        ("Question: dresser\nAnswer:", " b"),
        ("Fog is around:", " a marsh"),
        ("Fog is around:", " a desert"),
    ]


@pytest.mark.parametrize("rows", [ARC, WINO, LAMBADA])
def test_shots_are_other_questions_with_their_answers(rows, tmp_path):
    again = {**rows[0], "choices": ["something", "else"], "gold": 1} if rows is ARC else rows[0]
    path = lines(tmp_path / "task.jsonl", [*rows, again])
    shots = 2
    for question, context, _ in prompts(Job("task", shots, path)):
        *examples, last = context.split("\n\n")
        assert len(examples) == shots
        assert question.startswith(last) or last in question.split("\n")
        assert not any(option in "".join(examples) for option in question.split("\n")[:1])
        for example in examples:
            if rows is LAMBADA:
                assert example.endswith("was a cat")
            elif rows is WINO:
                name, number = example.split()[:2]
                assert name == ["Ann", "Bob"]["won 1." in example], number
            else:
                n = int(example[len("Question: What is ")])
                right = [ARC[n]["choices"][ARC[n]["gold"]], "else"]
                assert example.partition("Answer: ")[2] in right


def test_shots_are_drawn_by_the_seed(tmp_path):
    path = lines(tmp_path / "task.jsonl", ARC)
    draws = []
    for seed in (0, 0, 1):
        task = harness.load_task(Job("task", 3, path), seed)["tasks"]["task"]
        task.build_all_requests(rank=0, world_size=1)
        draws.append([each.args for each in task.instances])
    assert draws[0] == draws[1] != draws[2]


def test_more_shots_than_other_questions_raise(tmp_path):
    path = lines(tmp_path / "task.jsonl", WINO)
    assert len(prompts(Job("task", 4, path))) == 12
    with pytest.raises(EvaluationError, match=r"5 shots .*task.jsonl: a question has 4 others"):
        harness.load_task(Job("task", 5, path), 0)


YAML = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
{more}
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def task_file(folder, more=""):
    path = folder / "mine.yaml"
    file = lines(folder / "rows.jsonl", ARC)
    path.write_text(YAML.format(file=file, cache=folder / "cache", more=more), encoding="utf-8")
    return path


def test_a_task_file_of_lm_eval_is_asked(folder, model_pair, tmp_path):
    result = ask_file(folder, task_file(tmp_path), tmp_path)
    rows = [[(row["query"], " " + each) for each in row["choices"]] for row in ARC]
    assert result["task"] == "mine"
    assert result["metrics"]["acc"] == accuracy(answers(model_pair[0], rows), ARC)


def test_groups_and_tags_are_asked_as_a_whole(folder, tmp_path, monkeypatch):
    path = task_file(tmp_path, "tag: few")
    text = path.read_text(encoding="utf-8")
    (tmp_path / "other.yaml").write_text(text.replace("task: mine", "task: other"))
    group = "group: both\ntask: [mine, other]\naggregate_metric_list: [{metric: acc}]\n"
    (tmp_path / "both.yaml").write_text(group)
    manager = lm_eval_tasks.TaskManager(include_defaults=False, include_path=tmp_path)
    monkeypatch.setattr(harness, "_manager", lambda: manager)
    run_evaluation(str(folder), tasks=["both", "few"], out=str(tmp_path), limit=4, shots=0)
    whole, *parts = results_of(tmp_path)["tasks"]
    results = [(each["task"], each["questions"], each["shots"]) for each in (whole, *parts)]
    assert results == [("both", 8, 0), ("mine", 4, 0), ("other", 4, 0)]
    assert whole["metrics"]["acc"]["value"] == parts[0]["metrics"]["acc"]["value"]
    assert whole["subtasks"] == {each["task"]: each["metrics"] for each in parts}


def test_a_task_that_would_show_its_questions_raises(tmp_path):
    job = Job("mine", 2, task_file(tmp_path))
    with pytest.raises(
        EvaluationError, match="the shots of mine would be drawn from the questions"
    ):
        harness.load_task(job, 0)
    job = Job("mine", 2, task_file(tmp_path, "fewshot_split: test"))
    assert harness.load_task(job, 0)


def test_the_report_counts_prompts_that_were_cut(folder, tmp_path):
    path = lines(tmp_path / "arc_easy.jsonl", ARC)
    lengths = [len(f"{row['query']}\nAnswer: {each}") for row in ARC for each in row["choices"]]
    length = min(lengths) - 1
    bytes_model(tmp_path / "attention", "attention")
    result = ask_file(tmp_path / "attention", path, tmp_path, length=length)
    assert result["truncated"] == sum(each > length + 1 for each in lengths) > 0
    output = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert f"cut on the left: arc_easy ({result['truncated']})." in output
    assert ask_file(folder, path, tmp_path, length=length)["truncated"] == 0


def test_the_preset_has_the_papers_tasks(tmp_path):
    assert plan([], preset="paper") == [Job(*task) for task in paper.TASKS]
    assert {name: [n for each, n in paper.TASKS if each == name] for name, _ in paper.TASKS} == {
        "arc_challenge": [25, 3],
        "hellaswag": [10, 0],
        "openbookqa": [10, 0],
        "winogrande": [5, 0],
        "piqa": [0],
        "mmlu": [0],
    }
    assert {len(row.accuracies) for row in paper.PUBLISHED} == {len(paper.TASKS)}
    assert [row.tables for row in paper.PUBLISHED] == ["Table 5"] * 12 + ["Tables 2, 5"] * 4
    for name in ("openbook_qa", "piqa", "arc_easy"):
        lines(tmp_path / f"{name}.jsonl", ARC)
    jobs = plan([str(tmp_path), "boolq"], shots=1, preset="paper")
    by_name = {job.name: job.file and job.file.name for job in jobs}
    assert by_name["openbookqa"] == "openbook_qa.jsonl"
    assert by_name["piqa"] == "piqa.jsonl"
    assert by_name["mmlu"] is None
    assert jobs[-2:] == [Job("arc_easy", 1, tmp_path / "arc_easy.jsonl"), Job("boolq", 1)]


def test_the_report_has_the_paper_next_to_the_results(folder, tmp_path, capsys, monkeypatch):
    evaluate = harness.evaluator.evaluate
    noisy = lambda *args, **kwargs: (print("noise"), evaluate(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(harness.evaluator, "evaluate", noisy)
    (tmp_path / "text").mkdir()
    lines(tmp_path / "text" / "a.jsonl", [{"words": text} for text in DOCUMENTS])
    lines(tmp_path / "piqa.jsonl", ARC)
    lines(tmp_path / "winogrande.jsonl", WINO)
    out = tmp_path / "out"
    command = f"eval {folder} --tasks {tmp_path} --text {tmp_path / 'text'} --column words"
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
    assert text["documents"] == 2
    questions = [(each["task"], each["questions"]) for each in results["tasks"]]
    assert questions == [("piqa", 2), ("winogrande", 2)]
    assert results["config"]["model_type"] == "pararnn"
    assert {"device": "cpu", "dtype": "float32", "seed": 5, "limit": 2}.items() <= results.items()
    assert set(results["versions"]) == {"pararnn", "torch", "transformers", "lm-eval"}
    assert results["parameters"] == sum(each.numel() for each in model.parameters())
    assert f"| {score.bits_per_byte:.4f} |" in output
    assert "Only the first 2 documents" in output
    assert "| model | parameters | perplexity | where | winogrande (0) | piqa (0) |" in output
    assert "| ParaGRU 7B | 6.76B | 9.19 | Tables 2, 5 | 59.83 | 76.66 |" in output
    assert "| Transformer 400M | 412M | 17.00 | Table 5 | 51.69 | 64.64 |" in output
    acc = results["tasks"][0]["metrics"]["acc"]
    assert f"{100 * acc['value']:.2f} ± {100 * acc['stderr']:.2f}" in output


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    return str(path)


def test_the_report_is_in_the_models_folder(text, tmp_path):
    bytes_model(tmp_path)
    path = run_evaluation(str(tmp_path), texts=[text])
    assert path == tmp_path / "eval" / "results.md"
    assert "## Tasks" not in path.read_text(encoding="utf-8")
    assert run_evaluation(str(tmp_path), texts=[text]) == path


def test_a_report_does_not_replace_other_files(folder, text, tmp_path):
    (tmp_path / "results.md").write_text("mine")
    with pytest.raises(TrainingError, match=r"results\.md is there, and not by an earlier call"):
        run_evaluation(str(folder), texts=[text], out=str(tmp_path))
    assert (tmp_path / "results.md").read_text() == "mine"


def test_other_shots_are_not_compared_with_the_paper():
    result = {"task": "piqa", "shots": 1, "file": None, "questions": 2, "truncated": 0}
    result["metrics"] = {"acc": {"value": 0.5, "stderr": None}}
    results = {"model": "m", "parameters": 1, "dtype": "d", "device": "c", "versions": {}}
    results |= {"limit": None, "texts": [], "tasks": [result]}
    output = report.markdown(results)
    assert "| piqa | 1 | 2 | 50.00 |" in output
    assert "paper" not in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no task file"),
        (b"", "is empty; each line must be a JSON object with query, choices, gold; or"),
        (b"\n{\n", "line 2: found no JSON object"),
        (b"\xff\n", "line 1: found no JSON object"),
        (b"[1]", "line 1: found no JSON object; each line must"),
        (b'{"text": "a"}', "line 1: found the fields text; each line must"),
        (b'{"query": 1, "choices": ["a", "b"], "gold": 0}', "line 1: 'query' must be text, got 1"),
        (b'{"query": "a", "choices": ["a"], "gold": 0}', "'choices' must be a list of two texts"),
        (b'{"query": "a", "choices": ["a", ""], "gold": 0}', "'choices' must be text, got ''"),
        (b'{"query": "a", "choices": ["a", "b"], "gold": 2}', "'gold' must be from 0 to 1, got 2"),
        (b'{"query": "a", "choices": ["a", "b"], "gold": true}', "must be from 0 to 1, got True"),
        (b'{"context": "a", "continuation": "b"}\n{"context": "a"}', "line 2: 'continuation' must"),
        (b'{"context": "\\ud800", "continuation": "b"}', "line 1: 'utf-8' codec can't encode"),
    ],
)
def test_a_bad_task_file_gives_its_line(content, message, folder, tmp_path, capsys):
    path = tmp_path / "arc_easy.jsonl"
    if content is not None:
        path.write_bytes(content)
    error = error_of(f"eval {folder} --tasks {path}", capsys)
    assert message in error
    assert str(path) in error


def error_of(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    error = streams.err.strip().splitlines()[-1]
    assert error.startswith("pararnn")
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{model}", "there is nothing to evaluate: give tasks (--tasks, --preset paper) or texts"),
        ("", "required: MODEL"),
        ("{model} --tasks arc_chalenge", "has no task 'arc_chalenge'; did you mean arc_challenge?"),
        ("{model} --tasks arc_easy", "the task arc_easy cannot be loaded"),
        ("{model} --tasks {empty}", "has no task files; they end in .jsonl"),
        ("{model} --tasks {text}", "a.txt is no task file; they end in .jsonl, .yaml, .yml"),
        ("{model} --text {empty}", "has no files"),
        ("{model} --text {text} --text-column a", "unrecognized arguments: --text-column"),
        ("{model} --preset papers", "invalid choice: 'papers'"),
        ("{model} --text {text} --limit 0", "--limit: must be at least 1, got '0'"),
        ("{model} --text {text} --shots -1", "--shots: must be at least 0, got '-1'"),
        ("{model} --text {text} --dtype int8", "invalid choice: 'int8'"),
        ("{empty} --text {text}", "there is no model in"),
        ("{empty}/none/at/all --text {text}", "has no config.json"),
        ("no-such/model --text {text}", "there is no folder 'no-such/model', and no model of that"),
    ],
)
def test_errors_are_one_line(options, message, folder, text, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    command = "eval " + options.format(model=folder, empty=tmp_path / "empty", text=text)
    assert message in error_of(command, capsys)


def test_the_report_counts_files_that_are_left_out(folder, tmp_path, capsys):
    (tmp_path / "a.md").write_text("some text")
    (tmp_path / "b.md").write_bytes(b"\xff")
    command = f"eval {folder} --text {tmp_path} --suffixes .md --out {tmp_path / 'eval'}"
    assert cli.main(command.split()) == 0
    streams = capsys.readouterr().out
    assert "left out 1 documents without text in UTF-8, the first: " in streams
    (result,) = results_of(tmp_path / "eval")["texts"]
    assert (result["documents"], len(result["left_out"])) == (1, 1)


def test_a_byte_order_mark_is_not_part_of_a_question(folder, tmp_path):
    path = tmp_path / "arc_easy.jsonl"
    path.write_text("\ufeff" + json.dumps(ARC[0]) + "\n", encoding="utf-8")
    assert read_questions(path)[1][0]["question"].startswith("Question: What is 0?")


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
    arc = lines(tmp_path / "arc_easy.jsonl", ARC)
    for source_options in ({"texts": [text]}, {"tasks": [str(arc)]}):
        with pytest.raises(EvaluationError, match="the model's logits are NaN"):
            run_evaluation("m", out=str(tmp_path), **source_options)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("command", ["eval {} --text {}", "generate --model {} --prompt {}"])
def test_weights_that_are_nan_are_not_loaded(command, text, tmp_path, capsys):
    model = hugging("gru", vocab_size=257)
    model.model.backbone.blocks[0].mlp.up_proj.weight.data[1, 2] = torch.inf
    model.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, end=END)
    error = error_of(command.format(tmp_path, text), capsys)
    assert "up_proj.weight is NaN or infinite, as its training diverged" in error


def test_two_files_of_one_name_raise(tmp_path):
    (tmp_path / "a").mkdir()
    one = lines(tmp_path / "piqa.jsonl", ARC)
    other = lines(tmp_path / "a" / "piqa.jsonl", ARC)
    with pytest.raises(EvaluationError, match="are both called piqa: rename one"):
        plan([str(one), str(other)])
    assert len(plan([str(one), str(one)])) == 1
    with pytest.raises(DataError, match="no task file"):
        plan([str(tmp_path / "none.jsonl")])


def test_tasks_need_lm_eval_and_texts_do_not(folder, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "pararnn.lab.evaluation.harness")
    arc = lines(tmp_path / "arc_easy.jsonl", ARC)
    assert "pip install 'pararnn[eval]'" in error_of(f"eval {folder} --tasks {arc}", capsys)
    assert cli.main(f"eval {folder} --text {text} --out {tmp_path}".split()) == 0
