"""What Megatron's optimizers write into a checkpoint is each parameter's own state, under its own name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.launch import run

# Of two shapes only, so that a state under a wrong name is not refused for its shape; the embedding is a
# bucket of its own, and the three parameters before it in the buffer do not fill theirs: each begins at a
# multiple of 64 numbers, and a bucket ends at one of 128.
NAMES = ("embedding", "bias", "decay", "gate", "scale")
PINNED = "decay"
BETA1, BETA2 = 0.9, 0.75
ROUNDED = 1e-6  # a moment is a few float32 operations away; parameters are bits


def gradient(name: str) -> float:
    return 1.0 + NAMES.index(name)


def values(name: str) -> torch.Tensor:
    """No bfloat16 holds these."""
    shape = (16, 4) if name == "embedding" else (8,)
    return torch.randn(shape, generator=torch.Generator().manual_seed(NAMES.index(name)))


def trained(distributed: bool, undone: str | None):
    """(model in DDP, optimizer) after one step in which no parameter moves and each has its own gradient."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus import mark_param_dtype

    class Model(MegatronModule):
        def __init__(self, config):
            super().__init__(config)
            for name in NAMES:
                setattr(self, name, nn.Parameter(values(name)))
            self.embedding.shared_embedding = True
            mark_param_dtype(self.decay, torch.float32)

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    model = Model(config)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    ddp = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        clip_grad=0.0,
        weight_decay=0.0,
        adam_beta1=BETA1,
        adam_beta2=BETA2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )
    undo(undone)
    optimizer = get_megatron_optimizer(options, [ddp])
    for name in NAMES:
        getattr(model, name).main_grad.fill_(gradient(name))
    optimizer.step()
    return ddp, optimizer


def undo(correction: str | None) -> None:
    """Give Megatron one of its own functions back."""
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.optimizer.optimizer as plain

    match correction:
        case "float32 first":
            ours = distributed.DistributedOptimizer._build_optimizer_group_ranges
            distributed.DistributedOptimizer._build_optimizer_group_ranges = classmethod(
                ours.__func__.__wrapped__
            )
        case "no padding":
            owner, name = distributed.DistributedOptimizer, "sharded_param_state_fully_reshardable"
            setattr(owner, name, getattr(owner, name).__wrapped__)
        case "float32 last":
            owner = plain.Float16OptimizerWithFloat16Params
            owner.__init__ = owner.__init__.__wrapped__
        case "all parameters":
            owner = plain.Float16OptimizerWithFloat16Params
            owner.sharded_state_dict = owner.sharded_state_dict.__wrapped__


def saved(folder: Path, distributed: bool, undone: str | None) -> dict[str, torch.Tensor]:
    """The tensors in the files, by name."""
    from megatron.core import dist_checkpointing, parallel_state

    ddp, optimizer = trained(distributed, undone)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "chained_optim_avoid_prefix": True}
    if distributed:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    model = ddp.module.module.sharded_state_dict(metadata=metadata)
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata)}
    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in found.items() if torch.is_tensor(tensor)}


def wrong(found: dict[str, torch.Tensor], distributed: bool) -> list[str]:
    """Keys that do not hold what the parameter's value and gradient say; `found` has no others."""
    expected = {}
    for name in NAMES:
        value = values(name) if name == PINNED else values(name).bfloat16().float()
        expected[name] = value if name == PINNED else value.bfloat16()
        if distributed or name != PINNED:
            expected[f"optimizer.state.{'param' if distributed else 'fp32_param'}.{name}"] = value
        mean = torch.full_like(value, (1 - BETA1) * gradient(name))
        expected[f"optimizer.state.exp_avg.{name}"] = mean
        expected[f"optimizer.state.exp_avg_sq.{name}"] = torch.full_like(
            value, (1 - BETA2) * gradient(name) ** 2
        )
    assert found.keys() == expected.keys()
    return [
        key
        for key, tensor in expected.items()
        if not torch.allclose(found[key], tensor, rtol=ROUNDED if "exp_avg" in key else 0.0, atol=0.0)
    ]


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_a_checkpoint_has_each_parameters_own_state(tmp_path: Path, distributed: bool) -> None:
    (found,) = run(1, saved, tmp_path / "saved", distributed, None)
    assert wrong(found, distributed) == []


# Where one of these no longer fails, Megatron needs that correction no more.
@pytest.mark.parametrize(
    ("undone", "distributed"), [("float32 first", True), ("no padding", True), ("float32 last", False)]
)
def test_megatrons_own_description_is_seen_to_be_wrong(
    tmp_path: Path, undone: str, distributed: bool
) -> None:
    (found,) = run(1, saved, tmp_path / "saved", distributed, undone)
    assert wrong(found, distributed) != []


def test_megatron_alone_does_not_save_float32_among_16_bit_parameters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not match any model sharded param"):
        run(1, saved, tmp_path / "saved", False, "all parameters")
