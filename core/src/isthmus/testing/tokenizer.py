"""The files of a tiny checkpoint that are not weights: a tokenizer of single characters, a chat template."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

    The tokens are printable characters, as many as the config's vocabulary has room for; `bos_token_id` and
    `eos_token_id` of the config are `<|endoftext|>` and `<|im_end|>`.
    """
    bos, eos = config["bos_token_id"], config["eos_token_id"]
    special = {bos: "<|endoftext|>", eos: "<|im_end|>"}
    free = (i for i in range(config["vocab_size"]) if i not in special)
    special |= {next(free): "<|im_start|>", next(free): "<|unknown|>"}
    characters = [c for c in string.printable if c not in "\t\r\x0b\x0c"]
    vocabulary = {token: i for i, token in special.items()}
    vocabulary |= dict(zip(characters, free, strict=False))
    _write(folder / "tokenizer.json", _tokenizer(vocabulary, special))
    _write(
        folder / "tokenizer_config.json",
        {
            "bos_token": special[bos],
            "clean_up_tokenization_spaces": False,
            "eos_token": special[eos],
            "model_max_length": config["max_position_embeddings"],
            "pad_token": special[bos],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<|unknown|>",
        },
    )
    _write(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": [eos, bos], "do_sample": True, "temperature": 0.7},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _tokenizer(vocabulary: Mapping[str, int], special: Mapping[int, str]) -> dict[str, Any]:
    """tokenizer.json: byte-pair encoding without any merge, one token a character."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in sorted(special.items())
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<|unknown|>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
