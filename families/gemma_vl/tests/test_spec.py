"""The layer spec makes Gemma 3 also of what Megatron's own arguments can say."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks, reference, training_step
from isthmus.testing.batch import random_batch
from isthmus.testing.numerics import FLOAT32, rel_rms


def of_arguments(folder: Path, layout: Layout) -> tuple[float, list[str]]:
    """Relative RMS of logits against Hugging Face's, and the arguments that an import would write."""
    from megatron.training.models.gpt import GPTModelConfig

    from isthmus.checkpoint.megatron_arguments import arguments
    from isthmus_gemma_vl.spec import layer_spec

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(params_dtype="float32", calculate_per_token_loss=True)
    words = arguments({name: bridge.megatron_fields[name] for name in STATED}, layer_spec)
    # Megatron's arguments have no gated GELU, no second rope and no fields of a family's own.
    config.transformer.gated_linear_unit, config.transformer.activation_func = False, torch.nn.functional.gelu
    plain = GPTModelConfig(
        **{field.name: getattr(config, field.name) for field in fields(GPTModelConfig) if field.init}
    )
    chunks = bridge.build_model(plain)
    bridge.load_hf_weights(chunks)
    batch = random_batch(160, tokens=32, seed=0, ranks=1, microbatches=2, packed=False)
    ours = training_step.run(chunks, batch, gradients=False)
    assert ours is not None
    hf = reference.run(reference.load(folder, torch.float32), batch, gradients=False)
    return rel_rms(ours.logits, hf.logits), words


STATED = (
    *("gated_linear_unit", "activation_func", "window_size", "window_attn_skip_freq", "use_mup"),
    *("mup_base_head_dim", "seq_len_interpolation_factor", "share_embeddings_and_output_weights"),
)


def test_a_model_of_megatrons_arguments_is_hugging_faces(checkpoints: Callable[[str], Path]) -> None:
    difference, words = ranks.run(1, of_arguments, checkpoints("gqa"), Layout().resolved())[0]
    assert difference <= FLOAT32.forward
    given = " ".join(words)
    assert given.startswith(
        "--no-bias-gelu-fusion --spec isthmus_gemma_vl.spec layer_spec --window-size (8,0)"
    )
    assert given.endswith("--rotary-seq-len-interpolation-factor 8")
