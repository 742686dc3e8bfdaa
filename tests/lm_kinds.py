"""Small language models of every kind, whose every parameter counts."""

import torch

from pararnn.lm.config import LMConfig
from pararnn.lm.model import LanguageModel

ATTENTION = ("attention", "attention")
KINDS = {
    "gru": {},
    "lstm": {"cell": "lstm"},
    "user's": {"cell": "user_cells:Memory", "cell_config": {"decay": 0.75}},
    "attention": {"mixers": ATTENTION},
    "hybrid": {"mixers": ("rnn", "attention")},
    "matrix": {"mixers": ("matrix", "rnn"), "cell": "m2rnn", "cell_config": {"K": 4}},
    "mlstm": {"mixers": ("matrix", "attention"), "cell": "mlstm"},
    "no convolution": {"conv_kernel_size": 1},
    "tied": {"tie_word_embeddings": True},
    "layer norm": {"mixers": ("attention", "rnn"), "qk_norm": False, "norm": "layer"},
}
VOCABULARY = 48


def options(kind: str) -> dict:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    heads = {"num_heads": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    return {**sizes, **heads, **KINDS[kind]}


def add_noise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Add noise to every parameter: with zero biases an error at padding would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=0.2)
    return model.eval()


def is_wide(name: str) -> bool:
    """Return whether a parameter is float32 in 16-bit models: it is per channel in a recurrence."""
    return ".cell." in name or name.endswith(".rnn.bias")


def plain(kind: str, dtype: torch.dtype = torch.float32, **more) -> LanguageModel:
    torch.manual_seed(0)
    config = LMConfig(**options(kind) | more)
    model = add_noise(LanguageModel(config))
    if dtype != torch.float32:
        narrow = LanguageModel(config, dtype=dtype)
        narrow.load_state_dict(model.state_dict())
        return narrow.eval()
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Draw tokens; 0 is for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def documents(lengths: list[int]) -> list[torch.Tensor]:
    return [tokens(length, seed=7 + index) for index, length in enumerate(lengths)]


def pad_rows(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch of rows (T,), with random tokens at padding, and its mask."""
    longest = max(len(row) for row in rows)
    batch, mask = tokens(len(rows), longest, seed=2), torch.zeros(len(rows), longest).long()
    for index, row in enumerate(rows):
        at = slice(longest - len(row), None) if side == "left" else slice(len(row))
        batch[index, at], mask[index, at] = row, 1
    return batch, mask


def unpad(results: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the results of real tokens, one row after the other, (N, ...)."""
    return results[mask.bool()]


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def hugging(kind: str, dtype: torch.dtype = torch.float32, **more):
    """Build the model of `plain` for transformers."""
    from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    model = plain(kind, dtype, **more)
    theirs = ParaRNNForCausalLM(ParaRNNConfig.of_lm(model.config, **special))
    for name, parameter in theirs.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if is_wide(name) else dtype)
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    values["lm_head.weight"] = values.pop("model.lm_head.weight")
    theirs.load_state_dict(values)
    return theirs.eval()


def trainer_of(model, folder, rows: list[dict], collator=None, **options):
    """Build transformers' Trainer on the CPU, which writes no checkpoints; rows for both uses."""
    from transformers import Trainer, TrainingArguments

    shared = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **shared, **options)
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
    return Trainer(model, arguments, **data)


def cudnn_allowed(monkeypatch) -> list[bool]:
    """Return a list that gets, for each attention computed, whether cuDNN is allowed."""
    flags = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(*args, **options):
        flags.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return flags
