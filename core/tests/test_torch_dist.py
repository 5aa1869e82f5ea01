"""Megatron folders without a model: which checkpoint is the newest, and a model as Megatron's arguments."""

from pathlib import Path

import pytest
import torch

from isthmus import launch
from isthmus.checkpoint.megatron_folder import latest

# As a family gives them; each differs from the default of Megatron's training script, or has no argument.
FIELDS = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "linear_attention_freq": [1, 1, 0, 1],
    "linear_key_head_dim": 16,
    "moe_layer_freq": [0, 1, 1, 1],
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "mtp_num_layers": 1,
    "bf16": True,
    "fp16": False,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}
MODEL = {
    "vocab_size": 160,
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,
    "share_embeddings_and_output_weights": False,
    "seq_length": 512,
    "position_embedding_type": "rope",
    "rotary_base": 10000000,
    "rotary_percent": 0.25,
}


def through_megatron(fields: dict) -> tuple[dict, dict, dict]:
    """The fields of Megatron's two configs, made from `fields` by way of its command line; then as told."""
    import sys

    import isthmus.cpu
    from isthmus.checkpoint.megatron_arguments import arguments
    from isthmus.checkpoint.megatron_arguments import fields as fields_told

    isthmus.cpu.install_training()
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    run = "--micro-batch-size 1 --seq-length 512 --train-iters 1 --lr 1 --eval-interval 1 --tokenizer-type"
    run += " NullTokenizer --no-masked-softmax-fusion --no-rope-fusion --no-gradient-accumulation-fusion"
    sys.argv = ["train", *arguments(fields), *run.split()]
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    return (
        {name: getattr(config.transformer, name) for name in FIELDS},
        {name: getattr(config, name) for name in MODEL},
        fields_told(vars(args), fields),
    )


def test_megatrons_own_parser_gives_back_the_fields() -> None:
    transformer, model, told = launch.run(1, through_megatron, FIELDS | MODEL)[0]
    assert transformer == FIELDS
    assert model == MODEL | {"should_pad_vocab": False}  # the script has padded vocab_size itself
    apart = {"bf16", "fp16", "params_dtype", "pipeline_dtype", "should_pad_vocab"}
    assert told == {name: value for name, value in (FIELDS | MODEL).items() if name not in apart}


def told_by(fields: dict, left_out: set[str]) -> dict:
    """What the arguments of `fields` tell, as isthmus saves them: no default is spelled out."""
    from isthmus.checkpoint.megatron_arguments import arguments, namespace
    from isthmus.checkpoint.megatron_arguments import fields as fields_told

    saved = vars(namespace(arguments(fields)))
    return fields_told({name: value for name, value in saved.items() if name not in left_out}, fields)


def test_an_argument_that_was_not_saved_has_its_default_and_a_derived_size_is_not_told() -> None:
    told = launch.run(1, told_by, FIELDS | MODEL, {"rotary_base", "vocab_size"})[0]
    assert told["rotary_base"] == 10000
    assert "vocab_size" not in told
    assert told["moe_router_topk"] == 3


def arguments_of(fields: dict) -> list[str]:
    from isthmus.checkpoint.megatron_arguments import arguments

    return arguments(fields)


def test_a_field_that_no_argument_can_express_is_named() -> None:
    with pytest.raises(ValueError, match=r"no argument for flux_capacitor=3"):
        launch.run(1, arguments_of, FIELDS | MODEL | {"flux_capacitor": 3})


@pytest.mark.parametrize(
    ("word", "name"), [("release", "release"), ("0", "iter_0000000"), ("100\n", "iter_0000100")]
)
def test_the_tracker_says_which_checkpoint_is_the_newest(tmp_path: Path, word: str, name: str) -> None:
    for folder in ("release", "iter_0000000", "iter_0000100"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    assert latest(tmp_path) == tmp_path / name
    assert latest(tmp_path / name) == tmp_path / name


def test_a_folder_without_a_tracker_or_with_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no latest_checkpointed_iteration\.txt"):
        latest(tmp_path)
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"says '7', and .*iter_0000007 is not a complete torch_dist"):
        latest(tmp_path)
