"""One forward, or forward and backward, of a Megatron model on any layout, and what came out at each place.

Megatron's own schedules run the model, so that pipelines, model chunks and gradient reductions are those of a
training run. Hooks record; nothing of the model is changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.names import unwrapped
from isthmus.testing.batch import Batch


@dataclass(slots=True)
class Recorded:
    """What a run gave; T tokens of all sequences in the batch's order, on the CPU of the first rank."""

    layers: dict[int, Tensor] = field(default_factory=dict)  # each decoder layer's output, (T, H)
    logits: Tensor | None = None  # (T, V)
    mtp_logits: Tensor | None = None  # (T, V)
    loss: float = 0.0  # mean over tokens, in nats


def run(chunks: Sequence[nn.Module], batch: Batch, *, gradients: bool) -> Recorded | None:
    """Run the batch through the model; the whole record on the first rank, None elsewhere. Collective.

    With `gradients` the chunks are wrapped in Megatron's DDP, and every parameter's `main_grad` then holds
    the gradient of the mean loss over all tokens, reduced over all ranks. The model's config must have
    `calculate_per_token_loss`, without which Megatron averages over microbatches and ranks.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model = unwrapped(chunks[0])
    groups, config = model.pg_collection, model.config
    microbatches = batch.microbatches(groups.dp.rank(), groups.dp.size())
    device = next(model.parameters()).device
    feeds = [_feed(sequences, batch.packed, groups.cp, device) for sequences in microbatches]
    for chunk in chunks:
        chunk.train(gradients)
        if gradients:
            wrapped: Any = chunk  # Megatron's DDP
            wrapped.zero_grad_buffer()
            unwrapped(chunk).config.finalize_model_grads_func = finalize_model_grads
    with _Recorder(chunks) as recorder, torch.set_grad_enabled(gradients):
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(feeds) for _ in chunks] if len(chunks) > 1 else iter(feeds),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(feeds),
            seq_length=batch.row,
            micro_batch_size=len(feeds[0]["input_ids"]),
            forward_only=not gradients,
        )
    own = recorder.collected(config.mtp_num_layers or 0, model_vocabulary(model), groups.tp)
    place = groups.dp.rank(), groups.cp.rank()
    return _joined(own if groups.tp.rank() == 0 else None, losses, place, batch)


def model_vocabulary(model: Any) -> int:
    """Rows of the vocabulary without Megatron's padding."""
    return getattr(model, "isthmus_model_config", model).vocab_size


def _feed(sequences: list[Tensor], packed: bool, cp_group: Any, device: torch.device) -> dict[str, Any]:
    """Megatron's arguments for one microbatch, this context-parallel rank's part of each row."""
    tokens, labels = [s[:-1] for s in sequences], [s[1:] for s in sequences]
    positions = [torch.arange(len(t)) for t in tokens]
    rank, size = cp_group.rank(), cp_group.size()

    def join(rows: list[Tensor]) -> Tensor:
        row = torch.cat(rows)[None] if packed else torch.stack(rows)
        parts = row.chunk(2 * size, 1)
        return torch.cat([parts[rank], parts[-1 - rank]], 1).to(device) if size > 1 else row.to(device)

    feed: dict[str, Any] = {
        "input_ids": join(tokens),
        "labels": join(labels),
        "position_ids": join(positions),
        "attention_mask": None,
    }
    if packed:
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = torch.tensor([0, *(len(t) for t in tokens)])
        starts = lengths.cumsum(0).to(torch.int32).to(device)
        longest = int(lengths.max())
        feed["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return feed


def _forward_step(feeds: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Tensor, Any]:
    """Megatron's forward step: the chunk's output, and what makes a loss of the last chunk's."""
    return model(**next(feeds)), _loss


def _loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum over tokens, number of tokens, the sum to report) of the tokens' losses (b, s)."""
    total = losses.float().sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int, device=losses.device), total.detach()


