"""A tiny checkpoint's way into Megatron, through some training, and back: the engine of `isthmus demo`.

Two jobs: `train` runs on every rank of a layout, `reference_logits` on one process with transformers alone.
What they found is compared by `checks`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.bridge import AutoBridge
from isthmus.checkpoint.compare import Comparison, compare
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing import reference, training_step
from isthmus.testing.batch import Batch, random_batch
from isthmus.testing.numerics import FLOAT32, argmax_agreement, rel_rms, within

type Watch = Callable[[str], AbstractContextManager[None]]  # times a stage

TOKENS = 16  # of a sequence
LEARNING_RATE = 5e-3
LEARNED = 0.8  # of the first loss, at most, must be left at the end


@dataclass(frozen=True, slots=True)
class Stops:
    """The folders along the way."""

    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "hf"

    @property
    def megatron(self) -> Path:
        return self.folder / "megatron"

    @property
    def returned(self) -> Path:
        """Exported again before any training."""
        return self.folder / "hf-returned"

    @property
    def trained(self) -> Path:
        return self.folder / "hf-trained"


@dataclass(slots=True)
class Journey:
    """What happened on the ranks."""

    tensors: int  # of the HF checkpoint, all loaded
    logits: Tensor  # (T, V) before training
    losses: list[float]  # of every step, before its update; mean over tokens, in nats
    trained_logits: Tensor  # (T, V)


def train(layout: Layout, stops: Stops, steps: int, watch: Watch) -> Journey | None:
    """Import, export, train, export; what happened, on the first rank. Collective."""
    bridge = AutoBridge.from_hf_pretrained(stops.source)
    config = bridge.get_model_config(
        **layout.config_overrides(), params_dtype=torch.float32, calculate_per_token_loss=True
    )
    with watch("build"):
        chunks = bridge.build_model(config, wrap_with_ddp=True, ddp_config=_ddp())
    with watch("import"):
        report = bridge.import_ckpt(stops.megatron, chunks)
    with watch("export"):
        bridge.save_hf_pretrained(chunks, stops.returned)
    batch = fixed_batch(bridge, layout)
    with watch("train"):
        before = training_step.run(chunks, batch, gradients=False)
        losses = _steps(chunks, batch, steps)
        after = training_step.run(chunks, batch, gradients=False)
    with watch("export_trained"):
        bridge.save_hf_pretrained(chunks, stops.trained)
    if before is None or after is None:
        return None
    assert before.logits is not None
    assert after.logits is not None
    return Journey(report.hf_tensors, before.logits, [*losses, after.loss], after.logits)


def fixed_batch(bridge: AutoBridge, layout: Layout) -> Batch:
    """The same few sequences for every step, and for transformers."""
    rows = bridge.megatron_fields["vocab_size"]
    return random_batch(
        rows, tokens=TOKENS, seed=0, ranks=layout.dp, microbatches=max(2, layout.pp), packed=False
    )


def _ddp() -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)


def _steps(chunks: Sequence[nn.Module], batch: Batch, steps: int) -> list[float]:
    """Steps of Megatron's schedule, DDP and distributed Adam; the losses, on the first rank."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    adam = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, use_distributed_optimizer=True, clip_grad=1.0)
    models: list[Any] = list(chunks)  # MegatronModules
    optimizer = get_megatron_optimizer(adam, models)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        recorded = training_step.run(chunks, batch, gradients=True)
        optimizer.step()
        if recorded is not None:
            losses.append(recorded.loss)
    return losses


def reference_logits(layout: Layout, stops: Stops) -> tuple[Tensor, Tensor]:
    """transformers' logits of the source and of the trained export, each (T, V), loaded strictly."""
    batch = fixed_batch(AutoBridge.from_hf_pretrained(stops.source), layout)
    return tuple(
        reference.run(reference.load(folder, torch.float32), batch, gradients=False).logits
        for folder in (stops.source, stops.trained)
    )  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    what: str
    result: str
    bound: str
    passed: bool


def checks(stops: Stops, journey: Journey, references: tuple[Tensor, Tensor]) -> list[Check]:
    """Everything that must hold for the journey to have been a good one."""
    untouched, moved = _compare(stops.source, stops.returned), _compare(stops.source, stops.trained)
    changed = sum(what == "bits" for what in moved.differing.values())
    first, last = journey.losses[0], journey.losses[-1]
    total = journey.tensors
    return [
        Check(
            "HF -> Megatron -> HF, untrained",
            f"{untouched.equal} of {total} tensors bitwise equal",
            "all",
            _same_names(untouched) and untouched.equal == total,
        ),
        _logits("logits, Megatron and transformers", journey.logits, references[0]),
        Check(
            f"loss after {len(journey.losses) - 1} steps",
            f"{first:.3f} -> {last:.3f}",
            f"{LEARNED * first:.3f}",
            last <= LEARNED * first,
        ),
        Check(
            "trained export, names, dtypes and shapes",
            f"those of the source; {changed} of {total} tensors trained",
            "same",
            _same_names(moved) and changed + moved.equal == total and changed > 0,
        ),
        _logits("logits after training, reloaded", journey.trained_logits, references[1]),
    ]


def _compare(first: Path, second: Path) -> Comparison:
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        return compare(a, b)


def _same_names(outcome: Comparison) -> bool:
    return not outcome.missing and not outcome.added


def _logits(what: str, found: Tensor, expected: Tensor) -> Check:
    apart = rel_rms(found, expected)
    same = argmax_agreement(found, expected)
    result = f"rel RMS {apart:.1e}, same next token for {same:.0%}"
    return Check(what, result, f"{FLOAT32.forward:.0e}", within(apart, FLOAT32.forward))
