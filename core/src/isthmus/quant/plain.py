"""Plain tensors among quantised ones: left as they are, or codes cast to numbers that lost their scale?

No published config lists everything that is plain (DeepSeek-V3 lists nothing; embeddings, norms, routers and
`eh_proj` are plain), so a list alone tells nothing. A tensor is suspect where all of these hold:

- the same tensor of other layers or experts is quantised: same name but for the numbers in it;
- in its own layer other tensors are quantised: releases leave whole layers plain, MTP's or the first ones;
- no entry of the config's lists of exceptions may be meant for it;
- the config is for all linear layers, not for `targets` that it names.
"""

import re
from collections.abc import Iterator, Mapping

from isthmus.checkpoint.header import TensorInfo
from isthmus.quant.codec import Quantised
from isthmus.quant.fields import exceptions, may_name
from isthmus.quant.settings import Settings

_LAYER = re.compile(r".*?\.\d+\.")  # up to the first number


def suspects(
    plain: Mapping[str, TensorInfo], quantised: Mapping[str, Quantised], settings: Settings
) -> Iterator[tuple[str, str]]:
    """Each matrix or stack of the `plain` tensors that should be quantised, and one of its kind that is."""
    if not settings.every_linear:
        return
    kinds = {_kind(name): name for name in quantised}
    naming = exceptions(settings.left)
    layers = {layer for name in quantised if (layer := _layer(name))}
    for name, info in plain.items():
        if len(info.shape) < 2 or not info.dtype.is_floating_point:
            continue
        sibling = kinds.get(_kind(name))
        if sibling is None or _layer(name) not in layers:
            continue
        module = name.removesuffix(".weight")
        if not naming(module) and not any(may_name(entry, module) for entry in settings.left):
            yield name, sibling


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)


def _layer(name: str) -> str | None:
    found = _LAYER.match(name)
    return found[0] if found else None
