"""Overrides: types, what follows from sizes, the nearest key, and printed configs read back."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pararnn.lab.train.config import CLIPS, PRECISIONS, DataConfig, OptimiserConfig, RunConfig
from pararnn.lab.train.overrides import config_text, resolved
from pararnn.lab.train.recipes import RECIPES, recipe
from pararnn.lab.values import KINDS
from pararnn.lm import LMConfig

RUN = RunConfig("run", LMConfig(64, 3, 256, num_heads=2))


def of(path: str, config: RunConfig):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("steps=10", 10),
        ("steps = 20_000", 20_000),
        ("verify_every=0", 0),
        ("optimiser.learning_rate=1e-3", 1e-3),
        ("optimiser.learning_rate=1", 1.0),
        ("compile=false", False),
        ("data.resets=True", True),
        ("out=runs/a=b", "runs/a=b"),
        ("data.train=my file.txt", "my file.txt"),
        ('data.train=" a\\n"', " a\n"),
        ("data.valid=", ""),
        ("report_to=none", "none"),  # a name, where a text is wanted
        ("optimiser.clip=none", "none"),
        ("model.recurrent_clip=none", None),
        ("model.recurrent_clip=0.25", 0.25),
        ("model.recurrent_std=None", None),
        ("model.num_heads=4", 4),
        ("model.tie_word_embeddings=true", True),
        ("model.mixers=rnn,attention,rnn", ("rnn", "attention", "rnn")),
        ("model.mixers=rnn, attention ,rnn", ("rnn", "attention", "rnn")),
        ("model.mixers=attention", ("attention",) * 3),
        ("model.mixers=none", ("rnn",) * 3),
        ('model.cell_config={"dt": 0.5}', {"dt": 0.5}),
    ],
)
def test_values_are_read_as_their_fields_types(override, result):
    key = override.partition("=")[0].strip()
    config = resolved(RUN, [override])
    value = of(key, config)
    assert value == result
    assert type(value) is type(result)
    # Nothing else has changed.
    old = dict(line.split(" = ", 1) for line in config_text(RUN).splitlines())
    new = dict(line.split(" = ", 1) for line in config_text(config).splitlines())
    assert {each for each in old if old[each] != new[each]} <= {key}


def test_the_config_itself_stays():
    old = replace(RUN)
    assert resolved(RUN, ["steps=7", "model.cell=lstm"]) != RUN
    assert old == RUN
    assert resolved(RUN, []) == RUN
    with pytest.raises(FrozenInstanceError):
        resolved(RUN, ["steps=7"]).steps = 8


def test_the_last_of_a_key_counts():
    assert resolved(RUN, ["steps=1", "steps=2"]).steps == 2
    assert resolved(recipe("tiny"), [*config_text(RUN).splitlines(), "steps=2"]) == replace(
        RUN, steps=2
    )


def test_the_mlp_follows_the_width():
    assert RUN.model.intermediate_size == 256
    wide = resolved(RUN, ["model.hidden_size=512"]).model
    assert wide.intermediate_size == LMConfig(512, 3).intermediate_size == 1536
    for keys in (
        ["model.hidden_size=512", "model.intermediate_size=300"],
        ["model.intermediate_size=300", "model.hidden_size=512"],
    ):
        assert resolved(RUN, keys).model.intermediate_size == 300
    again = resolved(RUN, ["model.intermediate_size=none", "model.hidden_size=512"]).model
    assert again.intermediate_size == 1536


def test_a_recipes_own_mlp_stays():
    own = replace(RUN, model=replace(RUN.model, intermediate_size=128))
    assert resolved(own, ["model.hidden_size=512"]).model.intermediate_size == 128
    assert resolved(own, ["steps=1"]).model == own.model


def test_uniform_mixers_follow_the_blocks():
    for kind in ("rnn", "attention"):
        run = replace(RUN, model=replace(RUN.model, mixers=(kind,) * 3))
        for blocks in (1, 2, 7):
            model = resolved(run, [f"model.num_hidden_layers={blocks}"]).model
            assert model.mixers == (kind,) * blocks
    deep = resolved(RUN, ["model.num_hidden_layers=2", "model.mixers=attention"]).model
    assert deep.mixers == ("attention",) * 2


def test_rows_on_one_device_may_be_shorter_than_the_convolution():
    short = resolved(RUN, ["data.sequence_length=2", "model.conv_kernel_size=8"])
    assert short.data.sequence_length == 2
    with pytest.raises(ValueError, match=r"data\.sequence_length must be 14 at least"):
        resolved(short, ["context_parallel=2"])


def test_mixed_mixers_do_not_follow():
    config = replace(RUN, model=replace(RUN.model, mixers=("rnn", "attention", "rnn")))
    with pytest.raises(ValueError, match="mixers must name one mixer for each of the 4 blocks"):
        resolved(config, ["model.num_hidden_layers=4"])
    overrides = ["model.num_hidden_layers=2", "model.mixers=rnn,attention"]
    assert resolved(config, overrides).model.mixers == ("rnn", "attention")
    with pytest.raises(ValueError, match="each of the 3 blocks, got 2"):
        resolved(RUN, ["model.mixers=rnn,rnn"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepps=1", "there is no key 'stepps'; did you mean steps?"),
        ("optimizer.learning_rate=1", "did you mean optimiser.learning_rate?"),
        (
            "learning_rate=1",
            "there is no key 'learning_rate'; did you mean optimiser.learning_rate?",
        ),
        ("optimiser.lr=1", "did you mean optimiser.learning_rate?"),
        ("lr=1", "did you mean optimiser.learning_rate?"),
        ("wd=1", "did you mean optimiser.weight_decay?"),
        ("model.layers=1", "did you mean model.num_hidden_layers?"),
        ("batch_size=1", "did you mean batch?"),
        ("z_loss=1", "did you mean optimiser.z_loss?"),
        ("cell=lstm", "did you mean model.cell?"),
        ("model.hiden_size=1", "did you mean model.hidden_size?"),
        ("Steps=1", "there is no key 'Steps'; did you mean steps?"),
        ("model=1", "there is no key 'model': it is a record, with fields such as model."),
        ("model.mixers.x=1", "did you mean model.mixers?"),
        ("xyzzy=1", "there is no key 'xyzzy'; --print shows all keys"),
        ("=1", "there is no key ''"),
        ("steps", "'steps' is no key=value"),
        ("", "'' is no key=value"),
        ("steps=ten", "steps must be an integer, got 'ten'"),
        ("steps=1.5", "steps must be an integer, got '1.5'"),
        ("steps=1e3", "steps must be an integer, got '1e3'"),
        ("steps=", "steps must be an integer, got ''"),
        ("steps=none", "steps must be an integer, got 'none'"),
        ("steps=0", "steps must be positive, got 0"),
        ("optimiser.learning_rate=fast", "optimiser.learning_rate must be a finite number"),
        ("optimiser.learning_rate=nan", "must be a finite number, got 'nan'"),
        ("optimiser.grad_norm=inf", "must be a finite number, got 'inf'"),
        ("model.recurrent_clip=x", "must be a finite number, or none, got 'x'"),
        ("compile=yes", "compile must be true or false, got 'yes'"),
        ("compile=1", "compile must be true or false, got '1'"),
        ("model.mixers=rnn,,rnn", "names with commas between them, or none, got 'rnn,,rnn'"),
        ("model.mixers=", "model.mixers must be names"),
        ("model.cell_config=dt", "model.cell_config must be a JSON object, got 'dt'"),
        ('model.cell_config={"a": NaN}', "must be a JSON object, got '{\"a\": NaN}'"),
        ('model.cell_config={"a": [1e999]}', "must be a JSON object"),
        ("model.cell_config=[1]", "model.cell_config must be a JSON object, got '[1]'"),
        ('out="a', "out must be a text, or a JSON string if it begins with \", got '\"a'"),
        ("model.hidden_size=0", "hidden_size must be a positive integer, got 0"),
        ("precision=float8", "precision must be one of"),
        ("optimiser.clip=hard", "clip must be one of"),
        ("optimiser.learning_rate=0", "learning_rate must be positive, got 0.0"),
        ("optimiser.clip_to=-0.5", "clip_to must be positive, got -0.5"),
        ("optimiser.weight_decay=-1", "weight_decay must be 0 or positive, got -1.0"),
        ("optimiser.grad_norm=-1", "grad_norm must be 0 or positive"),
        ("optimiser.z_loss=-1", "z_loss must be 0 or positive"),
        ("optimiser.warmup=2000", "warmup must be from 0 to 1, got 2000.0"),
        ("optimiser.final=-0.1", "final must be from 0 to 1"),
        ("optimiser.beta1=1", "beta1 must be from 0 and below 1, got 1.0"),
        ("optimiser.beta2=-1", "beta2 must be from 0 and below 1"),
        ("seed=-1", "seed must be from 0 to 2^32 - 1, got -1"),
        ("data.sequence_length=1", "data.sequence_length must be at least 2"),
        ("model.norm_eps=-1", "norm_eps must be 0 or positive"),
        ("model.rope_theta=0", "rope_theta must be positive, got 0.0"),
        ("model.recurrent_clip=0", "recurrent_clip must be positive, got 0.0"),
        ("model.recurrent_std=-1", "recurrent_std must be 0 or positive"),
        ("model.projection_gain=-1", "projection_gain must be 0 or positive"),
    ],
)
def test_bad_overrides_say_what_was_got_and_wanted(override, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is asserted below)
        resolved(RUN, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_printed_and_read_back(name):
    run = recipe(name)
    lines = config_text(run).splitlines()
    assert len(lines) == len({line.split(" = ")[0] for line in lines})
    assert resolved(RUN, lines) == run
    assert resolved(run, lines) == run


def test_printed_is_what_one_would_write():
    lines = config_text(recipe("transformer-400m")).splitlines()
    assert lines[0] == "name = transformer-400m"
    for line in (
        "model.mixers = attention",
        "model.recurrent_std = none",
        "model.cell_config = {}",
        "compile = true",
        "optimiser.learning_rate = 0.003",
        'data.valid = ""',
        "data.tokenizer = EleutherAI/gpt-neox-20b",
    ):
        assert line in lines


def records(kind, **values):
    """Configs of any values: by the types of fields, but for the known ones."""
    positive = st.floats(0, exclude_min=True, allow_infinity=False)
    by_type = {
        int: st.integers(2, 10**9),
        float: positive,
        bool: st.booleans(),
        str: st.text(max_size=12) | st.sampled_from(["none", '"', " a", "a = b", "\u2028", "a\r"]),
        int | None: st.none() | st.integers(1, 10**6),
        float | None: st.none() | positive,
    }
    hints = get_type_hints(kind)
    others = {name: by_type[hints[name]] for name in hints if name not in values}
    return st.builds(kind, **(others | values))


@st.composite
def models(draw):
    blocks = draw(st.integers(1, 6))
    kinds = st.sampled_from(["rnn", "attention", "mine"])
    mixers = draw(st.none() | st.lists(kinds, min_size=blocks, max_size=blocks).map(tuple))
    json_values = st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.booleans())
    return draw(
        records(
            LMConfig,
            num_hidden_layers=st.just(blocks),
            mixers=st.just(mixers),
            norm=st.sampled_from(["rms", "layer"]),
            cell_config=json_values,
        )
    )


runs = records(
    RunConfig,
    model=models(),
    data=records(DataConfig, stateful=st.just(False)),  # or models with attention raise
    optimiser=records(
        OptimiserConfig,
        clip=st.sampled_from(CLIPS),
        **dict.fromkeys(("warmup", "final"), st.floats(0, 1)),
        **dict.fromkeys(("beta1", "beta2"), st.floats(0, 1, exclude_max=True)),
    ),
    precision=st.sampled_from(PRECISIONS),
    context_parallel=st.just(1),  # others need long rows
)


@settings(max_examples=30)
@given(runs, runs)
@example(RUN, replace(RUN, data=DataConfig(train='"', valid="\n", column=" ", cache="\x1c\ud800")))
def test_any_config_is_printed_and_read_back(run, other):
    lines = config_text(run).splitlines()
    assert resolved(other, lines) == run
    assert resolved(run, reversed(lines)) == run
    assert config_text(resolved(other, lines)) == config_text(run)


def test_kinds_say_what_they_want():
    assert len({kind.wanted for kind in KINDS.values()}) == len(KINDS)
    assert json.loads(KINDS[str].write(" ")) == " "
