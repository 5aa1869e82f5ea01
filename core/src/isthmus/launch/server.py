"""What every worker needs, imported once in the fork server, so that a worker starts by forking (20 ms).

Importing this module imports all of it. It starts no thread and computes nothing, for a fork copies neither
safely.
"""

import contextlib
import os
import warnings


def load() -> None:
    """Install the backend and import megatron, or raise what stands in the way."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import isthmus.cpu

    isthmus.cpu.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.dist_checkpointing
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.training.models.gpt  # noqa: F401
        import torch._dynamo  # imported by the first optimizer otherwise
        import torch.distributed.checkpoint  # noqa: F401


# A fork server dies of an error while it preloads, without a word. Workers call load() again and report it.
with contextlib.suppress(Exception):
    load()
