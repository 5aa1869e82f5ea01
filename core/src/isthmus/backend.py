"""Whether this process has the modules that `transformer_impl` makes Megatron build a model of.

Megatron itself finds out while it builds, by calling None or asserting.
"""

import importlib.util
from typing import Any


def check_modules(transformer: Any) -> None:
    """ValueError, with what to do, where this TransformerConfig asks for modules that are not there."""
    import isthmus.cpu

    if isthmus.cpu.is_installed():  # has a module for every slot
        return
    impl = transformer.transformer_impl
    if impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "transformer_impl='transformer_engine', and Transformer Engine is not installed. Try: "
            'pip install "transformer_engine[pytorch]"; or, to run on CPU, isthmus.cpu.install() before '
            "megatron is imported"
        )
    if impl != "local" or transformer.normalization != "RMSNorm":
        return
    wanted = {
        "layernorm_zero_centered_gamma": "zero-centred weights",
        "sequence_parallel": "sequence parallelism",
    }
    lacking = " and no ".join(what for field, what in wanted.items() if getattr(transformer, field))
    if lacking:
        raise ValueError(
            f"transformer_impl='local' normalizes by torch's RMSNorm, which has no {lacking}; "
            "use transformer_impl='transformer_engine'"
        )
