"""What `bridge.build_model` does around a model, where Megatron's own training builds it of a layer spec.

Megatron gives a layer spec the model config before it builds, and calls the config's `pre_wrap_hooks` after:
so the spec adds them. Frameworks that call a spec with Megatron's args have no such hooks; there, what only a
hook could make right is refused.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.checkpoint.megatron_folder import TRACKER
from isthmus.padding_token import PAD, FreezePadding
from isthmus.vocabulary import MaskPadding


def prepare(model_config: Any) -> None:
    """Add the hooks that are missing to the config of a model that is about to be built; once per config.

    ValueError: `model_config` is Megatron's args, and the model would have vocabulary padding, or a padding
    token whose embedding is not to be trained.
    """
    args = _training_args()
    if not hasattr(model_config, "pre_wrap_hooks"):
        _refuse_padding(model_config)
        _refuse_pad(_saved_pad(_start(args or model_config)))
        return
    hooks = model_config.pre_wrap_hooks
    if any(isinstance(hook, MaskPadding) for hook in hooks):
        return  # a bridge's config, or one of which another chunk was built
    rows = model_config.vocab_size
    if not model_config.should_pad_vocab and getattr(args, "vocab_size", None):
        rows = min(rows, args.vocab_size)  # it counts the padding
    folder = _start(args)
    pad = model_config.pad if hasattr(model_config, "pad") else _saved_pad(folder)
    if args is not None:
        setattr(args, PAD, pad)  # the run saves its arguments, and one that resumes finds it there
    hooks += [MaskPadding(rows), FreezePadding(pad)]
    if folder is not None:
        hooks.append(lambda chunks: pin_as_saved(chunks, folder))


def _start(args: Any) -> str | None:
    """The folder that Megatron loads weights from: the first of its two that has a checkpoint."""
    folders = [getattr(args, name, None) for name in ("load", "pretrained_checkpoint")]
    return next((each for each in folders if each and (Path(each) / TRACKER).is_file()), None)


def _saved_pad(folder: str | None) -> int:
    """The padding token of the model in a Megatron folder, which no argument of Megatron's tells."""
    from isthmus.checkpoint.torch_dist import saved_arguments

    return -1 if folder is None else saved_arguments(folder).get(PAD, -1)


def pin_as_saved(chunks: list[nn.Module], folder: str) -> list[nn.Module]:
    """Mark the parameters that the Megatron checkpoint in `folder` holds wider; the chunks as they are.

    Not where that is the checkpoint's main dtype: rounding all of it is the user's choice.
    """
    from isthmus.checkpoint.torch_dist import saved_dtypes
    from isthmus.precision import mark_param_dtype

    for parameter, saved in saved_dtypes(chunks, folder):
        dtype = torch.promote_types(saved, parameter.dtype)
        if dtype != parameter.dtype:
            mark_param_dtype(parameter, dtype)
    return chunks


def _training_args() -> Any:
    """Megatron's parsed arguments in a process that runs its training; None elsewhere."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def _refuse_pad(pad: int) -> None:
    if pad >= 0:
        raise ValueError(
            f"the model's padding token {pad} has an embedding that Hugging Face does not train, and a layer"
            " spec that is called with args cannot see to that. Build the model of a GPTModelConfig"
            " (megatron.training.argument_utils.gpt_config_from_args), or set pad_token_id to null in the"
            " checkpoint's config.json and import it again"
        )


def _refuse_padding(args: Any) -> None:
    fields: Mapping[str, Any] = vars(args) if hasattr(args, "__dict__") else {}
    rows, padded = fields.get("vocab_size"), fields.get("padded_vocab_size")
    if rows and padded and padded > rows:
        raise ValueError(
            f"padded_vocab_size={padded} is more than vocab_size={rows}: Megatron's softmax runs over the "
            "padding, which Hugging Face's model does not have, and a layer spec that is called with args "
            "cannot mask it. Build the model of a GPTModelConfig (megatron.training.argument_utils."
            "gpt_config_from_args), or choose a tensor_model_parallel_size that divides vocab_size, with "
            "--make-vocab-size-divisible-by 1"
        )
