"""Gemma 3 for isthmus: its language model, alone or with its vision tower."""

from isthmus_gemma_vl._version import __version__ as __version__
