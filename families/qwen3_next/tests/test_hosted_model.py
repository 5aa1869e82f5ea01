"""Hosted delta net and hosted attention in a whole model, over tensor and context parallelism.

Dense, so that sequence parallelism may be off, with HF's module in every layer; against transformers.
"""

from pathlib import Path
from typing import Any

import pytest

from isthmus import launch
from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.testing.verify import Request, verify
from isthmus.tiny import Variant
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import tiny_config

launch.preload("transformers.modeling_utils")

CONFIG = tiny_config(num_hidden_layers=2, full_attention_interval=2, mlp_only_layers=[0, 1])
CASES = [  # (sequence parallelism, hosted_mode, packed)
    (False, "heads", False),
    (False, "heads", True),
    (True, "heads", False),
    (True, "heads", True),
    (False, "replicated", True),
    (True, "replicated", False),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one delta net and one attention."""
    folder = tmp_path_factory.mktemp("tiny") / "dense"
    write_tiny(FAMILY, folder, Variant(CONFIG, mtp=False), seed=1)
    return folder


def proofs(folder: Path, layout: Layout) -> dict[tuple[bool, str, bool], dict[str, Any]]:
    """The documents of all cases, in one set of processes."""
    layout.initialize()
    found = {}
    for sp, mode, packed in CASES:
        if sp and layout.tp == 1:
            continue
        bridge = AutoBridge.from_hf_pretrained(folder)
        case = Layout(tp=layout.tp, cp=layout.cp, sp=sp)
        request = Request(grads=True, packed=packed, overrides={"attention": "hosted", "hosted_mode": mode})
        found[sp, mode, packed] = verify(bridge, case, request)
    return found


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=4), Layout(cp=2), Layout(cp=4), Layout(tp=2, cp=2)], ids=str
)
def test_a_model_of_hosted_mixers_alone_is_hugging_faces(dense: Path, layout: Layout) -> None:
    documents = ranks.run(layout.world_size, proofs, dense, layout)[0]
    assert len(documents) == (len(CASES) if layout.tp > 1 else 3)
    assert {case: document["failures"] for case, document in documents.items() if document["failures"]} == {}
