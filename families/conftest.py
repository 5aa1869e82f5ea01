"""What the tests of every family have in common."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.testing.tiny import write_tiny


@pytest.fixture(scope="module")
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of the family whose tests these are, by the variant's name."""
    family = importlib.import_module(f"isthmus_{request.path.parents[1].name}.family").FAMILY
    root = tmp_path_factory.mktemp("tiny")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            write_tiny(family, root / variant, variant, seed=1)
        return root / variant

    return folder
