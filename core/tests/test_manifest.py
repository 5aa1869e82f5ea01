"""What a Megatron checkpoint remembers of its source."""

import pytest
import torch
from safetensors.torch import save_file

from isthmus.checkpoint.manifest import load_manifest, save_manifest
from isthmus.checkpoint.reader import CheckpointReader


def test_a_manifest_gives_back_all_but_the_data(tmp_path):
    tensors = {
        "a.w": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.tensor(1.0),
        "\u00fc": torch.zeros(2).int(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    text = '{"model_type": "x",\n  "ratio": 1.0, "name": "\u00fc"}\n'
    with CheckpointReader(tmp_path) as reader:
        save_manifest(tmp_path, text, reader.tensors.values())
        manifest = load_manifest(tmp_path)
        assert manifest.config_text == text
        assert list(manifest.tensors) == list(reader.tensors)
        for name, info in reader.tensors.items():
            kept = manifest.tensors[name]
            for field in ("dtype", "shape", "nbytes", "file"):
                assert getattr(kept, field) == getattr(info, field)
    with pytest.raises(ValueError, match=r"describes a\.w but does not hold it"):
        manifest.slice("a.w")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 99}',
        '{"version": 1}',
        '{"version": 1, "config": "{}", "tensors": []}',
        '{"version": 1, "config": "", "tensors": [{}]}',
    ],
)
def test_a_missing_or_damaged_manifest_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"has no source\.json"):
        load_manifest(tmp_path)
    (tmp_path / "source.json").write_text(text)
    with pytest.raises(ValueError, match=r"source\.json cannot be used: .*import the checkpoint again"):
        load_manifest(tmp_path)
