"""A parallel layout: sizes of the process groups, checked against a model before anything is built."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import gcd
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from isthmus import pipeline_layout

if TYPE_CHECKING:
    from isthmus.family import Family

AXES = ("tp", "sp", "pp", "vp", "ep", "etp", "cp", "dp")
"""Every kind of parallelism, in the order in which they are written."""
SIZES = tuple(axis for axis in AXES if axis != "sp")  # sp is on or off


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of Megatron's parallel groups. `sp` None means: on where tp > 1.

    `vp` is the number of model chunks on a pipeline rank; `pipeline_layout` is Megatron's string, for example
    ``"Ett|tttmL"`` (E embedding, t decoder layer, m MTP, L loss, | stage), with pp x vp stages.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool | None = None
    pipeline_layout: str | None = None

    def __post_init__(self) -> None:
        wrong = {name: getattr(self, name) for name in SIZES if getattr(self, name) < 1}
        if wrong:
            raise ValueError(f"parallel sizes must be at least 1: {wrong}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Layout":
        """The layout that Megatron's config `fields` describe; data parallelism is none of theirs."""
        tp = fields.get("tensor_model_parallel_size") or 1
        return cls(
            tp=tp,
            pp=fields.get("pipeline_model_parallel_size") or 1,
            vp=fields.get("virtual_pipeline_model_parallel_size") or 1,
            ep=fields.get("expert_model_parallel_size") or 1,
            etp=fields.get("expert_tensor_parallel_size") or (tp if fields.get("num_moe_experts") else 1),
            cp=fields.get("context_parallel_size") or 1,
            sp=fields.get("sequence_parallel", False),
            pipeline_layout=pipeline_layout.as_text(fields.get("pipeline_model_parallel_layout")),
        )

    @classmethod
    def current(cls) -> "Layout":
        """The layout of Megatron's process groups. ValueError where they are not initialised.

        The very layout whose `initialize` made them, else one of their sizes: they know no `pipeline_layout`.
        """
        from megatron.core import parallel_state

        if not parallel_state.is_initialized():
            raise ValueError(
                "Megatron's process groups are not initialised. Try: Layout(tp=..., pp=...).initialize()"
            )
        group, made = _initialized
        if made is not None and group is parallel_state.get_tensor_model_parallel_group():
            return made
        return cls(
            tp=parallel_state.get_tensor_model_parallel_world_size(),
            pp=parallel_state.get_pipeline_model_parallel_world_size(),
            vp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            ep=parallel_state.get_expert_model_parallel_world_size(),
            etp=parallel_state.get_expert_tensor_parallel_world_size() or 1,
            cp=parallel_state.get_context_parallel_world_size(),
            dp=parallel_state.get_data_parallel_world_size(),
        )

    def unsupported(self, axes: frozenset[str]) -> list[str]:
        """The kinds of parallelism used here and not among a family's `axes`, one line each."""
        used: dict[str, Any] = {name: getattr(self, name) for name in SIZES if getattr(self, name) > 1}
        if self.sequence_parallel:
            used["sp"] = "on"
        known = " ".join(axis for axis in AXES if axis in axes)
        return [
            f"the family does not support {axis}={value} (it supports: {known})"
            for axis, value in used.items()
            if axis not in axes
        ]

    def misfits(self, family: "Family", fields: Mapping[str, Any]) -> list[str]:
        """Every reason why the family's model with these Megatron config `fields` cannot be divided so."""
        own = family.problems(self, fields) if family.problems is not None else []
        heads = family.hosted(SimpleNamespace(**fields)) if family.hosted is not None else None
        if heads is not None and fields.get("hosted_mode") != "replicated":
            own += heads.problems(self.tp, self.cp)
        return [*self.unsupported(family.axes), *self.problems(fields), *own]

    def check(self, family: "Family", fields: Mapping[str, Any]) -> None:
        """ValueError with all `misfits`; costs nothing, starts nothing."""
        if lines := self.misfits(family, fields):
            raise ValueError("this layout does not fit the model:" + "".join(f"\n  {line}" for line in lines))

    def check_groups(self, *, experts: bool) -> None:
        """ValueError where Megatron's process groups are of other sizes; ep and etp count if `experts`."""
        made = Layout.current()
        names = ("tp", "pp", "cp", "ep", "etp") if experts else ("tp", "pp", "cp")
        if wrong := [name for name in names if getattr(self, name) != getattr(made, name)]:
            sizes = ", ".join(
                f"{name}={getattr(self, name)} and {name}={getattr(made, name)}" for name in wrong
            )
            raise ValueError(
                f"the model config and Megatron's process groups differ: {sizes}. Make both of one Layout:"
                " layout.initialize() and get_model_config(**layout.config_overrides())"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp x pp x cp x dp. Experts (ep x etp) live on the same ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between tensor-parallel regions are divided along the sequence."""
        return self.tp > 1 if self.sp is None else self.sp and self.tp > 1

    def resolved(self) -> "Layout":
        """The same layout with dp raised to the least at which ep x etp divides tp x cp x dp."""
        experts = self.ep * self.etp
        step = experts // gcd(experts, self.tp * self.cp)
        return replace(self, dp=-(-self.dp // step) * step, sp=self.sequence_parallel)

    def as_dict(self) -> dict[str, Any]:
        """The sizes and `sp`, as the command line reports them."""
        return {**asdict(self), "sp": self.sequence_parallel}

    def config_overrides(self) -> dict[str, Any]:
        """The TransformerConfig fields of this layout, for ``bridge.get_model_config(**...)``."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp if self.vp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sequence_parallel,
            "pipeline_model_parallel_layout": self.pipeline_layout,
        }

    def initialize(self, seed: int = 1234, *, gloo: bool = True) -> None:
        """Create Megatron's process groups over the initialised torch.distributed; seed its generators.

        `gloo` False leaves out the groups that Megatron makes besides, for objects on the CPU.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"this layout needs {self.world_size} ranks (tp x pp x cp x dp = {self.tp} x {self.pp} x"
                f" {self.cp} x {self.dp}), torch.distributed has {dist.get_world_size()}"
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp if self.vp > 1 else None,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            create_gloo_process_groups=gloo,
        )
        model_parallel_cuda_manual_seed(seed)
        global _initialized
        _initialized = parallel_state.get_tensor_model_parallel_group(), self

    def problems(self, fields: Mapping[str, Any]) -> list[str]:
        """Why Megatron cannot divide a model with these config `fields` this way; empty where it can."""
        found = []

        def divide(what: str, count: int | None, by: str, size: int) -> None:
            if count is not None and count % size:
                found.append(f"cannot divide {count} {what} over {by}={size}")

        divide("attention heads", fields.get("num_attention_heads"), "tensor_model_parallel_size", self.tp)
        groups = fields.get("num_query_groups")
        if groups and groups % self.tp and self.tp % groups:
            found.append(f"cannot divide {groups} key/value heads over tensor_model_parallel_size={self.tp}")
        if _has_dense_layers(fields):
            divide("MLP rows", fields.get("ffn_hidden_size"), "tensor_model_parallel_size", self.tp)
        if not fields.get("should_pad_vocab", True):
            divide("vocabulary rows", fields.get("vocab_size"), "tensor_model_parallel_size", self.tp)
        divide(
            "shared-expert rows",
            fields.get("moe_shared_expert_intermediate_size"),
            "tensor_model_parallel_size",
            self.tp,
        )
        experts = fields.get("num_moe_experts")
        if experts is None and self.ep * self.etp > 1:
            found.append(f"the model has no experts to divide over ep={self.ep}, etp={self.etp}")
        divide("experts", experts, "expert_model_parallel_size", self.ep)
        divide("expert rows", fields.get("moe_ffn_hidden_size"), "expert_tensor_parallel_size", self.etp)
        if experts is not None and self.tp > 1 and not self.sequence_parallel:
            found.append(
                f"tp={self.tp} without sequence parallelism: Megatron refuses to train experts so;"
                " set sequence_parallel=True (--sp)"
            )
        layers = fields["num_layers"]
        if self.pipeline_layout is not None:
            mtp = fields.get("mtp_num_layers") or 0
            found += pipeline_layout.problems(str(self.pipeline_layout), self.pp, self.vp, layers, mtp)
        elif layers % (self.pp * self.vp) and not any(fields.get(name) for name in _UNEVEN):
            found.append(
                f"cannot divide {layers} layers over pp x vp = {self.pp} x {self.vp} stages;"
                f" give an uneven split: pipeline_model_parallel_layout (--pipeline-layout)"
            )
        if self.vp > 1 and self.pp == 1:
            found.append(f"vp={self.vp} needs pp > 1")
        return found


def _has_dense_layers(fields: Mapping[str, Any]) -> bool:
    """Whether any layer has an MLP in place of experts."""
    sparse = fields.get("moe_layer_freq", 1)
    if fields.get("num_moe_experts") is None:
        return True
    return 0 in sparse if isinstance(sparse, list) else sparse > 1


_UNEVEN = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Config fields by which Megatron divides layers unevenly over stages, and which it checks itself."""

_initialized: tuple[Any, Layout | None] = (None, None)
"""The layout that was initialised last, and its tensor-parallel group, by which it is known again."""
