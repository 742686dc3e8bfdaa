"""Tokens/s of rows with drafts (`sample(draft=)`), from their own text or by a head, and without.

    python benchmarks/lookup.py [--device cuda --dtype bfloat16 --model gru-1B] [--drafts 3 7]
        [--tokens 1024] [--what speed code] [--drafter lookup head] [--rows 1 8] [--price 1]
        [--steps 600] [--out FOLDER]

"speed": a model whose next token follows from the last one alone (the recurrent blocks' outputs are
multiplied by zero, and computed all the same), by weights of the head for which a few tokens follow
one another far above all others, so that no rounding makes a draft wrong. Drafts are then spoiled:
a token of one is right with the chance `right`. The time of a pass depends on sizes alone, so this
is the speed of any model of these sizes whose drafts are right as often. A head, not trained,
drafts too, for its time, and those drafts replace its. "code":
a small model of bytes is trained for some steps on source files of Python's library, and a head on
the same; they continue files that they have not seen, greedily and at temperature 0.8.
tokens_per_pass: tokens that a pass of the model wrote to a row. Tokens/s are of all rows, medians
of the repetitions, measured in turns. Puts its rows into results/lookup.csv.
"""

from __future__ import annotations

import itertools
import statistics
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from common import Record, new_parser, provenance
from torch import Tensor

from pararnn.lm import Drafter, DraftHead, LanguageModel, LMConfig, Lookup, preset, sample
from pararnn.lm.drafts import DraftCounts, Guess, Written
from pararnn.lm.lookup import Text
from pararnn.lm.mixers import RNNMixer

KEYS = (
    *("device", "what", "model", "dtype", "drafter", "rows"),
    *("drafts", "price", "right", "temperature", "tokens"),
)
"""Columns that identify a case."""
RIGHT = (1.0, 0.8, 0.6, 0.4, 0.0)
"""Chances that a token of a draft is right."""
PERIOD = 16
"""Tokens after which a text of "speed" comes back."""
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

    def text(self, tokens: Sequence[int], later: int = 0) -> Text:
        """Return a text with such drafts."""
        return SpoiledText(self, tokens, later)


class TimedHead(Spoiled):
    """Drafts of which a token stays as it is with a chance, after a head has drafted others."""

    is_costly = True

    def __init__(self, drafts: int, right: float, head: DraftHead) -> None:
        super().__init__(drafts, right)
        self.head = head

    def begin(self, model: LanguageModel, prompts: Any, length: int) -> Guess:
        """Return a function that takes the time of both."""
        guess, other = (
            super().begin(model, prompts, length),
            self.head.begin(model, prompts, length),
        )

        def timed(written: Written) -> Any:
            drafts = zip(guess(written), other(written), strict=True)
            return [looked_up or of_head for looked_up, of_head in drafts]

        return timed


@torch.no_grad()
def let_tokens_follow(model: LanguageModel, period: int) -> None:
    """Let tokens 0 to period - 1 follow one another, in a model without an effect of its states."""
    for block in model.backbone.blocks:
        cast(RNNMixer, block.mixer).out_proj.weight.zero_()
    tokens = torch.arange(period, device=model.lm_head.weight.device)
    model.lm_head.weight[(tokens + 1) % period] = model.hidden(tokens[:, None])[:, 0]


