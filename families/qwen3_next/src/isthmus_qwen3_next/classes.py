"""HF's classes of the blocks, by name: a later release of the same blocks has them under other names."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Classes:
    """Where transformers has the blocks, and how their names begin; imported when first used."""

    modeling: str
    prefix: str
    text: str = ""
    """What follows the prefix in names of the language model's own, where the family has others."""

    def config(self, **fields: Any) -> Any:
        """A config of the language model."""
        import transformers

        return getattr(transformers, f"{self.prefix}{self.text}Config")(**fields)

    @property
    def delta_net(self) -> Any:
        """The gated delta net."""
        return self._find("GatedDeltaNet")

    @property
    def attention(self) -> Any:
        """The gated attention."""
        return self._find("Attention")

    @property
    def rotary(self) -> Any:
        """The rotary embedding, called with hidden states and positions."""
        return self._find(f"{self.text}RotaryEmbedding")

    @property
    def norm(self) -> Any:
        """The zero-centred RMS norm."""
        return self._find("RMSNorm")

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self._find("DecoderLayer")

    def _find(self, name: str) -> Any:
        from isthmus.hosting.torch_functions import import_modeling

        return getattr(import_modeling(self.modeling), self.prefix + name)


CLASSES = Classes("transformers.models.qwen3_next.modeling_qwen3_next", "Qwen3Next")
