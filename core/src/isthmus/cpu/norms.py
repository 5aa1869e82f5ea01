"""LayerNorm and RMSNorm with Transformer Engine's arithmetic: all in fp32, one rounding at the end."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kind: str,
    eps: float,
    zero_centered: bool,
) -> torch.Tensor:
    """Normalise `x` (..., H) over its last dim; zero-centred weights are added to one, in fp32."""
    scale = weight.float() + 1 if zero_centered else weight.float()
    full = x.float()
    if kind == "RMSNorm":
        out = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps) * scale
    else:
        out = F.layer_norm(full, full.shape[-1:], scale, None if bias is None else bias.float(), eps)
    return out.to(x.dtype)


def norm_parameters(
    config: TransformerConfig, hidden_size: int
) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """Weight and bias (None for RMSNorm), marked so that sequence parallelism sums their gradients.

    Raises:
        ValueError: `config.normalization` is neither LayerNorm nor RMSNorm.
    """
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(
            f"normalization={config.normalization!r}: only LayerNorm and RMSNorm have a CPU module"
        )
    options: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
    initial = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(initial(hidden_size, **options))
    bias = (
        torch.nn.Parameter(torch.zeros(hidden_size, **options))
        if config.normalization == "LayerNorm"
        else None
    )
    for parameter in (weight, bias):
        if parameter is not None:  # read by distributed/finalize_model_grads
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return weight, bias


class Norm(torch.nn.Module):
    """In TENorm's slot: `weight`, and `bias` for LayerNorm. (..., H) -> (..., H)."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        has_residual: bool = False,
        **_: Any,
    ):
        super().__init__()
        if has_residual and config.fused_residual_rmsnorm:
            raise ValueError(
                "fused_residual_rmsnorm=True needs Transformer Engine: set it to False on the CPU"
            )
        self.kind, self.eps, self.zero_centered = (
            config.normalization,
            eps,
            config.layernorm_zero_centered_gamma,
        )
        self.weight, self.bias = norm_parameters(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(
            x, self.weight, self.bias, kind=self.kind, eps=self.eps, zero_centered=self.zero_centered
        )

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.weight.numel()}, eps={self.eps}, zero_centered={self.zero_centered}"
