"""What leaves Megatron: which tensors, from which rank, in which dtype, and what is refused."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.layout import Layout
from isthmus.registry import families, family
from isthmus.testing import ranks
from isthmus.testing.files import tensors
from isthmus.testing.tiny import write_tiny

pytestmark = pytest.mark.skipif("qwen3_next" not in families(), reason="needs the family qwen3_next")

NATIVE = {"delta_net": "megatron"}  # its heads are divided over tensor-parallel ranks, a hosted one's are not
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny variant, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            write_tiny(family("qwen3_next"), root / variant, variant)
        return root / variant

    return folder


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name].dtype != expected[name].dtype] == []
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# In the workers


def load(folder: Path, layout: Layout, **fields: Any) -> tuple[Any, Any, Any]:
    """(bridge, loaded model, load report) on this rank."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides(), **fields))
    return bridge, model, bridge.load_hf_weights(model)


def loaded_bytes(folder: Path, layout: Layout, **fields: Any) -> int:
    return load(folder, layout, **fields)[2].bytes_read


def saved(folder: Path, layout: Layout, target: Path, options: dict[str, Any], **fields: Any) -> None:
    bridge, model, _ = load(folder, layout, **fields)
    bridge.save_hf_pretrained(model, target, **options)


def streamed(folder: Path, layout: Layout, **options: Any) -> list[tuple[str, str, tuple[int, ...], str]]:
    """(name, dtype, shape, digest) of each tensor, in the order it came."""
    bridge, model, _ = load(folder, layout)
    return [described(name, tensor) for name, tensor in bridge.export_hf_weights(model, **options)]


def described(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], str]:
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b""
    return name, str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(content, digest_size=8).hexdigest()


def drifted(folder: Path, layout: Layout, target: Path, parameter: str, **fields: Any) -> None:
    """Save after the last rank has changed one number of its `parameter`."""
    bridge, model, _ = load(folder, layout, **fields)
    if torch.distributed.get_rank() == layout.world_size - 1:
        dict(model[0].module.named_parameters())[parameter].data[0, 0] += 1
    bridge.save_hf_pretrained(model, target)


def without_a_file(folder: Path, layout: Layout, target: Path) -> str:
    """Save where the last rank cannot open its file; the error on this rank."""
    from isthmus.checkpoint import rank_files

    def refuse(path: Path, tensors: object) -> None:
        raise ValueError("no such file today")

    bridge, model, _ = load(folder, layout)
    if torch.distributed.get_rank() == layout.world_size - 1:
        rank_files.ShardWriter = refuse
    with pytest.raises(ValueError, match="no such file today") as caught:
        bridge.save_hf_pretrained(model, target)
    return str(caught.value)


def received(folder: Path, layout: Layout, target: Path, apart: bool, **fields: Any) -> int:
    """Save; the bytes that came to this rank. `apart`: each rank says that it is on a machine of its own."""
    from torch import distributed as dist

    from isthmus.checkpoint import place

    bridge, model, _ = load(folder, layout, **fields)
    nbytes, exchange = 0, dist.batch_isend_irecv

    def count(operations: list[Any]) -> list[Any]:
        nonlocal nbytes
        nbytes += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.irecv)
        return exchange(operations)

    dist.batch_isend_irecv = count
    if apart:
        place._host = lambda: f"machine {dist.get_rank()}"
    bridge.save_hf_pretrained(model, target)
    return nbytes


def with_wrong_rows(folder: Path, layout: Layout, target: Path, kind: str) -> str:
    """Save where the last rank does the wrong thing to its rows of the embedding; the error on this rank."""
    from isthmus.checkpoint.rank_files import RankFiles

    bridge, model, _ = load(folder, layout)
    write = RankFiles.write

    def wrong(self: Any, name: str, *parts: Tensor, row: int | None = None, **place: Any) -> None:
        if name != EMBEDDING:
            write(self, name, *parts, row=row, **place)
        elif kind == "fails":
            raise OSError("no room for the embedding")
        elif kind == "twice":
            write(self, name, *parts, row=0, **place)

    if torch.distributed.get_rank() == layout.world_size - 1:
        RankFiles.write = wrong
    with pytest.raises((ValueError, OSError)) as caught:
        bridge.save_hf_pretrained(model, target)
    return str(caught.value)