def code_files() -> list[bytes]:
    """Return source files of Python's library, from the shortest names on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: (len(path.name), path.name))
    return [data for data in (path.read_bytes() for path in files) if len(data) > 2 * PROMPT]


def trained(module: torch.nn.Module, loss_of: Any, files: list[bytes], steps: int) -> float:
    """Train a module on files by its loss; return the last one, in nats a byte."""
    text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    generator, loss = torch.Generator().manual_seed(0), torch.tensor(torch.nan)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator).tolist()
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = loss_of(rows.to(next(module.parameters()).device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def measure(
    model: LanguageModel, prompts: list[Tensor], tokens: int, temperature: float, drafter: Drafter,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Return tokens/s with drafts and without, and the counts of the drafts."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    texts: dict[bool, list[Tensor]] = {False: [], True: []}
    for repeat in range(repeats + 1):  # the first compiles
        for has_drafts, times in seconds.items():
            drafter.counts = DraftCounts()
            generator = torch.Generator(prompts[0].device).manual_seed(repeat)
            start = time.perf_counter()
            texts[has_drafts] = [
                sample(model, prompt, tokens, temperature, generator,
                       draft=drafter if has_drafts else None).cpu()
                for prompt in prompts
            ]  # fmt: skip
            times.append((time.perf_counter() - start) / len(prompts))
    plain, ahead = (
        tokens * len(prompts[0]) / statistics.median(seconds[way][1:]) for way in (False, True)
    )
    counts = drafter.counts
    return {
        "plain_tokens_s": round(plain, 1),
        "lookup_tokens_s": round(ahead, 1),
        "ratio": round(ahead / plain, 3),
        "tokens_per_pass": round(drafter.tokens_per_pass, 3),
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
    parser.add_argument(
        "--drafter", nargs="+", default=["lookup"], choices=["lookup", "head"], dest="drafters"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--price", type=float, help="of a pass (Drafter.price); 0 drafts always")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    record = Record(options.out / "lookup.csv", provenance(options.device), KEYS)

    def add(
        what: str, model: str, rows: int, drafter: str, drafts: int, temperature: float, **row: Any
    ) -> None:
        case = {"what": what, "model": model, "dtype": options.dtype, "drafter": drafter}
        case |= {"rows": rows, "drafts": drafts, "temperature": temperature}
        price = drafts / 4 if options.price is None else options.price
        case |= {"tokens": options.tokens, "price": price}
        record.add(case | row)

    drafters = list(itertools.product(options.drafters, options.drafts))
    if "speed" in options.what:
        config = SMALL if options.model == "small" else preset(*options.model.split("-")).model
        assert isinstance(config, LMConfig)
        torch.manual_seed(0)
        model = LanguageModel(config, device=options.device, dtype=dtype).eval()
        let_tokens_follow(model, PERIOD)
        sizes = {"device": options.device, "dtype": dtype}
        for rows, (name, drafts) in itertools.product(options.rows, drafters):
            prompt = torch.arange(PERIOD, device=options.device).repeat(rows, 1)
            for right in RIGHT:
                ahead = Spoiled(drafts, right)
                if name == "head":
                    ahead = TimedHead(drafts, right, DraftHead(config.hidden_size, drafts, **sizes))
                ahead.price = options.price
                row = measure(model, [prompt], options.tokens, 0, ahead, options.repeats)
                add("speed", options.model, rows, name, drafts, 0, right=right, loss="", **row)
    if "code" in options.what:
        torch.manual_seed(0)
        files = code_files()
        held_out = max(2, *options.rows)
        files, unseen = files[:-held_out], files[-held_out:]
        wide = LanguageModel(SMALL, device=options.device)
        loss = round(trained(wide, wide.loss, files, options.steps), 3)
        model = LanguageModel(SMALL, device=options.device, dtype=dtype).eval()
        model.load_state_dict(wide.state_dict())
        prompts = torch.tensor([[*x[:PROMPT]] for x in unseen], device=options.device)
        made: dict[tuple[str, int], Drafter] = {}
        for name, drafts in drafters:
            made[name, drafts] = Lookup(drafts)
            if name == "head":
                learner = DraftHead(SMALL.hidden_size, drafts, device=options.device)
                trained(
                    learner, partial(learner.loss, wide.requires_grad_(False)), files, options.steps
                )
                head = DraftHead(SMALL.hidden_size, drafts, device=options.device, dtype=dtype)
                head.load_state_dict(learner.state_dict())
                made[name, drafts] = head.eval()
        for rows, (name, drafts) in itertools.product(options.rows, drafters):
            some, drafter = [*prompts[: max(2, rows)].split(rows)], made[name, drafts]
            drafter.price = options.price
            for temperature in (0, 0.8):
                row = measure(model, some, options.tokens, temperature, drafter, options.repeats)
                add("code", "small", rows, name, drafts, temperature, right="", loss=loss, **row)


if __name__ == "__main__":
    main()
