"""Qwen3.5 with its vision tower computes what HF's does, gradients of the tower included, on every layout."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isthmus.bridge import AutoBridge
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.hosting.vision_config import PARTS
from isthmus.layout import Layout
from isthmus.names import unwrapped
from isthmus.testing import ranks, reference, training_step
from isthmus.testing.batch import random_batch
from isthmus.testing.files import tensors
from isthmus.testing.numerics import FLOAT32, rel_rms
from isthmus.testing.proof import prove
from isthmus.testing.tower import features_one_token_late
from isthmus.testing.verify import SAMPLES, Request
from isthmus_qwen3_5.samples import sample

GRADIENTS = Request(grads=True)
# Two data-parallel ranks of two microbatches of two: the second rank has no image at all.
ON_ONE_RANK = ("image", "video", "text", "images", *4 * ("text",))


def proof(folder: Path, layout: Layout, request: Request, mutation: str = "") -> dict[str, Any]:
    layout = layout.resolved()
    return ranks.run(layout.world_size, on_rank, folder, layout, request, mutation)[0]


def on_rank(folder: Path, layout: Layout, request: Request, mutation: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[mutation](patch)
        return prove(folder, layout, request)


@pytest.mark.parametrize(
    ("variant", "layout", "request_"),
    [
        ("vision", Layout(tp=2, sp=False), GRADIENTS),
        ("vision_tied", Layout(pp=2, vp=2), GRADIENTS),
        ("vision_moe_fused_experts", Layout(ep=2), GRADIENTS),
        ("vision", Layout(tp=2, cp=2), GRADIENTS),
        ("vision_moe", Layout(tp=2, etp=2), replace(GRADIENTS, overrides={"delta_net": "megatron"})),
        ("vision", Layout(tp=2), replace(GRADIENTS, packed=True)),
        ("vision", Layout(cp=2), replace(GRADIENTS, packed=True)),
        ("vision", Layout(dp=2), replace(GRADIENTS, samples=ON_ONE_RANK)),
        ("vision", Layout(tp=2), replace(GRADIENTS, samples=("text",))),
        ("vision", Layout(cp=2), replace(GRADIENTS, samples=("both", "image"))),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces(
    checkpoints: Callable[[str], Path], variant: str, layout: Layout, request_: Request
) -> None:
    document = proof(checkpoints(variant), layout, request_)
    assert document["failures"] == []
    assert document["passed"]
    assert document["roundtrip"]["bitwise_equal"]
    assert document["coverage"]["passed_through"] == []
    # Every tensor of the files is compared, the tower's among them; HF stacks experts.
    trained = {
        re.sub(r"experts\.\d+\.(gate|up|(down))_proj\.weight", r"experts.\2", name)
        for name in tensors(checkpoints(variant))
    }
    assert document["gradients"]["params"] == len(trained)
    assert document["gradients"]["zero"] == []


def height_and_width_swapped(patch: pytest.MonkeyPatch) -> None:
    from isthmus_qwen3_5 import vision

    original = vision.positions

    def swapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs)[[0, 2, 1]]

    patch.setattr(vision, "positions", swapped)


def gradients_not_summed(patch: pytest.MonkeyPatch) -> None:
    from isthmus.hosting import vision_model

    def alone(features: torch.Tensor, group: Any) -> torch.Tensor:
        return features

    patch.setattr(vision_model, "copy_to_tensor_model_parallel_region", alone)


def gradients_of_one_context_rank(patch: pytest.MonkeyPatch) -> None:
    from isthmus_qwen3_5.vision import Qwen35Model

    original = Qwen35Model.features

    def detached(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        found = original(self, input_ids, **inputs)
        return found and (found[0] if dist.get_rank() == 0 else found[0].detach(), found[1])

    patch.setattr(Qwen35Model, "features", detached)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda patch: None,
    "place": partial(features_one_token_late, model="isthmus_qwen3_5.vision:Qwen35Model"),
    "axes": height_and_width_swapped,
    "tp": gradients_not_summed,
    "cp": gradients_of_one_context_rank,
}


@pytest.mark.parametrize(
    ("mutation", "layout", "wrong"),
    [
        ("place", Layout(), "logits"),
        ("axes", Layout(), "logits"),
        ("tp", Layout(tp=2), "gradients"),
        ("cp", Layout(cp=2), "gradients"),
    ],
    ids=str,
)
def test_a_mistake_is_found(
    checkpoints: Callable[[str], Path], mutation: str, layout: Layout, wrong: str
) -> None:
    document = proof(checkpoints("vision"), layout, GRADIENTS, mutation)
    assert any(line.startswith(wrong) for line in document["failures"]), document["failures"]


def train(folder: Path, layout: Layout, out: Path, freeze: list[str]) -> dict[str, Any]:
    """A step of Adam in bf16, then an export; what of the tower differs from tensor-parallel rank 0's."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    fields = {"freeze": freeze, "calculate_per_token_loss": True, **layout.config_overrides()}
    chunks = bridge.build_model(bridge.get_model_config(**fields), wrap_with_ddp=True)
    bridge.load_hf_weights(chunks)
    options = OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(options, chunks)
    place = partial(sample, bridge.hf_config)
    batch = random_batch(
        140, tokens=32, seed=0, ranks=1, microbatches=2, packed=False, sample=place, kinds=SAMPLES
    )
    training_step.run(chunks, batch, gradients=True)
    optimizer.step()
    model = unwrapped(chunks[0])
    differ = []
    for name, parameter in getattr(model, "vision_model", torch.nn.Module()).named_parameters():
        first = parameter.data.clone()
        dist.broadcast(first, group=model.pg_collection.tp, group_src=0)
        if not torch.equal(first, parameter):
            differ.append(name)
    buffers = {b.dtype for b in getattr(model, "vision_model", torch.nn.Module()).buffers()}
    bridge.save_hf_pretrained(chunks, out)
    return {"differ": differ, "buffers": buffers}


