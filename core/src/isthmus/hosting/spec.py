"""Layer specs of families: Megatron's own decoder layers, other mixers in the place of some attentions.

A family's function returns the block; :func:`layer_spec` makes of it what `GPTModelConfig` and Megatron's
`--spec` call.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from isthmus import mtp, optimizer_state, tied_head
from isthmus.hosting import own_training
from isthmus.hosting.module import CP, MODES, HostedModule
from isthmus.zigzag import LAYOUTS

type Block = Callable[[Any, TransformerConfig, int | None], TransformerBlockSubmodules]


def layer_spec(
    block: Block, *, gated_activation: Callable[[Tensor], Tensor] | None = None
) -> Callable[..., TransformerBlockSubmodules]:
    """`block` (model config, transformer config, vp_stage) in Megatron's two signatures.

    Those are (model config, vp_stage) of its model builder, and (args, transformer config, vp_stage).
    `gated_activation` is of the gated MLPs of a config that has none: Megatron's arguments, of which it may
    be made, know only SiLU there.
    """

    @functools.wraps(block)
    def spec(
        model_config: Any, config: TransformerConfig | int | None = None, vp_stage: int | None = None
    ) -> TransformerBlockSubmodules:
        if isinstance(config, int):
            config, vp_stage = None, config
        transformer = config or model_config.transformer
        if gated_activation is not None and not transformer.gated_linear_unit:
            transformer.gated_linear_unit, transformer.activation_func = True, gated_activation
            transformer.bias_activation_fusion = False  # has no such function
        _prepare(model_config, transformer)
        return block(model_config, transformer, vp_stage)

    spec.gated_activation = gated_activation  # type: ignore[attr-defined]
    return spec


def vision_language_spec(*args: Any, **kwargs: Any) -> NoReturn:
    """What `--spec` names for a model with a vision tower. ValueError: Megatron's script builds none."""
    raise ValueError(
        "Megatron's training script builds language models, without the vision tower of this checkpoint."
        " Build the model with AutoBridge.build_model in a script of your own, or import with part='text'"
    )


def _prepare(model_config: Any, transformer: TransformerConfig) -> None:
    """See to it that the model computes what Hugging Face's does, also where no bridge builds it."""
    optimizer_state.install()
    own_training.prepare(model_config)
    if transformer.mtp_num_layers:
        mtp.install()
        tied_head.install()


def hosting(model_config: Any) -> dict[str, str]:
    """The params of a HostedModule that the model config (or Megatron's args, which lack them) chooses.

    ValueError: `hosted_mode`, `cp_layout` or `hosted_cp` is no known one.
    """
    found = {}
    for name, param, known in (
        ("hosted_mode", "mode", MODES),
        ("cp_layout", "cp_layout", LAYOUTS),
        ("hosted_cp", "cp", CP),
    ):
        found[param] = getattr(model_config, name, known[0])
        if found[param] not in known:
            raise ValueError(f"{name} must be one of {known}, got {found[param]!r}")
    return found


def rope(model_config: Any) -> dict[str, float]:
    """The params of a HostedAttention: the rotary embedding, which a TransformerConfig lacks."""
    return {name: getattr(model_config, name) for name in ("rotary_base", "rotary_percent")}


def decoder_block(
    config: TransformerConfig, vp_stage: int | None, mixers: Sequence[ModuleSpec | None]
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, `mixers[i]` as `self_attention` of layer i where not None.

    The input norm stands before the mixer, unless the mixer's `metainfo` says, as Megatron's own do, that it
    has it fused: ``{"fuse_input_layernorm": True}``. Its `input_layernorm_key` is what the checkpoint then
    calls that norm, so that the unfused layer can do so too.

    Raises:
        ValueError: there is not a mixer for each layer, or context parallelism is contiguous and some layer,
            which is not hosted, knows zigzag shards only.
    """
    if len(mixers) != config.num_layers:
        raise ValueError(f"{len(mixers)} mixers for num_layers={config.num_layers}")
    _check_contiguous(config, mixers)
    backend, rms = layer_backend(config), config.normalization == "RMSNorm"
    layers: Any = get_gpt_decoder_layer_specs(  # a list, whatever its annotation says
        config,
        config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    norm = backend.layer_norm(rms_norm=rms, for_qk=False, has_residual=True)
    layers = [
        layer if mixer is None else _with_mixer(layer, mixer, norm)
        for layer, mixer in zip(layers, mixers, strict=True)
    ]
    return TransformerBlockSubmodules(
        layer_specs=[layers[i] for i in stage_layers(config, vp_stage)],
        layer_norm=backend.layer_norm(rms_norm=rms, for_qk=False),
    )


def layer_backend(config: TransformerConfig) -> BackendSpecProvider:
    """Megatron's choice of modules. ValueError: `transformer_impl` has layers of another kind."""
    if config.transformer_impl == "local":
        return LocalSpecProvider()
    if config.transformer_impl != "transformer_engine":
        raise ValueError(
            f"transformer_impl {config.transformer_impl!r} has no layers whose attention can be replaced; "
            "use 'transformer_engine' or 'local'"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def stage_layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Global indices, from 0, of the decoder layers that this pipeline rank builds for `vp_stage`."""
    layout: Any = config.pipeline_model_parallel_layout  # parsed by the config
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _with_mixer(layer: ModuleSpec, mixer: ModuleSpec, norm: Any) -> ModuleSpec:
    """A copy of `layer` with another attention and the norm before it.

    Megatron's unfused layers save the input norm under the name it has when fused into linear_qkv, which a
    layer with another mixer does not have.
    """
    submodules: Any = layer.submodules
    names = submodules.sharded_state_dict_keys_map
    names = {name: key for name, key in names.items() if not name.startswith("input_layernorm")}
    fused, key = mixer.metainfo.get("fuse_input_layernorm"), mixer.metainfo.get("input_layernorm_key")
    if key and not fused:
        names["input_layernorm."] = key
    submodules = replace(
        submodules,
        self_attention=mixer,
        input_layernorm=IdentityOp if fused else norm,
        sharded_state_dict_keys_map=names,
    )
    return replace(layer, submodules=submodules)


def _check_contiguous(config: TransformerConfig, mixers: Sequence[ModuleSpec | None]) -> None:
    hosted = [isinstance(m.module, type) and issubclass(m.module, HostedModule) for m in mixers if m]
    contiguous = any(m.params.get("cp_layout") == "contiguous" for m in mixers if m)
    whole = len(hosted) == len(mixers) and all(hosted) and not config.mtp_num_layers
    if contiguous and config.context_parallel_size > 1 and not whole:
        raise ValueError(
            "cp_layout='contiguous' needs every layer that mixes tokens to be hosted: Megatron's attention, "
            "delta net and MTP block know zigzag shards only. Use 'zigzag', or host all layers' mixers "
            "(attention='hosted', where the family has the choice) with mtp_num_layers=None"
        )
