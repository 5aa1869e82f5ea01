"""Keeps the disk a little ahead of a reader that has said what it will read."""

from collections.abc import Callable

WINDOW = 64 << 20  # bytes ahead of the reader; more would crowd out what others have in the page cache
STEP = 8 << 20  # bytes asked for at a time

Key = tuple[str, int | None]  # a tensor's name, and the row where it is stacked


class ReadAhead:
    """Byte ranges in the order in which they will be read; `ask(file, begin, end)` starts a read."""

    def __init__(self, ask: Callable[[str, int, int], None]) -> None:
        self._ask = ask
        self._ranges: list[tuple[str, int, int]] = []  # (file, begin, end); those that touch are joined
        self._places: dict[Key, int] = {}  # where a key's bytes begin, counted over all ranges
        self._length = 0
        self._asked = 0
        self._current = 0  # the range in which `_asked` lies, and where that range begins
        self._begin = 0

    def add(self, key: Key, file: str, begin: int, end: int) -> None:
        """Plans a range, to be read after those added before."""
        self._places[key] = self._length
        self._length += end - begin
        if self._ranges:
            last_file, last_begin, last_end = self._ranges[-1]
            if (last_file, last_end) == (file, begin):
                self._ranges[-1] = (file, last_begin, end)
                return
        self._ranges.append((file, begin, end))

    def start(self) -> None:
        """Asks for the first bytes."""
        self._advance(0)

    def reached(self, key: Key, byte: int) -> bool:
        """Asks for what follows byte `byte` of this key's range; False if the key was not planned."""
        place = self._places.get(key)
        if place is None:
            return False
        self._advance(place + byte)
        return True

    def _advance(self, place: int) -> None:
        """Asks for the window behind byte `place` of all ranges."""
        goal = min(self._length, place + WINDOW)
        if goal - self._asked < min(STEP, self._length - self._asked):
            return
        at = max(place, self._asked)
        while at < goal:
            file, begin, end = self._ranges[self._current]
            done = at - self._begin
            if done >= end - begin:
                self._current += 1
                self._begin += end - begin
                continue
            count = min(end - begin - done, goal - at, STEP)
            self._ask(file, begin + done, begin + done + count)
            at += count
        self._asked = max(self._asked, at)