@pytest.mark.parametrize(
    ("layout", "freeze", "changed"),
    [
        (Layout(tp=2), ["vision"], {"projector", "language"}),
        (Layout(pp=2), ["language"], {"vision", "projector"}),  # of the second stage, all
        (Layout(tp=2), [], {*PARTS}),
    ],
    ids=["vision", "language", "nothing"],
)
def test_frozen_parts_are_exported_as_they_were_and_the_others_trained(
    checkpoints: Callable[[str], Path], tmp_path: Path, layout: Layout, freeze: list[str], changed: set[str]
) -> None:
    source, out = checkpoints("vision"), tmp_path / "out"
    found = ranks.run(2, train, source, layout.resolved(), out, freeze)
    assert [rank["differ"] for rank in found] == [[], []]  # copies are bitwise equal
    assert found[0]["buffers"] == {torch.float32}  # rotary frequencies of a bf16 tower
    with CheckpointReader(source) as before, CheckpointReader(out) as after:
        assert before.tensors.keys() == after.tensors.keys()
        moved = {
            _part(name)
            for name in before.tensors
            if not torch.equal(before.slice(name), after.slice(name)) and not name.startswith("mtp.")
        }
    assert moved == changed


def _part(name: str) -> str:
    if name.startswith("model.visual."):
        return "projector" if ".merger." in name else "vision"
    return "language"


def import_(folder: Path, layout: Layout, megatron: Path) -> None:
    layout.initialize()
    AutoBridge.from_hf_pretrained(folder).import_ckpt(megatron)


def export(megatron: Path, layout: Layout, out: Path) -> None:
    layout.initialize()
    bridge = AutoBridge.from_megatron(megatron)
    bridge.export_ckpt(megatron, out)


