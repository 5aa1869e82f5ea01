"""What Megatron prints and warns of, kept from people and from pipes; errors still get out."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def silence() -> None:
    """From here on nothing reaches standard output, and no warning is seen, nor what Megatron logs as one."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


@contextmanager
def silenced() -> Iterator[None]:
    """:func:`silence` for a while: standard output and the warnings' filters are as before at its end."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with warnings.catch_warnings():
            silence()
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
