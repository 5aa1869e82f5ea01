"""How much memory an import and an export take beside the model's own parameters."""

import gc
import re
from pathlib import Path

import pytest
import torch

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.tiny import Variant
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import tiny_config

pytestmark = ranks.cpu_only

# A bf16 checkpoint of some 100 MB in tensors of up to 33 MB; all experts of a layer are one.
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
LEAST = 100e6  # bytes of the checkpoint
# Of the checkpoint, in anonymous memory: a copy of it all would be 1, one of all experts of a layer 0.09.
# Loading copies from mapped files into the parameters. Exporting writes rows from the parameters; what is
# divided by columns is put together expert by expert.
MOST = 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "hf"
    write_tiny(FAMILY, folder, Variant(tiny_config(**SIZES), fused_experts=True), dtype=torch.bfloat16)
    return folder


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def growth(folder: Path, out: Path, layout: Layout) -> dict[str, float]:
    """The most that this rank's anonymous memory grew by during a load and an export, in bytes."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    for parameter in model[0].parameters():
        parameter.data.fill_(1.0)  # memory that was never written is not counted
    gc.collect()
    most = {}
    for name in ("load", "export"):
        seen = [before := anonymous()]

        def look(nbytes: int, seen: list[int] = seen) -> None:
            seen.append(anonymous())

        if name == "load":
            bridge.load_hf_weights(model, advance=look)
        else:
            bridge.save_hf_pretrained(model, out, advance=look)
        look(0)
        assert len(seen) > 20, "a look at each tensor"
        most[name] = max(seen) - before
    return most


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(ep=2)], ids=["tp2", "ep2"])
def test_weights_pass_through_without_a_second_copy(checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert size > LEAST
    layout = layout.resolved()
    found = launch.run(layout.world_size, growth, checkpoint, tmp_path / "out", layout)
    print([{name: most / size for name, most in rank.items()} for rank in found])
    for rank in found:
        assert rank["load"] < MOST * size
        assert rank["export"] < MOST * size
