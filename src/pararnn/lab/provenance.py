"""Origin of results: versions, and the commit that the environment names."""

from __future__ import annotations

import os
from typing import Any

import torch

from pararnn.base.version import __version__

COMMIT = "PARARNN_COMMIT"
"""Environment variable with the commit that results name."""


def provenance() -> dict[str, Any]:
    """Return the versions and the commit, None where `COMMIT` is not set."""
    return {
        "versions": {"pararnn": __version__, "torch": torch.__version__},
        "commit": os.environ.get(COMMIT),
    }
