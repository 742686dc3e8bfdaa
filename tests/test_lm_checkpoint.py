"""A model as a folder: written and read with transformers and without."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from fresh import run_fresh
from lm_kinds import hugging
from table import CELLS
from torch import Tensor

import pararnn
from pararnn.base.errors import MissingExtra
from pararnn.lm import (
    MIXERS,
    CheckpointError,
    LanguageModel,
    LMConfig,
    load_checkpoint,
    save_byte_tokenizer,
    save_checkpoint,
)
from pararnn.lm.checkpoint import AUTO_MAP, CLASSES, CODE
from pararnn.lm.mixers import RNNMixer
from pararnn.lm.tokens import byte_tokenizer

safetensors = pytest.importorskip("safetensors.torch")

SIZES = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TEXTS = [
    "",
    "do n't , or . \n",
    "plain  text\n\ttabs\r\n",
    "é ß 你好 🎉\u00ad\u00a0",
    "\x00\x1b\x7f'll <|endoftext|>",
]


class OwnCell(pararnn.Cell):
    """A user's, found by its import path."""

    states = ("h", "slow", "slower")
    gates = ("x", "f")
    params = {"a": pararnn.Param("D", std=0.1)}
    config = {"rate": 0.5}

    def step(self, state, gates, p):
        h, slow, slower = state
        f = torch.sigmoid(gates.f)
        new = f * h + (1 - f) * torch.tanh(gates.x + p.a * slower)
        slow = slow + self.rate * (new - slow)
        return new, slow, slower + self.rate * (slow - slower)


OWN = f"{__name__}:OwnCell"


def make_lm(dtype: torch.dtype | None = None, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(**(SIZES | options)), dtype=dtype).eval()


def tokens() -> Tensor:
    return torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(make_lm(), tmp_path / "deep" / "model")
    return tmp_path / "deep" / "model"


