"""The repository's sessions; `nox -l` lists them, arguments after `--` go to the tool that a session runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]
FAMILIES = sorted(project.parent.name for project in ROOT.glob("families/*/pyproject.toml"))
EVERYTHING = ["core", *(f"families/{name}" for name in FAMILIES)]
# Packages that are documentation: tested, never released.
EXAMPLES = sorted(f"examples/{project.parent.name}" for project in ROOT.glob("examples/*/pyproject.toml"))
# megatron-core needs 3.12. A nox on an older Python looks for a newer one and says where there is none.
PYTHON = None if sys.version_info >= (3, 12) else "3.12"
CPU_ONLY = ("-m", "not gpu")
# Two modules at a time, or classes, whose tests share their checkpoints: one alone leaves a core idle while
# it starts its ranks, and while it works in one process.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadscope")
# Tests that go through isthmus.testing.ranks: of a family by name, and core's own.
ON_GPU = (
    "test_conformance.py",
    "test_verify.py",
    "test_torch_dist.py",
    "test_vision.py",
    "test_processor.py",
)
CORE_ON_GPU = ("core/tests/test_export.py",)

one_each = nox.parametrize("family", [nox.param(name, id=name) for name in FAMILIES])


def needed_by(family: str) -> list[str]:
    """Core, the family, and the families that it is built on."""
    project = nox.project.load_toml(f"families/{family}/pyproject.toml")["project"]
    dists = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    others = [name for name in FAMILIES if f"isthmus-{name.replace('_', '-')}" in dists]
    return ["core", *(f"families/{name}" for name in (*others, family))]


def install_editable(session: nox.Session, *packages: str, group: str | None = None) -> None:
    """Packages of this tree and a dependency group in one resolve; nothing under `nox --no-venv`."""
    if session.venv_backend == "none":
        return
    editables = [argument for package in packages for argument in ("-e", f"./{package}")]
    session.install("-c", "constraints.txt", *editables, *(GROUPS[group] if group else ()))


def install_wheels(session: nox.Session, *packages: str) -> None:
    """Build the packages and install the wheels, as a user gets them, with the test tools."""
    session.install("hatchling")
    wheels = Path(session.create_tmp()).resolve() / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    build_into(session, wheels, *packages, targets=("wheel",))
    session.install("-c", "constraints.txt", *map(str, sorted(wheels.glob("*.whl"))), *GROUPS["test"])


def build_into(session: nox.Session, folder: Path, *packages: str, targets: tuple[str, ...]) -> None:
    """sdists or wheels of the packages into one folder."""
    for package in packages:
        with session.chdir(package):
            for target in targets:
                session.run("hatchling", "build", "-t", target, "-d", str(folder), silent=True)


@nox.session(python=PYTHON, default=False)
def demo(session: nox.Session) -> None:
    """A tiny checkpoint imported, trained, exported and compared with Hugging Face, on CPU."""
    install_editable(session, *EVERYTHING)
    session.run("isthmus", "demo", "--family", "qwen3_next", *session.posargs)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """ruff check, ruff format --check, pyright."""
    install_editable(session, *EVERYTHING, *EXAMPLES, group="lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyright", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Every CPU test of core, of all families and of the example of one."""
    install_editable(session, *EVERYTHING, *EXAMPLES, group="test")
    session.run("pytest", *SIDE_BY_SIDE, *CPU_ONLY, *session.posargs)


@nox.session(python=PYTHON, default=False, reuse_venv=False)
@one_each
def family(session: nox.Session, family: str) -> None:
    """One family's tests with core alone beside it, from built wheels in a clean environment."""
    install_wheels(session, *needed_by(family))
    session.run("isthmus", "families")
    session.run("pytest", f"families/{family}/tests", *CPU_ONLY, *session.posargs)


@nox.session(python=PYTHON, default=False, reuse_venv=False)
def together(session: nox.Session) -> None:
    """All families in one environment, from built wheels: every entry point loads, no two claim one key."""
    install_wheels(session, *EVERYTHING)
    session.run("isthmus", "families")
    session.run("pytest", "core/tests/test_repository.py", "core/tests/test_cli.py", *session.posargs)


@nox.session(python=PYTHON, default=False)
def build(session: nox.Session) -> None:
    """sdist and wheel of every package, into dist/."""
    session.install("hatchling")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build_into(session, ROOT / "dist", *EVERYTHING, targets=("sdist", "wheel"))
    for file in sorted((ROOT / "dist").iterdir()):
        session.log(f"dist/{file.name}  {file.stat().st_size:,} bytes")


@nox.session(python=PYTHON, default=False)
def bench(session: nox.Session) -> None:
    """The benchmarks: `nox -s bench -- --help` tells what can be measured."""
    install_editable(session, *EVERYTHING)
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session(python=PYTHON, default=False)
@one_each
def gpu(session: nox.Session, family: str) -> None:
    """The suites of one family and of core on this machine's GPUs; an error where it cannot run them."""
    smi = shutil.which("nvidia-smi")
    if smi is None or subprocess.run([smi, "-L"], capture_output=True, check=False).returncode != 0:
        session.error("no NVIDIA GPU on this machine (nvidia-smi -L); the CPU tests are `nox -s tests`")
    install_editable(session, *needed_by(family), group="test")
    find = "import importlib.util as u; print(u.find_spec('transformer_engine') is not None)"
    if "True" not in (session.run("python", "-c", find, silent=True) or ""):
        session.error(
            "no Transformer Engine in this environment, and models on a GPU are built of its modules;"
            f' in an environment that has it: nox --no-venv -s "gpu({family})"'
        )
    folder = Path("families") / family / "tests"
    tests = [*CORE_ON_GPU, *(str(folder / name) for name in ON_GPU if (ROOT / folder / name).exists())]
    session.run("pytest", *tests, *session.posargs, env={"ISTHMUS_DEVICE": "cuda"})


if __name__ == "__main__":
    nox.main()
