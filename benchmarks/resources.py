"""GPU resources of the CUDA kernels: registers, spills, shared memory. Needs NVRTC and no GPU.

Every elementwise cell's kernels at 1,024 channels, for three architectures, as NVRTC's assembler
reports them. Writes results/resources.csv.

    python benchmarks/resources.py [--out FOLDER]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Record, commit, new_parser

import pararnn
from pararnn.codegen import headers, nvrtc
from pararnn.codegen.cuda import source_of
from pararnn.codegen.elementwise_cuda import SOLVERS, ring_of, usual_variants
from pararnn.codegen.families import why_no_kernels
from pararnn.program.program import Program, program_of

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
DTYPES = (torch.float32, torch.bfloat16)
CHANNELS = 1024


def rows_of(name: str, program: Program, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, dtype and architecture of a cell."""
    for dtype in DTYPES:
        usual = (usual_variants(program, dtype, CHANNELS, CHANNELS, solver=s) for s in SOLVERS)
        for variant in itertools.chain.from_iterable(usual):
            if variant.per_lane == 1:
                continue
            titles = {"run": f"{variant.solver} {variant.direction}"}
            source = folder / "kernels.cu"
            source.write_text(source_of(program, variant), encoding="utf-8")
            ring = ring_of(program, variant)._asdict()
            for arch in ARCHITECTURES:
                place = (source, headers.folder("cuda"), folder / "kernels.cubin", arch)
                report = nvrtc.resources(nvrtc.compile_cubin(*place))
                about = {"cell": name, "dtype": str(dtype).split(".")[1], "arch": arch}
                for kernel, figures in report.items():
                    yield {**about, "kernel": titles.get(kernel, kernel), **ring, **figures}


def main() -> None:
    args = new_parser(__doc__).parse_args()
    about = {
        "commit": commit(),
        "torch": torch.__version__,
        "compiler": nvrtc.identity().partition(" [")[0],
    }
    record = Record(args.out / "resources.csv", about)
    with tempfile.TemporaryDirectory() as folder:
        for name, cell in pararnn.CELLS.items():
            program = program_of(cell(4))
            if why_no_kernels(program) is None:
                for row in rows_of(name, program, Path(folder)):
                    record.add(row)


if __name__ == "__main__":
    main()
