"""Fine-tune a Hugging Face checkpoint with Megatron, in any layout; a Hugging Face checkpoint comes out.

    isthmus tiny qwen3_next tiny --dtype float32
    torchrun --nproc-per-node 4 examples/finetune.py tiny out --tp 2 --cp 2 --dtype float32 --lr 1e-3

Each step is Megatron's own: its schedules, data parallelism, distributed optimizer and checkpoints. Ranks
that tp x pp x cp leaves over are data parallel. Where there is no GPU, the same lines run on CPU and gloo.

OUT holds `megatron/`, which `--resume` continues from (in another layout too) and `isthmus export` reads, and
`hf-N/`, the weights after N steps for transformers, vLLM and SGLang.
"""

import argparse
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import isthmus.cpu
from isthmus import AutoBridge, Layout
from isthmus.zigzag import zigzag

if not torch.cuda.is_available():
    isthmus.cpu.install()  # before the first import of megatron

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import unwrap_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CORPUS = Path(__file__).with_name("corpus.txt")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says; on every rank of torchrun."""
    args = parse(argv)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it lists every parameter
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("hf", help="checkpoint folder or hub id")
    parser.add_argument("out", type=Path)
    for size in ("tp", "pp", "vp", "ep", "etp", "cp"):
        parser.add_argument(f"--{size}", type=int, default=1)
    parser.add_argument("--pipeline-layout", help='uneven stages, such as "Ett|tttmL"')
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of parameters")
    parser.add_argument("--recompute", action="store_true", help="layers again in the backward: less memory")
    parser.add_argument("--text", type=Path, default=CORPUS)
    parser.add_argument("--seq-length", type=int, default=128, help="tokens")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences of a step")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences of a forward")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--decay-steps", type=int, help="of the cosine; --steps by default")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="write a Megatron checkpoint")
    parser.add_argument("--export-every", type=int, metavar="STEPS", help="besides after the last step")
    parser.add_argument("--resume", action="store_true", help="continue from OUT's newest checkpoint")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each step printed")
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train and export; what each step reported. Collective: torch.distributed is initialised."""
    if not args.resume and args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out} is not empty: continue with --resume, or choose another folder")
    layout = make_layout(args)
    layout.initialize(args.seed)
    bridge = AutoBridge.from_hf_pretrained(args.hf)
    model = build(args, bridge, layout)
    optimizer, schedule = make_optimizer(args, model)
    first = load_checkpoint(args.out / "megatron", model, optimizer, schedule) if args.resume else 0
    text = tokenize(args.text.read_text(encoding="utf-8"), bridge)
    speaks = dist.get_rank() == dist.get_world_size() - 1  # on the last stage, which has all losses
    reports = []
    for done in range(first + 1, args.steps + 1):
        began = time.perf_counter()
        model_parallel_cuda_manual_seed(args.seed + done)  # dropout; so nothing random has to be saved
        batch = sequences(text, done - 1, args).chunk(layout.dp)[parallel_state.get_data_parallel_rank()]
        reports.append({"step": done, **train_step(args, model, optimizer, batch)})
        schedule.step(increment=1)
        if speaks:
            values = "  ".join(f"{name} {value:.6g}" for name, value in reports[-1].items())
            rate = args.global_batch_size * args.seq_length / (time.perf_counter() - began)
            print(f"{values}  ({rate:.0f} tokens/s)", flush=True)
        if args.save_every and done % args.save_every == 0:
            save_checkpoint(args.out / "megatron", done, model, optimizer, schedule)
        if done == args.steps or (args.export_every and done % args.export_every == 0):
            bridge.save_hf_pretrained(model, args.out / f"hf-{done}", overwrite=True)
            if dist.get_rank() == 0:
                print(f"exported {args.out / f'hf-{done}'}", flush=True)
    if args.json and speaks:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")
    return reports


