"""DeepSeek-V4: known, so that what it is can be said, and refused."""

LACKING = (
    "attention over compressed keys, with an indexer and sinks (layer_types)",
    "hyper-connections between layers (hc_mult)",
    "experts chosen by a token's id (num_hash_layers)",
)

REASON = (
    "DeepSeek-V4 cannot be converted: megatron-core 0.19 has no"
    + "".join(f"\n  {what}" for what in LACKING)
    + "\nV2, V3 and V3.2 are supported. `isthmus inspect` says what the files of a V4 hold"
)
