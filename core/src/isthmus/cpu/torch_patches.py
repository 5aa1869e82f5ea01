"""Patches of torch: the CUDA surface that megatron-core uses, redirected to the CPU; and gloo's one gap.

Numbers are lines of megatron/core 0.19.2. This file imports no megatron.
"""

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from isthmus.cpu.patches import patch

CPU = torch.device("cpu")

# Every factory that megatron-core calls with device="cuda" or pin_memory=True.
FACTORIES = (
    *(
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "as_tensor",
        "arange",
        "rand",
        "randn",
        "randint",
        "eye",
        "linspace",
    ),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)


@patch("torch")
def current_device() -> None:
    """About 80 sites say device=torch.cuda.current_device(): it is the default device, "meta" included."""
    torch.cuda.current_device = torch.get_default_device  # pyright: ignore[reportAttributeAccessIssue]


class NullStream:
    """A stream and an event that do nothing: what a CPU was told to do is done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "NullStream":
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> "NullStream":
        return self

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


@patch("torch")
def streams() -> None:
    """Streams are made unasked: param_and_grad_buffer:632, token_dispatcher:469, moe_layer:434."""
    cuda: Any = torch.cuda
    null = NullStream()
    cuda.Stream = cuda.Event = NullStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: null
    cuda.stream = lambda stream: contextlib.nullcontext()


@patch("torch")
def synchronize() -> None:
    """Waiting for a GPU: p2p_communication:263,419, parallel_state:216, timers:152, filesystem_async:248."""
    torch.cuda.synchronize = lambda *args, **kwargs: None


@patch("torch")
def cuda_generator() -> None:
    """The CPU's random generator plays the GPU's: tensor_parallel/random:118,303, rerun_state_machine:979."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # torch.manual_seed calls torch.cuda.manual_seed_all, so the generator itself is seeded, not torch.
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and torch.device(device).type == "cuda"
    )


def _redirected(factory: Any) -> Any:
    """The factory, with device="cuda" meaning the default device and pinned memory ordinary."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.get_default_device()
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


@patch("torch")
def cuda_literals() -> None:
    """device="cuda" in schedules:749, optimizer:315, clip_grads:96, utils:1332; pin_memory in rope_utils:63.

    Wrapping the factories costs nothing; a TorchFunctionMode costs a third of a step and holds in one thread
    only.
    """
    # torch.device(...) contexts recognise factories by identity and look them up at first use, so look first.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))


@patch("torch")
def tensor_cuda() -> None:
    """Moves to the GPU leave a tensor where it is: rope_utils:64, utils:946, exchange_utils:339, data:84."""
    to = torch.Tensor.to

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (self.device, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = self.device
        return to(self, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.to = stay
    tensor.cuda = lambda self, *args, **kwargs: self


@patch("torch")
def tensor_type() -> None:
    """Parameters are classed by the string "torch.cuda.FloatTensor": optimizer:1009, clip_grads:174."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        name = original(self)
        # Under a TorchFunctionMode the original calls this function again.
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # pyright: ignore[reportAttributeAccessIssue]


@patch("torch")
def uneven_all_gather() -> None:
    """gloo gathers equal shapes only; mappings:154 (token dispatch with expert TP) gathers uneven ones."""
    all_gather = dist.all_gather

    @functools.wraps(all_gather)
    def gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if all(out.shape == tensor.shape for out in tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        longest = max(out.numel() for out in tensor_list)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        received = [tensor.new_empty(longest) for _ in tensor_list]
        all_gather(received, padded, group=group)
        for out, flat in zip(tensor_list, received, strict=True):
            out.copy_(flat[: out.numel()].view_as(out))
        return None

    dist.all_gather = gather
