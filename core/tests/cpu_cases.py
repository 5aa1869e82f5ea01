"""Tiny Megatron models and one training loop, run in workers by the tests of isthmus.cpu."""

import functools
from pathlib import Path

import torch

from isthmus.cpu.positions import zigzag

VOCABULARY, SEQUENCE, MICROBATCHES, STEPS = 64, 16, 4, 2

DENSE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "bias_dropout_fusion": False,
}
MOE = DENSE | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
DELTA_NET = DENSE | {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LOCAL = DENSE | {"transformer_impl": "local"}
LATENT = DENSE | {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "add_qkv_bias": False,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
LAYER_NORM = DENSE | {"normalization": "LayerNorm", "softmax_type": "learnable", "window_size": (5, 0)}
MODELS = {
    "dense": DENSE,
    "moe": MOE,
    "delta_net": DELTA_NET,
    "latent": LATENT,
    "layer_norm": LAYER_NORM,
    "local": LOCAL,
}


def build(model: str, tp=1, pp=1, cp=1, ep=1, etp=None, **overrides):
    """The model on this rank of the layout, with groups and random states set up."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as variant_spec,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    model_parallel_cuda_manual_seed(1)
    fields = MODELS[model] | overrides
    config = (MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig)(
        **fields,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
        pipeline_dtype=torch.float32,
    )
    if config.experimental_attention_variant:
        spec = variant_spec(config)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=config.transformer_impl != "local")
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )


def wrap(model, **ddp):
    """The model in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = DistributedDataParallelConfig(**ddp)
    wrapped = DistributedDataParallel(model.config, options, model)
    distributed = options.use_distributed_optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-3, use_distributed_optimizer=distributed), [wrapped]
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def train(model: str, start: str, end: str, sizes: dict, **overrides) -> dict:
    """Train from the weights in `start` (made if it is empty) to those in `end`: losses and norms."""
    from megatron.core import dist_checkpointing, parallel_state

    net = build(model, **sizes, **overrides)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    if any(Path(start).iterdir()):
        net.load_state_dict(dist_checkpointing.load(net.sharded_state_dict(metadata=metadata), start))
    else:
        scatter(net)
        dist_checkpointing.save(net.sharded_state_dict(metadata=metadata), start)
    wrapped, optimizer = wrap(net)
    losses, norms = zip(*(step(wrapped, optimizer, i) for i in range(STEPS)), strict=True)
    dist_checkpointing.save(net.sharded_state_dict(metadata=metadata), end)
    return {"losses": losses, "norms": norms, "reports": parallel_state.is_pipeline_last_stage()}


def step(wrapped, optimizer, number: int) -> tuple[float, float]:
    """One step on the batch of that number: mean loss (on the last stage) and gradient norm."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches(number),
        model=wrapped,
        num_microbatches=MICROBATCHES // parallel_state.get_data_parallel_world_size(),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([o["loss"] for o in outputs]).sum() if outputs else torch.zeros(())
    torch.distributed.all_reduce(
        total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return float(total) / (MICROBATCHES * SEQUENCE), float(optimizer.step()[1])


def scatter(net) -> None:
    """Give norms, biases and the delta net's small parameters values of their own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def microbatches(step: int):
    """This data-parallel rank's rows of the step's fixed batch."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, SEQUENCE + 1), generator=generator)
    first, every = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return iter(tokens[first::every])


def forward_step(data, model):
    from megatron.core import parallel_state

    row = next(data)[None]
    cp_rank, cp_size = (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )
    here = zigzag(SEQUENCE, cp_rank, cp_size)
    tokens, labels = row[:, :-1][:, here], row[:, 1:][:, here]
    output = model(tokens, here[None], None, labels=labels)

    def loss(losses):
        total = losses.float().sum()
        return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.detach()}

    return output, loss


def largest_difference(folder: str, other: str) -> tuple[float, int]:
    """The largest difference between two checkpoints' tensors, and how many tensors there are."""
    from megatron.core import dist_checkpointing

    ours, theirs = (dist_checkpointing.load_plain_tensors(f) for f in (folder, other))
    assert ours.keys() == theirs.keys()
    tensors = [n for n, t in ours.items() if isinstance(t, torch.Tensor)]
    return max(float((ours[n] - theirs[n]).abs().max()) for n in tensors), len(tensors)


def parameters(model: str, meta: bool = False, **overrides) -> dict[str, tuple]:
    """Name -> (shape, device) of what a single process builds, on the meta device if asked."""
    with torch.device("meta") if meta else torch.device("cpu"):
        net = build(model, **overrides)
    return {name: (tuple(p.shape), p.device.type) for name, p in net.named_parameters()}


@functools.cache
def packed_batch():
    """(tokens (1, T), cu_seqlens) of three sequences in a row."""
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(5))
    return tokens, torch.tensor([0, 5, 6, SEQUENCE], dtype=torch.int32)


def packed_logits(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three packed sequences: run as one batch, and run one by one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    net = build(model)
    scatter(net)
    tokens, bounds = packed_batch()
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=SEQUENCE,
        max_seqlen_kv=SEQUENCE,
    )
    together = net(tokens, None, None, packed_seq_params=params)
    spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    alone = [net(tokens[:, a:b], torch.arange(b - a)[None], None) for a, b in spans]
    return together, torch.cat(alone, 1)
