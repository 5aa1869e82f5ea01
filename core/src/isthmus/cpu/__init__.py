"""Megatron-core on CPU and gloo: `install()` turns this process into one that runs it.

    import isthmus.cpu
    isthmus.cpu.install()          # before anything imports megatron
    import megatron.core           # the real one; transformer_impl="transformer_engine" works unchanged

Two things happen. torch's CUDA surface is redirected to the CPU by named patches, and the modules that
Transformer Engine would provide are replaced by torch ones with the same interfaces and parameter names, so
that weight code meets the layout that it meets on a GPU. `patches.patches()` lists what is changed and why.
Modules are built on torch's default device, so `with torch.device("meta"):` builds any model without
allocating it.

Nothing is patched by importing this package. `isthmus.launch.run` starts worker processes with it
installed.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable

MEGATRON_VERSION = "0.19"  # the release whose lines the patches are written against

_installed: frozenset[str] | None = None  # what the first install skipped


def install(skip: Iterable[str] = ()) -> None:
    """Run Megatron-core on CPU in this process; a second call does nothing.

    Args:
        skip: names of patches to leave out, to find those that a newer Megatron no longer needs.

    Raises:
        ValueError: megatron is imported already, is not 0.19, this machine has CUDA or Transformer Engine, or
        it was installed before with another `skip`. LookupError: `skip` names no patch.
    """
    global _installed
    skip = frozenset(skip)
    if _installed is not None:
        if skip != _installed:
            raise ValueError(
                f"isthmus.cpu is installed already, skipping {sorted(_installed)}; it cannot now skip "
                f"{sorted(skip)}. Use a fresh process"
            )
        return
    _refuse()
    from isthmus.cpu import megatron_patches, patches, torch_patches  # noqa: F401  (they fill the registry)
    from isthmus.cpu.importing import without_accelerator_packages

    patches.check_names(skip)
    patches.apply("torch", skip)
    with without_accelerator_packages(compile="jit" in skip):
        patches.apply("megatron", skip)
    _installed = skip


def is_installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return _installed is not None


def install_training() -> None:
    """Also patch what only `megatron.training.pretrain` touches (after :func:`install`)."""
    install(_installed or ())
    from isthmus.cpu import patches, training  # noqa: F401  (fills the registry)

    patches.apply("training", _installed or frozenset())


def _refuse() -> None:
    """ValueError where the backend would do harm: see :func:`check_machine`, or megatron imported already."""
    if "megatron.core" in sys.modules:
        raise ValueError(
            "isthmus.cpu.install() came after megatron.core was imported, which had bound CUDA functions. "
            "Call it before the first import of megatron"
        )
    check_machine()


def check_machine() -> None:
    """ValueError, with what to do, where :func:`install` cannot work: a GPU, Transformer Engine, a Megatron.

    For asking before worker processes are started; patches nothing.
    """
    import torch

    found = importlib.metadata.version("megatron-core")
    if not found.startswith(MEGATRON_VERSION + "."):
        raise ValueError(
            f"isthmus.cpu knows megatron-core {MEGATRON_VERSION}, but {found} is installed. "
            f'Try: pip install "megatron-core=={MEGATRON_VERSION}.*"'
        )
    if torch.cuda.is_available():
        raise ValueError(
            "isthmus.cpu.install() on a machine with CUDA would hide its GPUs: use Megatron as it is, "
            "or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        raise ValueError(
            "isthmus.cpu stands in for Transformer Engine, but transformer_engine is installed. "
            "Use an environment without it for what runs on the CPU (isthmus plan, isthmus demo, ...)"
        )
