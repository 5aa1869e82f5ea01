"""Megatron layer specs of Qwen3-Next: Megatron's own layers, with a delta net in place of three attentions in
four.

`layer_spec` is what `GPTModelConfig.transformer_layer_spec` and Megatron's `--spec` call.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from isthmus import mtp
from isthmus.hosting.module import MODES
from isthmus.zigzag import LAYOUTS
from isthmus_qwen3_next.attention import HostedAttention
from isthmus_qwen3_next.delta_net import HostedDeltaNet, NativeDeltaNet, OnesCentredNorm

MIXERS = ("hosted", "megatron")


@dataclass(frozen=True, slots=True)
class Hosted:
    """The hosted modules of a family that is made of these blocks."""

    delta_net: type[HostedDeltaNet] = HostedDeltaNet
    attention: type[HostedAttention] = HostedAttention


def layer_spec(
    model_config: Any, config: TransformerConfig | int | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, called as (model_config, vp_stage) or (args, config,
    vp_stage).

    Of the first argument, `delta_net` (default "hosted": HF's module) and `attention` (default "megatron")
    choose the modules, `hosted_mode` and `cp_layout` how HF's are divided; see Qwen3NextModelConfig.
    `config.linear_attention_freq` says which layers have a delta net (1) and which full attention (0), and
    `config.moe_layer_freq` which have experts, as everywhere in Megatron.
    """
    return block(Hosted(), model_config, config, vp_stage)


def native_layer_spec(
    model_config: Any, config: TransformerConfig | int | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """`layer_spec` with Megatron's delta net, for `--spec`: Megatron's arguments have no `delta_net`."""
    return block(Hosted(), model_config, config, vp_stage, delta_net="megatron", attention="megatron")


def hosted_layer_spec(
    model_config: Any, config: TransformerConfig | int | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """`layer_spec` with HF's delta net and HF's attention, for `--spec`."""
    return block(Hosted(), model_config, config, vp_stage, delta_net="hosted", attention="hosted")


def block(
    modules: Hosted,
    model_config: Any,
    config: TransformerConfig | int | None,
    vp_stage: int | None,
    **mixers: str,
) -> TransformerBlockSubmodules:
    """The layers of a stage, with `modules` where they are hosted; `mixers` overrule the model config."""
    if isinstance(config, int):
        config, vp_stage = None, config
    transformer = config or model_config.transformer
    delta_net = mixers.get("delta_net") or getattr(model_config, "delta_net", "hosted")
    attention = mixers.get("attention") or getattr(model_config, "attention", "megatron")
    params = {
        "mode": getattr(model_config, "hosted_mode", "heads"),
        "cp_layout": getattr(model_config, "cp_layout", "zigzag"),
    }
    _check(transformer, delta_net, attention, **params)
    if transformer.mtp_num_layers:
        mtp.install()
    te = transformer.transformer_impl == "transformer_engine"
    layers: Any = get_gpt_decoder_layer_specs(  # a list, whatever its annotation says
        transformer, te, normalization=transformer.normalization, qk_l2_norm=transformer.qk_l2_norm
    )
    pattern = get_linear_attention_pattern(transformer)
    backend = _backend(te)
    hosted = {1: ModuleSpec(module=modules.delta_net, params=params)}
    if attention == "hosted":
        rope = {name: getattr(model_config, name) for name in ("rotary_base", "rotary_percent")}
        hosted[0] = ModuleSpec(module=modules.attention, params=params | rope)
    kinds = [int(kind) for kind in pattern]
    norm = _norm(transformer, backend)
    layers = [
        _native(layer, transformer, backend)
        if kind == 1 and delta_net == "megatron"
        else _replaced(layer, hosted[kind], norm, {})  # its norm is before it, not fused into anything
        if kind in hosted
        else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    return TransformerBlockSubmodules(
        layer_specs=[layers[i] for i in _stage_layers(transformer, vp_stage)],
        layer_norm=backend.layer_norm(rms_norm=transformer.normalization == "RMSNorm", for_qk=False),
    )


def _native(layer: ModuleSpec, config: TransformerConfig, backend: BackendSpecProvider) -> ModuleSpec:
    """`layer` with Megatron's delta net; the input norm is fused into its in_proj where the backend fuses."""
    fused = backend.column_parallel_layer_norm_linear() if backend.fuse_layernorm_and_linear() else None
    out_norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    attention = ModuleSpec(
        module=NativeDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=fused or backend.column_parallel_linear(),
            out_norm=ModuleSpec(module=OnesCentredNorm, params={"norm": out_norm}),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    if fused:
        return _replaced(layer, attention, IdentityOp, {})
    return _replaced(
        layer, attention, _norm(config, backend), {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    )


def _replaced(layer: ModuleSpec, attention: ModuleSpec, norm: Any, keys: dict[str, str]) -> ModuleSpec:
    """A copy of `layer` with another attention, norm before it, and checkpoint keys of that norm.

    Megatron's unfused layers save the input norm under the name it has when fused into linear_qkv, which a
    layer with a delta net does not have.
    """
    submodules: Any = layer.submodules
    names = submodules.sharded_state_dict_keys_map
    kept = {name: key for name, key in names.items() if not name.startswith("input_layernorm")}
    submodules = replace(
        submodules,
        self_attention=attention,
        input_layernorm=norm,
        sharded_state_dict_keys_map=kept | keys,
    )
    return replace(layer, submodules=submodules)


def _norm(config: TransformerConfig, backend: BackendSpecProvider) -> Any:
    return backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False, has_residual=True)


def _backend(te: bool) -> BackendSpecProvider:
    if not te:
        return LocalSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _stage_layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Global indices, from 0, of the decoder layers that this pipeline rank builds for `vp_stage`."""
    layout: Any = config.pipeline_model_parallel_layout  # parsed by the config
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _check(config: TransformerConfig, delta_net: str, attention: str, mode: str, cp_layout: str) -> None:
    for name, value, known in (
        ("delta_net", delta_net, MIXERS),
        ("attention", attention, MIXERS),
        ("hosted_mode", mode, MODES),
        ("cp_layout", cp_layout, LAYOUTS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    native = [name for name, kind in (("delta_net", delta_net), ("attention", attention)) if kind != "hosted"]
    if cp_layout == "contiguous" and config.context_parallel_size > 1 and (native or config.mtp_num_layers):
        raise ValueError(
            "cp_layout='contiguous' needs every layer that mixes tokens to be hosted: Megatron's attention, "
            "delta net and MTP block know zigzag shards only. Use 'zigzag', or delta_net='hosted', "
            "attention='hosted' and mtp_num_layers=None"
        )
    if config.transformer_impl not in ("transformer_engine", "local"):
        raise ValueError(
            f"transformer_impl {config.transformer_impl!r} has no delta net; use 'transformer_engine' or "
            "'local'"
        )
    if not isinstance(config.linear_attention_freq, list):
        raise ValueError(
            "linear_attention_freq must list each layer's kind, 1 for a delta net and 0 for full attention, "
            f"got {config.linear_attention_freq!r}. On Megatron's command line: "
            "--linear-attention-freq '([1]*3+[0])*12'"
        )
    if delta_net == "megatron" and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            "Megatron's delta net does not reduce the gradient of its output norm over tensor-parallel ranks "
            "when sequence_parallel is off. Turn it on, or use delta_net='hosted'"
        )
