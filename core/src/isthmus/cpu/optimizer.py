"""Adam with the interface of Transformer Engine's FusedAdam: groups, not states, count the steps."""

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2 where `adam_w_mode` is off) with torch's arithmetic and fp32 moments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
        **unsupported: Any,
    ):
        if unsupported or not bias_correction:
            raise ValueError(
                f"Adam on the CPU does not take {', '.join(sorted(unsupported)) or 'bias_correction=False'}: "
                "leave use_precision_aware_optimizer off"
            )
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step") or 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """One step of one parameter, in place."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        gradient = parameter.grad.float()  # pyright: ignore[reportOptionalMemberAccess]
        (beta1, beta2), lr, decay, step = group["betas"], group["lr"], group["weight_decay"], group["step"]
        if decay and self.adam_w_mode:
            parameter.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-lr / (1 - beta1**step))
