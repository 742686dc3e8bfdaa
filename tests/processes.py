"""Python functions on several processes of this machine, which meet by gloo.

They are forks of one that has imported everything, once for all tests of a run. With GPUs each
imports for itself: a fork cannot use CUDA where an import has begun to, as torchao's does.
"""

import faulthandler
import multiprocessing.forkserver
import os
import socket
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import kernel_cache
import pytest
import torch
import torch.multiprocessing as mp
from table import HANGS_AFTER
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

WORLD = 2
METHOD = "spawn" if torch.cuda.is_available() else "forkserver"


@cache
def _start_server() -> None:
    if METHOD != "forkserver":
        return
    mp.get_context("forkserver").set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv(
            "PARARNN_CACHE_DIR", str(kernel_cache.folder())
        )  # the test that is first may have its own
        multiprocessing.forkserver.ensure_running()


def _run(check: Callable[..., None], *args: int) -> None:
    assert METHOD == "spawn" or "preloaded" in sys.modules  # whose ImportError nobody would see
    torch.set_num_threads(1)
    torch.manual_seed(0)
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    check(*args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _process(rank: int, check: Callable[[int], None], port: int, world: int) -> None:
    if world > 1:  # as torchrun sets it
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    _run(check, rank)


def start(check: Callable[[int], None], world: int = WORLD) -> mp.ProcessContext:
    """Begin to run a module's function, or a partial of one, once a process."""
    _start_server()
    port = socket.socket()  # rank 0 shares it, and nobody else gets its number before
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    arguments = check, port.getsockname()[1], world
    running = mp.start_processes(_process, arguments, nprocs=world, join=False, start_method=METHOD)
    running.port = port
    return running


def on_processes(check: Callable[[int], None], world: int = WORLD) -> None:
    """Run it to its end; raises what a process raises, once the others are ended."""
    running = start(check, world)
    while not running.join():  # one of them has ended
        pass


def launch(check: Callable[[], None], logs: Path, world: int = WORLD) -> str:
    """Run a module's function, or a partial of one, as torchrun does; what rank 0 printed.

    Raises ChildFailedError where a process fails, once the launcher has ended the others.
    """
    _start_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    with ThreadPoolExecutor(1) as thread:  # in the main thread it would take over signals
        thread.submit(elastic_launch(config, _run), check).result()
    (stdout,) = logs.glob("*/attempt_0/0/stdout.log")
    return stdout.read_text()


def with_group(check: Callable[[int], None], rank: int) -> None:
    """Run `check` with PyTorch's own process group open."""
    torch.distributed.init_process_group("gloo")
    check(rank)
