"""Tokens/s of one row with drafts from its own text (`sample(draft=Lookup())`), and without.

    python benchmarks/lookup.py [--device cuda --dtype bfloat16 --model gru-1B] [--drafts 3 7]
        [--tokens 1024] [--what speed code] [--steps 600] [--out FOLDER]

"speed": a model whose next token follows from the last one alone (the recurrent blocks' outputs are
multiplied by zero, and computed all the same), so that its text comes back to what it was and a
draft is right. Drafts are then spoiled: a token of one is right with the chance `right`. The time
of a pass depends on sizes alone, so this is the speed of any model of these sizes whose drafts are
right as often. "code": a small model of bytes is trained for some steps on source files of Python's
library, and continues files that it has not seen, greedily and at temperature 0.8. tokens_per_pass:
tokens that a pass of the model wrote. Tokens/s are medians of the repetitions, measured in turns.
Puts its rows into results/lookup.csv.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any, cast

import torch
from common import add_row, new_parser, provenance
from torch import Tensor

from pararnn.lm import LanguageModel, LMConfig, Lookup, preset, sample
from pararnn.lm.drafts import DraftCounts
from pararnn.lm.lookup import Text
from pararnn.lm.mixers import RNNMixer

KEYS = ("device", "what", "model", "dtype", "drafts", "right", "temperature", "tokens")
"""Columns that identify a case."""
RIGHT = (1.0, 0.8, 0.6, 0.4, 0.0)
"""Chances that a token of a draft is right."""
SMALL = LMConfig(256, 4, vocab_size=256, num_heads=4)
"""The model of bytes."""
ROWS, LENGTH, PROMPT = 16, 256, 512
"""Rows and bytes of a training step, and bytes of a prompt."""


class SpoiledText(Text):
    """A text whose drafts are spoiled, token by token."""

    def draft(self) -> list[int]:
        """Return a draft with tokens that are wrong."""
        assert isinstance(self.lookup, Spoiled)
        wrong = torch.rand(self.lookup.drafts, generator=self.lookup.generator) >= self.lookup.right
        return [
            token ^ 1 if is_wrong else token
            for token, is_wrong in zip(super().draft(), wrong.tolist(), strict=False)
        ]


class Spoiled(Lookup):
    """Drafts of which a token stays as it is with a chance."""

    def __init__(self, drafts: int, right: float) -> None:
        super().__init__(drafts, least=1)  # a token decides the next
        self.right, self.generator = right, torch.Generator().manual_seed(0)

    def text(self, tokens: Any) -> Text:
        """Return a text with such drafts."""
        return SpoiledText(self, tokens)


def code_files() -> list[bytes]:
    """Return source files of Python's library, from the shortest names on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: (len(path.name), path.name))
    return [data for data in (path.read_bytes() for path in files) if len(data) > 2 * PROMPT]


def trained(model: LanguageModel, files: list[bytes], steps: int) -> float:
    """Train a model on files; return its last loss, in nats a byte."""
    text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, loss = torch.Generator().manual_seed(0), torch.tensor(torch.nan)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator).tolist()
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model.loss(rows.to(model.lm_head.weight.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def measure(
    model: LanguageModel, prompts: list[Tensor], tokens: int, temperature: float, lookup: Lookup,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Return tokens/s with drafts and without, and the counts of the drafts."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    texts: dict[bool, list[Tensor]] = {False: [], True: []}
    for repeat in range(repeats + 1):  # the first compiles
        for has_lookup, times in seconds.items():
            lookup.counts = DraftCounts()
            generator = torch.Generator(prompts[0].device).manual_seed(repeat)
            start = time.perf_counter()
            texts[has_lookup] = [
                sample(model, prompt, tokens, temperature, generator,
                       draft=lookup if has_lookup else None).cpu()
                for prompt in prompts
            ]  # fmt: skip
            times.append((time.perf_counter() - start) / len(prompts))
    plain, ahead = (tokens / statistics.median(seconds[way][1:]) for way in (False, True))
    counts = lookup.counts
    return {
        "plain_tokens_s": round(plain, 1),
        "lookup_tokens_s": round(ahead, 1),
        "ratio": round(ahead / plain, 3),
        "tokens_per_pass": round(lookup.tokens_per_pass, 3),
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "same_texts": all(map(torch.equal, texts[False], texts[True])),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default="small", help="small, or a preset as gru-1B")
    parser.add_argument("--what", nargs="+", default=["speed", "code"], choices=["speed", "code"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shared, dtype = provenance(options.device), getattr(torch, options.dtype)

    def add(name: str, drafts: int, temperature: float, right: float | str, **row: Any) -> None:
        case = {"model": name, "dtype": options.dtype, "drafts": drafts, "right": right}
        case |= {"temperature": temperature, "tokens": options.tokens}
        print({**case, **row}, flush=True)
        add_row(options.out / "lookup.csv", {**shared, **case, **row}, KEYS)

    if "speed" in options.what:
        config = SMALL if options.model == "small" else preset(*options.model.split("-")).model
        assert isinstance(config, LMConfig)
        torch.manual_seed(0)
        model = LanguageModel(config, device=options.device, dtype=dtype).eval()
        for block in model.backbone.blocks:
            cast(RNNMixer, block.mixer).out_proj.weight.data.zero_()
        prompt = torch.randint(config.vocab_size, (1, 16), device=options.device)
        for drafts in options.drafts:
            for right in RIGHT:
                ahead = Spoiled(drafts, right)
                row = measure(model, [prompt], options.tokens, 0, ahead, options.repeats)
                add(options.model, drafts, 0, right, what="speed", loss="", **row)
    if "code" in options.what:
        torch.manual_seed(0)
        *files, last, other = code_files()
        wide = LanguageModel(SMALL, device=options.device)
        loss = round(trained(wide, files, options.steps), 3)
        model = LanguageModel(SMALL, device=options.device, dtype=dtype).eval()
        model.load_state_dict(wide.state_dict())
        prompts = [torch.tensor([list(x[:PROMPT])], device=options.device) for x in (last, other)]
        for drafts in options.drafts:
            for temperature in (0, 0.8):
                lookup = Lookup(drafts)
                row = measure(model, prompts, options.tokens, temperature, lookup, options.repeats)
                add("small", drafts, temperature, "", what="code", loss=loss, **row)


if __name__ == "__main__":
    main()
