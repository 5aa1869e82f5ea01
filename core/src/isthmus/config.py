"""config.json as written: what it says, which keys were read, and Hugging Face's value where it is silent.

`HFConfig` reads the raw dict, in the spellings of transformers 4 and 5 alike, and never the attributes of a
config object, whose names change between releases. :mod:`isthmus.decoder` turns it into Megatron's fields.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from isthmus.config_values import check_values
from isthmus.json_text import parse_json

# Keys that no forward pass depends on, by what they are for.
INERT_FOR = {
    "finding the model": "_name_or_path name_or_path architectures model_type auto_map transformers_version",
    "readers of their own": "quantization_config compression_config torch_dtype dtype",
    "token ids": """bos_token_id eos_token_id sep_token_id cls_token_id unk_token_id
        decoder_start_token_id forced_bos_token_id forced_eos_token_id tokenizer_class""",
    "equal implementations": """attn_implementation _attn_implementation use_cache use_bfloat16
        _attn_implementation_autoset _attn_implementation_internal experts_implementation
        _experts_implementation""",
    "what is returned": """output_attentions output_hidden_states output_scores return_dict use_return_dict
        return_dict_in_generate torchscript""",
    "other kinds of model": """id2label label2id num_labels problem_type finetuning_task task_specific_params
        is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
        chunk_size_feed_forward pruned_heads prefix tf_legacy_loss""",
    "generation": """temperature top_k top_p typical_p repetition_penalty length_penalty do_sample num_beams
        num_beam_groups diversity_penalty early_stopping max_length min_length max_new_tokens bad_words_ids
        no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""",
    "marks of tools": "unsloth_fixed unsloth_version",
}
INERT = frozenset(" ".join(INERT_FOR.values()).split())


class HFConfig(Mapping[str, Any]):
    """A config.json, or a named section of it, that records which of its keys were read.

    `hf["key"]` is what Hugging Face computes with: the file's value, else the default of transformers' own
    config class for this `model_type` (`LookupError` where neither has one). `hf.get("key")` is the file's
    value only. A null in the file counts as absent. ValueError, listing all, where values are none that their
    fields can have (:mod:`isthmus.config_values`).
    """

    def __init__(self, raw: Mapping[str, Any], *, _root: "HFConfig | None" = None, _path: str = ""):
        check_values(raw, _path)
        self.raw = dict(raw)
        self.read: set[str] = set()
        self.defaulted: dict[str, Any] = {}  # keys absent from the file, with the class default handed out
        self._root = _root or self
        self._path = _path
        self._sections: dict[str, HFConfig] = {}
        self._class_config: Any = None

    @classmethod
    def from_text(cls, text: str) -> "HFConfig":
        """The config in the text of a config.json. ValueError: not one JSON object, each name given once."""
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise ValueError(f"config.json is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"config.json holds a {type(raw).__name__}, expected an object")
        return cls(raw)

    def overruled_by(self, fields: Mapping[str, Any]) -> "HFConfig":
        """This config with other values in `fields`, which are dotted for those of a section."""
        raw = copy.deepcopy(self.raw)
        for path, value in fields.items():
            *sections, name = path.split(".")
            holder = raw
            for section in sections:
                holder = holder[section]
            holder[name] = value
        return HFConfig(raw)

    @property
    def model_type(self) -> str:
        """The file's `model_type`; LookupError where it has none."""
        value = self.get("model_type")
        if not isinstance(value, str):
            raise LookupError(f"config.json: {self._path}model_type is {value!r}, expected a name")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The file's value of `key`, or `default`; transformers is never asked."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        return self.default(key) if value is None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.raw.get(key) is not None

    def either(self, *keys: str) -> Any:
        """The value under one of several spellings, None where all are absent. ValueError: they differ."""
        given = {key: value for key in keys if (value := self.get(key)) is not None}
        values = list(given.values())
        if any(value != values[0] for value in values):
            stated = ", ".join(f"{self._path}{key}={value!r}" for key, value in given.items())
            raise ValueError(f"config.json contradicts itself: {stated}. Keep the one used in training")
        return values[0] if values else None

    def section(self, name: str) -> "HFConfig":
        """The nested config `name` (`text_config`), always the same object, so that what was read adds up."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise LookupError(f"config.json: {self._path}{name} is {value!r}, expected a section")
        if name not in self._sections:
            self._sections[name] = HFConfig(value, _root=self._root, _path=f"{self._path}{name}.")
        return self._sections[name]

    def default(self, key: str) -> Any:
        """What transformers' class holds for `key` after reading this file. LookupError: no such field."""
        config = self._root.as_transformers_reads_it()
        for name in filter(None, self._path.split(".")):
            config = getattr(config, name)
        try:
            value = getattr(config, key)
        except AttributeError:
            raise LookupError(
                f"config.json has no {self._path}{key}, and transformers' {type(config).__name__} has no "
                "default for it. Add the value used in training"
            ) from None
        self.defaulted[key] = value
        return value

    def class_attribute(self, key: str) -> Any:
        """What transformers' class has for `key` whatever a file says; None: no such class or attribute."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if (kind := self._root.model_type) not in CONFIG_MAPPING:
            return None
        config: Any = CONFIG_MAPPING[kind]
        for name in filter(None, self._path.split(".")):
            config = getattr(config, "sub_configs", {}).get(name)
        return getattr(config, key, None)

    def as_transformers_reads_it(self) -> Any:
        """The config object of transformers' class for this file.

        LookupError: it has no class for the `model_type`. ValueError: the class refuses the file.
        """
        if self._class_config is None:
            import transformers
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            if self.model_type not in CONFIG_MAPPING:
                raise LookupError(
                    f"transformers {transformers.__version__} has no class for model_type"
                    f" {self.model_type!r}, whose defaults stand for fields that config.json leaves out."
                    " Upgrade transformers, or add the fields"
                )
            for name, value in self.raw.items():  # errors of ours say more than transformers'
                if name.endswith("_config") and name not in INERT and isinstance(value, Mapping):
                    check_values(value, f"{name}.")
            config_class = CONFIG_MAPPING[self.model_type]
            try:
                self._class_config = config_class.from_dict(copy.deepcopy(self.raw))
            except Exception as error:  # transformers' validation raises several kinds
                raise ValueError(
                    f"transformers' {config_class.__name__} refuses config.json: {error}"
                ) from error
        return self._class_config

    def unread(self, inert: Iterable[str] = ()) -> dict[str, Any]:
        """Keys with a value, here and in the sections read, that were neither read nor are known as inert."""
        known = INERT.union(inert)
        found = {
            self._path + key: value
            for key, value in self.raw.items()
            if value is not None and key not in self.read and key not in known
        }
        for section in self._sections.values():
            found |= section.unread(inert)
        return found

    def check_all_understood(self, inert: Iterable[str] = ()) -> None:
        """ValueError listing every key that nobody read; call it once the family has read its fields.

        Args:
            inert: the family's keys that its forward pass does not depend on, in any section.
        """
        if unread := self.unread(inert):
            lines = "".join(f"\n  {key} = {value!r}" for key, value in unread.items())
            raise ValueError(
                f"config.json of model_type {self.raw.get('model_type')!r} has {len(unread)} keys that "
                f"nothing here understands, so that they might change the model unnoticed:{lines}\n"
                "Remove them if Hugging Face's model ignores them; otherwise the family has to learn them"
            )