def test_a_megatron_checkpoint_has_the_tower_once_and_is_exported_at_another_layout(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    source, megatron, out = checkpoints("vision_moe"), tmp_path / "megatron", tmp_path / "out"
    ranks.run(2, import_, source, Layout(tp=2).resolved(), megatron)
    assert "vision_language_spec" in (megatron / "megatron_args.txt").read_text()
    ranks.run(2, export, megatron, Layout(pp=2).resolved(), out)
    with CheckpointReader(source) as before, CheckpointReader(out) as after:
        outcome = compare(before, after)
        assert outcome.equal == len(before.tensors)
        assert not outcome.added
    reference.load(out, torch.float32, vision=True)  # strictly, as ForConditionalGeneration


def tower_gradients(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Of two microbatches in all, reduced while the backward runs; only the first has images."""
    from megatron.core.distributed import DistributedDataParallelConfig

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(
        params_dtype=torch.float32, calculate_per_token_loss=True, **layout.config_overrides()
    )
    overlapped = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=layout.dp > 1, average_in_collective=False
    )
    chunks = bridge.build_model(config, wrap_with_ddp=True, ddp_config=overlapped)
    bridge.load_hf_weights(chunks)
    count = 2 // layout.dp
    batch = random_batch(
        140,
        tokens=32,
        seed=0,
        ranks=layout.dp,
        microbatches=count,
        packed=False,
        sample=partial(sample, bridge.hf_config),
        kinds=("image", "video", "text", "text"),
    )
    training_step.run(chunks, batch, gradients=True)
    tower = unwrapped(chunks[0]).vision_model
    return {name: parameter.main_grad.clone() for name, parameter in tower.named_parameters()}


def test_a_rank_without_images_takes_part_in_reductions_that_overlap_the_backward(
    checkpoints: Callable[[str], Path],
) -> None:
    folder = checkpoints("vision")
    alone = ranks.run(1, tower_gradients, folder, Layout().resolved())[0]
    first, second = ranks.run(2, tower_gradients, folder, Layout(dp=2).resolved())
    assert all(gradient.any() for gradient in alone.values())
    for name, gradient in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert rel_rms(first[name], gradient) < FLOAT32.worst_gradient, name


def single_rows(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Logits, Megatron's and HF's, of single rows by what is special in their inputs; refusals on the way."""
    from megatron.core.packed_seq_params import PackedSeqParams

    Layout().resolved().initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(params_dtype=torch.float32), wrap_with_ddp=False)
    bridge.load_hf_weights(model)
    hf = reference.load(folder, torch.float32, vision=True).hf
    ids = torch.arange(1, 17)[None]
    spread = torch.stack([torch.arange(16) * step for step in (1, 2, 3)])[:, None]
    mask = torch.ones_like(ids)
    # Two frames, which no processor gives of an image, and token ids that are not int64.
    image = torch.full((8,), bridge.hf_config["image_token_id"])
    frames = torch.cat([ids[0, :4], image, ids[0, 4:]])[None].int()
    inputs = {
        "pixel_values": torch.randn(32, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": (frames == image[0]).int(),
    }
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    short = PackedSeqParams("thd", ends, ends, max_seqlen_q=6, max_seqlen_kv=6)
    found = {}
    with torch.no_grad():
        mine = model[0](ids, attention_mask=mask, position_ids=spread)
        found["positions"] = mine, hf(input_ids=ids, position_ids=spread).logits
        mine = model[0](frames, **inputs)
        found["frames"] = mine, hf(input_ids=frames.long(), **inputs).logits
        for kind, message, change in (
            (ValueError, r"attention_mask has padding in sample 0, .*: pack", {"attention_mask": mask - 1}),
            (ValueError, r"labels is \(1, 8\), expected \(1, 16\)", {"labels": ids[:, :8]}),
            (ValueError, r"position_ids of row 0 are not 0, 1, 2", {"position_ids": ids}),
            (ValueError, "last boundary at 12, the row 16 tokens", {"packed_seq_params": short}),
            (ValueError, r"input_ids is \(16,\)", {"input_ids": ids[0]}),
            (
                ValueError,
                r"pixel_values is \(16, 95\), expected .*, 96",
                {"pixel_values": torch.ones(16, 95)},
            ),
            (LookupError, r"no argument 'image_grid'; it has .*image_grid_thw", {"image_grid": ids}),
        ):
            with pytest.raises(kind, match=message):
                model[0](**{"input_ids": ids, **change})
    return found


def test_a_row_of_any_inputs_gives_what_hugging_face_gives_or_is_refused(
    checkpoints: Callable[[str], Path],
) -> None:
    for found, expected in ranks.run(1, single_rows, checkpoints("vision"))[0].values():
        assert rel_rms(found, expected) < FLOAT32.forward
