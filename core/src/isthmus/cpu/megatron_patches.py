"""Patches of megatron-core 0.19: what needs a GPU, a compiler or Transformer Engine, and upstream slips.

Numbers are lines of megatron/core 0.19.2. megatron is imported inside the patches only, after torch's are
applied.
"""

import logging
import queue
import sys
from typing import Any

import torch

from isthmus.cpu.patches import patch


@patch("megatron")
def jit() -> None:
    """60 functions are decorated with torch.compile (jit:21): minutes of C++ builds for no gain here."""
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()


@patch("megatron")
def rng_tracker() -> None:
    """Setting a random state waits in torch.cuda._lazy_call for a GPU that never comes (random:136-175)."""
    import megatron.core.tensor_parallel.random as module

    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # random:331 warns where the CPU generator moves inside a fork: here that is the point.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@patch("megatron")
def selective_recompute() -> None:
    """CheckpointWithoutOutput builds C++ code (random:69) and takes fp8=False for True (random:740)."""
    import megatron.core.tensor_parallel.random as module

    checkpoint: Any = module.CheckpointWithoutOutput
    init = checkpoint.__init__
    checkpoint.__init__ = lambda self, fp8=None, *args, **kwargs: init(self, fp8 or None, *args, **kwargs)

    def copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        storage = source.untyped_storage()
        target.untyped_storage().resize_(storage.nbytes())
        target.untyped_storage().copy_(storage)

    module._get_share_storage = lambda: copy_storage


@patch("megatron")
def checkpoint_queue() -> None:
    """Each rank's first save starts a process for a queue that it reads itself (filesystem_async:65)."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as module

    module._results_queue = queue.Queue()


@patch("megatron")
def fused_adam() -> None:
    """Without TE it takes torch's AdamW, whose state it cannot load (distrib_optimizer:839,1027,1223)."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    from isthmus.cpu.optimizer import FusedAdam

    optimizer.Adam = distributed.Adam = FusedAdam  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_TE_OPTIMIZER = True


@patch("megatron")
def distributed_optimizer_load() -> None:
    """Loading fp32 parameters copies into a view of a leaf with gradients on (distrib_optimizer:1225)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    cls: Any = DistributedOptimizer
    cls._set_main_param_and_optimizer_states = torch.no_grad()(cls._set_main_param_and_optimizer_states)


@patch("megatron")
def dispatch_splits() -> None:
    """All-to-all split sizes become numbers only on a GPU (moe_utils:1184); gloo needs numbers."""
    import megatron.core.transformer.moe.token_dispatcher as module

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = on_cpu


@patch("megatron")
def transformer_engine_slots() -> None:
    """Without TE its names are mocks; CPU modules in their place let every spec function run as on a GPU."""
    import megatron.core.extensions.transformer_engine as engine
    import megatron.core.extensions.transformer_engine_spec_provider as engine_provider

    from isthmus.cpu.provider import SLOTS, CPUSpecProvider

    for name, cls in SLOTS.items():
        setattr(engine, name, cls)
    engine_provider.TESpecProvider = CPUSpecProvider
    # The users of these names are imported now: specs made at import (hybrid_layer_specs:58) hold ours,
    # and names that are None without TE (attention:121, moe_layer:61, gpt_layer_specs:46) are bound below.
    import megatron.core.models.gpt.experimental_attention_variant_module_specs as variants
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.hybrid.hybrid_layer_specs
    import megatron.core.models.hybrid.hybrid_model  # noqa: F401
    import megatron.core.transformer.transformer_block as block

    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.core")]:
        for name, cls in (SLOTS | {"TESpecProvider": CPUSpecProvider}).items():
            if name in vars(module):
                setattr(module, name, cls)
    variants.TESpecProvider = (
        CPUSpecProvider  # its import stands behind one that fails, so the name is unbound
    )
    block.LayerNormImpl = SLOTS["TENorm"]  # the final norm of a block made from a single layer spec


@patch("megatron")
def local_slots() -> None:
    """transformer_impl="local" refuses SP and zero-centred norms (torch_norm:46), CP, packing and MLA."""
    import megatron.core.models.backends as backends
    import megatron.core.models.gpt.gpt_layer_specs as specs

    from isthmus.cpu.provider import SLOTS

    provider: Any = backends.LocalSpecProvider
    provider.layer_norm = lambda self, rms_norm=False, for_qk=False, has_residual=False: SLOTS["TENorm"]
    provider.core_attention = lambda self: SLOTS["TEDotProductAttention"]
    provider.linear = lambda self: SLOTS["TELinear"]
    backends.LNImpl = specs.LNImpl = SLOTS["TENorm"]  # pyright: ignore[reportAttributeAccessIssue]


@patch("megatron")
def delta_net_kernels() -> None:
    """GatedDeltaNet needs fla's Triton kernels; its own torch rule refuses packed sequences (gdn:99)."""
    import megatron.core.ssm.gated_delta_net.common as common
    import megatron.core.ssm.gated_delta_net.gdn as gdn

    from isthmus.cpu import kernels

    common.HAVE_FLA = True
    common.l2norm = kernels.l2norm
    users: tuple[Any, ...] = (common, gdn)
    for module in users:
        module.causal_conv1d = kernels.causal_conv1d
        module.chunk_gated_delta_rule = kernels.chunk_gated_delta_rule


@patch("megatron")
def hadamard() -> None:
    """DSA's indexer rotates with fast_hadamard_transform, a CUDA extension, in bf16 only (dsa:253-267)."""
    import megatron.core.transformer.experimental_attention_variant.dsa as dsa

    from isthmus.cpu.kernels import rotate_activation

    dsa.rotate_activation = rotate_activation
