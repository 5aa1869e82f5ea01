"""The norm of a latent, in Megatron's layers."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus_deepseek.latent import LATENT_NORM_EPS


class LatentNorm:
    """Builds `norm` with the epsilon of HF's latent norms, whatever the model's is.

    A class because Megatron's specs hold classes; what it builds is an instance of `norm`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, *, norm: Any) -> Any:
        return norm(config=config, hidden_size=hidden_size, eps=LATENT_NORM_EPS)
