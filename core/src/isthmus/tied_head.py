"""Checkpoints of a tied model whose prediction block is on another stage than the first.

That stage has the embedding, by which the block and the head both work, and an output layer whose own weight
nothing reads. Megatron 0.19 asserts that there is no such weight, so that neither saving nor loading works.
Here it is one more copy of the embedding, as on a last stage without a block.
"""

import functools
from typing import Any


@functools.cache
def install() -> None:
    """Have Megatron's models describe the weight in this process; a second call does nothing."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    model: Any = LanguageModule
    model.tie_embeddings_and_output_weights_state_dict = _as_without_block(
        model.tie_embeddings_and_output_weights_state_dict
    )


def _as_without_block(original: Any) -> Any:
    @functools.wraps(original)
    def tie(self: Any, *args: Any, **kwargs: Any) -> None:
        block = getattr(self, "mtp_process", False)
        self.mtp_process = False
        try:
            original(self, *args, **kwargs)
        finally:
            self.mtp_process = block

    return tie
