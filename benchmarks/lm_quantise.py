"""Bits per byte of a language model on bytes, with weights as they are and in 8 bits.

Puts its rows into results/lm_quantise.csv; those of other models and texts stay.

    python benchmarks/lm_quantise.py MODEL TEXT [--bytes 200000] [--device cpu]
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import Record, new_parser, provenance

from pararnn.lm import LanguageModel, bits_per_byte, load_checkpoint, quantise_weights

WEIGHTS = ("as stored", "int8", "fp8")
KEYS = ("device", "model", "text", "dtype", "weights")
"""Columns that identify a case."""
WINDOW, ROWS = 1024, 16


@torch.no_grad()
def loss_of(model: LanguageModel, text: bytes) -> float:
    """Return the bits per byte of a text, in windows of which each starts from zero states."""
    device = model.lm_head.weight.device
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [bits_per_byte(model(part)[:, :-1], part[:, 1:]) for part in windows.split(ROWS)]
    sizes = torch.tensor([float(len(part)) for part in windows.split(ROWS)])
    return float((torch.stack(losses).cpu() * sizes).sum() / sizes.sum())


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of a model of bytes")
    parser.add_argument("text", type=Path, help="held out of its training")
    parser.add_argument("--bytes", type=int, default=200_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    text = options.text.read_bytes()[: options.bytes]
    record = Record(options.out / "lm_quantise.csv", provenance(options.device), KEYS)
    for dtype in options.dtypes:
        for weights in WEIGHTS:
            original = load_checkpoint(options.model, options.device)
            model = LanguageModel(
                original.config, device=options.device, dtype=getattr(torch, dtype)
            ).eval()
            model.load_state_dict(original.state_dict())
            if weights != "as stored":
                quantise_weights(model, weights)
            row = {
                "model": f"{original.config.cell}-{original.config.hidden_size}",
                "parameters": sum(part.numel() for part in original.parameters()),
                "text": options.text.stem,
                "dtype": dtype,
                "weights": weights,
                "bytes": len(text),
                "bits_per_byte": round(loss_of(model, text), 5),
            }
            record.add(row)


if __name__ == "__main__":
    main()
