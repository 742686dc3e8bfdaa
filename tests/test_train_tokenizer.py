"""Tokenizers: bytes, files, folders, and training on the text to learn."""

import json
from dataclasses import replace

import pytest
import torch
from data_files import TEXTS, json_lines, tokens_of
from data_files import config as config

from pararnn.lab.cli import main
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.corpus import packing
from pararnn.lab.train.corpus import prepare as data_module
from pararnn.lab.train.corpus.prepare import prepare
from pararnn.lab.train.corpus.sources import DataError
from pararnn.lab.train.corpus.tokenizer import (
    ENDS,
    ends_of,
    load_tokenizer,
    size_of,
    train_tokenizer,
)
from pararnn.lab.train.run import write_model
from pararnn.lm import preset
from pararnn.lm.tokens import byte_tokenizer


def test_bytes_are_tokens():
    tokenizer = load_tokenizer("bytes")
    assert list(tokenizer.encode_all(["é"])[0]) == [0xC3, 0xA9]
    assert (tokenizer.end, tokenizer.vocabulary) == (256, 257)


@pytest.fixture
def new_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    folder = tmp_path / "tokenizer"
    return folder, train_tokenizer(TEXTS * 3, 280, folder)


def test_a_tokenizer_is_trained_and_loaded(new_tokenizer, config):
    folder, tokenizer = new_tokenizer
    assert 257 < tokenizer.vocabulary <= 280
    for name in (folder, folder / "tokenizer.json"):
        copy = load_tokenizer(str(name))
        assert (copy.end, copy.vocabulary) == (tokenizer.end, tokenizer.vocabulary)
        assert copy.key == tokenizer.key
        assert [copy.tokenizer.decode(copy.encode_all([text])[0]) for text in TEXTS] == TEXTS
    options = {"valid": config.train, "sequence_length": 2, "tokenizer": str(folder)}
    data = prepare(replace(config, **options))
    ids = [token for text in tokenizer.encode_all(TEXTS) for token in [*text, tokenizer.end]]
    assert tokens_of(data.train) == ids
    assert data.folder != prepare(config).folder


def test_words_are_those_of_gpt2_and_long_ones_are_cut(new_tokenizer):
    """A text of 5 MB without blanks was one word, and training on it did not end."""
    byte_level = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel(add_prefix_space=False)
    _, tokenizer = new_tokenizer
    words = tokenizer.tokenizer.pre_tokenizer.pre_tokenize_str
    text = "  It's\t\r\n\n  2,000 'quoted' leagues — ὕβρις_and  <|x|>  e\u0301🙂!\n " + "=" * 127
    assert words(text) == byte_level.pre_tokenize_str(text)
    for part in ("ACGT", "你好嗎", " ", "🙂", "7", "\n"):
        spans = words(part * 1000)
        assert {end - start for _, (start, end) in spans[:-1]} == {128}
        assert spans[-1][1][1] == len(part) * 1000
    endless = "ACGTTGCAAC" * 500
    assert tokenizer.tokenizer.decode(tokenizer.encode_all([endless])[0]) == endless


def test_a_text_cannot_spell_the_end_of_a_document(new_tokenizer):
    _, tokenizer = new_tokenizer
    text = "a<|endoftext|>b"
    assert tokenizer.end not in tokenizer.encode_all([text])[0]
    assert tokenizer.tokenizer.decode(tokenizer.encode_all([text])[0]) == text


def test_settings_that_cut_and_pad_are_ignored(new_tokenizer):
    folder, tokenizer = new_tokenizer
    ids = tokenizer.encode_all([TEXTS[0]])[0]
    tokenizer.tokenizer.enable_truncation(3)
    tokenizer.tokenizer.enable_padding(length=50)
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    copy = load_tokenizer(str(folder))
    assert copy.encode_all([TEXTS[0]])[0] == copy.encode_all(TEXTS)[0] == ids


