"""Functions that the tests of isthmus.launch run in workers."""

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist


def total(*numbers: int, scale: int = 1) -> torch.Tensor:
    tensor = torch.tensor(sum(numbers) * scale + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor


def settings() -> dict:
    return {
        name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "ISTHMUS_TEST")
    } | {
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "pid": os.getpid(),
    }


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise RuntimeError("the oil is out")
    dist.barrier()


def refuses():
    raise ValueError("cannot divide 2 heads over 3 ranks")


def refuses_name():
    raise LookupError("no such layer")


def has_a_bug():
    return {}["missing"]


def dies_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def sleeps_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)


def cannot_be_sent():
    return lambda: None


def chatters():
    print("> number of parameters on rank 0")
    os.write(1, b"written to the descriptor\n")
    warnings.warn("a worker's warning", stacklevel=1)
    print("an error message", file=sys.stderr, flush=True)
