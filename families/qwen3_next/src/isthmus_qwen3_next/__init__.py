"""Qwen3-Next for isthmus."""

from isthmus_qwen3_next._version import __version__ as __version__
