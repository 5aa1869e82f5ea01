"""Run a function on every rank of a layout: torchrun's ranks, or CPU worker processes of this machine."""

import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isthmus.cli import output, progress

if TYPE_CHECKING:
    from isthmus.layout import Layout

LIMIT = "ISTHMUS_MAX_WORKERS"
"""Environment variable: the most processes to start on this machine."""
LEAST_LIMIT = 16  # where it is not set, on a machine with fewer cores


def run(
    layout: "Layout", function: Callable[..., Any], *args: Any, timeout: float | None = None
) -> list[Any]:
    """`function(*args)` on every rank, Megatron's groups initialised; results by rank, on every rank alike.

    `function` belongs to a module; its arguments and its result can be pickled. `timeout` is in seconds, for
    worker processes. ValueError where the ranks at hand are not the layout's, or would be too many here.
    """
    if under_torchrun():
        return _run_here(layout, function, args)

    import torch

    if torch.cuda.is_available():
        raise ValueError(
            f"this machine has GPUs: {layout.world_size} ranks are started by torchrun. Try:\n"
            f"  {torchrun_command(layout.world_size, torch.cuda.device_count(), sys.argv[1:])}\n"
            "or set CUDA_VISIBLE_DEVICES= (empty) to run on CPU"
        )
    import isthmus.cpu
    from isthmus import launch

    isthmus.cpu.check_machine()
    _check_count(layout.world_size)
    progress.announce(f"starting {output.counted(layout.world_size, 'process')} with Megatron")
    return launch.run(layout.world_size, on_rank, layout, function, args, progress.silent, timeout=timeout)


def _check_count(world_size: int) -> None:
    """ValueError where that many processes would drown this machine."""
    cores = os.cpu_count() or 1
    stated = os.environ.get(LIMIT, "")
    if stated and not stated.isdecimal():
        raise ValueError(f"{LIMIT}={stated!r} is set in the environment, expected a whole number")
    most = int(stated) if stated else max(LEAST_LIMIT, cores)
    if world_size > most:
        raise ValueError(
            f"this layout needs {world_size} processes, more than {most} on this machine of {cores} cores"
            " (each takes 0.5 GB and more). Use a smaller layout, start the ranks on enough machines with"
            f" torchrun, or allow them here: {LIMIT}={world_size}"
        )


def under_torchrun() -> bool:
    """True where a launcher has given this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_command(world_size: int, gpus: int, argv: list[str]) -> str:
    """The command line to type for the same request under torchrun."""
    local = min(world_size, gpus)
    nodes = f"--nnodes {-(-world_size // gpus)} " if world_size > gpus else ""
    return f"torchrun {nodes}--nproc-per-node {local} -m isthmus {shlex.join(argv)}"


def on_rank(layout: "Layout", function: Callable[..., Any], args: tuple[Any, ...], silent: bool) -> Any:
    """What each rank runs, torch.distributed initialised: the layout's groups, then the function.

    `silent` is :data:`progress.silent` of the process that starts the ranks.
    """
    progress.silent = silent
    layout.initialize()
    return function(*args)


def _run_here(layout: "Layout", function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """This process is one of torchrun's ranks."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise ValueError(
            f"{_words(layout)} needs {output.counted(layout.world_size, 'rank')}, torchrun started"
            f" {world_size}. Try: --nproc-per-node {layout.world_size}, or other layout options"
        )
    import torch

    from isthmus.checkpoint.gather import from_all
    from isthmus.launch.quiet import silenced
    from isthmus.launch.worker import BACKENDS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        import isthmus.cpu

        isthmus.cpu.install()
    with silenced():
        torch.distributed.init_process_group(BACKENDS[device])
        results = from_all(on_rank(layout, function, args, progress.silent))
        torch.distributed.destroy_process_group()
    return results


def _words(layout: "Layout") -> str:
    """`tp=2 pp=2`: the sizes that make up the world size, as the user gave them."""
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"
