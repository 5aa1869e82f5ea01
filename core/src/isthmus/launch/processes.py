"""Run a function in several fresh local processes joined by gloo, with Megatron-core on CPU in each.

    results = run(4, "my_package.train:step", config)      # results[rank]

Workers are forked from a server that has imported torch and megatron once, so a run costs 0.1 s to start.
Each begins clean: Megatron keeps much state in module globals. Nothing of theirs reaches this process's
stdout. The same function runs on this machine's GPUs with `device="cuda"`: one rank on each, joined by NCCL,
with Megatron as it is, and started from scratch, since CUDA does not survive a fork.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from isthmus.launch.transfer import Failure, Task
from isthmus.launch.worker import main

GRACE = 0.5  # seconds for other ranks to report the same failure
PATIENCE = 10.0  # seconds for a rank to write its stack, on a machine that does much else

_preload = ["isthmus.launch.server"]


class WorkerError(RuntimeError):
    """A worker raised, died or hung. `tracebacks` maps its rank to the text of its traceback or stack."""

    def __init__(self, message: str, tracebacks: dict[int, str] | None = None):
        super().__init__(message)
        self.tracebacks = tracebacks or {}


def preload(*modules: str) -> None:
    """Have the fork server import these too; without effect after the first :func:`run`."""
    _preload.extend(m for m in modules if m not in _preload)


def run(
    world_size: int,
    function: str | Callable[..., Any],
    *args: Any,
    timeout: float | None = 600,
    quiet: bool = True,
    device: str = "cpu",
    exact: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks of a process group; the results, by rank.

    Args:
        function: "module:name", or a function defined at the top of its module.
        timeout: seconds for the whole run, None for no limit.
        quiet: drop what workers print, and Megatron's warnings; if False, both go to stderr.
        device: "cpu", or "cuda" for a GPU a rank; ValueError where there are fewer.
        exact: GPUs compute as a comparison with float32 needs it, and the same twice; CPUs do anyway.

    Raises:
        ValueError, LookupError, OSError: a worker raised it, for the user: same type and message, WorkerError
        as cause. WorkerError: a worker raised anything else, died, or was not done in time.
    """
    if world_size < 1:
        raise ValueError(f"cannot start {world_size} workers: world_size must be at least 1")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"cannot start workers on {device!r}: device must be 'cpu' or 'cuda'")
    if device == "cuda" and (reason := missing_gpus(world_size)):
        raise ValueError(f"cannot start {world_size} workers on GPUs: {reason}")
    module, file, name = _locate(function)
    with tempfile.TemporaryDirectory(prefix="isthmus-run-", ignore_cleanup_errors=True) as folder:
        task = Task(
            module=module,
            file=file,
            name=name,
            arguments=pickle.dumps((args, kwargs)),
            world_size=world_size,
            device=device,
            exact=exact,
            folder=folder,
            timeout=timeout,
            quiet=quiet,
            environment=dict(os.environ),
        )
        workers: dict[int, tuple[BaseProcess, Connection]] = {}
        try:
            for rank in range(world_size):
                workers[rank] = _start(rank, task)
            return _collect(workers, task)
        finally:
            _stop(workers)


def missing_gpus(world_size: int) -> str | None:
    """Why not every one of `world_size` ranks can have a GPU of this machine; None where each can."""
    import torch

    count = torch.cuda.device_count()
    return None if count >= world_size else f"{world_size} ranks need a GPU each, this machine has {count}"


