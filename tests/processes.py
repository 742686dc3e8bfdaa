"""Python functions on several processes of this machine, which meet by gloo."""

import faulthandler
import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from table import HANGS_AFTER

WORLD = 2
IMPORTS = ["pararnn", "pytest", "torch.distributed.fsdp", "pararnn.train.run", "transformers"]


def _process(rank: int, check: Callable[[int], None], port: int, world: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # As torchrun says it, so that accelerate finds it too.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    check(rank)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def on_processes(check: Callable[[int], None], world: int = WORLD) -> None:
    """Run a module's function, or a partial of one, once a process."""
    mp.get_context("forkserver").set_forkserver_preload(IMPORTS)  # once for all tests
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = mp.start_processes(
        _process, (check, port, world), nprocs=world, join=False, start_method="forkserver"
    )
    while not running.join():  # one of them has ended
        pass


def initialised(check: Callable[[int], None], rank: int) -> None:
    """Run `check` with PyTorch's own process group open."""
    torch.distributed.init_process_group("gloo")
    check(rank)
