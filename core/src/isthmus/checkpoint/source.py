"""Where a checkpoint lies: a folder, or a hub id whose folder is downloaded, and its config.json."""

import re
from pathlib import Path


def resolve(path_or_id: str | Path, revision: str | None = None, files: list[str] | None = None) -> Path:
    """The folder of a checkpoint; a hub id is downloaded, or found in the offline cache.

    `files` are those that a download gets, None for all.
    ValueError where no path or id is given, FileNotFoundError or NotADirectoryError where it leads nowhere.
    """
    if not isinstance(path_or_id, str | Path) or not str(path_or_id):
        raise ValueError(f"expected a checkpoint folder or a hub id, got {path_or_id!r}")
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise NotADirectoryError(f"{path_or_id} is a file; give the checkpoint folder that holds it")
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_id)):
        raise FileNotFoundError(f"{path_or_id} is neither a checkpoint folder nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=files))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{path_or_id} is not a folder here, nor a hub id in the cache, and the hub cannot be asked"
            " (offline?). Correct the path, or download the checkpoint where there is a network"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{path_or_id} is not a folder here, and the hub gives no checkpoint of that name: {error}"
        ) from error


def read_config(folder: Path) -> str:
    """The text of the folder's config.json. FileNotFoundError where there is none."""
    path = folder / "config.json"
    if path.is_dir() or (path.is_symlink() and not path.exists()):
        what = "a folder" if path.is_dir() else "a broken link"
        raise FileNotFoundError(f"{path} is {what}; download or copy the file again")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; it is not a Hugging Face checkpoint")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
