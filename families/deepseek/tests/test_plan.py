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
