"""What is shipped: imports that go downwards, one version number, a wheel of the library alone."""

import ast
import collections
import configparser
import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import recurrent_gates

ROOT = Path(__file__).parents[1]
LIBRARY = "recurrent_gates"
VERSION = recurrent_gates.__version__

# A module imports from the lines above its own.
ORDER = (
    {"version", "shapes", "checks", "pickling", "target"},
    {"declared", "initializers", "carry", "pointwise"},
    {"gates", "zoneout"},
    {"base"},
    {"gato", "gru_d", "scan", "slstm"},
    {
        "cells",
        "linear",
        "layers",
        "interop",
        "analysis.trajectories",
        "analysis.products",
    },
    {"backends", "backends.shared", "memory.core", "memory.addressing"}
    | {"analysis.jacobians", "analysis.bounds", "analysis.gates"},
    {
        "backends.shared.rows",
        "backends.shared.halves",
        "backends.shared.refusal",
        "backends.newton.blocks",
        "backends.pallas.body",
    }
    | {"memory.relational", "memory.dnc", "memory.rma"},
    {"backends.shared.accumulation", "backends.newton.shooting", "backends.pallas.loop", "memory"},
    {"backends.shared.products", "backends.shared.two_layer", "registry"},
    {"backends.newton.backend", "backends.pallas.gato", "backends.pallas.recurrence"}
    | {"backends.shared.stepwise"},
    {"backends.cudnn", "backends.fused", "backends.parallel"}
    | {"backends.native.library", "backends.native.switch"},
    {"backends.native.kernel"},
    {"backends.native.gated", "backends.native.gato"},
    {"backends.native.two_layer"},
    {"backends.newton", "backends.pallas.backend", "backends.native.backend"},
    {"backends.pallas", "backends.native", "testing", "analysis.convergence", "gate_theory"},
    {"analysis", "serving"},
    {"desiderata", "nnx"},
    {""},  # __init__.py: the public names
)
OUTSIDE = {"jax", "flax", "numpy"} | set(sys.stdlib_module_names)


def files(package):
    """{dotted name inside the package: path}; the package itself is ""."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


MODULES = files(LIBRARY)


def imports(path):
    """(dotted name, whether inside a function) of everything that a file imports."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in late


def module_of(name):
    """The library's module that an imported dotted name is, or is in."""
    inside = name.partition(".")[2]
    while inside not in MODULES:
        inside = inside.rpartition(".")[0]
    return inside


def height(module):
    (found,) = [i for i, line in enumerate(ORDER) if module in line]
    return found