def _locate(function: str | Callable[..., Any]) -> tuple[str, str | None, str]:
    """(module, its file, name) of a function that a fresh process can find.

    Raises:
        ValueError: the function is a lambda, a method or local to another function.
        LookupError: there is no such function.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
        if not module or not name:
            raise ValueError(f"{function!r} does not name a function: write 'module:name'")
        if not hasattr(importlib.import_module(module), name):
            raise LookupError(f"module {module!r} has no {name!r}")
    else:
        module, name = function.__module__, function.__qualname__
        if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not function:
            raise ValueError(
                f"worker processes cannot find {module}.{name}: pass a function from the top of its module"
            )
    if module == "__main__":
        module = "__mp_main__"  # what multiprocessing calls the parent's script in its children
    return module, getattr(sys.modules.get(module.replace("__mp_main__", "__main__")), "__file__", None), name


def _start(rank: int, task: Task) -> tuple[BaseProcess, Connection]:
    """Fork one worker from the server, starting that first if need be; for a GPU, spawn it."""
    on_cpu = task.device == "cpu"
    context: Any = multiprocessing.get_context("forkserver" if on_cpu else "spawn")
    context.set_forkserver_preload(_preload)
    ours, theirs = context.Pipe()
    # Not a daemon: workers may start processes of their own. They end when their connection closes.
    process = context.Process(target=main, args=(rank, task, theirs), name=f"rank {rank}")
    uses_script = task.module == "__mp_main__" or b"__main__" in task.arguments
    with contextlib.nullcontext() if uses_script else _without_script():
        if on_cpu:
            with _environment(OMP_NUM_THREADS="1"):  # read when the server loads OpenMP
                forkserver.ensure_running()
        process.start()
    theirs.close()
    return process, ours


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Workers import this process's script only if they need it: it may lack a __main__ guard, or be slow."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(workers: dict[int, tuple[BaseProcess, Connection]], task: Task) -> list[Any]:
    """Every rank's result; raises at the first failure or when time is up."""
    deadline = None if task.timeout is None else time.monotonic() + task.timeout
    waiting = {connection: rank for rank, (_, connection) in workers.items()}
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}  # in order of arrival
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), GRACE if failures else left)
        if failures and not ready:
            break
        if not ready:
            _raise_timeout(workers, sorted(waiting.values()), task)
        for connection in ready:
            rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
            answer = _receive(connection, workers[rank][0])  # pyright: ignore[reportArgumentType]
            if isinstance(answer, Failure):
                failures[rank] = answer
            else:
                results[rank] = answer[0]
    if failures:
        _raise_failures(failures)
    for process, _ in workers.values():
        process.join(10)
    return [results[rank] for rank in range(task.world_size)]


def _receive(connection: Connection, process: BaseProcess) -> tuple[Any] | Failure:
    """A worker's answer: its result in a tuple, or its failure."""
    try:
        answer = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join(5)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        )
        return Failure(f"the process {how} without an answer\n", None)
    return answer if isinstance(answer, Failure) else (answer,)


def _raise_failures(failures: dict[int, Failure]) -> None:
    """The first failure, as its own type if it is the user's, else as a WorkerError with all tracebacks."""
    tracebacks = {rank: failure.traceback for rank, failure in sorted(failures.items())}
    first = next(iter(failures))
    text = f"{len(failures)} of the workers failed, rank {first} first\n"
    error = WorkerError(text + _by_rank({first: tracebacks[first]} | tracebacks), tracebacks)
    pickled = failures[first].exception
    original = None if pickled is None else pickle.loads(pickled)
    if original is not None and _is_for_user(original):
        raise original from error
    raise error


def _is_for_user(error: BaseException) -> bool:
    """Whether the message is meant for who asked; KeyError and IndexError are mistakes in a program."""
    if isinstance(error, OSError):
        return not isinstance(error, (ConnectionError, TimeoutError, ChildProcessError, ProcessLookupError))
    return isinstance(error, (ValueError, LookupError)) and not isinstance(error, (KeyError, IndexError))


def _raise_timeout(
    workers: dict[int, tuple[BaseProcess, Connection]], unfinished: list[int], task: Task
) -> None:
    """WorkerError that says where every unfinished rank is."""
    for rank in unfinished:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank][0].pid or 0, signal.SIGUSR1)
    files = {rank: task.stack_file(rank) for rank in unfinished}
    end = time.monotonic() + PATIENCE
    while any(file.exists() and not file.stat().st_size for file in files.values()):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    time.sleep(GRACE)  # for the rest of what has begun
    stacks = {}
    for rank, file in files.items():
        stacks[rank] = file.read_text() if file.exists() else "the process has not started\n"
    ranks = ", ".join(map(str, unfinished))
    raise WorkerError(
        f"not finished after {task.timeout:g} s: ranks {ranks} of {task.world_size}\n{_by_rank(stacks)}",
        stacks,
    )


def _by_rank(texts: dict[int, str]) -> str:
    """Every line behind its rank."""
    return "\n".join(f"rank {rank}: {line}" for rank, text in texts.items() for line in text.splitlines())


def _stop(workers: dict[int, tuple[BaseProcess, Connection]]) -> None:
    """End what still runs, and give its resources back."""
    for process, _ in workers.values():
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has no group yet, and so no processes
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
    for process, connection in workers.values():
        process.join()
        connection.close()
        process.close()
