"""What a model config has besides Megatron's fields where a checkpoint has a vision tower."""

import importlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from isthmus.config import HFConfig

PARTS = ("vision", "projector", "language")


@dataclass(kw_only=True)
class VisionModelConfig:
    """To be mixed into a GPTModelConfig, before it: which parts are built, and which of them are trained.

    Attributes:
        part: of the checkpoint, "all", or "text" for the language model alone.
        vision: what the tower is built of; of a checkpoint without one None.
        freeze: parts that are not trained, of `PARTS`: "vision" is the tower without its projector.
    """

    builder: ClassVar[str] = "isthmus.hosting.vision_model.VisionModelBuilder"
    model: ClassVar[str]  # "module:Class" of the VisionLanguageModel
    projector: ClassVar[tuple[str, ...]]  # prefixes of its parameters

    part: str = "text"
    vision: dict[str, Any] | None = None
    freeze: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if lines := problems(vars(self)):
            raise ValueError("the model config asks for what there is not:\n  " + "\n  ".join(lines))
        super().__post_init__()  # type: ignore[misc]  # of what this is mixed into

    @classmethod
    def model_class(cls) -> Any:
        """The VisionLanguageModel."""
        module, _, name = cls.model.partition(":")
        return getattr(importlib.import_module(module), name)

    @classmethod
    def part_of(cls, name: str) -> str:
        """Which of `PARTS` the parameter `name` belongs to."""
        if name.startswith(cls.projector):
            return "projector"
        return "vision" if name.startswith("vision_model.") else "language"


def tower_problems(section: HFConfig, model_types: Collection[str], heads: str) -> list[str]:
    """Why transformers has no such tower as a config's section `vision_config` says, a line each.

    `heads` is what the section calls their number. What each field may hold, `isthmus.config_values` knows.
    """
    from transformers.activations import ACT2FN

    found, kind, act = [], section.get("model_type"), section["hidden_act"]
    if kind is not None and kind not in model_types:
        found.append(f"vision_config.model_type={kind!r}, expected {' or '.join(map(repr, model_types))}")
    if section["hidden_size"] % section[heads]:
        found.append(
            f"vision_config.hidden_size={section['hidden_size']}, expected a multiple of"
            f" vision_config.{heads}={section[heads]}"
        )
    if act not in ACT2FN:
        found.append(f"vision_config.hidden_act={act!r}, expected one of {', '.join(sorted(ACT2FN))}")
    return found


def problems(fields: Any) -> list[str]:
    """What is wrong with a model config's `part` and `freeze`."""
    part, freeze, found = fields.get("part", "text"), fields.get("freeze", []), []
    if part not in ("text", "all"):
        found.append(f"part must be 'text' or 'all', got {part!r}")
    if part == "all" and not fields.get("vision"):
        found.append("part='all', and the checkpoint has no vision tower: part='text' is all of it")
    if unknown := [name for name in freeze if name not in PARTS]:
        found.append(f"cannot freeze {', '.join(map(repr, unknown))}; the parts are {', '.join(PARTS)}")
    elif freeze and part == "text" and set(freeze) != {"language"}:
        found.append(f"cannot freeze {freeze} of a model with part='text', which has no vision tower")
    return found