def test_every_module_has_a_place_in_the_order():
    assert set(MODULES) <= set().union(*ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_library_imports_downwards_only(module):
    for name, late in imports(MODULES[module]):
        if name.partition(".")[0] != LIBRARY:
            continue
        assert not late, f"{module} imports {name} inside a function"
        assert height(module_of(name)) < height(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_library_needs_jax_flax_and_numpy_only(module):
    for name, _ in imports(MODULES[module]):
        top = name.partition(".")[0]
        assert top in OUTSIDE | {LIBRARY}, f"{module} imports {name}"
        private = [part for part in name.split(".") if re.match(r"_(?!_)", part)]
        assert not private or top == LIBRARY, f"{module} imports the private {name}"


@pytest.mark.parametrize("package", ["benchmarks", "experiments", "examples"])
def test_programs_read_the_public_api_only(package):
    public = {"", *recurrent_gates._MODULES}
    for module, path in files(package).items():
        for name, _ in imports(path):
            if name.partition(".")[0] != LIBRARY:
                continue
            last = name.rpartition(".")[2]
            assert module_of(name) in public, f"{package}.{module} imports {name}"
            assert not last.startswith("_"), f"{package}.{module} imports {name}"
            if module_of(name) == "" and name != LIBRARY:
                assert last in recurrent_gates.__all__, f"{package}.{module} imports {name}"


# Sizes: what a reader has to hold in mind at once

_MOST_LINES, _MOST_PARAMETERS, _MOST_NAMES = 60, 7, 10
# What Flax asks of a cell, or ``Cell`` makes of the rest.
FLAX_NAMES = {"weights", "initialize_carry", "num_feature_axes"}


def functions(path):
    """(name, lines but for the docstring, parameters that are not keywords) of all functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node.name, lines, len(node.args.posonlyargs) + len(node.args.args)


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short_and_take_few_things(module):
    for name, lines, parameters in functions(MODULES[module]):
        assert lines <= _MOST_LINES, f"{module}.{name} has {lines} lines"
        assert parameters <= _MOST_PARAMETERS, f"{module}.{name} takes {parameters} parameters"


def names_to_define(cell):
    """The public methods and properties of a cell's class itself."""
    members = {name for name, value in vars(cell).items() if hasattr(value, "__get__")}
    members -= FLAX_NAMES | set(cell.__dataclass_fields__)
    return {name for name in members if not name.startswith("_")}


def test_the_contract_fits_on_a_card():
    names = names_to_define(recurrent_gates.Cell)
    assert {"init_params", "initial", "step", "products", "sums"} <= names
    assert len(names) <= _MOST_NAMES
    card = recurrent_gates.Cell.__doc__
    for name in names:
        assert re.search(rf"^    {name}\b", card, re.MULTILINE), f"Cell's card lacks {name}"
    # A SlotCell makes these of what it asks for itself.
    made = {"init_params", "project", "step", "emit", "products"}
    more = names_to_define(recurrent_gates.SlotCell) - names - {"zeros"}
    assert len(names - made | more) <= _MOST_NAMES


# The rooms of the experiments


# A room imports from the lines above its own; rooms of one line know nothing of each other.
ROOMS = (
    {"settings"},
    {"datasets"},
    {"machine"},
    {"records"},
    {"figures"},
    {"training"},
    {"command"},
    {"copy", "adding", "pixels", "language_model", "sentiment", "stay"}
    | {"execute", "recall", "match", "captioning"},
    {"forgetting", "transfer_copy"},
    {"catalog"},
    {"compare", "diagnose"},
    {"sweep"},
    {"results"},
    {""},  # __init__.py
)
EXPERIMENTS = files("experiments")
_MOST_FILES = 14


def room_of(module):
    return module.partition(".")[0]


def level(module):
    (found,) = [i for i, line in enumerate(ROOMS) if room_of(module) in line]
    return found


def experiments_imported(module):
    """The modules of the experiments that one of them imports, also inside of functions."""
    for name, _ in imports(EXPERIMENTS[module]):
        if name.partition(".")[0] != "experiments":
            continue
        inside = name.partition(".")[2]
        while inside not in EXPERIMENTS:
            assert "." in inside, f"{module} imports {name}, which is not there"
            inside = inside.rpartition(".")[0]
        yield inside


@pytest.mark.parametrize("module", EXPERIMENTS)
def test_rooms_import_downwards_only(module):
    for other in experiments_imported(module):
        if room_of(other) != room_of(module):
            assert level(other) < level(module), f"{module} imports {other}"


def test_no_module_of_the_experiments_imports_itself_by_a_detour():
    above = {module: set(experiments_imported(module)) for module in EXPERIMENTS}
    for module, others in above.items():
        if module.endswith(".settings"):  # which task it is of is looked up when there is one
            others.discard(f"{room_of(module)}.task")
    while above:
        lowest = {module for module, others in above.items() if not others & set(above)}
        assert lowest, f"these import each other: {sorted(above)}"
        above = {module: others for module, others in above.items() if module not in lowest}


def test_no_room_is_crowded():
    rooms = collections.Counter(room_of(module) for module in EXPERIMENTS)
    assert max(rooms.values()) <= _MOST_FILES, rooms


def test_settings_are_read_without_jax():
    """``--help`` is quick: nothing on its way imports JAX, or what does, at module level."""
    light = {"absl"} | set(sys.stdlib_module_names)
    waiting, seen = ["copy.__main__", "pixels.__main__"], set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name, late in imports(EXPERIMENTS[module]):
            top = name.partition(".")[0]
            if late:
                continue
            assert top in light | {"experiments"}, f"{module} imports {name}"
        early = {name for name, late in imports(EXPERIMENTS[module]) if not late}
        for other in experiments_imported(module):
            path = f"experiments.{other}"
            if any(name == path or name.startswith(f"{path}.") for name in early):
                waiting += [other] if other not in seen else []
    assert {"settings.resolver", "command.flags", "pixels.settings"} <= seen


# The version


def test_one_version_number():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: recurrent_gates.version.__version__"
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [VERSION]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == VERSION


# The wheel


def builds_offline():
    """Whether this environment has the setuptools that pyproject.toml asks for."""
    try:
        installed = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    (least,) = re.findall(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text())
    return int(installed.partition(".")[0]) >= int(least)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the clone; nothing is written into the clone itself."""
    clone, out = tmp_path_factory.mktemp("clone") / "clone", tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, clone, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out)]
    if builds_offline():
        command.append("--no-isolation")
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_the_library_alone(wheel):
    assert wheel.name == f"recurrent_gates-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = {name for name in names if name.startswith(f"{LIBRARY}-{VERSION}.dist-info/")}
    sources = {str(path.relative_to(ROOT)) for path in MODULES.values()}
    kernels = ROOT / LIBRARY / "backends" / "native" / "kernels"
    sources |= {str(path.relative_to(ROOT)) for path in kernels.iterdir()}
    assert names - about == sources | {f"{LIBRARY}/py.typed"}
    assert any(name.endswith("LICENSE") for name in about)


def test_wheel_says_what_it_is(wheel):
    about = metadata(wheel)
    assert about["Version"] == VERSION
    assert "Apache-2.0" in (about["License"], about["License-Expression"])
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    needs = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in needs} == {"jax", "flax"}
    assert {"experiments", "test", "cuda", "tpu"} <= set(about.get_all("Provides-Extra"))


def test_wheel_imports_from_another_directory(wheel, tmp_path):
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    program = (
        f"import sys; sys.path.insert(0, {str(place)!r})\n"
        "import jax, jax.numpy as jnp, recurrent_gates as rg\n"
        "late = {'analysis', 'desiderata', 'gate_theory', 'nnx', 'testing'}\n"
        "assert not {f'recurrent_gates.{name}' for name in late} & set(sys.modules)\n"
        "assert late < set(rg._MODULES) < set(dir(rg))\n"
        "for name in rg._MODULES:\n"
        "    assert getattr(rg, name) is sys.modules[f'recurrent_gates.{name}']\n"
        "assert not hasattr(rg, 'nothing')\n"
        "from recurrent_gates.backends import fused\n"
        "cell = rg.GRU(2)\n"
        "params = cell.init_params(jax.random.key(0), 1)\n"
        "ys = rg.unroll(cell, params, jnp.ones((3, 1, 1)), backend='fused')[1]\n"
        "assert jnp.isfinite(ys).all()\n"
        "print(rg.__file__, rg.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(place / LIBRARY / "__init__.py"), VERSION]
