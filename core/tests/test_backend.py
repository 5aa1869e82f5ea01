"""A model whose modules are not installed is refused with what to do, before Megatron builds it."""

import importlib.util
from types import SimpleNamespace

import pytest

from isthmus.backend import check_modules

PLAIN = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}


def config(impl: str, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{**PLAIN, "transformer_impl": impl, **fields})


@pytest.fixture(autouse=True)
def not_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.cpu._installed", None)


def find_transformer_engine(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: found)


def test_transformer_engine_that_is_not_installed_is_refused(monkeypatch) -> None:
    find_transformer_engine(monkeypatch, None)
    with pytest.raises(ValueError, match=r"not installed\. Try: pip install .*isthmus\.cpu\.install\(\)"):
        check_modules(config("transformer_engine"))
    check_modules(config("local"))
    find_transformer_engine(monkeypatch, object())
    check_modules(config("transformer_engine", layernorm_zero_centered_gamma=True, sequence_parallel=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "no zero-centred weights; use"),
        ({"sequence_parallel": True}, "no sequence parallelism; use"),
        (
            {"layernorm_zero_centered_gamma": True, "sequence_parallel": True},
            "no zero-centred weights and no sequence parallelism; use",
        ),
    ],
)
def test_norms_that_local_modules_do_not_have_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_modules(config("local", **fields))
    check_modules(config("local", normalization="LayerNorm", **fields))


def test_the_cpu_backend_has_modules_for_all(monkeypatch) -> None:
    monkeypatch.setattr("isthmus.cpu._installed", frozenset())
    find_transformer_engine(monkeypatch, None)
    check_modules(config("transformer_engine"))
    check_modules(config("local", layernorm_zero_centered_gamma=True))
