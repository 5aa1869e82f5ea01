"""Gemma 4: known, so that what it is can be said, and refused."""

LACKING = (
    "embeddings of every layer's own (hidden_size_per_layer_input)",
    "heads of another size in its full-attention layers (global_head_dim), with keys that are values",
    "layers that share the keys and values of earlier ones (num_kv_shared_layers)",
    "experts beside a dense MLP in one layer (enable_moe_block)",
)

REASON = (
    "Gemma 4 cannot be converted yet: it has"
    + "".join(f"\n  {what}" for what in LACKING)
    + "\nGemma 3 is supported. `isthmus inspect` says what the files of a Gemma 4 hold"
)
