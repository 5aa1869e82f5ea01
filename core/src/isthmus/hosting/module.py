"""A Hugging Face module inside a Megatron layer: whole on every tensor-parallel rank, with exact gradients.

`[s, b, h]` activations (the local slice of s under sequence parallelism) become HF's `[b, s, h]` and back.
Every rank of the tensor-parallel group runs the whole module on the same whole sequences, so every rank holds
the whole gradient of every parameter and the copies stay bitwise equal. What is not exact is refused.
"""

import sys
from typing import Any, ClassVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.hosting.initial import initialise, nan_for_empty
from isthmus.hosting.regions import enter_replicated, leave_replicated
from isthmus.hosting.sequence import sequence_bounds
from isthmus.hosting.torch_functions import use_torch_functions
from isthmus.precision import mark_param_dtype


class HostedModule(MegatronModule):
    """Base class of a layer's `self_attention` that is an HF module, run as it is.

    A subclass gives :meth:`build_hf_module`, and :meth:`run` where the HF module wants more than the
    activations. Megatron's specs pass all the arguments below; only `config` is needed.

    Attributes:
        hosted_name: the attribute that holds the HF module, and so its prefix in parameter names.
        fp32_params: parameters, by their names inside the HF module, that stay float32 whatever
            `config.params_dtype` is.
    """

    hosted_name: ClassVar[str] = "hf_module"
    fp32_params: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ):
        """Build the HF module in `config.params_dtype`, initialised where `config.perform_initialization`."""
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group = self.pg_collection.tp
        self._refuse_context_parallel(self.pg_collection.cp)
        setattr(self, self.hosted_name, self._build())

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """The HF module, built under the current default device and dtype; its values do not matter.

        A config that no model has seen needs `_attn_implementation`, "sdpa" for causal attention.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build_hf_module(config)")

    def run(self, hf_module: nn.Module, hidden: Tensor, **megatron: Any) -> Tensor:
        """HF's output (b, s, h) for `hidden` (b, s, h), whole sequences; the same on every rank.

        `megatron` holds what the Megatron layer passed besides (`attention_mask`, `rotary_pos_emb`, ...), for
        whole sequences only: with packed sequences it is empty, and this is called for each of them.
        The attention mask is not passed to the HF module: one that looks ahead must be masked here.
        """
        output = hf_module(hidden)
        return output[0] if isinstance(output, tuple) else output

    def initialise(self, hf_module: nn.Module) -> None:
        """Fill the HF module's parameters in place, by default with transformers' own rules.

        Draws from the default random state, which Megatron seeds alike on all ranks of a tensor-parallel
        group: the copies start equal.
        """
        initialise(hf_module, self.config.init_method_std)

    @property
    def hosted(self) -> nn.Module:
        """The HF module itself."""
        return getattr(self, self.hosted_name)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **megatron: Any,
    ) -> tuple[Tensor, None]:
        """(s, b, h) -> ((s, b, h), None); s is this rank's slice under sequence parallelism.

        Packed sequences (thd) come as (t, 1, h) and are run one by one: neither a convolution nor a recurrent
        state sees a neighbour, and the gradients are those of separate sequences.
        """
        if inference_context is not None or megatron.pop("inference_params", None) is not None:
            raise ValueError(
                f"{type(self).__name__} trains; it has no inference cache. Export and serve the model"
            )
        full = enter_replicated(hidden_states, self.tp_group) if self._sequence_parallel else hidden_states
        hidden = full.transpose(0, 1)
        if packed_seq_params is None:
            output = self.run(self.hosted, hidden, attention_mask=attention_mask, **megatron)
        else:
            self._refuse_context_parallel(packed_seq_params.cp_group)
            bounds = sequence_bounds(packed_seq_params, *full.shape[:2])
            output = torch.cat([self.run(self.hosted, hidden[:, a:b]) for a, b in bounds], dim=1)
        if output.shape != hidden.shape:
            raise ValueError(
                f"{type(self.hosted).__name__} returned {tuple(output.shape)} for (b, s, h) = "
                f"{tuple(hidden.shape)}; override run() to give an output of the same shape"
            )
        full = output.transpose(0, 1).contiguous()
        return (leave_replicated(full, self.tp_group) if self._sequence_parallel else full), None

    def backward_dw(self) -> None:
        """Nothing: the weight gradients are computed with the input gradients, never delayed."""

    @property
    def _sequence_parallel(self) -> bool:
        return self.config.sequence_parallel and self.tp_group.size() > 1

    def _refuse_context_parallel(self, group: torch.distributed.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            raise ValueError(
                f"{type(self).__name__} does not divide sequences: context_parallel_size is {group.size()}, "
                "and a hosted module needs whole ones. Set context_parallel_size=1"
            )

    def _build(self) -> nn.Module:
        device = torch.get_default_device()
        if device.type == "cpu" and torch.cuda.is_available() and not self.config.use_cpu_initialization:
            device = torch.device("cuda", torch.cuda.current_device())
        with device, nan_for_empty():
            hf_module = self.build_hf_module(self.config)
        _refuse_default_attention(hf_module)
        if not torch.cuda.is_available():
            for modeling in {type(part).__module__ for part in hf_module.modules()}:
                if modeling.startswith("transformers."):
                    use_torch_functions(sys.modules[modeling])
        if self.config.perform_initialization and device.type != "meta":
            self.initialise(hf_module)
        for name, parameter in hf_module.named_parameters():
            if name not in self.fp32_params:
                parameter.data = parameter.data.to(self.config.params_dtype)
        self._mark(hf_module)
        return hf_module

    def _mark(self, hf_module: nn.Module) -> None:
        """Tell Megatron that every rank holds the whole parameter and its whole gradient."""
        parameters = dict(hf_module.named_parameters())
        if missing := set(self.fp32_params) - parameters.keys():
            raise LookupError(
                f"{type(hf_module).__name__} has no parameter {sorted(missing)} to keep in float32"
            )
        for name, parameter in parameters.items():
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
            # Equal gradients, averaged so that an unequal rounding cannot let the copies drift. Not
            # `sequence_parallel`, which would sum them: each is whole already.
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
            if name in self.fp32_params:
                mark_param_dtype(parameter, torch.float32)

    def _apply(self, fn: Any, recurse: bool = True) -> "HostedModule":
        """Keep the marks when torch replaces parameters, as it does on the way from the meta device."""
        before = {name: id(parameter) for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        if any(before[name] != id(parameter) for name, parameter in self.named_parameters()):
            self._mark(self.hosted)
        return self


def _refuse_default_attention(hf_module: nn.Module) -> None:
    """ValueError where HF would fall back to eager attention, which without a mask sees later tokens."""
    for name, part in hf_module.named_modules():
        config = getattr(part, "config", None)
        if getattr(part, "is_causal", False) and getattr(config, "_attn_implementation", "") is None:
            raise ValueError(
                f"{name or type(part).__name__}: its config has no _attn_implementation, and HF's default is "
                "not causal without a mask. Set config._attn_implementation = 'sdpa' in build_hf_module"
            )
