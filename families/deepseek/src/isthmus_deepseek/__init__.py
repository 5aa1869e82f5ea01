"""DeepSeek V2 and V3 for isthmus."""

from isthmus_deepseek._version import __version__ as __version__
