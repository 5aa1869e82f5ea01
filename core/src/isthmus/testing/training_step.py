"""One forward, or forward and backward, of a Megatron model on any layout, and what came out at each place.

Megatron's own schedules run the model, so that pipelines, model chunks and gradient reductions are those of a
training run. Hooks record; nothing of the model is changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from isthmus.names import unwrapped
from isthmus.testing.batch import PER_TOKEN, PIXELS, Batch, Inputs
from isthmus.zigzag import order


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
    layout = getattr(getattr(model, "isthmus_model_config", None), "cp_layout", "zigzag")
    held = order(batch.bounds, groups.cp.size(), layout)
    own = held.chunk(groups.cp.size())[groups.cp.rank()]
    feeds: list[dict[str, Any]] = [
        _feed(sequences, batch, torch.arange(batch.row) if batch.inputs else own, device)
        for sequences in microbatches
    ]
    if batch.inputs:
        inputs = batch.vision_inputs(groups.dp.rank(), groups.dp.size())
        feeds = [feed | _vision(each, batch, device) for feed, each in zip(feeds, inputs, strict=True)]
    for chunk in chunks:
        chunk.train(gradients)
        if gradients:
            wrapped: Any = chunk  # Megatron's DDP
            wrapped.zero_grad_buffer()
            unwrapped(chunk).config.finalize_model_grads_func = finalize_model_grads
    with _Recorder(chunks) as recorder, torch.set_grad_enabled(gradients):
        losses = get_forward_backward_func()(
            forward_step_func=_whole_rows if batch.inputs else _forward_step,
            data_iterator=[iter(feeds) for _ in chunks] if len(chunks) > 1 else iter(feeds),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(feeds),
            seq_length=batch.row,
            micro_batch_size=len(feeds[0]["input_ids"]),
            forward_only=not gradients,
        )
    # A rank has its tokens; over all of them, the row's, of which padding is dropped.
    kept = held.argsort()[batch.kept]
    found = recorder.collected(config.mtp_num_layers or 0, model_vocabulary(model), kept)
    return _joined(found, losses, groups, batch)


def model_vocabulary(model: Any) -> int:
    """Rows of the vocabulary without Megatron's padding."""
    return getattr(model, "isthmus_model_config", model).vocab_size


def _vision(inputs: list[Inputs], batch: Batch, device: torch.device) -> dict[str, Tensor | None]:
    """A microbatch's vision inputs, as HF's processor joins those of samples; no `position_ids`."""
    found: dict[str, Tensor | None] = {"position_ids": None}
    for name in dict.fromkeys(name for each in inputs for name in each):
        if not name.endswith(PER_TOKEN):
            found[name] = torch.cat([each[name] for each in inputs if name in each]).to(device)
            continue
        rows = [each[name] for each in inputs]
        if batch.packed:
            lengths = [stop - start for start, stop in batch.bounds]
            rows = [torch.cat([pad(row, (0, n - len(row))) for row, n in zip(rows, lengths, strict=True)])]
        found[name] = torch.stack(rows).to(device)
    return found


def _feed(sequences: list[Tensor], batch: Batch, own: Tensor, device: torch.device) -> dict[str, Any]:
    """Megatron's arguments for one microbatch: of its rows' tokens, the `own` ones.

    Padding counts as its sequence's: causal layers do not let it reach another token, and the loss is masked.
    """

    def row(tokens: list[Tensor]) -> Tensor:
        """(b, s) or, packed, (1, s) of the sequences' tokens, 0 for padding."""
        if not batch.packed:
            return torch.stack(tokens)[:, own].to(device)
        lengths = [stop - start for start, stop in batch.bounds]
        padded = [pad(t, (0, length - len(t))) for t, length in zip(tokens, lengths, strict=True)]
        return torch.cat(padded)[None, own].to(device)

    feed: dict[str, Any] = {
        "input_ids": row([s[:-1] for s in sequences]),
        "labels": row([batch.labels(s) for s in sequences]),
        "position_ids": row([torch.arange(len(s) - 1) for s in sequences]),
        "loss_mask": row([torch.ones(len(s) - 1) for s in sequences]),
        "attention_mask": None,
    }
    if batch.packed:
        from megatron.core.packed_seq_params import PackedSeqParams

        offsets = [0, *(stop for _, stop in batch.bounds)]
        starts = torch.tensor(offsets, dtype=torch.int32, device=device)
        longest = max(stop - start for start, stop in batch.bounds)
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
    feed = next(feeds)
    return model(**feed), partial(_loss, mask=feed["loss_mask"])


