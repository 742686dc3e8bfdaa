"""A trained model as one file of plain types and tensors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from pararnn.cells import CELLS
from pararnn.errors import PararnnError
from pararnn.lm.model import ByteLM


class CheckpointError(PararnnError, ValueError):
    """A model cannot be written as a checkpoint, or a file is not one."""


def save_checkpoint(model: ByteLM, path: Path) -> None:
    """Write the model's class of cell, options and parameters.

    Raises CheckpointError for a cell that is not in `pararnn.CELLS`, under whose name the file
    would have to record it.
    """
    names = [name for name, cell_class in CELLS.items() if cell_class is model.cell_class]
    if not names:
        raise CheckpointError(
            f"{model.cell_class.__name__} has no name in pararnn.CELLS; add it there first"
        )
    content = {"cell": names[0], "options": model.options, "state_dict": model.state_dict()}
    torch.save(content, path)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> ByteLM:
    """The model that `save_checkpoint` wrote, in evaluation mode on `device`.

    Runs no code from the file (weights_only). Raises OSError where there is no such file,
    CheckpointError when it holds something else.
    """
    try:
        content: Any = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(content, dict) or set(content) != {"cell", "options", "state_dict"}:
        raise CheckpointError(f"{path} is not a checkpoint of a pararnn language model")
    if content["cell"] not in CELLS:
        raise CheckpointError(f"{path} needs the cell {content['cell']!r}: add it to pararnn.CELLS")
    model = ByteLM(CELLS[content["cell"]], device=device, **content["options"])
    model.load_state_dict(content["state_dict"])
    return model.eval()
