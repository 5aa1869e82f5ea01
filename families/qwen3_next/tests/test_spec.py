"""Which layer is what on which pipeline stage, under which names, and what the spec refuses."""

import pytest
import torch

from isthmus import launch

launch.preload("transformers.modeling_utils")

# Relative, of one parameter's gradient in float32: A_log's few numbers are sums that nearly cancel, and are
# made anew in another order.
FEW_NUMBERS = 1e-3

HOSTED = ["A_log", "conv1d.weight", "dt_bias", "in_proj_ba.weight", "in_proj_qkvz.weight", "norm.weight"]
HOSTED = [f"self_attention.linear_attn.{name}" for name in [*HOSTED, "out_proj.weight"]]
NATIVE = ["A_log", "conv1d.weight", "dt_bias", "in_proj.weight", "out_norm.weight", "out_proj.weight"]
NATIVE = [f"self_attention.{name}" for name in NATIVE]
NAMES = {  # of the delta net and the norm before it
    ("hosted", "transformer_engine"): ["input_layernorm.weight", *HOSTED],
    ("hosted", "local"): ["input_layernorm.weight", *HOSTED],
    ("megatron", "transformer_engine"): sorted([*NATIVE, "self_attention.in_proj.layer_norm_weight"]),
    ("megatron", "local"): ["input_layernorm.weight", *NATIVE],
}


def model_config(delta_net: str = "hosted", pp: int = 1, vp: int | None = None, **fields):
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus_qwen3_next.model_config import Qwen3NextModelConfig

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, pp, vp)
        model_parallel_cuda_manual_seed(1)
    defaults = {
        "num_layers": 4,
        "linear_attention_freq": [1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": fields.get("transformer_impl") != "local",
    }
    transformer = TransformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        add_bias_linear=False,
        activation_func=F.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=vp is not None,
        batch_p2p_comm=vp is None,
        mtp_num_layers=1,
        **(defaults | fields),
    )
    return Qwen3NextModelConfig(
        transformer=transformer,
        vocab_size=64,
        seq_length=16,
        position_embedding_type="rope",
        rotary_percent=0.5,
        delta_net=delta_net,
    )


def build(config, vp_stage=None):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    return GPTModelBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), vp_stage=vp_stage
    )


def loss_of(model) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16) * 7 % 64
    return model(ids, torch.arange(16).expand(2, -1), None, labels=ids).mean()


def built(delta_net: str, impl: str) -> tuple[list[str], dict[str, str], set[str], list[str]]:
    """Layer 0's attention names and checkpoint keys, names lost in a checkpoint, names without a gradient."""
    from megatron.core import parallel_state

    written = model_config(delta_net, transformer_impl=impl).as_dict()
    config = model_config().from_dict(written)
    model = build(config)
    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": dp_cp})
    keys = {name: tensor.key for name, tensor in sharded.items() if "_extra_state" not in name}
    loss_of(model).backward()
    prefix = "decoder.layers.0."
    names = [name.removeprefix(prefix) for name, _ in model.named_parameters() if name.startswith(prefix)]
    return (
        sorted(name for name in names if not name.startswith(("mlp", "pre_mlp"))),
        {name: key for name, key in keys.items() if name.startswith(prefix) and "mlp" not in name},
        {name for name in model.state_dict() if "_extra_state" not in name} ^ keys.keys(),
        [name for name, parameter in model.named_parameters() if parameter.grad is None],
    )