def _whole_rows(feeds: Iterator[dict[str, Any]], chunk: nn.Module) -> tuple[Tensor, Any]:
    """The forward step of a vision-language model, which takes whole rows; its losses are of its own."""
    from isthmus.hosting.vision_model import own

    model, feed = unwrapped(chunk), next(feeds)
    mask = own(feed["loss_mask"], model.pg_collection.cp, feed.get("packed_seq_params"))
    given = {name: v for name, v in feed.items() if model.pre_process or not name.startswith(PIXELS)}
    return chunk(**given), partial(_loss, mask=mask)


def _loss(losses: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum over tokens, number of tokens, the sum to report) of the tokens' losses (b, s)."""
    total = (losses.float() * mask).sum()
    return total, mask.sum().to(torch.int), total.detach()


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

    def collected(self, mtp_layers: int, vocabulary: int, kept: Tensor) -> dict[str | int, Tensor]:
        """(T, ...) of this rank's sequences by layer, "logits" or "mtp".

        Collective over the tensor- and context-parallel groups. `kept` are the tokens to keep, in order, of
        those that the context-parallel ranks hold.
        """
        model = self.chunks[0]
        tp, cp = model.pg_collection.tp, model.pg_collection.cp
        sequence_parallel = [(tp, 0)] if model.config.sequence_parallel else []
        found: dict[str | int, Tensor] = {}
        for number, outputs in sorted(self.layers.items()):
            found[number] = _whole(outputs, [*sequence_parallel, (cp, 0)], kept)
        calls = 1 + mtp_layers  # of the head, in each microbatch
        divided = [(tp, -1), (cp, 0)]
        if self.head:
            found["logits"] = _whole(self.head[mtp_layers::calls], divided, kept)[:, :vocabulary]
        if self.head and mtp_layers:
            found["mtp"] = _whole(self.head[0::calls], divided, kept)[:, :vocabulary]
        return found


def _record(into: list[Tensor]) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a backward that recomputes
            # A copy: the pipeline schedule frees what it has sent on.
            into.append(output[0].detach().clone())

    return record


def _whole(outputs: list[Tensor], groups: Sequence[tuple[Any, int]], kept: Tensor) -> Tensor:
    """Outputs (s, b, ...) of the microbatches as (T, ...) on the CPU: gathered over each of `groups`, which
    divides a dim, and then only the `kept` of all s."""
    rows = []
    for output in outputs:
        for group, dim in groups:
            if group.size() > 1:
                parts = [torch.empty_like(output) for _ in range(group.size())]
                dist.all_gather(parts, output.contiguous(), group=group)
                output = torch.cat(parts, dim)
        rows.append(output[kept.to(output.device)].transpose(0, 1).flatten(0, 1).cpu())
    return torch.cat(rows)


def _joined(own: dict[str | int, Tensor], losses: list[Tensor], groups: Any, batch: Batch) -> Recorded | None:
    """The records of all ranks as one, on the first. Collective."""
    from megatron.core import parallel_state

    last, first = parallel_state.is_pipeline_last_stage(ignore_virtual=True), groups.tp.rank() == 0
    total = float(torch.stack(list(losses)).sum()) if last and first else 0.0
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    record = own if first and groups.cp.rank() == 0 else None  # the others have the same
    dist.gather_object((groups.dp.rank(), record, total), everyone)
    if everyone is None:
        return None
    parts: dict[str | int, dict[int, Tensor]] = {}
    for rank, found, _ in everyone:
        for place, tensor in (found or {}).items():
            parts.setdefault(place, {})[rank] = tensor
    whole = {place: torch.cat([t for _, t in sorted(found.items())]) for place, found in parts.items()}
    return Recorded(
        layers={place: whole[place] for place in sorted(p for p in whole if isinstance(p, int))},
        logits=whole.get("logits"),
        mtp_logits=whole.get("mtp"),
        loss=sum(loss for _, _, loss in everyone) / batch.tokens,
    )
