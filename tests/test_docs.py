"""README and docs: every code block runs, every command is accepted, every public name is there."""

import ast
import configparser
import contextlib
import functools
import inspect
import io
import json
import os
import re
import shlex
import signal
from pathlib import Path

import jax
import pytest
from flax import linen as nn
from flax import nnx

import recurrent_gates as rg
from recurrent_gates import (
    analysis,
    desiderata,
    gate_theory,
    initializers,
    interop,
    testing,
)
from tests.support import run_as_main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
API = (ROOT / "docs" / "API.md").read_text()
README = (ROOT / "README.md").read_text()
# Public modules that the package does not re-export.
BESIDE = (analysis, desiderata, gate_theory, initializers, interop, testing)


def blocks(text, language):
    """(first line number, code) of every block of a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def name_of(path):
    return str(path.relative_to(ROOT))


# Code


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p.read_text(), "python")], ids=name_of)
def test_python_blocks_run_in_order(path):
    namespace = {"__name__": "__main__"}
    for line, code in blocks(path.read_text(), "python"):
        # Blank lines in front, so that a traceback names the page's own lines.
        with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


def test_every_block_says_its_language():
    for path in PAGES:
        fences = re.findall(r"^```(.*)$", path.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= {"python", "bash", "text"}, path
        assert set(fences[1::2]) <= {""}, path


# Commands


def commands():
    texts = [code for page in PAGES for _, code in blocks(page.read_text(), "bash")]
    lines = [line for text in texts for line in text.splitlines()]
    split = [tuple(shlex.split(line, comments=True)) for line in lines]
    return sorted({words for words in split if words})


def output(module, *arguments):
    """What a program prints, run in this process as ``python -m`` runs it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(signal, "signal", lambda *_: None)
        for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
            patch.setenv(name, os.environ.get(name, ""))  # put back afterwards
        with jax.numpy_dtype_promotion("standard"), pytest.raises(SystemExit) as ended:
            run_as_main(patch, module, arguments)
    assert not ended.value.code, f"{module} {' '.join(arguments)}"
    return out.getvalue()


def check_make(target):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target in targets


def check_install(*arguments):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    *options, requirement = arguments
    assert options in ([], ["-e"])
    place, _, extras = requirement.rstrip("]").partition("[")
    assert place == "."
    assert set(filter(None, extras.split(","))) <= set(setup["options.extras_require"])


def flags_of(module):
    return set(re.findall(r"^  --(\w+)", output(module, "--help"), re.MULTILINE))


def check_experiment(module, *arguments):
    if "--help" in arguments:
        assert output(module, *arguments).startswith("usage:")
        return
    untrained = {f"experiments.{name}" for name in ("compare", "diagnose", "sweep", "results")}
    if module in untrained or module.startswith("benchmarks."):
        named = {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}
        assert named <= flags_of(module)
        return
    described = json.loads(output(module, *arguments, "--describe"))
    for run in described.get("runs", {"": described}).values():
        assert 0 < run["recurrent_parameters"] < run["total_parameters"]


CHECKS = {
    ("make",): check_make,
    ("pip", "install"): check_install,
    ("python", "-m"): check_experiment,
}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command_is_accepted(words):
    for start, check in CHECKS.items():
        if words[: len(start)] == start:
            check(*words[len(start) :])
            return
    raise AssertionError(f"no test knows the command {' '.join(words)}")


def test_every_flag_that_the_pages_name_exists():
    binaries = {words[2] for words in commands() if words[:2] == ("python", "-m")}
    known = set().union(*map(flags_of, binaries))
    for path in PAGES:
        named = set(re.findall(r"--([a-z]\w+)", path.read_text())) - {"help"}
        assert named <= known, f"{name_of(path)}: {named - known}"


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            assert not target or (path.parent / target).exists(), f"{name_of(path)}: {link}"
            if anchor and not target:
                headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
                assert anchor in anchors, f"{name_of(path)}: {link}"


# Tables