def padding(folder: Path, layout: Layout, target: Path) -> list[int]:
    """(nonzero padding elements, padding rows) after the load; then it is soiled, and the model saved."""
    bridge, model, _ = load(folder, layout)
    rank, found = torch.distributed.get_rank(), []
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = dict(model[0].module.named_parameters())[name].data
        pad = weight[max(0, 151 - rank * len(weight)) :]
        found += [int(pad.count_nonzero()), len(pad)]
        pad.fill_(7.0)
    bridge.save_hf_pretrained(model, target)
    return found


# What is written


def test_vocabulary_padding_is_zero_and_never_written(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint("odd_vocab")
    layout = Layout(tp=2).resolved()
    found = ranks.run(2, padding, source, layout, tmp_path / "out")
    assert [nonzero for rank in found for nonzero in rank[::2]] == [0] * 4
    assert sum(rank[1] for rank in found) > 0, "no padding, nothing tested"
    assert_same(tensors(tmp_path / "out"), tensors(source))


@pytest.mark.parametrize("variant", ["tied", "tied_with_head"])
def test_a_tied_head_is_written_if_the_source_has_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, variant: str
) -> None:
    source = checkpoint(variant)
    ranks.run(2, saved, source, Layout(pp=2).resolved(), tmp_path / "out", {})
    found = tensors(tmp_path / "out")
    assert (HEAD in found) == (variant == "tied_with_head")
    assert_same(found, tensors(source))


@pytest.mark.parametrize(
    ("mtp", "parameter"),
    [(True, "embedding.word_embeddings.weight"), (False, "output_layer.weight")],
    ids=["embedding", "head"],
)
def test_a_copy_that_has_drifted_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, mtp: bool, parameter: str
) -> None:
    # The last stage has a copy of the embedding: for its MTP block, or as the head.
    fields = {} if mtp else {"mtp_num_layers": None}
    with pytest.raises(ValueError, match=r"different copies of embedding\.word_embeddings\.weight"):
        ranks.run(
            2,
            drifted,
            checkpoint("tied"),
            Layout(pp=2).resolved(),
            tmp_path / "out",
            parameter,
            **fields,
        )
    assert not (tmp_path / "out").exists()


