"""DiffLlama in Megatron: its own layers, with HF's attention hosted in each."""

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from isthmus.hosting.attention import HostedAttention
from isthmus.hosting.model_config import HostedModelConfig
from isthmus.hosting.spec import decoder_block, hosting, layer_spec, rope
from isthmus.hosting.torch_functions import import_modeling
from isthmus.weights import Heads
from isthmus_diffllama import family

MODELING = "transformers.models.diffllama.modeling_diffllama"


class DifferentialAttention(HostedAttention):
    """transformers' DiffLlamaAttention as a layer's self_attention."""

    def heads(self, config: Any) -> Heads:
        """The division by which the weights are loaded too."""
        return family.heads(config)

    def build_hf_module(self, config: Any) -> Any:
        """HF's module with the heads that `config` counts; its lambda depends on the layer."""
        return import_modeling(MODELING).DiffLlamaAttention(self.hf_config(config), self.layer_number - 1)

    def build_rotary(self, config: Any) -> Any:
        """HF's rotary embedding."""
        return import_modeling(MODELING).DiffLlamaRotaryEmbedding(self.hf_config(config))

    def hf_config(self, config: Any) -> Any:
        """HF's config of one layer, from Megatron's."""
        from transformers import DiffLlamaConfig

        hf = DiffLlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.kv_channels,
            rms_norm_eps=config.layernorm_epsilon,
            initializer_range=config.init_method_std,
            rope_parameters=dict(self.rope),
        )
        hf._attn_implementation = self.implementation
        return hf


@layer_spec
def diffllama_spec(model_config: Any, config: Any, vp_stage: int | None = None) -> Any:
    """The layers of this pipeline stage, for DiffLlamaModelConfig and for Megatron's --spec."""
    attention = ModuleSpec(DifferentialAttention, params=hosting(model_config) | rope(model_config))
    return decoder_block(config, vp_stage, [attention] * config.num_layers)


@dataclass(kw_only=True)
class DiffLlamaModelConfig(HostedModelConfig):
    """Megatron's GPTModelConfig with these layers."""

    transformer_layer_spec: Any = diffllama_spec
