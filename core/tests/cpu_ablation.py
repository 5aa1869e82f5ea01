"""Leave each patch of isthmus.cpu out in turn and report what breaks: `python cpu_ablation.py [PATCH ...]`.

Prints one JSON object: patch -> null if its case passed without it, else what broke.
A script, because an installed backend cannot be taken back: each patch has a process forked before megatron.
"""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from datetime import timedelta

import cpu_cases
import torch
import torch._dynamo  # here once, not in every process
import torch.distributed.checkpoint

LIMIT = 60  # seconds for one patch


def trains(model="dense", **sizes):
    wrapped, optimizer = cpu_cases.wrap(cpu_cases.build(model, **sizes))
    cpu_cases.step(wrapped, optimizer, 0)


def trains_in_context_parallel():
    trains(cp=2)


def experts_divide_over_ranks():
    trains("moe", ep=2)


def experts_divide_twice():
    trains("moe", tp=2, ep=2, etp=2)


def pipeline_trains():
    trains(pp=2)


def delta_net_trains():
    trains("delta_net")


def gradients_reduce_while_computing():
    model = cpu_cases.build("dense")
    wrapped, optimizer = cpu_cases.wrap(model, overlap_grad_reduce=True)
    model.config.no_sync_func = wrapped.no_sync
    cpu_cases.step(wrapped, optimizer, 0)


def local_spec_takes_zero_centred_norms():
    trains("local")


def norms_recompute():
    model = cpu_cases.build("local", recompute_granularity="selective", recompute_modules=["layernorm"])
    cpu_cases.step(*cpu_cases.wrap(model), 0)


def random_streams_are_separate():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    cpu_cases.build("dense")
    model_parallel_cuda_manual_seed(3)
    undisturbed = torch.rand(4)
    model_parallel_cuda_manual_seed(3)
    with get_cuda_rng_tracker().fork():
        torch.rand(4)
    assert torch.equal(torch.rand(4), undisturbed), "drawing in a fork moved the stream outside"


def nothing_is_compiled():
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    assert not hasattr(swiglu, "_torchdynamo_orig_callable"), "a fused function is wrapped by torch.compile"


def saving_starts_no_process():
    from megatron.core import dist_checkpointing

    with tempfile.TemporaryDirectory() as folder:
        model = cpu_cases.build("dense")
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata()), folder)
    started = multiprocessing.active_children()
    for process in started:
        process.kill()  # or it outlives this one, which ends without cleaning up
    assert not started, f"saving started {started}"


def optimizer_resumes(sharding="fully_reshardable"):
    """Save after one step, load into a fresh optimizer, and take the same second step."""
    from megatron.core import dist_checkpointing

    model = cpu_cases.build("dense")
    options = metadata() | {"distrib_optim_sharding_type": sharding}

    def state(is_loading=False):
        sharded = model.sharded_state_dict(metadata=options)
        optimizer_state = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=options)
        return {"model": sharded, "optimizer": optimizer_state}

    def load(folder):
        loaded = dist_checkpointing.load(state(is_loading=True), folder)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    with tempfile.TemporaryDirectory() as folder:
        wrapped, optimizer = cpu_cases.wrap(model, use_distributed_optimizer=True)
        cpu_cases.step(wrapped, optimizer, 0)
        dist_checkpointing.save(state(), folder)
        cpu_cases.step(wrapped, optimizer, 1)
        expected = [p.detach().clone() for p in model.parameters()]
        wrapped, optimizer = cpu_cases.wrap(model, use_distributed_optimizer=True)
        load(folder)
        cpu_cases.step(wrapped, optimizer, 1)
    worst = max(float((p - e).abs().max()) for p, e in zip(model.parameters(), expected, strict=True))
    assert worst == 0, f"the step after resuming differs by {worst:g}"


def optimizer_resumes_at_the_same_layout():
    optimizer_resumes("dp_reshardable")