def rows(heading):
    """The cells of every table row in a section of the README, inner code quotes kept."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_cells_table_names_every_cell():
    firsts = [row[0] for row in rows("Cells and papers") if row[0].startswith("`")]
    names = set(re.findall(r"`([^`]+)`", " ".join(firsts)))
    gates = names & set(rg.GATES)
    families = {name.removeprefix("G") for name in names if name.startswith("G_")}
    cells = {n for n in names - gates if not n.startswith("G_")}
    assert gates == set(rg.GATES) - {"standard"}
    assert cells | {gate + family for gate in gates for family in families} == set(rg.CELLS)


def test_parameter_table_is_what_the_cells_have():
    table = [row for row in rows("Parameters") if row[1].isdigit()]
    assert len(table) == 4
    for _, hidden, inputs, gato, gru, lstm in table:
        printed, described = re.fullmatch(r"([\d,]+) \((.*)\)", gato).groups()
        name = {"two-layer": "gato2", "one-layer": "gato1"}[described.split(",")[0]]
        biases = 2 if "two bias vectors" in described else 1
        for cell, count in (
            (rg.CELLS[name](int(hidden), bias_vectors=biases), printed),
            (rg.CELLS["gru"](int(hidden), bias_vectors=2), gru),
            (rg.CELLS["lstm"](int(hidden), bias_vectors=2), lstm),
        ):
            init = functools.partial(cell.init_params, in_features=int(inputs))
            shapes = jax.eval_shape(init, jax.random.key(0))
            assert f"{rg.count_parameters(shapes):,}" == count


# The API page


def public_names():
    names = {name: getattr(rg, name) for name in rg.__all__}
    for module in BESIDE:
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                names[name] = value
    return names | {f"nnx.{name}": getattr(rg.nnx, name) for name in rg.nnx.__all__}


PUBLIC = public_names()


def section(name):
    """The text under a name's heading."""
    parts = re.split(rf"^### `{re.escape(name)}`$", API, flags=re.MULTILINE)
    assert len(parts) == 2, f"docs/API.md has {len(parts) - 1} headings for {name}"
    return re.split(r"^##", parts[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_api_page_documents_the_public_names_and_no_others():
    assert set(re.findall(r"^### `([\w.]+)`$", API, re.MULTILINE)) == set(PUBLIC)
    for module in (*BESIDE, rg.nnx):
        assert f"## `{module.__name__}`" in API


def test_all_is_complete():
    assert len(set(rg.__all__)) == len(rg.__all__)
    namespace = {
        name
        for name, value in vars(rg).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert namespace | {"__version__"} == set(rg.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_documented(name):
    assert len(section(name).split()) >= 10
    value = PUBLIC[name]
    if callable(value):
        own = value.__doc__
        assert own, f"{name} has no docstring"
        assert not own.startswith(f"{name}("), f"{name} has only a generated docstring"


def written_parameters(name):
    """{parameter: (kind, has a default)} as the API page writes the signature."""
    ((_, text),) = blocks(section(name).lstrip("\n").split("\n\n")[0] + "\n", "text")
    home, dot, name = name.rpartition(".")
    head, _, _ = text.strip().removeprefix(home + dot).partition(" -> ")
    function = ast.parse(f"def {head}: ...").body[0]
    arguments = function.args
    required = len(arguments.args) - len(arguments.defaults)
    found = {a.arg: ("positional", i >= required) for i, a in enumerate(arguments.args)}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = ("keyword", default is not None)
    if arguments.kwarg:
        found[arguments.kwarg.arg] = ("positional", False)
    assert function.name == name
    return found


CLASSES = sorted(n for n, v in PUBLIC.items() if inspect.isclass(v))
CALLED = sorted({n for n, v in PUBLIC.items() if callable(v)} - {"Backend", "UnknownCellError"})


@pytest.mark.parametrize("name", CALLED)
def test_signature_is_the_one_in_the_code(name):
    value = PUBLIC[name]
    is_module = inspect.isclass(value) and issubclass(value, nn.Module)
    flax_own = {"parent", "name"} if is_module else set()
    if inspect.isclass(value) and issubclass(value, nnx.Module):  # its metaclass hides it
        value, flax_own = value.__init__, {"self"}
    actual = {
        p.name: (
            "keyword" if p.kind is p.KEYWORD_ONLY else "positional",
            p.default is not p.empty,
        )
        for p in inspect.signature(value).parameters.values()
        if p.name not in flax_own
    }
    assert list(written_parameters(name).items()) == list(actual.items())


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_have_words(name):
    value = PUBLIC[name]
    inherited = {member for base in value.__mro__[1:] for member in vars(base)}
    fields = getattr(value, "__dataclass_fields__", {})
    for member, attribute in vars(value).items():
        is_ours = inspect.isfunction(attribute) or isinstance(attribute, property)
        if member.startswith("_") or member in fields or not is_ours:
            continue
        if getattr(attribute, "__module__", rg.__name__).partition(".")[0] != rg.__name__:
            continue  # struct.dataclass adds replace
        assert inspect.getdoc(attribute) or member in inherited, f"{name}.{member} has no docstring"
        if member not in inherited:
            words = section(name)
            assert f"`{member}" in words, f"docs/API.md does not name {name}.{member}"
