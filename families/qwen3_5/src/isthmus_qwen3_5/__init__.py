"""Qwen3.5 for isthmus, dense and with experts, with its vision tower; Qwen3.6 has the same architecture."""

from isthmus_qwen3_5._version import __version__ as __version__
