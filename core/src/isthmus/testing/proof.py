"""`verify` as tests ask for it: a checkpoint's document, at a layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.verify import Request, verify


def proof(folder: Path, layout: Layout, request: Request) -> dict[str, Any]:
    """The document, from workers; skips the test where the device cannot build what `request` asks for."""
    ranks.skip_unbuildable(request.overrides)
    layout = layout.resolved()
    return ranks.run(layout.world_size, prove, folder, layout, request)[0]


def prove(
    folder: Path,
    layout: Layout,
    request: Request,
    mistake: Callable[[AutoBridge], None] | None = None,
) -> dict[str, Any]:
    """The document, in a worker: of a bridge that `mistake` is made in first. Collective."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    if mistake is not None:
        mistake(bridge)
    return verify(bridge, layout, request)