def edit(folder, **changes) -> None:
    """Change fields of a folder's config.json; None takes one away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


CONFIGS = {
    **{cell: {"cell": cell} for cell in CELLS},
    "config": {"cell": "lem", "cell_config": {"dt": 0.25}},
    "own": {"cell": OWN, "cell_config": {"rate": 0.25}},
    "tied": {"tie_word_embeddings": True},
    "hybrid": {"mixers": ("attention", "rnn"), "norm": "layer", "num_heads": 2},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.one_in(5)
def test_a_folder_rebuilds_the_model(name, tmp_path):
    model = make_lm(**CONFIGS[name])
    save_checkpoint(model, tmp_path)
    copy = load_checkpoint(tmp_path)
    assert not copy.training
    assert copy.config == model.config
    assert [p.dtype for p in copy.parameters()] == [p.dtype for p in model.parameters()]
    assert (copy.lm_head.weight is copy.embed_tokens.weight) == (name == "tied")
    assert torch.equal(copy(tokens()), model(tokens()))


@pytest.mark.parametrize("name", ["gru", "slstm", "own", "tied", "hybrid", "bfloat16"])
@torch.no_grad()
def test_transformers_reads_and_writes_the_same_folder(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    known_class = pararnn.lm.ParaRNNForCausalLM  # to transformers, once it is imported
    model = make_lm(**CONFIGS[name])
    save_checkpoint(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs) is known_class
    assert torch.equal(theirs(tokens()).logits, model(tokens()))
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    for kind in ("theirs", "shards"):
        copy = load_checkpoint(tmp_path / kind)
        assert copy.config == model.config
        assert torch.equal(copy(tokens()), model(tokens()))
    ours, config_of_theirs = (
        json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("ours", "theirs")
    )
    assert ours.items() <= config_of_theirs.items()


def test_a_save_that_fails_leaves_the_model_that_was_there(folder, monkeypatch):
    before = load_checkpoint(folder)
    files = sorted(path.name for path in folder.iterdir())

    def full(tensors, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(make_lm(cell="lstm"), folder)
    assert sorted(path.name for path in folder.iterdir()) == files
    after = load_checkpoint(folder)
    assert after.config == before.config
    assert torch.equal(after(tokens()), before(tokens()))


def test_the_byte_tokenizers_ids_are_bytes(folder):
    transformers = pytest.importorskip("transformers")
    save_byte_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 256
    every = "".join(chr(code) for code in range(1, 0x3000, 7))
    for text in [*TEXTS, every]:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(folder)
    again = transformers.AutoTokenizer.from_pretrained(folder)
    assert again(TEXTS[3])["input_ids"] == list(TEXTS[3].encode())


def test_streams_hold_back_characters_that_are_not_complete(folder):
    transformers = pytest.importorskip("transformers")
    save_byte_tokenizer(folder)
    pieces = []

    class Streamer(transformers.TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    streamer = Streamer(transformers.AutoTokenizer.from_pretrained(folder))
    text = "héllo wörld 你好吗 🎉🎉 ende\nß"
    for byte in text.encode():
        streamer.put(torch.tensor([byte]))
    streamer.end()
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 5


@pytest.mark.parametrize("ways", [("file", "shards"), ("shards", "file"), ("shards", "ours")])
def test_weights_of_an_earlier_save_are_not_loaded(ways, tmp_path):
    """One file and several have other names, and readers take what they find."""
    transformers = pytest.importorskip("transformers")
    models = [hugging("gru"), hugging("gru")]
    with torch.no_grad():
        models[1].lm_head.weight.neg_()
    both, ids = tmp_path / "both", tokens() % 48
    for model, way in zip(models, ways, strict=True):
        if way == "ours":
            model.save_pretrained(tmp_path / "alone")
            save_checkpoint(load_checkpoint(tmp_path / "alone"), both)
        else:
            model.save_pretrained(both, max_shard_size="5KB" if way == "shards" else "1GB")
    expected = models[1](ids).logits
    assert load_checkpoint(both)(ids).equal(expected)
    assert transformers.AutoModelForCausalLM.from_pretrained(both)(ids).logits.equal(expected)


def test_an_index_whose_files_are_gone_is_not_read(folder):
    """As transformers alone leaves it where it writes one file."""
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert load_checkpoint(folder)(tokens()).equal(make_lm()(tokens()))


def test_folders_without_a_model_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"no model in .*absent: it has no config\.json"):
        load_checkpoint(tmp_path / "absent")
    for name in ("absent.pt", "there.pt"):
        (tmp_path / "there.pt").write_bytes(b"PK")
        with pytest.raises(CheckpointError, match="older version: a model is now a folder"):
            load_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"no model in .*config\.json"):
        load_checkpoint(folder / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "a model of type 'llama', not 'pararnn'"),
        ({"model_type": None}, "a model of type None"),
        ({"hidden_size": 0}, "describes no model: hidden_size must be a positive integer"),
        ({"hidden_size": None}, "describes no model: .*hidden_size"),
        ({"layer_types": ["sliding_attention"] * 2}, "describes no model: .*sliding_attention"),
        ({"dtype": "float99"}, "describes no model: .*float99"),
        ({"dtype": "int8"}, "describes no model: dtype must have one of .*, got torch.int8"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight is not the embedding: set it to false"),
        ({"num_hidden_layers": 1}, "describes no model: mixers must name one"),
        ({"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}, "misses the weight"),
        ({"conv_kernel_size": 1}, r"holds a weight that the model has not: \S+conv\S+ and 3 more"),
        ({"intermediate_size": 32}, r"another shape: \S+ \(16, 24\), which must be \(16, 32\)"),
    ],
)
def test_folders_that_do_not_fit_are_refused_in_one_line(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "no JSON", "is no JSON"),
        ("config.json", "[1]", r"must be a JSON object, got \[1\]"),
        ("model.safetensors", "nothing", r"model\.safetensors holds no weights"),
        ("model.safetensors", None, r"no weights: .*model\.safetensors is missing"),
        *(
            (INDEX, content, f"{INDEX} names no files of weights")
            for content in ("{}", "[1", "[1]", '{"weight_map": [1]}')
        ),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, content, message, folder):
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_cell_that_cannot_be_imported_is_named(folder):
    edit(folder, cell="own")
    with pytest.raises(pararnn.CellError, match="there is no cell 'own'"):
        load_checkpoint(folder)
    edit(folder, cell="not_installed_cells:Own")
    with pytest.raises(pararnn.CellError, match="install the package that defines it"):
        load_checkpoint(folder)


def test_mixers_that_transformers_cannot_name_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", RNNMixer)
    with pytest.raises(CheckpointError, match=r"mixers may hold.*'mine'.*state_dict\(\) yourself"):
        save_checkpoint(make_lm(mixers=("mine", "rnn")), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_every_byte_has_a_character_of_its_own():
    vocabulary = byte_tokenizer()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert all(character.isprintable() and not character.isspace() for character in vocabulary)
    assert (vocabulary["a"], vocabulary["Ġ"], vocabulary["Ċ"]) == (97, 32, 10)


def test_missing_packages_are_named(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        patch.delitem(sys.modules, "safetensors.torch")
        with pytest.raises(MissingExtra, match=r"safetensors .*pip install -e '\.\[demo\]'"):
            load_checkpoint(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"transformers .*pip install -e '\.\[hf\]'"):
        _ = pararnn.lm.ParaRNNConfig
    with pytest.raises(AttributeError, match="no attribute 'ParaRNN'"):
        _ = pararnn.lm.ParaRNN


def test_a_new_process_loads_folders_by_their_own_file(folder, tmp_path):
    """It has imported nothing. What it loads has the same bits, and what it saves loads again."""
    pytest.importorskip("transformers")
    kinds = ("user's", "hybrid", "tied")
    for kind in kinds:
        hugging(kind).save_pretrained(tmp_path / kind, max_shard_size="5KB")
    code = f"""
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(folder)!r})
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("what is not known was loaded")
trusted = {{"trust_remote_code": True}}
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, **trusted)
import pararnn.lm
assert type(model) is pararnn.lm.ParaRNNForCausalLM
model.save_pretrained({str(tmp_path / "again")!r})
assert type(AutoModel.from_pretrained({str(folder)!r})) is pararnn.lm.ParaRNNModel
logits = [model(torch.arange(5)[None], use_cache=False).logits]
sys.path.insert(0, {str(Path(__file__).parent)!r})
assert "user_cells" not in sys.modules
for kind in {kinds!r}:
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + kind)
    logits.append(model(torch.arange(5)[None], use_cache=False).logits)
