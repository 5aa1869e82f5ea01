"""Where this rank stands in Megatron's process groups, and on which machine."""

import socket
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.weights import Rule


class Place(NamedTuple):
    """This rank's index in each group, the sizes of the two groups that divide tensors, and its machine."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int  # data-parallel rank among holders of the same experts
    tp_size: int
    etp_size: int
    host: str  # the same for ranks that see one page cache

    @classmethod
    def of(cls, model: Any) -> "Place":
        """From the model's own process groups."""
        groups = model.pg_collection
        return cls(
            tp=groups.tp.rank(),
            cp=groups.cp.rank(),
            dp=groups.dp.rank(),
            pp=groups.pp.rank(),
            ep=groups.ep.rank(),
            etp=groups.expt_tp.rank(),
            edp=groups.expt_dp.rank(),
            tp_size=groups.tp.size(),
            etp_size=groups.expt_tp.size(),
            host=_host(),
        )

    def shard(self, rule: Rule) -> tuple[int, int]:
        """(rank, size) of the group that divides the rule's tensor."""
        if rule.dim is None:
            return 0, 1
        return (self.etp, self.etp_size) if rule.expert else (self.tp, self.tp_size)


def _host() -> str:
    """A name of the running kernel: host names repeat in containers and clusters, boot ids do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()
