"""A model with Megatron's DDP and Adam: steps, checkpoints, and its whole state under HF's names.

For tests that compare trainings: of the same weights, on the same tokens, in different layouts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.names import unwrapped
from isthmus.testing import training_step
from isthmus.testing.batch import random_batch

SEQUENCES = 8  # of each step, over all ranks
TOKENS = 16  # of each sequence
STATES = ("model", "param", "exp_avg", "exp_avg_sq")  # parameters, their main copies, and Adam's moments


@dataclass(slots=True)
class Trainer:
    """What a training run holds. Every method is collective."""

    bridge: AutoBridge
    layout: Layout
    chunks: list[nn.Module]
    optimizer: Any

    @classmethod
    def build(
        cls,
        hf: Path,
        layout: Layout,
        *,
        distributed: bool = True,
        lr: float = 1e-2,
        clip: float = 1.0,
        load: bool = True,
        before_wrap: Callable[[list[Any]], None] = lambda chunks: None,
        **fields: Any,
    ) -> "Trainer":
        """Process groups, model and optimizer, in place of those that this process had.

        Args:
            distributed: Megatron's distributed optimizer, else its plain one.
            clip: the gradient norm, at most; 0 is any.
            load: fill the model from `hf`; else its values are random.
            before_wrap: called with each bare chunk of a model that is about to be cast.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from isthmus.precision import exact_float16_module

        parallel_state.destroy_model_parallel()
        layout.initialize()
        bridge = AutoBridge.from_hf_pretrained(hf)
        config = bridge.get_model_config(**layout.config_overrides(), calculate_per_token_loss=True, **fields)

        def wrap(config: Any, chunk: Any) -> Any:
            before_wrap([chunk])
            return exact_float16_module(config, chunk)

        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        chunks: Any = bridge.build_model(
            config, wrap_with_ddp=True, ddp_config=ddp, mixed_precision_wrapper=wrap
        )
        if load:
            bridge.load_hf_weights(chunks)
        adam = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.01,
            clip_grad=clip,
            bf16=config.transformer.bf16,
            params_dtype=config.transformer.params_dtype,
            use_distributed_optimizer=distributed,
        )
        return cls(bridge, layout, chunks, get_megatron_optimizer(adam, chunks))

    def step(self, seed: int) -> tuple[float | None, float]:
        """(loss before the update on the first rank, gradient norm) of one step on the tokens of `seed`."""
        batch = random_batch(
            self.bridge.megatron_fields["vocab_size"],
            tokens=TOKENS,
            seed=seed,
            ranks=self.layout.dp,
            microbatches=SEQUENCES // 2 // self.layout.dp,
            packed=False,
        )
        self.optimizer.zero_grad()
        recorded = training_step.run(self.chunks, batch, gradients=True)
        _, norm, _ = self.optimizer.step()
        return None if recorded is None else recorded.loss, norm

    def save(self, path: Path, sharding: str | None = "fully_reshardable") -> None:
        """A torch_dist checkpoint of model and optimizer, with the metadata that megatron.training writes."""
        from megatron.core import dist_checkpointing

        content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if sharding is not None:
            content["distrib_optim_sharding_type"] = sharding
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        dist_checkpointing.save(self._states(content, loading=False), str(path), content_metadata=content)

    def load(self, path: Path) -> None:
        """What :meth:`save` wrote at any layout."""
        from megatron.core import dist_checkpointing

        content: Any = dist_checkpointing.load_content_metadata(str(path))
        loaded: Any = dist_checkpointing.load(self._states(content, loading=True), str(path))
        for key, chunk in zip(self._keys(), self.chunks, strict=True):
            unwrapped(chunk).load_state_dict(loaded[key], strict=False)  # absent: extra state only
        self.optimizer.load_state_dict(loaded["optimizer"])

    def whole(self, state: str) -> dict[str, Tensor]:
        """One of STATES over all ranks, in float32, by HF's names."""
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        held = [parameter.data for parameter in parameters]
        if state != "model":
            values = dict(self._of_optimizer(state))
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.data = values[parameter].detach().clone()
        exported = self.bridge.export_hf_weights(self.chunks, dtype=torch.float32)
        found = {name: tensor.clone() for name, tensor in exported}
        for parameter, data in zip(parameters, held, strict=True):
            parameter.data = data
        return found

    def everything(self) -> dict[str, dict[str, Tensor]]:
        """All STATES."""
        return {state: self.whole(state) for state in STATES}

    def _of_optimizer(self, state: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its main copy or moment in its own shape) of all that this rank trains."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        for optimizer in self.optimizer.chained_optimizers:
            if optimizer.is_stub_optimizer:
                continue
            inner = optimizer.optimizer.state
            if isinstance(optimizer, DistributedOptimizer):
                yield from _gathered(optimizer, state)
                continue
            narrow = [p for group in getattr(optimizer, "float16_groups", ()) for p in group]
            wide = [p for group in getattr(optimizer, "fp32_from_fp32_groups", ()) for p in group]
            for parameter in [*narrow, *wide] or optimizer.get_parameters():
                main = getattr(parameter, "main_param", parameter)
                yield parameter, main.data if state == "param" else inner[main][state]

    def _states(self, content: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        from megatron.core import parallel_state

        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**content, "dp_cp_group": replicas}
        states: dict[str, Any] = {
            key: unwrapped(chunk).sharded_state_dict(metadata=metadata)
            for key, chunk in zip(self._keys(), self.chunks, strict=True)
        }
        return states | {
            "optimizer": self.optimizer.sharded_state_dict(states, is_loading=loading, metadata=metadata)
        }

    def _keys(self) -> list[str]:
        """megatron.training's names of model chunks."""
        count = len(self.chunks)
        return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """ "state: name" of what is not bitwise equal; both as of :meth:`Trainer.everything`."""
    assert found.keys() == expected.keys()
    wrong = []
    for state, tensors in expected.items():
        assert found[state].keys() == tensors.keys(), found[state].keys() ^ tensors.keys()
        wrong += [f"{state}: {n}" for n, tensor in tensors.items() if not _same(found[state][n], tensor)]
    return wrong


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def _gathered(optimizer: Any, state: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Put together over the data-parallel ranks, of which each has a range of the flat parameter.

    From what the optimizer steps with, and not by way of its own description of its state for checkpoints.
    """
    own = {}
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model, main in zip(models, mains, strict=True):
            own.update(zip(model, main, strict=True))
    for buffer in optimizer.buffers:
        for parameter in buffer.params:
            full = torch.zeros(parameter.numel(), device=parameter.device)
            if parameter in own:
                shard = own[parameter]
                place = optimizer._get_model_param_range_map(parameter)["param"]
                full[place.start : place.end] = (
                    shard if state == "param" else optimizer.optimizer.state[shard][state]
                )
            dist.all_reduce(full.view(torch.int32), group=optimizer.data_parallel_group)  # sums with 0: bits
            yield parameter, full.view(parameter.shape)