torch.save(logits, {str(tmp_path / "logits.pt")!r})
"""
    again = tmp_path / "again"
    process = run_fresh(code, environment={"HF_MODULES_CACHE": str(tmp_path / "modules")})
    assert process.returncode == 0, process.stderr
    want = load_checkpoint(folder)(torch.arange(5)[None])
    first, *logits = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(first, want, rtol=0, atol=1e-4)
    for kind, got in zip(kinds, logits, strict=True):
        assert torch.equal(got, hugging(kind)(torch.arange(5)[None], use_cache=False).logits)
    for path in (folder, again):
        assert json.loads((path / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert [file.name for file in path.glob("*.py")] == [CODE]
    assert (folder / CODE).read_bytes() == (again / CODE).read_bytes()


def test_without_pararnn_a_folder_says_where_it_is_from(folder):
    """transformers would name a package of an index for imports outside of try statements."""
    utils = pytest.importorskip("transformers.dynamic_module_utils")
    assert utils.check_imports(folder / CODE) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pararnn.lm.hf", None)
        with pytest.raises(
            ImportError, match=r"needs pararnn: pip install -e '\.\[hf\]' in a copy"
        ):
            runpy.run_path(str(folder / CODE))
    assert set(CLASSES.values()) <= set(runpy.run_path(str(folder / CODE)))


def test_auto_map_adds_our_classes_to_other_entries(tmp_path):
    pytest.importorskip("transformers")
    config_class = pararnn.lm.ParaRNNConfig
    auto_map = {"AutoConfig": f"some/where--{AUTO_MAP['AutoConfig']}", "AutoModel": "mine.Model"}
    config = config_class(hidden_size=8, num_hidden_layers=1, auto_map=auto_map)
    assert config.auto_map == AUTO_MAP | {"AutoModel": "mine.Model"}
    config_class.register_for_auto_class()  # as transformers does when it has run the file
    config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.py")] == [CODE]
