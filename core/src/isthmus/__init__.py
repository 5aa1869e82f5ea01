"""isthmus: Hugging Face checkpoints and Megatron-core training, joined.

The public names are imported on first use: `import isthmus` loads neither torch nor megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isthmus._version import __version__ as __version__

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge as AutoBridge
    from isthmus.family import Family as Family
    from isthmus.hosting.module import HostedModule as HostedModule
    from isthmus.layout import Layout as Layout
    from isthmus.precision import enforce_marked_param_dtypes as enforce_marked_param_dtypes
    from isthmus.precision import mark_param_dtype as mark_param_dtype

_HOME = {
    "AutoBridge": "isthmus.bridge",
    "Family": "isthmus.family",
    "HostedModule": "isthmus.hosting.module",
    "Layout": "isthmus.layout",
    "enforce_marked_param_dtypes": "isthmus.precision",
    "mark_param_dtype": "isthmus.precision",
}

__all__ = [
    "AutoBridge",
    "Family",
    "HostedModule",
    "Layout",
    "__version__",
    "enforce_marked_param_dtypes",
    "mark_param_dtype",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
