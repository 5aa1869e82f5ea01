"""Damaged Megatron folders: the message names the file and what to do, and nothing else is read."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from isthmus.checkpoint.damage import check_files, refused
from isthmus.checkpoint.megatron_folder import latest, recorded_choices

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"a": torch.arange(4000.0), "b": torch.ones(3, 5)}
    dcp.save(state, checkpoint_id=tmp_path / "release", no_dist=True)
    (tmp_path / "release" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / TRACKER).write_text("release")
    check_files(latest(tmp_path))  # it is whole
    return tmp_path / "release"


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "halved": halve,
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": Path.unlink,
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_file_of_a_checkpoint_is_named(checkpoint: Path, name: str, damage: str) -> None:
    DAMAGES[damage](checkpoint / name)
    with pytest.raises(ValueError, match=name) as caught:
        check_files(checkpoint)
    assert "copy it again" in str(caught.value)


def test_metadata_of_something_else_is_refused(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        check_files(checkpoint)


def test_damage_that_torch_finds_first_is_a_wrong_request_too(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:64] + bytes(len(whole) - 64))
    check_files(checkpoint)  # sizes and beginnings do not tell
    with (
        pytest.raises(ValueError, match="release is damaged or incomplete; copy it again"),
        refused(checkpoint),
    ):
        dcp.load({"a": torch.zeros(4000)}, checkpoint_id=checkpoint, no_dist=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"sharded_backend": "zarr"}', "says sharded_backend='zarr', and only torch_dist"),
    ],
)
def test_a_checkpoint_of_no_known_format_is_refused(checkpoint: Path, text: str, message: str) -> None:
    (checkpoint / "metadata.json").write_text(text)
    for folder in (checkpoint, checkpoint.parent):
        with pytest.raises(ValueError, match=rf"metadata\.json {message}"):
            latest(folder)


@pytest.mark.parametrize("content", ["\u00b2".encode(), b"\xff", b"x" * 400, b"", b"../release", b"9" * 400])
def test_a_tracker_that_names_no_checkpoint_is_refused_in_few_words(checkpoint: Path, content: bytes) -> None:
    (checkpoint.parent / TRACKER).write_bytes(content)
    with pytest.raises(ValueError, match=f"{TRACKER} says .*, expected 'release' or the number") as caught:
        latest(checkpoint.parent)
    assert len(str(caught.value)) < 300 + len(str(checkpoint))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"fields": []}',
        b'{"fields": null}',
        b'{"fields": {"num_layers": 2}}',
    ],
)
def test_a_damaged_record_of_the_import_is_named(tmp_path: Path, content: bytes) -> None:
    assert recorded_choices(tmp_path) == {}
    (tmp_path / "isthmus.json").write_text(json.dumps({"fields": {"delta_net": "hosted"}}))
    assert recorded_choices(tmp_path) == {"delta_net": "hosted"}
    (tmp_path / "isthmus.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"isthmus\.json is damaged: .*import the checkpoint again"):
        recorded_choices(tmp_path)


def test_a_record_may_not_overrule_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "isthmus.json").write_text(json.dumps({"fields": {"num_layers": "2"}}))
    with pytest.raises(ValueError, match=r"isthmus\.json is damaged: num_layers is the checkpoint's to say"):
        recorded_choices(tmp_path, ["num_layers"])
