"""Files of strangers cannot run code: nothing here reads what can hold a program."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for package in ("recurrent_gates", "experiments", "benchmarks", "examples")
    for path in sorted((ROOT / package).rglob("*.py"))
]
# Modules whose readers run what they read, and functions that do, or that write where an archive
# says. A pickle may be written, not read: submitit does both, in a sweep's own folder.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FUNCTIONS = {"extractall", "unpack_archive", "Unpickler", "read_pickle"}
# Those that are harmless with an argument.
SAFE = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}


def name_of(function):
    """A dotted name, as it stands in the source."""
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""


def dangers(tree):
    """The names of what a module imports or calls and should not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from MODULES & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from MODULES & {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            yield from {"eval", "exec"} & {name}
            yield from FUNCTIONS & {name.rpartition(".")[2]}
            if name in SAFE:
                keyword, value = SAFE[name]
                given = {one.arg: getattr(one.value, "value", None) for one in node.keywords}
                if given.get(keyword) is not value:
                    yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_reads_what_can_hold_a_program(path):
    assert list(dangers(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
        "archive.extractall(place)",
        "eval(text)",
    ],
)
def test_what_could_is_noticed(source):
    assert list(dangers(ast.parse(source)))
