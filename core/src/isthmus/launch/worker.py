"""The child's side of :mod:`isthmus.launch`: one rank, from its fork to its answer."""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from isthmus.launch.quiet import silence
from isthmus.launch.transfer import Failure, Task, dumps

FOREVER = timedelta(days=7)  # a gloo timeout has to be finite
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # objects and CPU tensors go by gloo on both
# Of a process with a GPU, before it imports torch. Megatron overlaps communication in the order of launches.
ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# GPUs then compute as exactly as a comparison in float32 needs, and slower.
EXACT = ORDERED | {
    "NVIDIA_TF32_OVERRIDE": "0",  # cuBLAS and cuDNN, whoever calls them: Transformer Engine asks for TF32
    "TRITON_F32_DEFAULT": "ieee",  # fla's kernels
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def main(rank: int, task: Task, connection: Connection) -> None:
    """Run one rank's task and send back its pickled result, or a Failure; never returns if it failed."""
    _settle(rank, task, connection)
    try:
        answer = dumps(_run(rank, task))
    except BaseException as error:
        _send(connection, pickle.dumps(Failure.of(error)))
        # Closed sockets would make the other ranks fail too and hide the cause: wait for the parent's kill.
        threading.Event().wait()
        return
    import torch.distributed as dist

    _send(connection, answer)
    dist.barrier()  # or a fast rank closes its sockets while a slow one still connects
    dist.destroy_process_group()


def _settle(rank: int, task: Task, connection: Connection) -> None:
    """Take on the parent's environment, keep off its stdout, and die with it."""
    os.environ.clear()
    os.environ.update(environment(rank, task))
    os.setsid()  # a group of its own, which ends with it: Megatron writes checkpoints in processes of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stacks = task.stack_file(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    sys.stdout.flush()
    if task.quiet:
        silence()
    else:
        os.dup2(2, 1)
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()


def environment(rank: int, task: Task) -> dict[str, str]:
    """A rank's environment: its parent's, its place, and what its device needs."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.world_size)}
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if task.device == "cuda":
        settings |= EXACT if task.exact else ORDERED
    return task.environment | place | settings


def _die_with_parent(connection: Connection) -> None:
    """Wait for the other end to close, which it does only when the parent is gone."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _send(connection: Connection, answer: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(answer)


def _run(rank: int, task: Task) -> Any:
    import torch
    import torch.distributed as dist

    if task.device == "cuda":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(task.exact, warn_only=True)
    else:
        from isthmus.launch.server import load

        load()
    torch.set_num_threads(1)
    function = _function(task)
    args, kwargs = pickle.loads(task.arguments)
    dist.init_process_group(
        BACKENDS[task.device],
        init_method=f"file://{task.folder}/rendezvous",
        rank=rank,
        world_size=task.world_size,
        # The parent's timeout comes first: it can say which ranks hang, and where.
        timeout=FOREVER if task.timeout is None else timedelta(seconds=task.timeout + 60),
    )
    return function(*args, **kwargs)


def _function(task: Task) -> Callable[..., Any]:
    """The function, from its module, or from the module's file where that has no importable name (tests)."""
    try:
        module = importlib.import_module(task.module)
    except ModuleNotFoundError as error:
        if task.file is None or not error.name or not f"{task.module}.".startswith(f"{error.name}."):
            raise
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[task.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, task.name)