def test_unusable_tokenizers_raise(new_tokenizer, tmp_path):
    folder, tokenizer = new_tokenizer
    with pytest.raises(ValueError, match=r"size must be at least 257.*got 256"):
        train_tokenizer(TEXTS, 256, tmp_path)
    with pytest.raises(DataError, match=r"there is no tokenizer .*missing\.json'"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"there is no tokenizer '.*bad\.json': "):
        load_tokenizer(str(tmp_path / "bad.json"))
    text = tokenizer.tokenizer.to_str().replace(ENDS[0], "<|other|>")
    (tmp_path / "endless.json").write_text(text)
    with pytest.raises(DataError, match="has no token for the end of documents"):
        load_tokenizer(str(tmp_path / "endless.json"))
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(DataError, match=r"end of documents: set eos_token in its tokenizer_config"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, "uint16"), (70_000, "uint32")])
def test_a_large_vocabulary_is_stored_in_32_bits(config, monkeypatch, vocabulary, dtype):
    class Wide:
        end, key = vocabulary - 1, f"wide {vocabulary}"

        def encode_all(self, texts):
            return [[self.end - 1 - ord(letter) for letter in text] for text in texts]

    wide = Wide()
    wide.vocabulary = vocabulary
    monkeypatch.setattr(data_module, "load_tokenizer", lambda name: wide)
    data = prepare(config)
    assert data.train.tokens.dtype == dtype
    ids = [*(wide.end - 1 - ord(letter) for letter in "".join(TEXTS[:1])), wide.end]
    assert data.train[0]["input_ids"].tolist() == ids[:8]
    assert tokens_of(data.train)[: len(ids)] == ids


@pytest.mark.parametrize("name", ["bytes", "new_tokenizer"])
def test_transformers_reads_the_tokenizer_that_packs(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    if name == "new_tokenizer":
        train_tokenizer(["the cat sat on the mat"] * 9, 300, tmp_path / "original")
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(tmp_path / "original"))
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "the cät sat\n"
    assert read(text)["input_ids"] == list(tokenizer.encode_all([text])[0])
    assert read.eos_token_id == read.pad_token_id == tokenizer.end
    assert read.decode(list(tokenizer.encode_all([text])[0])) == text
    assert load_tokenizer(str(tmp_path / "saved")).end == tokenizer.end