class _Recorder:
    """Hooks on the decoder layers and the head of this rank's chunks, while it is entered."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.chunks = [unwrapped(chunk) for chunk in chunks]
        self.layers: dict[int, list[Tensor]] = {}
        self.head: list[Tensor] = []  # of each microbatch: MTP logits, then the main ones
        self.handles: list[Any] = []

    def __enter__(self) -> "_Recorder":
        for chunk in self.chunks:
            for layer in chunk.decoder.layers:
                into = self.layers.setdefault(layer.layer_number - 1, [])
                self.handles.append(layer.register_forward_hook(_record(into)))
            if getattr(chunk, "output_layer", None) is not None and chunk.post_process:
                self.handles.append(chunk.output_layer.register_forward_hook(_record(self.head)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def collected(self, mtp_layers: int, vocabulary: int, tp_group: Any) -> dict[str | int, Tensor]:
        """(T, ...) of this rank's sequences by layer, "logits" or "mtp". Collective over `tp_group`."""
        sequence_parallel = self.chunks[0].config.sequence_parallel
        found: dict[str | int, Tensor] = {}
        for number, outputs in sorted(self.layers.items()):
            found[number] = _whole(outputs, 0, tp_group if sequence_parallel else None)
        calls = 1 + mtp_layers  # of the head, in each microbatch
        if self.head:
            found["logits"] = _whole(self.head[mtp_layers::calls], -1, tp_group)[:, :vocabulary]
        if self.head and mtp_layers:
            found["mtp"] = _whole(self.head[0::calls], -1, tp_group)[:, :vocabulary]
        return found


def _record(into: list[Tensor]) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        # A copy: the pipeline schedule frees what it has sent on.
        into.append(output[0].detach().clone())

    return record


def _whole(outputs: list[Tensor], dim: int, group: Any) -> Tensor:
    """Outputs (s, b, ...) of the microbatches, gathered along `dim` over `group`, as (T, ...) on the CPU."""
    rows = []
    for output in outputs:
        parts = [output]
        if group is not None and group.size() > 1:
            parts = [torch.empty_like(output) for _ in range(group.size())]
            dist.all_gather(parts, output.contiguous(), group=group)
        rows.append(torch.cat(parts, dim).transpose(0, 1).flatten(0, 1).cpu())
    return torch.cat(rows)


def _joined(
    own: dict[str | int, Tensor] | None, losses: list[Tensor], rank: tuple[int, int], batch: Batch
) -> Recorded | None:
    """The records of all ranks as one, on the first; `rank` is (data, context parallel). Collective."""
    from megatron.core import parallel_state

    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    total = float(torch.stack(list(losses)).sum()) if last and own is not None else 0.0
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((rank, own, total), everyone)
    if everyone is None:
        return None
    parts: dict[str | int, dict[int, dict[int, Tensor]]] = {}
    for (dp_rank, cp_rank), found, _ in everyone:
        for place, tensor in (found or {}).items():
            parts.setdefault(place, {}).setdefault(dp_rank, {})[cp_rank] = tensor
    whole = {
        place: torch.cat([_ends_joined(shares, batch.row) for _, shares in sorted(found.items())])
        for place, found in parts.items()
    }
    return Recorded(
        layers={place: whole[place] for place in sorted(p for p in whole if isinstance(p, int))},
        logits=whole.get("logits"),
        mtp_logits=whole.get("mtp"),
        loss=sum(loss for _, _, loss in everyone) / batch.tokens,
    )


def _ends_joined(shares: dict[int, Tensor], length: int) -> Tensor:
    """(T, ...) of whole sequences of `length` tokens from context-parallel shares by rank."""
    size = len(shares)
    if size == 1:
        return shares[0]
    halves = [shares[rank].unflatten(0, (-1, 2, length // (2 * size))) for rank in range(size)]
    order = [half[:, 0] for half in halves] + [half[:, 1] for half in reversed(halves)]
    return torch.stack(order, 1).flatten(0, 2)
