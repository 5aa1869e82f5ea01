"""How an HF module divides by heads over ranks: one description, which loading and hosting both read.

Ranks are numbered `tp_rank * cp + cp_rank`, and rank r runs the r-th share of the heads. A tensor-parallel
rank holds what its context-parallel ranks run: its shard of every divided parameter, by which checkpoints
and optimizers know it; each of those ranks runs a slice of that shard. Arithmetic on row numbers alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.weights.parts import Interval, Parts, concatenated

_ROWS = Parts(("rows",))


@dataclass(frozen=True, slots=True)
class Division:
    """How one parameter divides: along `dim`, each part by itself; `dim` None where all heads share it.

    `over` names the count of heads that a parameter follows which may have fewer heads than there are ranks
    (key/value heads of grouped queries): neighbouring ranks then use the same head.
    """

    dim: int | None
    rows: Mapping[str, int] | None = None  # parts one after the other, each divided; None: one part
    over: str | None = None

    @property
    def parts(self) -> Parts:
        """The parts along `dim`."""
        return _ROWS if self.rows is None else concatenated(" ".join(self.rows))


ROWS, COLUMNS, SHARED = Division(0), Division(1), Division(None)


def rows_over(count: str) -> Division:
    """Rows of heads that the config field `count` counts, of which there may be fewer than ranks."""
    return Division(0, over=count)


def rows_by_parts(**rows: int) -> Division:
    """Rows that are parts one after the other, `rows` of each in the whole module; a rank has some of all."""
    return Division(0, rows)


@dataclass(frozen=True, slots=True)
class Heads:
    """A module's division: its counts of heads by Megatron's config fields, and its parameters by HF's names.

    A module built from a config with fewer heads must be a part of the whole one: the same function of its
    own heads' parameters, the outputs of all parts summing to the whole output. `together` heads of each kind
    are needed to be such a part.
    """

    counts: Mapping[str, int]
    parameters: Mapping[str, Division]
    together: int = 1

    def problems(self, tp: int, cp: int) -> list[str]:
        """Why the heads cannot be divided over tp x cp ranks; empty where they can."""
        size = tp * cp
        shared = {division.over for division in self.parameters.values()}
        unit = f", {self.together} together," if self.together > 1 else ""
        return [
            f"cannot divide {count} {field}{unit} over tp x cp = {tp} x {cp} ranks"
            for field, count in self.counts.items()
            if count % (size * self.together) and not (field in shared and size % count == 0)
        ]

    def run(self, tp: int, cp: int) -> dict[str, int]:
        """The config fields of the module that one rank runs."""
        return {field: max(count // (tp * cp), 1) for field, count in self.counts.items()}

    def held(self, tp: int) -> dict[str, int]:
        """The config fields of the module whose parameters a tensor-parallel rank holds."""
        return {field: count if count % tp else count // tp for field, count in self.counts.items()}

    def dim(self, name: str, tp: int) -> int | None:
        """The dim along which tensor-parallel ranks hold shards of a parameter; None where each holds all."""
        division = self.parameters[name]
        few = division.over is not None and self.counts[division.over] % tp
        return None if few else division.dim

    def own(self, name: str, held: int, tp: tuple[int, int], cp: tuple[int, int]) -> list[Interval]:
        """Which of the `held` rows (or columns) of a parameter the rank runs; `tp` and `cp` are (rank, size).

        Intervals of the held tensor, each with `start` its first row there. [] for a parameter that all heads
        share.
        """
        division = self.parameters[name]
        if division.dim is None:
            return []
        size = tp[1] * cp[1]
        count = size if division.over is None else self.counts[division.over]
        if count < size:
            whole = self.dim(name, tp[1]) is None
            # The rank's head among those held: of all, or of its tensor-parallel rank's.
            rank, ranks = (tp[0] * cp[1] + cp[0], size) if whole else cp
            heads = count if whole else count // tp[1]
            return [Interval("rows", rank * heads // ranks * (held // heads), held // heads)]
        rows = {"rows": held}
        if division.rows is not None:
            rows = {part: length // tp[1] for part, length in division.rows.items()}
        first, starts = 0, {}
        for part, length in rows.items():
            starts[part], first = first, first + length
        return [
            Interval(part, starts[part] + start, length)
            for part, start, length in division.parts.shard(rows, *cp)
        ]
