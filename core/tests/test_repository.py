"""The rules of the repository that a machine can check: layout of the packages, purity, imports, spelling."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = sorted(project.parent for project in ROOT.glob("families/*/pyproject.toml"))
PACKAGES = [ROOT / "core", *FAMILIES]
EXAMPLE = ROOT / "examples/own_family"
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".ini"}

# Files of a family that say what a model is; the others build it.
TABLES = (
    "family",
    "bridge",
    "rules",
    "config",
    "names",
    "heads",
    "blocks",
    "groups",
    "latent",
    "tensors",
    "tiny",
)

by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
by_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def source(package: Path) -> Path:
    """The one import package below src/."""
    (found,) = (package / "src").iterdir()
    return found


def tracked_files() -> list[Path]:
    """What git has, and what it would take: a file that is not added yet obeys the rules too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def imported_modules(file: Path, *, at_import_time: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; `at_import_time` leaves out functions and TYPE_CHECKING."""
    pending: list[ast.AST] = [ast.parse(file.read_text(), str(file))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        if at_import_time:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                pending.extend(node.orelse)
                continue
        pending.extend(ast.iter_child_nodes(node))


def offenders(files: list[Path], forbidden: tuple[str, ...], *, at_import_time: bool = False) -> list[str]:
    return sorted(
        {
            f"{file.relative_to(ROOT)}:{line} imports {module}"
            for file in files
            for line, module in imported_modules(file, at_import_time=at_import_time)
            if any(module == name or module.startswith(f"{name}.") for name in forbidden)
        }
    )


@by_name
def test_a_family_has_the_files_of_every_family(family: Path) -> None:
    package = source(family)
    expected = [
        family / "README.md",
        family / "CHANGELOG.md",
        family / "tests",
        package / "__init__.py",
        package / "_version.py",
        package / "py.typed",
        package / "family.py",
        package / "bridge.py",
        package / "spec.py",
    ]
    assert [str(path.relative_to(ROOT)) for path in expected if not path.exists()] == []


@by_name
def test_a_family_is_named_alike_everywhere(family: Path) -> None:
    metadata = project(family)
    assert metadata["name"] == f"isthmus-{family.name.replace('_', '-')}"
    assert source(family).name == f"isthmus_{family.name}"
    points = metadata["entry-points"]["isthmus.families"]
    assert set(points.values()) == {f"isthmus_{family.name}.family:FAMILY"}


def test_no_two_families_claim_one_model_type() -> None:
    claims = [key for family in FAMILIES for key in project(family)["entry-points"]["isthmus.families"]]
    assert len(claims) == len(set(claims))


@by_name
def test_a_family_depends_on_the_core_of_this_tree(family: Path) -> None:
    needs = [need for need in project(family)["dependencies"] if need.startswith("isthmus")]
    versions = {project(package)["name"]: _version(package) for package in PACKAGES}
    assert f"isthmus-core~={versions['isthmus-core']}" in needs
    assert needs == [f"{name}~={versions[name]}" for name in (need.partition("~=")[0] for need in needs)]


@by_name
def test_a_family_imports_no_other_family_than_it_depends_on(family: Path) -> None:
    dependencies = {re.split(r"[^\w-]", line)[0] for line in project(family)["dependencies"]}
    others = tuple(
        source(other).name
        for other in FAMILIES
        if other != family and project(other)["name"] not in dependencies
    )
    assert offenders(sorted(family.rglob("*.py")), others) == []


def test_core_imports_no_family() -> None:
    families = tuple(source(family).name for family in FAMILIES)
    assert offenders(sorted((ROOT / "core").rglob("*.py")), families) == []


def test_development_requirements_list_every_package() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    editables = [line.removeprefix("-e ./") for line in lines if line.startswith("-e")]
    assert editables == [str(package.relative_to(ROOT)) for package in [*PACKAGES, EXAMPLE]]


def test_the_example_of_a_family_stays_small_and_apart() -> None:
    others = tuple(source(family).name for family in FAMILIES)
    files = sorted(EXAMPLE.rglob("*.py"))
    assert offenders(files, others) == []
    assert sum(len(file.read_text().splitlines()) for file in files) < 200


@by_package
def test_version_is_one_line(package: Path) -> None:
    assert len((source(package) / "_version.py").read_text().splitlines()) == 1
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", _version(package))
    assert project(package)["dynamic"] == ["version"]


def _version(package: Path) -> str:
    match = re.fullmatch(r'__version__ = "(.+)"\n', (source(package) / "_version.py").read_text())
    assert match, f"{package.name}/_version.py"
    return match[1]


def test_weight_rules_are_pure() -> None:
    files = sorted((ROOT / "core/src/isthmus/weights").glob("*.py"))
    assert files
    assert offenders(files, ("torch.distributed", "megatron")) == []


@by_name
def test_the_tables_of_a_family_hold_no_transport(family: Path) -> None:
    files = [source(family) / f"{name}.py" for name in TABLES]
    files = [file for file in files if file.exists()]
    assert offenders(files, ("torch.distributed", "megatron")) == []


def test_the_command_line_imports_nothing_heavy() -> None:
    files = sorted((ROOT / "core/src/isthmus/cli").glob("*.py"))
    assert files
    assert offenders(files, ("torch", "megatron", "transformers"), at_import_time=True) == []


def test_text_is_ascii() -> None:
    found = []
    for file in tracked_files():
        if file.suffix in TEXT:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                if not line.isascii():
                    found.append(f"{file.relative_to(ROOT)}:{number}: {line!a}")
    assert found == []


def test_constraints_pin_exactly_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9_-]+==[0-9.]+", line)] == []


# The checks above are only worth something if they can fail.


def test_offenders_sees_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch.distributed as dist\n"
        "from torch import distributed\n"
        "from torch.distributed import nn\n"
        "import torchvision\n"
        "def later():\n"
        "    import megatron.core\n"
        "if TYPE_CHECKING:\n"
        "    import torch.distributed\n"
    )
    lines = {
        int(found.split(":")[1].split()[0]) for found in offenders([file], ("torch.distributed", "megatron"))
    }
    assert lines == {1, 2, 3, 6, 8}
    now = offenders([file], ("torch.distributed", "megatron"), at_import_time=True)
    assert {int(found.split(":")[1].split()[0]) for found in now} == {1, 2, 3}


def test_the_recipe_for_a_family_names_every_file_of_the_one_to_copy() -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = ROOT / "families/qwen3_next/src/isthmus_qwen3_next"
    files = {path.name for path in package.iterdir() if path.is_file() and not path.name.startswith("_")}
    assert {
        name for name in files - {"py.typed"} if f"`{name}`" not in recipe and f"/{name}`" not in recipe
    } == set()