def ending_model(prompt):
    """Return a model that predicts the end after a text of bytes."""
    hugging = pytest.importorskip("pararnn.lm.hf")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_heads": 1}
    torch.manual_seed(0)
    model = hugging.ParaRNNForCausalLM(hugging.ParaRNNConfig(vocab_size=257, **sizes)).eval()
    with torch.no_grad():
        last = model.model(torch.tensor([list(prompt.encode())])).last_hidden_state[0, -1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[256] = last
    return model


@pytest.mark.parametrize("pad", ["<|endoftext|>", None], ids=["new", "of an earlier version"])
def test_texts_end_where_the_tokenizer_says(pad, tmp_path, capsys):
    """Without the end in the saved config, generation runs to the last token."""
    transformers = pytest.importorskip("transformers")
    prompt = "It was"
    model = ending_model(prompt)
    load_tokenizer("bytes").save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": pad}))
    write_model(model, model.state_dict(), tmp_path)
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for holder in (copy.config, copy.generation_config, tokenizer):
        assert holder.eos_token_id == holder.pad_token_id == 256
    say = transformers.pipeline("text-generation", copy, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False}
    outputs = say([prompt, "as it was or may be"], batch_size=2, **options)
    assert outputs[0][0]["generated_text"] == prompt
    ids = tokenizer(prompt, return_tensors="pt")
    assert copy.generate(**ids, **options)[0].tolist() == [*prompt.encode(), 256]
    command = ["generate", "--model", str(tmp_path), "--prompt", prompt, "--device", "cpu"]
    assert main([*command, "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == prompt + "\n"


def test_a_tokenizers_own_pad_token_stays(tmp_path):
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    original = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer("<eos>")))
    original.add_special_tokens(["<pad>"])
    original.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    settings |= {"pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    copy, folder = load_tokenizer(str(tmp_path)), tmp_path / "saved"
    folder.mkdir()
    copy.save(folder)
    assert ends_of(folder) == (copy.end, copy.pad) == (256, 257)
    assert ends_of(tmp_path / "none") is None


# --- trained on what is learned ---

WORDS = "the cat sat on the mat while a dog ate all of the ham "


@pytest.fixture
def trainings(monkeypatch):
    """Record the texts that tokenizers are trained on."""
    pytest.importorskip("tokenizers")
    samples = []

    def train_and_note(documents, size, folder):
        samples.append(list(documents))
        return train_tokenizer(samples[-1], size, folder)

    monkeypatch.setattr(data_module, "train_tokenizer", train_and_note)
    return samples


@pytest.fixture
def words(config, tmp_path):
    texts = [WORDS * 20, "z" * 300 + "y" * 300 + "w" * 480]
    source = json_lines(tmp_path / "words.jsonl", [{"text": text} for text in texts])
    return replace(config, train=source, tokenizer="bpe:300", holdout=0.2, sequence_length=4)


def test_a_tokenizer_is_trained_once_on_what_is_learned(words, trainings, tmp_path):
    data = prepare(words)
    total = len(WORDS * 20) + 1080
    assert len("".join(trainings[0])) == total - int(total * 0.2)
    assert "w" * 100 not in "".join(trainings[0])  # of which the held-out end is
    assert 257 < data.tokenizer.vocabulary <= 300
    decode = data.tokenizer.tokenizer.decode
    text = decode(tokens_of(data.train)) + decode(tokens_of(data.valid))
    assert text.replace(ENDS[0], "") == WORDS * 20 + "z" * 300 + "y" * 300 + "w" * 480
    assert data.train.part.bytes == len("".join(trainings[0]))
    assert data.train.part.bytes_per_token > 1.5
    again = prepare(words)
    assert (again.folder, again.tokenizer.key) == (data.folder, data.tokenizer.key)
    assert len(trainings) == 1
    prepare(replace(words, sequence_length=2, resets=True))
    assert len(trainings) == 1
    (tmp_path / "saved").mkdir()
    data.tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).key == data.tokenizer.key
    others = [replace(words, tokenizer="bpe:301"), replace(words, holdout=0.4)]
    folders = {prepare(other).folder for other in others}
    assert len(trainings) == 3
    assert len(folders | {data.folder}) == 3


def test_a_tokenizer_sees_the_first_pieces_only(words, trainings, monkeypatch):
    monkeypatch.setattr(packing, "SAMPLE", 1000)
    prepare(words)
    assert "".join(trainings[0]) == WORDS * 20


@pytest.mark.parametrize("tokens", [30, 100, 400, 5000])
def test_a_tokenizer_sees_no_held_out_text_under_a_limit(words, trainings, tmp_path, tokens):
    texts = [f"{row} {WORDS}" for row in range(200)]
    source = json_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    data = prepare(replace(words, train=source, tokens=tokens))
    samples = "".join(trainings[0])
    assert "".join(texts).startswith(samples)
    assert 0 < len(samples) <= data.train.part.bytes
    separate = prepare(replace(words, train=source, tokens=tokens, valid=words.train))
    assert 0 < len("".join(trainings[1])) <= separate.train.part.bytes


def test_pieces_have_the_tokens_of_the_whole_document(new_tokenizer, config, tmp_path):
    _, tokenizer = new_tokenizer
    lines = (TEXTS[row % 3].strip() + "\n" * (1 + row % 3) for row in range(40_000))
    text = "".join(lines)
    (tmp_path / "long.txt").write_text(text)
    config = replace(config, train=str(tmp_path / "long.txt"), valid=config.train)
    assert len(list(packing.passages(config, config.train))) > 1
    data = prepare(replace(config, tokenizer=str(tmp_path / "tokenizer")))
    assert tokens_of(data.train) == [*tokenizer.encode_all([text])[0], tokenizer.end]


@pytest.mark.parametrize("name", ["bpe:", "bpe:256", "bpe:x", "bpe:-1", "bpe:1e4"])
def test_impossible_sizes_raise(config, name):
    with pytest.raises(DataError, match=r'"bpe:N", N at least 257, such as bpe:16384; got'):
        prepare(replace(config, tokenizer=name))


def test_a_size_larger_than_the_models_vocabulary_raises(config):
    assert [size_of(name) for name in ("bpe:300", "bytes", "owner/name")] == [300, None, None]
    model = replace(preset("gru", "400M").model, vocab_size=260)
    with pytest.raises(ValueError, match=r"bpe:300 .*vocab_size is 260: set .*vocab_size=300"):
        RunConfig("a", model, replace(config, tokenizer="bpe:300"))
    RunConfig("a", model, replace(config, tokenizer="bpe:260"))
