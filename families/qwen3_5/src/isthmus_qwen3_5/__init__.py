"""Qwen3.5 for isthmus: the language model, dense and with experts; Qwen3.6 uses the same architecture."""

from isthmus_qwen3_5._version import __version__ as __version__