@pytest.mark.parametrize(("delta_net", "impl"), NAMES)
def test_a_config_read_back_builds_the_layers_with_mtp_under_their_names(delta_net, impl):
    ((names, keys, lost, without_gradient),) = launch.run(1, built, delta_net, impl)
    assert names == NAMES[delta_net, impl]
    assert lost == set(), "parameters that a checkpoint would lose"
    assert without_gradient == []
    renamed = {name: key for name, key in keys.items() if name != key}
    fused = {
        "decoder.layers.0.input_layernorm.weight": "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    }
    assert renamed == (fused if (delta_net, impl) == ("megatron", "local") else {})


def kinds(vp: int | None, fields: dict) -> list[dict[int, tuple[bool, bool]]]:
    """(delta net, experts) of each layer by its number, of each chunk; calls the spec in every way."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from isthmus_qwen3_next.delta_net import HostedDeltaNet
    from isthmus_qwen3_next.spec import layer_spec

    config = model_config(pp=2, vp=vp, **fields)
    chunks = []
    for stage in range(vp) if vp else [None]:
        layers = build(config, stage).decoder.layers
        same = [
            layer_spec(config, stage),
            layer_spec(config, vp_stage=stage),
            layer_spec(None, config.transformer, stage),
        ]
        assert {len(spec.layer_specs) for spec in same} == {len(layers)}
        found = {
            layer.layer_number: (
                isinstance(layer.self_attention, HostedDeltaNet),
                isinstance(layer.mlp, MoELayer),
            )
            for layer in layers
        }
        chunks.append(found)
    return chunks


@pytest.mark.parametrize(
    ("vp", "fields", "layers"),
    [
        (None, {}, [[(1, 2)], [(3, 4)]]),
        (2, {}, [[(1,), (3,)], [(2,), (4,)]]),
        (None, {"pipeline_model_parallel_layout": "Ettt|tmL"}, [[(1, 2, 3)], [(4,)]]),
        (None, {"num_layers_in_first_pipeline_stage": 1}, [[(1,)], [(2, 3, 4)]]),
    ],
)
def test_each_pipeline_stage_builds_its_own_layers(vp, fields, layers):
    expected = {1: (True, False), 2: (True, True), 3: (True, True), 4: (False, True)}
    for rank, chunks in enumerate(launch.run(2, kinds, vp, fields)):
        assert chunks == [{number: expected[number] for number in chunk} for chunk in layers[rank]]


def recomputed(delta_net: str, fields: dict) -> float:
    """The largest relative error of a parameter's gradient that recomputation brings."""
    plain, recomputing = build(model_config(delta_net)), build(model_config(delta_net, **fields))
    recomputing.load_state_dict(plain.state_dict())
    for model in (plain, recomputing):
        loss_of(model).backward()
    pairs = zip(plain.parameters(), recomputing.parameters(), strict=True)
    return max(((a.grad - b.grad).norm() / a.grad.norm()).item() for a, b in pairs)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
)
def test_recomputing_activations_changes_no_gradient(fields):
    (error,) = launch.run(1, recomputed, "hosted", fields)
    assert error < FEW_NUMBERS


def refused(delta_net: str, fields: dict) -> None:
    from isthmus_qwen3_next.spec import layer_spec

    config = model_config()
    config.delta_net = delta_net
    for name, value in fields.items():
        setattr(config.transformer, name, value)
    layer_spec(config)


@pytest.mark.parametrize(
    ("delta_net", "fields", "message"),
    [
        ("hf", {}, "delta_net must be one of .*got 'hf'"),
        ("hosted", {"linear_attention_freq": None}, "linear_attention_freq must list each layer's kind"),
        ("hosted", {"transformer_impl": "inference_optimized"}, "has no layers whose attention"),
        ("megatron", {"tensor_model_parallel_size": 2}, "does not reduce the gradient of its output norm"),
    ],
)
def test_what_the_spec_cannot_build_is_refused(delta_net, fields, message):
    with pytest.raises(ValueError, match=message):
        launch.run(1, refused, delta_net, fields)


def padded_vocabulary() -> None:
    from argparse import Namespace

    from isthmus_qwen3_next.spec import layer_spec

    layer_spec(Namespace(vocab_size=151, padded_vocab_size=152), model_config().transformer)


def padding_token() -> None:
    from argparse import Namespace

    from isthmus.hosting import own_training
    from isthmus_qwen3_next.spec import layer_spec

    own_training._saved_pad = lambda folder: 79
    layer_spec(Namespace(vocab_size=152, padded_vocab_size=152), model_config().transformer)


def test_a_padding_token_that_nobody_could_keep_from_training_is_refused():
    with pytest.raises(ValueError, match=r"padding token 79 .*GPTModelConfig"):
        launch.run(1, padding_token)


def test_vocabulary_padding_that_nobody_could_mask_is_refused():
    with pytest.raises(
        ValueError, match=r"padded_vocab_size=152 is more than vocab_size=151.*GPTModelConfig"
    ):
        launch.run(1, padded_vocabulary)