def test_a_tied_head_that_megatron_does_not_use_may_drift(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    # With an MTP block the last stage has the embedding itself, and the head beside it is never trained.
    source, out = checkpoint("tied"), tmp_path / "out"
    ranks.run(2, drifted, source, Layout(pp=2).resolved(), out, "output_layer.weight")
    assert_same(tensors(out), tensors(source))


def test_an_export_without_mtp_counts_no_mtp(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint("default"), source)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    options = {"passthrough": False}
    ranks.run(1, saved, source, Layout(), out, options, mtp_num_layers=None)
    assert json.loads((out / "config.json").read_text()) == config | {"num_nextn_predict_layers": 0}


def test_a_head_that_is_tied_and_differs_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    content = tensors(checkpoint("tied_with_head"))
    content[HEAD] = content[HEAD].clone()
    content[HEAD][3, 5] += 1
    save_file(content, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint("tied") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        ranks.run(1, loaded_bytes, tmp_path, Layout())


def test_files_are_cut_at_the_size_asked_for(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = checkpoint("default"), tmp_path / "out"
    ranks.run(2, saved, source, Layout(tp=2).resolved(), out, {"max_shard_size": "100KB"})
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = tensors(out)
    assert len(files) > 8
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 100_000
    assert_same(found, tensors(source))


def test_a_writer_that_refuses_on_one_rank_stops_all(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    layout = Layout(tp=2).resolved()
    found = ranks.run(2, without_a_file, checkpoint("default"), layout, tmp_path / "out")
    assert found == ["rank 1: no such file today", "no such file today"]
    assert list(tmp_path.iterdir()) == []


# What travels


def by_columns(content: dict[str, Tensor]) -> int:
    """Bytes of the tensors that tensor parallelism divides by columns."""
    names = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    return sum(tensor.nbytes for name, tensor in content.items() if name.endswith(names))


def by_rows(content: dict[str, Tensor]) -> int:
    """Bytes of those that it divides by rows: all but norms, routers and the like."""
    gates = (".gate.weight", "shared_expert_gate.weight")
    whole = sum(t.nbytes for name, t in content.items() if "norm" in name or name.endswith(gates))
    return sum(tensor.nbytes for tensor in content.values()) - whole - by_columns(content)


def test_ranks_of_a_machine_send_only_what_is_divided_by_columns(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, layout = checkpoint("default"), Layout(tp=2, etp=2).resolved()
    content = tensors(source)
    sent = {}
    for apart in (False, True):
        out = tmp_path / str(apart)
        sent[apart] = 2 * sum(ranks.run(2, received, source, layout, out, apart, **NATIVE))
        assert_same(tensors(out), content)
        assert len(list(out.glob("*.safetensors"))) == 2, "one owner, nothing divided"
    assert sent[False] == by_columns(content)
    assert sent[True] >= by_columns(content) + by_rows(content)  # Megatron's A_log is wider than the source's


def test_the_rows_of_a_stack_are_written_where_they_are(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, layout = checkpoint("fused_experts"), Layout(ep=2, dp=2).resolved()
    content = tensors(source)
    stacks = sum(tensor.nbytes for name, tensor in content.items() if ".experts." in name)
    for apart, travelling in ((False, 0), (True, stacks // 2)):
        out = tmp_path / str(apart)
        assert sum(ranks.run(2, received, source, layout, out, apart)) == travelling
        assert_same(tensors(out), content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", f"never written to .*{EMBEDDING}.*"),
        ("twice", f"{EMBEDDING} is written twice to "),
        ("fails", "no room for the embedding"),
    ],
)
def test_rows_that_a_rank_does_not_write_stop_all(
    checkpoint: Callable[[str], Path], tmp_path: Path, kind: str, message: str
) -> None:
    layout = Layout(tp=2).resolved()
    found = ranks.run(2, with_wrong_rows, checkpoint("default"), layout, tmp_path / "out", kind)
    for error in found:
        assert re.search(message, error, re.DOTALL)
    assert list(tmp_path.iterdir()) == []


# MTP


def test_the_source_keeps_its_mtp_block_through_a_model_without(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint("sharded")  # the head and MTP tensors share a file
    for passthrough in (True, False):
        out = tmp_path / str(passthrough)
        options = {"passthrough": passthrough}
        ranks.run(2, saved, source, Layout(pp=2).resolved(), out, options, mtp_num_layers=None)
    expected = tensors(source)
    assert_same(tensors(tmp_path / "True"), expected)
    without = {name: tensor for name, tensor in expected.items() if not name.startswith("mtp.")}
    assert 0 < len(without) < len(expected)
    assert_same(tensors(tmp_path / "False"), without)


# Dtypes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_tensors_are_written_in_the_dtype_asked_for(
    checkpoint: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    source, out = checkpoint("fp32_a_log"), tmp_path / "out"
    ranks.run(1, saved, source, Layout(), out, {"dtype": dtype}, mtp_num_layers=None)
    wanted = getattr(torch, dtype)
    assert_same(tensors(out), {name: tensor.to(wanted) for name, tensor in tensors(source).items()})
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype


def test_each_tensor_keeps_the_sources_dtype(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = checkpoint("fp32_a_log"), tmp_path / "out"
    layout = Layout(tp=2).resolved()
    ranks.run(2, saved, source, layout, out, {}, params_dtype=torch.float32)
    found = tensors(out)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.bfloat16}
    assert_same(found, tensors(source))
    assert (out / "config.json").read_text() == (source / "config.json").read_text()


def soiled(folder: Path, layout: Layout, target: Path | None, value: float) -> None:
    """Save, or stream, as float16 after one number of the final norm, and of an MTP tensor, is `value`."""
    bridge, model, _ = load(folder, layout)
    found = dict(model[0].module.named_parameters())
    for name in ("decoder.final_layernorm.weight", "mtp.layers.0.final_layernorm.weight"):
        found[name].data[3] = value
    if target is None:
        list(bridge.export_hf_weights(model, dtype="float16"))
    else:
        bridge.save_hf_pretrained(model, target, dtype="float16")


def test_finite_values_that_become_infinite_are_refused_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, layout = checkpoint("default"), Layout(tp=2).resolved()
    for target in (tmp_path / "out", None):
        with pytest.raises(ValueError, match=r"infinite in float16 \(.*: .*norm\.weight.*larger range"):
            ranks.run(2, soiled, source, layout, target, 65536.0)
    assert list(tmp_path.iterdir()) == []
    ranks.run(2, soiled, source, layout, tmp_path / "out", float("inf"))
    assert tensors(tmp_path / "out")["model.norm.weight"].isinf().sum() == 1, "what was infinite stays so"


def test_a_dtype_that_is_none_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="dtype must be auto, source, float32, bfloat16 or float16, got 'fp8'"
    ):
        ranks.run(1, saved, checkpoint("default"), Layout(), tmp_path / "out", {"dtype": "fp8"})


# Which rank


@pytest.mark.parametrize(
    ("variant", "layout"),
    [("default", Layout(tp=2, pp=2, ep=2)), ("fused_experts", Layout(ep=2, dp=2))],
    ids=["tp2-pp2-ep2", "stacked-ep2"],
)
def test_a_stream_has_one_order_whoever_yields(
    checkpoint: Callable[[str], Path], variant: str, layout: Layout
) -> None:
    source, layout = checkpoint(variant), layout.resolved()
    expected = {name: described(name, tensor) for name, tensor in tensors(source).items()}
    everywhere = ranks.run(layout.world_size, streamed, source, layout, ranks="all")
    owned = ranks.run(layout.world_size, streamed, source, layout, ranks="owner")
    assert all(rank == everywhere[0] for rank in everywhere)
    assert sorted(everywhere[0]) == sorted(expected.values())
    assert sorted(line for rank in owned for line in rank) == sorted(expected.values()), "each has one owner"
    assert all(owned), "every rank has work"
    for rank in owned:
        assert rank == [line for line in everywhere[0] if line in set(rank)]


def test_ranks_are_all_or_owner(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="ranks must be 'all' or 'owner', got 'some'"):
        ranks.run(1, streamed, checkpoint("default"), Layout(), ranks="some")


# How much is read


def test_ranks_read_their_share(checkpoint: Callable[[str], Path]) -> None:
    source = checkpoint("default")
    sizes = {name: tensor.nbytes for name, tensor in tensors(source).items()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    whole = ranks.run(1, loaded_bytes, source, Layout())
    assert whole == [total]
    over_experts = ranks.run(2, loaded_bytes, source, Layout(ep=2, dp=2))
    assert over_experts == [total - experts // 2] * 2
    for layout in (Layout(tp=2, ep=2).resolved(), Layout(tp=2, etp=2).resolved()):
        divided = ranks.run(2, loaded_bytes, source, layout, **NATIVE)
        assert max(divided) <= 0.52 * total, f"{divided} of {total} bytes"
        assert sum(divided) >= total
