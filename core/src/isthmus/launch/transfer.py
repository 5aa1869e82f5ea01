"""What crosses between the parent and its workers: the task, the failure, and results as bytes."""

import io
import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is told: where the function is, and `arguments`, pickled (args, kwargs)."""

    module: str
    file: str | None
    name: str
    arguments: bytes
    world_size: int
    device: str  # "cpu" or "cuda"
    exact: bool  # GPUs compute as a comparison needs it
    folder: str  # holds the rendezvous file and the stack dumps
    timeout: float | None  # seconds
    quiet: bool
    environment: dict[str, str]

    def stack_file(self, rank: int) -> Path:
        """Where the rank writes its stack when it gets SIGUSR1."""
        return Path(self.folder) / f"stack{rank}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker that raised answers: the traceback, and the exception if it can be pickled."""

    traceback: str
    exception: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The error as the parent can read it; the traceback begins at the user's function."""
        here, trace = Path(__file__).parent / "worker.py", error.__traceback__
        while (
            trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == str(here)
        ):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        try:
            pickled = pickle.dumps(error)  # goes without its causes and locals
            pickle.loads(pickled)
        except Exception:  # of any kind: then the traceback alone is sent
            pickled = None
        return cls(text, pickled)


class _Pickler(pickle.Pickler):
    """Tensors go by value, and only what they show of their storage.

    megatron.core.safe_globals has pickled tensors name a function of its own: reading them imports megatron
    in the parent.
    """

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        file = io.BytesIO()
        torch.save(obj.detach().clone(), file)
        return _tensor, (file.getvalue(),)


def _tensor(saved: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(saved), weights_only=True)


def dumps(result: Any) -> bytes:
    """Pickle a worker's result; `pickle.loads` reads it without megatron."""
    file = io.BytesIO()
    _Pickler(file).dump(result)
    return file.getvalue()
