"""Megatron's multi-token prediction loss, exact under context parallelism.

Megatron 0.19 divides the loss by the number of tokens that *this rank* predicts. Rolling labels takes a token
from every sequence's end, which one context-parallel rank holds: its tokens then weigh more than the others',
and the gradient is not that of one process (grad norm off by 3e-3 at 32 tokens). Here the tokens of all
ranks of a sequence are counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Have Megatron's GPTModel use the loss below in this process; a second call does nothing."""
    from megatron.core.models.gpt import gpt_model

    original = gpt_model.process_mtp_loss
    if not hasattr(original, "without_isthmus"):
        gpt_model.process_mtp_loss = _instead_of(original)


def _instead_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def process_mtp_loss(*, cp_group: Any = None, packed_seq_params: Any = None, **given: Any) -> Tensor:
        _refuse_gaps(packed_seq_params)
        given |= {"cp_group": cp_group, "packed_seq_params": packed_seq_params}
        if cp_group is None or cp_group.size() == 1:
            return original(**given)
        return loss_over_context_parallel_ranks(**given)

    process_mtp_loss.without_isthmus = original  # type: ignore[attr-defined]
    return process_mtp_loss


def loss_over_context_parallel_ranks(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., Any],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any,
    tp_group: Any = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
    input_ids: Tensor | None = None,
) -> Tensor:
    """The decoder's part of `hidden_states` (s x (1 + depth), b, h), the loss attached to its backward.

    In place of Megatron's function of the same arguments; collective over `cp_group`. Each depth's loss
    weighs `mtp_loss_scaling_factor / mtp_num_layers` times its mean over the tokens of all ranks, in the
    units of the main loss: its sum over tokens with `calculate_per_token_loss`, else its mean.
    """
    import megatron.core.transformer.multi_token_prediction as mtp

    def rolled(tensor: Tensor) -> Tensor:
        given: Any = {"cp_group": cp_group, "packed_seq_params": packed_seq_params}
        found: Any = mtp.roll_tensor(tensor, shifts=-1, dims=-1, **given)
        return found[0]

    def over_ranks(tensor: Tensor) -> Tensor:
        total = tensor.sum().float()
        torch.distributed.all_reduce(total, group=cp_group)
        return total

    main, *depths = hidden_states.chunk(1 + config.mtp_num_layers)
    from_ids = labels is None
    if labels is None:
        if input_ids is None:
            return main
        labels = rolled(input_ids)
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    if from_ids:
        mask = rolled(mask)  # the last label of a sequence is made up
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()  # type: ignore[attr-defined]
    main_tokens = over_ranks(mask)
    for depth, hidden in enumerate(depths):
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels, mask = rolled(labels), rolled(mask)
        tokens = over_ranks(mask).clamp(min=1)
        losses = mask * compute_language_model_loss(labels, logits)
        if is_training:
            counts = mtp._compute_mtp_acceptance_counts(
                logits, labels, mask, output_layer, runtime_gather_output, tp_group
            )
            _log(losses.sum() * cp_group.size() / tokens, *counts, depth, config)
        weight = config.mtp_loss_scaling_factor / config.mtp_num_layers / tokens
        # Afterwards Megatron divides by the main loss's tokens over all ranks, or averages over the ranks.
        weight = weight * (main_tokens if config.calculate_per_token_loss else cp_group.size())
        main = mtp.MTPLossAutoScaler.apply(main, weight * losses)
    return main


def _log(loss: Tensor, correct: Tensor, total: Tensor, depth: int, config: Any) -> None:
    """Add to what Megatron logs, which it averages over data- and context-parallel ranks."""
    import megatron.core.transformer.multi_token_prediction as mtp
    from megatron.core import parallel_state

    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mtp.MTPLossLoggingHelper.save_metrics_to_tracker(
        loss, correct, total, depth, config.mtp_num_layers, avg_group=group
    )


def _refuse_gaps(packed: Any) -> None:
    """ValueError where padding stands between packed sequences that `cu_seqlens_q` does not count."""
    if packed is None or packed.cu_seqlens_q_padded is None:
        return
    if not torch.equal(packed.cu_seqlens_q_padded, packed.cu_seqlens_q):
        raise ValueError(
            "Megatron rolls the labels of packed sequences by cu_seqlens_q, which here does not count the "
            "padding between them: the prediction loss would take a neighbour's tokens. Give the padded "
            "offsets as cu_seqlens_q and mask the padding in the loss, or build with mtp_num_layers=None"
        )
