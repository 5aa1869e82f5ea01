"""A rank that fails is not waited for: the others fail with it."""

import pytest
import torch.distributed as dist

from isthmus import launch
from isthmus.checkpoint.gather import from_first, on_every_rank

KINDS = {"bug": RuntimeError, "memory": MemoryError, "request": ValueError}


def told_when_one_fails(kind: str, text: str, rank: int) -> tuple[str, str]:
    """What each rank is told where `rank` raises that error."""

    def work() -> int:
        if dist.get_rank() == rank:
            raise KINDS[kind](text)
        return 7

    try:
        on_every_rank(work) if rank else from_first(work)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "text", "elsewhere"),
    [("bug", "no kernel", "RuntimeError"), ("memory", "", "RuntimeError"), ("request", "", "ValueError")],
)
def test_an_error_of_any_kind_on_one_rank_is_raised_on_all(kind, text, elsewhere, rank) -> None:
    told = launch.run(2, told_when_one_fails, kind, text, rank)
    name = KINDS[kind].__name__
    assert told[rank] == (name, text)
    assert told[1 - rank] == (elsewhere, f"rank {rank}: {text or name}")