def make_layout(args: argparse.Namespace) -> Layout:
    """The layout of all ranks that torchrun has started. ValueError: the batch does not divide over them."""
    sizes = {name: getattr(args, name) for name in ("tp", "pp", "vp", "ep", "etp", "cp", "pipeline_layout")}
    layout = Layout(dp=max(1, dist.get_world_size() // (args.tp * args.pp * args.cp)), **sizes)
    if args.global_batch_size % (layout.dp * args.micro_batch_size):
        raise ValueError(
            f"cannot divide {args.global_batch_size} sequences over {layout.dp} data-parallel ranks"
            f" with {args.micro_batch_size} in each forward: change --global-batch-size or --micro-batch-size"
        )
    return layout


def build(args: argparse.Namespace, bridge: AutoBridge, layout: Layout) -> list[Any]:
    """This rank's model chunks in Megatron's DDP, with the checkpoint's weights."""
    config = bridge.get_model_config(
        **layout.config_overrides(),
        params_dtype=DTYPES[args.dtype],
        calculate_per_token_loss=True,  # the mean over a step's tokens, however these are divided
        finalize_model_grads_func=finalize_model_grads,
        **(RECOMPUTE if args.recompute else {}),
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = bridge.build_model(config, wrap_with_ddp=True, ddp_config=ddp)
    bridge.load_hf_weights(model)
    return model


def train_step(args: argparse.Namespace, model: list[Any], optimizer: Any, batch: Tensor) -> dict[str, float]:
    """One update by this data-parallel rank's sequences (B, S + 1); what to report of it. Collective."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    feeds = [feed(rows, args.cp) for rows in batch.split(args.micro_batch_size)]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(feeds) for _ in model] if len(model) > 1 else iter(feeds),
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(feeds),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    lr = optimizer.param_groups[0]["lr"]
    _, grad_norm, _ = optimizer.step()
    return {**mean_losses(losses, len(feeds)), "grad_norm": float(grad_norm), "lr": lr}


def make_optimizer(args: argparse.Namespace, model: list[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's distributed Adam, and warmup and cosine decay of its learning rate."""
    adam = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=0.0,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=args.dtype == "bfloat16",
        params_dtype=DTYPES[args.dtype],
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(adam, model)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr / max(1, args.warmup_steps),
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=args.warmup_steps,
        lr_decay_steps=args.decay_steps or args.steps,
        lr_decay_style="cosine",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, schedule


def tokenize(text: str, bridge: AutoBridge) -> Tensor:
    """(T,) tokens of the text by the checkpoint's tokenizer; where it has none, its bytes."""
    if bridge.folder and (bridge.folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(bridge.folder)
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return torch.tensor(list(text.encode())) % bridge.hf_config["vocab_size"]


def sequences(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """(B, S + 1) tokens of one step's sequences, out of an endless shuffle; the same on every rank."""
    count = (len(text) - 1) // args.seq_length
    rows = []
    for number in range(step * args.global_batch_size, (step + 1) * args.global_batch_size):
        epoch, place = divmod(number, count)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(args.seed + epoch))
        start = int(order[place]) * args.seq_length
        rows.append(text[start : start + args.seq_length + 1])
    return torch.stack(rows)


def feed(rows: Tensor, cp: int) -> dict[str, Tensor | None]:
    """What Megatron's model takes, each (b, S / cp): of every sequence, this rank's tokens."""
    own = zigzag(rows.size(1) - 1, parallel_state.get_context_parallel_rank(), cp)
    tensors = {
        "input_ids": rows[:, own],
        "labels": rows[:, own + 1],
        "position_ids": own.expand(len(rows), -1),
        "loss_mask": torch.ones(len(rows), len(own)),  # 0 where a label is not to be learned
    }
    device = torch.cuda.current_device()  # of this rank; the CPU where there is no GPU
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"attention_mask": None}


def forward_step(feeds: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Any]:
    """A chunk's output for the next microbatch, and the function that makes a loss of the last chunk's."""
    tensors = next(feeds)
    return model(**tensors), partial(loss, mask=tensors["loss_mask"])


def loss(losses: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, number of tokens, both to report) of the tokens' losses (b, S / cp).

    The loss of the MTP block has been attached to the model's output by Megatron.
    """
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), torch.stack([total.detach(), tokens])


def mean_losses(losses: list[Tensor], microbatches: int) -> dict[str, float]:
    """Means over all tokens of the step, in nats: of the model, and on the last stage of its MTP block."""
    total = sum(losses, torch.zeros(2, device=torch.cuda.current_device()))
    dist.all_reduce(total)  # of tensor-parallel ranks all alike, of earlier stages 0
    found = {"loss": (total[0] / total[1]).item()}
    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    if "loss_values" in MTPLossLoggingHelper.tracker:
        found["mtp_loss"] = MTPLossLoggingHelper.tracker["loss_values"].mean().item() / microbatches
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    return found


def save_checkpoint(folder: Path, step: int, model: list[Any], optimizer: Any, schedule: Any) -> None:
    """Write all that a later run needs to continue, in the folder layout of Megatron's `--save`."""
    path = folder / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)  # of a run that died
        path.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        states(model, optimizer, schedule, step=step, loading=False), str(path), content_metadata=CONTENT
    )
    if dist.get_rank() == 0:  # the checkpoint is whole
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def load_checkpoint(folder: Path, model: list[Any], optimizer: Any, schedule: Any) -> int:
    """Fill model, optimizer and schedule from the newest checkpoint; the number of steps behind it."""
    step = int((folder / "latest_checkpointed_iteration.txt").read_text())
    wanted = states(model, optimizer, schedule, step=step, loading=True)
    found: Any = dist_checkpointing.load(wanted, str(folder / f"iter_{step:07d}"))
    for number, chunk in enumerate(unwrap_model(model)):
        chunk.load_state_dict(found[f"model{number}"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["opt_param_scheduler"])
    return step


# How Megatron divides a checkpoint: so that another layout can read it, under its training script's names.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def states(model: list[Any], optimizer: Any, schedule: Any, *, step: int, loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dicts of everything."""
    metadata = CONTENT | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    chunks = {f"model{number}": chunk for number, chunk in enumerate(unwrap_model(model))}
    sharded = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in chunks.items()}
    return {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=metadata),
        "opt_param_scheduler": schedule.state_dict(),
        "iteration": step,
    }


if __name__ == "__main__":
    main()
