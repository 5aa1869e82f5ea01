"""Gemma 3 with its vision tower computes what HF's does, gradients of the tower included, on every layout."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.bridge import AutoBridge
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.hosting.vision_config import PARTS
from isthmus.layout import Layout
from isthmus.testing import ranks, reference, training_step
from isthmus.testing.batch import random_batch
from isthmus.testing.numerics import FLOAT32, rel_rms
from isthmus.testing.proof import proof
from isthmus.testing.tower import features_one_token_late
from isthmus.testing.verify import SAMPLES, Request, verify
from isthmus_gemma_vl.samples import sample

GRADIENTS = Request(grads=True)
ON_ONE_RANK = ("image", "images", *6 * ("text",))


@pytest.mark.parametrize(
    ("variant", "layout", "request_"),
    [
        ("vision", Layout(tp=2, pp=2), GRADIENTS),
        ("vision_untied", Layout(pp=2, vp=2), GRADIENTS),
        ("vision", Layout(tp=2), replace(GRADIENTS, packed=True)),
        (
            "vision",
            Layout(dp=2),
            replace(GRADIENTS, samples=ON_ONE_RANK, overrides={"transformer_impl": "local"}),
        ),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces(
    checkpoints: Callable[[str], Path], variant: str, layout: Layout, request_: Request
) -> None:
    layout = layout.resolved()
    document = proof(checkpoints(variant), layout, request_)
    assert document["failures"] == []
    assert document["passed"]
    assert document["roundtrip"]["bitwise_equal"]
    assert document["coverage"]["passed_through"] == []
    # A bias of all keys moves all scores of a query alike.
    assert document["gradients"]["zero"] == [
        f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias" for i in range(2)
    ]


def test_an_image_token_that_the_vocabulary_lacks_and_a_tower_with_dropout(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "beyond"
    shutil.copytree(checkpoints("vision"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_index": 400, "boi_token_index": 401}
    config["vision_config"]["attention_dropout"] = 0.5  # off in both of verify's models
    (folder / "config.json").write_text(json.dumps(config))
    document = proof(folder, Layout(), GRADIENTS)
    assert document["failures"] == []
    assert document["passed"]


def features_scaled_like_embeddings(patch: pytest.MonkeyPatch) -> None:
    from isthmus_gemma_vl.vision import Gemma3Model

    original = Gemma3Model.features

    def scaled(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        found = original(self, input_ids, **inputs)
        return found and (found[0] * self.config.mup_embedding_mult, found[1])

    patch.setattr(Gemma3Model, "features", scaled)


def causal(patch: pytest.MonkeyPatch) -> None:
    from isthmus_gemma_vl.vision import Gemma3Model

    patch.setattr(Gemma3Model, "mask", lambda self, ids, row, mask: None)


def no_window_within_an_image(patch: pytest.MonkeyPatch) -> None:
    from isthmus_gemma_vl import masked

    patch.setattr(masked, "windowed", lambda mask, before: mask)


MUTATIONS = {
    "as it is": lambda patch: None,
    "place": partial(features_one_token_late, model="isthmus_gemma_vl.vision:Gemma3Model"),
    "scale": features_scaled_like_embeddings,
    "causal": causal,
    "window": no_window_within_an_image,
}


def mutated(folder: Path, layout: Layout) -> dict[str, list[str]]:
    layout.initialize()
    found = {}
    for name, mutate in MUTATIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            found[name] = verify(AutoBridge.from_hf_pretrained(folder), layout, Request())["failures"]
    return found


def test_a_mistake_is_found(checkpoints: Callable[[str], Path]) -> None:
    found = ranks.run(1, mutated, checkpoints("vision"), Layout().resolved())[0]
    assert found.pop("as it is") == []
    assert [name for name, failures in found.items() if not failures] == []


def foreign(folder: Path, layout: Layout) -> float:
    """Relative RMS of the logits from HF's."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    chunks = bridge.build_model(bridge.get_model_config(params_dtype=torch.float32))
    bridge.load_hf_weights(chunks)
    generator = torch.Generator().manual_seed(0)
    tokens, inputs = sample(
        bridge.hf_config, torch.randint(150, (33,), generator=generator), "images", generator
    )
    given: dict[str, Any] = {"input_ids": tokens[None, :-1], "pixel_values": inputs["pixel_values"]}
    given["token_type_ids"] = inputs["token_type_ids"][None]
    assert tokens.max() == 160
    hf = reference.load(folder, torch.float32, vision=True).hf
    with torch.no_grad():
        return rel_rms(chunks[0](**given), hf(**given).logits)


def test_an_image_token_may_be_none_of_the_vocabularys(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints("vision"), tmp_path / "foreign"))
    raw = json.loads((folder / "config.json").read_text())
    assert raw["text_config"]["vocab_size"] == 160
    (folder / "config.json").write_text(json.dumps(raw | {"image_token_index": 160}))
    assert ranks.run(1, foreign, folder, Layout().resolved())[0] < FLOAT32.forward


def train(folder: Path, layout: Layout, out: Path, freeze: list[str]) -> None:
    """A step of Adam in bf16, then an export."""
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
        150, tokens=32, seed=0, ranks=1, microbatches=2, packed=False, sample=place, kinds=SAMPLES
    )
    training_step.run(chunks, batch, gradients=True)
    optimizer.step()
    bridge.save_hf_pretrained(chunks, out)


@pytest.mark.parametrize(
    ("freeze", "changed"),
    [(["vision"], {"projector", "language"}), (["vision", "projector"], {"language"}), ([], {*PARTS})],
    ids=["vision", "vision-and-projector", "nothing"],
)
def test_frozen_parts_are_exported_as_they_were_and_the_others_trained(
    checkpoints: Callable[[str], Path], tmp_path: Path, freeze: list[str], changed: set[str]
) -> None:
    source, out = checkpoints("vision"), tmp_path / "out"
    ranks.run(1, train, source, Layout().resolved(), out, freeze)
    with CheckpointReader(source) as before, CheckpointReader(out) as after:
        assert before.tensors.keys() == after.tensors.keys()
        moved = {
            _part(name) for name in before.tensors if not torch.equal(before.slice(name), after.slice(name))
        }
    assert moved == changed


def _part(name: str) -> str:
    parts = {"vision_tower": "vision", "multi_modal_projector": "projector", "language_model": "language"}
    return parts[name.split(".")[0]]
