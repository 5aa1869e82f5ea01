"""A Hugging Face module inside a Megatron layer, under tensor and context parallelism, with exact gradients.

`[s, b, h]` activations (this rank's tokens) become HF's `[b, s, h]`, whole sequences in natural order, and
back. In mode "heads" each of tp x cp ranks runs its own heads on all tokens; in mode "replicated" each runs
the whole module. What is not exact is refused.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from isthmus.hosting.division import Share, sharded_state
from isthmus.hosting.initial import initialise, nan_for_empty
from isthmus.hosting.regions import Groups, enter_heads, enter_replicated, leave_heads, leave_replicated
from isthmus.hosting.relayout import from_contiguous, to_contiguous
from isthmus.hosting.sequence import Row, row
from isthmus.hosting.torch_functions import use_torch_functions
from isthmus.precision import mark_param_dtype
from isthmus.weights import Heads
from isthmus.zigzag import LAYOUTS

MODES = ("heads", "replicated")
CP = ("heads", "state_passing")


class _Alone:
    """A group of this rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class HostedModule(MegatronModule):
    """Base class of a layer's `self_attention` that is an HF module, run as it is.

    A subclass gives :meth:`build_hf_module`, :meth:`heads` where the module's work can be divided, and
    :meth:`run` where the HF module wants more than the activations. Megatron's specs pass the arguments up to
    `name`, of which only `config` is needed; `mode` and `cp_layout` are a spec's `params`.

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
        mode: str | None = None,
        cp_layout: str = "zigzag",
        cp: str = "heads",
    ):
        """Build the HF module in `config.params_dtype`, initialised where `config.perform_initialization`.

        Args:
            mode: "heads" or "replicated"; None is "heads" where :meth:`heads` declares a division.
            cp_layout: how context parallelism divides sequences, "zigzag" (Megatron's) or "contiguous".
            cp: what each context-parallel rank runs: "heads", whole sequences as `mode` says; or
                "state_passing", all heads on a run of tokens, where the module has :meth:`passing`.

        Raises:
            ValueError: the heads do not divide over the ranks, or states cannot be passed here. There is no
                silent change of mode.
        """
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group = self.pg_collection.tp
        tp, cp_size = self.tp_group.size(), self.pg_collection.cp.size()
        self.groups = Groups(self.tp_group, self.pg_collection.cp, config.sequence_parallel and tp > 1)
        if cp_layout not in LAYOUTS:
            raise ValueError(f"cp_layout must be one of {LAYOUTS}, got {cp_layout!r}")
        self.cp_layout = cp_layout
        self.declared = declared = self.heads(config)
        # The ranks that divide the module, where those of context parallelism divide the tokens instead.
        dividing, self._within = self.pg_collection, self.groups
        self.passes_state = self._passes_state(cp)
        if self.passes_state:
            dividing = ProcessGroupCollection(tp=self.tp_group, cp=_Alone())
            self._within, cp_size = replace(self.groups, cp=dividing.cp), 1
        self.mode = self._mode(mode, declared, tp, cp_size)
        self.share = Share(declared if self.mode == "heads" else None, dividing)
        setattr(self, self.hosted_name, self._build(self.share.held_config(config)))
        self.share.check(self.hosted)
        self._run_module = () if self.share.runs_what_it_holds else (self._build_run_module(),)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """The HF module that `config` describes, built under the current default device and dtype.

        Its values do not matter. The config's counts of heads are those of this rank in mode "heads": take
        them from here. An HF config that no model has seen needs `_attn_implementation`, "sdpa" for causal
        attention.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build_hf_module(config)")

    def heads(self, config: TransformerConfig) -> Heads | None:
        """How the whole module that `config` describes divides by heads; None: not at all.

        Give the weight rules the same description: ``hosted(..., split=heads, model=model)``.
        """
        return None

    def run(self, hf_module: Any, hidden: Tensor, **megatron: Any) -> Tensor:
        """HF's output (b, s, h) for `hidden` (b, s, h), whole sequences from position 0 on.

        In mode "heads" the output of this rank's heads alone, which are summed over the ranks later: add
        nothing to it here. `megatron` holds what the Megatron layer passed besides (`attention_mask`,
        `rotary_pos_emb`, ...), for whole sequences only: with packed sequences, which come one by one, and
        under context parallelism it is empty.
        The attention mask is not passed to the HF module: one that looks ahead must be masked here.
        """
        output = hf_module(hidden)
        return output[0] if isinstance(output, tuple) else output

    def passing(self, bounds: tuple[tuple[int, int], ...]) -> AbstractContextManager[None] | None:
        """A context in which :meth:`run` gets this rank's run of a row of sequences, and hands on its state.

        `bounds` are the sequences, over all ranks; () asks whether there is such a context: None where the
        module has none, ValueError where this machine cannot run it.
        """
        return None

    def initialise(self, hf_module: nn.Module) -> None:
        """Fill the HF module's parameters in place, by default with transformers' own rules.

        Draws from the default random state, which Megatron seeds alike on all ranks of a tensor-parallel
        group, or for divided parameters from Megatron's, which differs on each.
        """
        initialise(hf_module, self.config.init_method_std)

    @property
    def hosted(self) -> nn.Module:
        """The HF module that has this rank's parameters."""
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
        """(s, b, h) -> ((s, b, h), None); s are this rank's tokens under sequence and context parallelism.

        Packed sequences (thd) come as (t, 1, h) and are run one by one: neither a convolution nor a recurrent
        state sees a neighbour, and the gradients are those of separate sequences.
        """
        if inference_context is not None or megatron.pop("inference_params", None) is not None:
            raise ValueError(
                f"{type(self).__name__} trains; it has no inference cache. Export and serve the model"
            )
        groups = self._groups(packed_seq_params)
        local, batch = hidden_states.shape[:2]
        layout = row(
            packed_seq_params,
            groups.tokens(local),
            batch,
            groups.cp.size(),
            self.cp_layout,
            hidden_states.device,
        )
        enter, leave = (
            (enter_heads, leave_heads) if self.mode == "heads" else (enter_replicated, leave_replicated)
        )
        hidden = enter(hidden_states, self._within, layout)
        module = self._bound()
        if self.passes_state:
            output = self._run_passing(module, to_contiguous(hidden, groups.cp, layout), layout)
            return leave(from_contiguous(output, groups.cp, layout), self._within, layout), None
        hidden = hidden.transpose(0, 1).contiguous()  # once; else each projection of HF's copies it
        if packed_seq_params is None:
            # Under context parallelism these are of this rank's tokens only.
            passed = {} if groups.cp.size() > 1 else {"attention_mask": attention_mask, **megatron}
            output = self.run(module, hidden, **passed)
        else:
            output = torch.cat([self.run(module, hidden[:, a:b]) for a, b in layout.bounds], dim=1)
        if output.shape != hidden.shape:
            raise ValueError(
                f"{type(self.hosted).__name__} returned {tuple(output.shape)} for (b, s, h) = "
                f"{tuple(hidden.shape)}; override run() to give an output of the same shape"
            )
        return leave(output.transpose(0, 1).contiguous(), self._within, layout), None

    def backward_dw(self) -> None:
        """Nothing: the weight gradients are computed with the input gradients, never delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's, with shards where tensor parallelism divides; the keys are the same in both modes."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        dp_cp = metadata["dp_cp_group"]
        prefix = f"{prefix}{self.hosted_name}."
        return found | sharded_state(
            self.hosted, self.share, self.declared, prefix, sharded_offsets, self.pg_collection, dp_cp
        )

    def _mode(self, asked: str | None, declared: Heads | None, tp: int, cp: int) -> str:
        if asked not in (None, *MODES):
            raise ValueError(f"mode must be one of {MODES}, got {asked!r}")
        if asked == "heads" and declared is None:
            raise ValueError(
                f"{type(self).__name__} does not say how its heads divide; define heads(config), or use "
                "mode='replicated'"
            )
        mode = asked or ("heads" if declared else "replicated")
        if mode == "heads" and declared is not None and (problems := declared.problems(tp, cp)):
            raise ValueError(
                f"{type(self).__name__}: {'; '.join(problems)}. Use mode='replicated' (every rank then does "
                "all the work), or fewer ranks"
            )
        return mode

    def _passes_state(self, cp: str) -> bool:
        """Whether states are passed: asked for, and there is more than one context-parallel rank."""
        if cp not in CP:
            raise ValueError(f"cp must be one of {CP}, got {cp!r}")
        if cp == "heads":
            return False
        if self.passing(()) is None:
            raise ValueError(f"{type(self).__name__} has no state that ranks could pass; use cp='heads'")
        return self.groups.cp.size() > 1

    def _run_passing(self, module: Any, tokens: Tensor, row: Row) -> Tensor:
        """(n, b, h) -> (n, b, h) of this rank's run of tokens; each row of a batch by itself."""
        context = self.passing(row.bounds)
        assert context is not None
        with context:
            outputs = [self.run(module, tokens[:, i : i + 1].transpose(0, 1)) for i in range(tokens.size(1))]
        return torch.cat(outputs).transpose(0, 1).contiguous()

    def _groups(self, packed: PackedSeqParams | None) -> Groups:
        """The ranks that share this batch's sequences. ValueError: others than the module was built for."""
        given = None if packed is None else packed.local_cp_size
        if packed is not None and packed.cp_group is not None:
            given = packed.cp_group.size()
        if given is not None and given != self.groups.cp.size():
            raise ValueError(
                f"{type(self).__name__} is built for context_parallel_size={self.groups.cp.size()}, and the "
                f"batch is divided over {given}: a size that varies by batch (hybrid context parallelism) is "
                "not supported"
            )
        return self.groups

    def _bound(self) -> Any:
        """What `run` calls: the HF module of this rank's heads with its slices of the parameters."""
        if not self._run_module:
            return self.share.bound(self.hosted, self.hosted)
        return self.share.bound(self.hosted, self._run_module[0].train(self.hosted.training))

    def _build_run_module(self) -> nn.Module:
        """The module of the heads that this rank runs; its parameters are never used."""
        with torch.device("meta"):
            return self.build_hf_module(self.share.run_config(self.config))

    def _build(self, config: TransformerConfig) -> nn.Module:
        device = torch.get_default_device()
        if device.type == "cpu" and torch.cuda.is_available() and not self.config.use_cpu_initialization:
            device = torch.device("cuda", torch.cuda.current_device())
        with device, nan_for_empty():
            hf_module = self.build_hf_module(config)
        _refuse_default_attention(hf_module)
        if not torch.cuda.is_available():
            for modeling in {type(part).__module__ for part in hf_module.modules()}:
                if modeling.startswith("transformers."):
                    use_torch_functions(sys.modules[modeling])
        if self.config.perform_initialization and device.type != "meta":
            self._initialise(hf_module)
        for name, parameter in hf_module.named_parameters():
            if name not in self.fp32_params:
                parameter.data = parameter.data.to(self.config.params_dtype)
        self._mark(hf_module)
        return hf_module

    def _initialise(self, hf_module: nn.Module) -> None:
        """Initial values: alike on all tensor-parallel ranks for whole parameters, their own for shards."""
        self.initialise(hf_module)
        if self.share.heads is None or self.tp_group.size() == 1:
            return
        whole = {
            name: parameter.detach().clone()
            for name, parameter in hf_module.named_parameters()
            if self.share.dim(name) is None
        }
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork():
            self.initialise(hf_module)
        with torch.no_grad():
            for name, value in whole.items():
                hf_module.get_parameter(name).copy_(value)

    def _mark(self, hf_module: nn.Module) -> None:
        """Tell Megatron what each parameter and its gradient is to the ranks of a group."""
        parameters = dict(hf_module.named_parameters())
        if missing := set(self.fp32_params) - parameters.keys():
            raise LookupError(
                f"{type(hf_module).__name__} has no parameter {sorted(missing)} to keep in float32"
            )
        for name, parameter in parameters.items():
            self.share.mark(name, parameter)
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
