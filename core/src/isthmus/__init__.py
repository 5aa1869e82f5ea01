"""isthmus: Hugging Face checkpoints and Megatron-core training, joined."""

from isthmus._version import __version__ as __version__
