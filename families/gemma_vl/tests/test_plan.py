"""`isthmus plan` works for every published size from its config.json alone."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from isthmus import cli
from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus.tiny import transformers_tensors
from isthmus_gemma_vl.layout import problems
from isthmus_gemma_vl.tiny import PUBLISHED, VISION, vision_language

WITH_TOWER = vision_language(
    PUBLISHED["4b"],
    vision_config=VISION,
    mm_tokens_per_image=256,
    boi_token_index=255999,
    eoi_token_index=256000,
    image_token_index=262144,
)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (PUBLISHED["270m"], ["--tp", "4"]),
        (PUBLISHED["1b"], ["--tp", "2", "--pp", "2"]),
        (WITH_TOWER, ["--tp", "4", "--pp", "2"]),
        (PUBLISHED["27b"], ["--tp", "8", "--pp", "2", "--cp", "2"]),
    ],
    ids=["270m, more ranks than key/value heads", "1b", "4b with its vision tower", "27b"],
)
def test_ranks_hold_what_transformers_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], layout: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path / "config.json"), *layout, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    shapes = transformers_tensors(HFConfig(config), mtp=False)
    del shapes["lm_head.weight"]  # the embedding
    assert document["problems"] == []
    assert document["parameters"] == sum(map(prod, shapes.values()))


def test_three_ranks_cannot_share_four_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["270m"]))
    assert cli.main(["plan", str(tmp_path / "config.json"), "--tp", "3"]) == 1
    captured = capsys.readouterr()
    assert "cannot divide 4 attention heads" in captured.out + captured.err


def test_rows_of_attention_must_divide_where_key_value_heads_are_fewer() -> None:
    fields = {"num_attention_heads": 6, "num_query_groups": 1, "kv_channels": 32}
    assert problems(Layout(tp=2), fields) == []
    assert problems(Layout(tp=3), fields) == [
        "cannot divide 256 rows of linear_qkv, 6 attention heads and twice 1 key/value heads, over"
        " tensor_model_parallel_size=3"
    ]
