"""Gemma 3 for isthmus: its language model, alone or out of a vision-language checkpoint."""

from isthmus_gemma_vl._version import __version__ as __version__
