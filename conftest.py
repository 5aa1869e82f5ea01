"""Settings of every test run: threads, no network, and no GPU unless ISTHMUS_DEVICE=cuda asks for it."""

import os

import pytest

# Before torch is imported. Worker processes inherit them; more threads than cores make gloo tests crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that asks a hub for anything is wrong: what it needs, it makes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `isthmus.cpu` refuses to hide a machine's GPUs by itself.
if os.environ.get("ISTHMUS_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Tests that are shipped say what they found, as any other test does.
pytest.register_assert_rewrite("isthmus.testing.conformance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where CUDA is absent; a run without such tests does not import torch for it."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and ISTHMUS_DEVICE=cuda"))
