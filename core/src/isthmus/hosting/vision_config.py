"""What a model config has besides Megatron's fields where a checkpoint has a vision tower."""

import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
