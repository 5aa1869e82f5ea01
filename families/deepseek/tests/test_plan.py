"""DeepSeek-V3 at full size on a cluster: what each rank holds, from config.json alone."""

import json
from pathlib import Path

import pytest

from isthmus import cli
from isthmus_deepseek.tiny import V3

LAYOUT = ["--tp", "8", "--pp", "16", "--ep", "32", "--pipeline-layout", "Et*3|(t*4|)*14ttmL"]

# Of the 671 billion, none of which is the MTP layer's: embedding, head, and what a layer has, on paper.
HIDDEN, VOCABULARY, WIDTH, HEADS = 7168, 129280, 2048, 128
ATTENTION = (
    1536 * HIDDEN
    + 1536
    + HEADS * 192 * 1536  # queries
    + (512 + 64) * HIDDEN
    + 512
    + HEADS * 256 * 512  # keys and values
    + HIDDEN * HEADS * 128  # output
)
NORMS = 2 * HIDDEN
EXPERTS = 257 * 3 * WIDTH * HIDDEN + 256 * HIDDEN + 256  # with the shared one, the router and its bias
DENSE = 3 * 18432 * HIDDEN
DECODER = 61 * (ATTENTION + NORMS) + 3 * DENSE + 58 * EXPERTS + 2 * VOCABULARY * HIDDEN + HIDDEN
MTP = ATTENTION + NORMS + EXPERTS + 2 * HIDDEN * HIDDEN + 3 * HIDDEN


# Releases that are a DeepSeek-V3 of other sizes: what their config.json has otherwise.
PLAIN = {key: value for key, value in V3.items() if key != "quantization_config"} | {
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_theta": 50000.0,
    "vocab_size": 163840,
}
KIMI_K2 = PLAIN | {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072,
    "pad_token_id": 163839,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
MOONLIGHT = PLAIN | {
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "pad_token_id": 163838,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "layout", "billions"),
    [
        (KIMI_K2, ["--tp", "8", "--pp", "2", "--ep", "32", "--pipeline-layout", "Et*31|t*30L"], 1026.4),
        (MOONLIGHT, ["--tp", "2", "--ep", "8"], 15.96),
    ],
    ids=["kimi-k2", "moonlight"],
)
def test_other_sizes_work_from_their_config(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, object],
    layout: list[str],
    billions: float,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), *layout, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == []
    assert document["parameters"] / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_name_of_its_own_is_refused_with_the_one_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2 | {"model_type": "kimi_k2"}))
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert '"model_type": "deepseek_v3"' in capsys.readouterr().err


def test_the_whole_model_is_divided_over_512_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert cli.main(["plan", str(tmp_path), *LAYOUT, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 512
    assert document["problems"] == []
    assert document["parameters"] == DECODER + MTP
    assert round(DECODER / 1e9) == 671
    middle = document["stages"][1]
    assert middle["layers"] == [3, 4, 5, 6]
    held = 4 * (8 * 3 * WIDTH * HIDDEN)  # 8 of 256 experts, whole: etp is 1
    assert middle["by_kind"]["experts"] == held
    bias = 4 * 256 * 2  # in float32, all else in bfloat16
    assert middle["bytes"] == 2 * middle["parameters"] + bias