def indexer_rotates():
    from megatron.core.transformer.experimental_attention_variant.dsa import rotate_activation

    x = torch.randn(3, 16)
    torch.testing.assert_close(rotate_activation(x).norm(dim=-1), x.norm(dim=-1))


def pretrains():
    """Two iterations of Megatron's own training program, on mock data."""
    import isthmus.cpu

    isthmus.cpu.install_training()
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import arguments, get_tokenizer, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    sys.argv = ["pretrain", *PRETRAIN.split()]
    args = arguments.parse_and_validate_args()

    def datasets(samples):
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=cpu_cases.SEQUENCE,
            tokenizer=get_tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            split="98,1,1",
        )
        return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()

    def forward(data, model):
        batch = next(data)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses, lambda out: (out.float().mean(), {"loss": out.float().mean().detach()})

    datasets.is_distributed = True
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward)


PRETRAIN = f"""--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length {cpu_cases.SEQUENCE}
--max-position-embeddings {cpu_cases.SEQUENCE} --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
--train-iters 2 --eval-interval 100 --eval-iters 0 --log-interval 1 --mock-data --tokenizer-type
NullTokenizer --vocab-size 63 --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm --num-workers 0 --moe-grouped-gemm"""


def metadata():
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


CASES = {  # patch -> (what needs it, on how many ranks)
    "nothing": (trains, 1),
    "current_device": (trains, 1),
    "streams": (gradients_reduce_while_computing, 1),
    "synchronize": (pipeline_trains, 2),
    "cuda_generator": (trains, 1),
    "cuda_literals": (trains, 1),
    "tensor_cuda": (trains_in_context_parallel, 2),
    "tensor_type": (trains, 1),
    "uneven_all_gather": (experts_divide_twice, 4),
    "jit": (nothing_is_compiled, 1),
    "rng_tracker": (random_streams_are_separate, 1),
    "selective_recompute": (norms_recompute, 1),
    "checkpoint_queue": (saving_starts_no_process, 1),
    "fused_adam": (optimizer_resumes, 1),
    "distributed_optimizer_load": (optimizer_resumes_at_the_same_layout, 1),
    "dispatch_splits": (experts_divide_over_ranks, 2),
    "transformer_engine_slots": (trains, 1),
    "local_slots": (local_spec_takes_zero_centred_norms, 1),
    "delta_net_kernels": (delta_net_trains, 1),
    "hadamard": (indexer_rotates, 1),
    "initialize": (pretrains, 1),
    "dataset_helpers": (pretrains, 1),
    "device_properties": (pretrains, 1),
}


def start(function, *args) -> tuple[int, int]:
    """Fork a process that runs the function; its id, and where its answer comes from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    signal.alarm(LIMIT)  # a hang ends the process
    answer = ""
    try:
        answer = function(*args) or ""
    except BaseException as error:
        answer = traceback.format_exception_only(error)[-1].strip().replace("\n", " ")
    finally:
        os.write(writer, (answer[:300] + "\0").encode())
        os._exit(0)


def finish(pid: int, reader: int) -> str | None:
    """What the process answers: None if all went well, else what broke."""
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer.rstrip("\0") or None if answer else f"no answer after {LIMIT} s"


def on_rank(case, rank: int, world_size: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", timedelta(seconds=20), world_size, rank
    )
    case()
    torch.distributed.barrier()


def without(patch: str) -> str | None:
    """Install all patches but this one, then run its case on its ranks."""
    import isthmus.cpu

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    case, world_size = CASES[patch]
    isthmus.cpu.install(skip=[] if patch == "nothing" else [patch])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(on_rank, case, rank, world_size, folder) for rank in range(world_size)]
        broken = [finish(*rank) for rank in ranks]
    return next((b for b in broken if b), None)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints
    names = sys.argv[1:] or list(CASES)
    broken = {}
    for some in itertools.batched(names, 2):  # cores
        running = {name: start(without, name) for name in some}
        broken |= {name: finish(*process) for name, process in running.items()}
    os.write(answers, json.dumps(broken, indent=1).encode())
