"""Whether a Megatron model computes a checkpoint's function: its config fields beside the checkpoint's.

Names and shapes of tensors do not tell two models apart that differ in a norm's epsilon or the rotary base.
The rule is one list: a field that the checkpoint's config.json decides has its value, unless it is `FREE`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

# Fields that a run chooses, by why the exported checkpoint is right all the same.
FREE_BECAUSE = {
    "an export writes each tensor's own dtype": """params_dtype pipeline_dtype bf16 fp16 moe_router_dtype
        attention_softmax_in_fp32""",
    "training alone knows it": """hidden_dropout attention_dropout init_method_std seq_length
        moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
        mtp_loss_scaling_factor gradient_accumulation_fusion""",
    "another implementation of the same": """transformer_impl moe_grouped_gemm moe_token_dispatcher_type
        apply_rope_fusion moe_router_fusion moe_permute_fusion""",
    "padding is never in a file": "should_pad_vocab make_vocab_size_divisible_by",
    "coverage accounts for what is left out": "mtp_num_layers part",
}
FREE = frozenset(" ".join(FREE_BECAUSE.values()).split())
# Fields that a run chooses among these values: other ways of balancing ("sinkhorn") route otherwise.
FREE_AMONG = {"moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")}


def check(expected: Mapping[str, Any], found: Mapping[str, Any], of: str) -> None:
    """ValueError with a line for each field that is not `FREE` and differs from what is expected.

    `of` says whose fields were found. One that was not found is not compared: its builder kept no note of it.
    """
    lines = [
        f"{name}: {_text(value)} by the checkpoint's config.json, {_text(found[name])} of {of}"
        for name, value in expected.items()
        if name in found and not _free(name, found[name]) and not _same(value, found[name])
    ]
    if lines:
        raise ValueError(
            f"{of} does not compute what the checkpoint does:\n  " + "\n  ".join(lines) + "\nUse the"
            " checkpoint that it was made from. To change on purpose what is computed, change config.json in"
            " a copy of that checkpoint, and build, load and export by the copy"
        )


def _free(name: str, value: Any) -> bool:
    chosen = value if isinstance(value, list) else [value]  # of balancing there may be several
    return name in FREE or all(each in FREE_AMONG.get(name, ()) for each in chosen)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, partial) and isinstance(b, partial):
        return (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords)
    return a == b


def _text(value: Any) -> str:
    if isinstance(value, partial):
        stated = ", ".join(f"{name}={given!r}" for name, given in value.keywords.items())
        return f"{_text(value.func)}({stated})"
    return getattr(value, "__name__", None) or repr(value)
