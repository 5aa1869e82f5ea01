"""The `isthmus` command: parse, run one command, turn what went wrong into an exit code.

A command is one module of this package, named in COMMANDS (a trailing underscore keeps a keyword legal). Its
docstring's first line is its help; `add_arguments(parser)` declares its options and `run(args)` does the work
and returns 0 (all right) or 1 (a check failed). A wrong request is a ValueError, LookupError or OSError
raised anywhere below: `main` prints its message and returns 2. Anything else is a bug, or a worker that died:
`main` prints where and returns 3. Ctrl-C and SIGTERM end it with 130 and 143. Importing a module of this
package does not import torch.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

from isthmus import __version__
from isthmus.cli import output, progress

COMMANDS = ("families", "inspect", "plan", "tiny", "import_", "export", "roundtrip", "verify", "demo")
PATIENCE = 10.0  # seconds that ranks may find the same mistake apart


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0 all right, 1 a check failed, 2 the request was wrong, 3 it broke."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after a message of its own
        return stop.code if isinstance(stop.code, int) else 2
    progress.silent = args.json == "-"
    try:
        with _signals_raised():
            output.check_destination(args)
            return args.run(args)
    except (ValueError, LookupError, OSError) as error:
        if os.environ.get("ISTHMUS_TRACEBACK") == "1":
            traceback.print_exception(error)
        else:
            _leave_it_to_rank_0()
            print(f"isthmus {args.command}: {_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"isthmus {args.command}: " + "; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)
    except Exception as error:
        from isthmus.launch import WorkerError

        if isinstance(error, WorkerError):  # its message has the tracebacks of the ranks
            print(f"isthmus {args.command}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        return 3


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which a scheduler sends before it kills."""


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Ctrl-C and SIGTERM are raised, once: what follows the first one is let finish its clearing up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line: one subparser for each command, each with `--json`."""
    parser = argparse.ArgumentParser(
        prog="isthmus",
        description="Hugging Face checkpoints and Megatron-core training, joined.",
        epilog="Exit codes: 0 all right, 1 a check failed, 2 the request was wrong, 3 it broke.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isthmus {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"isthmus.cli.{name}")
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name.rstrip("_"), help=summary.rstrip("."), description=summary, allow_abbrev=False
        )
        module.add_arguments(command)
        output.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _message(error: Exception) -> str:
    """What the user reads: the message, with the type's name where the message alone says nothing."""
    text = str(error).strip()
    if not text or isinstance(error, KeyError | IndexError | UnicodeError):
        text = f"{type(error).__name__}: {text} (ISTHMUS_TRACEBACK=1 shows where)"
    return text if output.is_reporting_rank() else f"rank {os.environ['RANK']}: {text}"


def _leave_it_to_rank_0() -> None:
    """Wait on the other ranks of torchrun: what is wrong with a request, rank 0 mostly finds too, and says.

    torchrun then ends the others. Where it does not, something is wrong on this rank alone.
    """
    if not output.is_reporting_rank():
        time.sleep(PATIENCE)
