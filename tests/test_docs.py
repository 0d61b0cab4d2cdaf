"""README and docs: every code block runs, every command is accepted, every public name is there."""

import ast
import configparser
import contextlib
import doctest
import enum
import functools
import importlib
import inspect
import io
import json
import os
import re
import runpy
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from experiments.catalog import EXPERIMENTS
from tests.support import run_as_main, thinned

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("guide/*.md"))]
CELLS_PAGE = (DOCS / "guide" / "cells.md").read_text()


def blocks(text, language):
    """(first line number, code) of every block of a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def unjitted(value):
    """The function inside a jitted one."""
    return inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value


def name_of(path):
    return str(path.relative_to(ROOT))


# Code


@pytest.mark.parametrize(
    "path",
    thinned(
        [(page,) for page in PAGES if blocks(page.read_text(), "python")],
        lambda page: page.name == "README.md",
        pytest.mark.long,
    ),
    ids=name_of,
)
def test_python_blocks_run_in_order(path):
    namespace = {"__name__": "__main__"}
    for line, code in blocks(path.read_text(), "python"):
        # Blank lines in front, so that a traceback names the page's own lines.
        with jax.numpy_dtype_promotion("standard"):  # as a user has it; optax needs it
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


def test_every_block_says_its_language():
    for path in PAGES:
        fences = re.findall(r"^```(.*)$", path.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= {"python", "bash", "text", "toml"}, path
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
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", output(module, "--help"), re.MULTILINE))


def check_experiment(module, *arguments):
    if "--help" in arguments:
        assert output(module, *arguments).startswith("usage:")
        return
    untrained = {f"experiments.{name}" for name in ("compare", "diagnose", "sweep", "results")}
    if module in untrained or module.startswith("benchmarks."):
        named = {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}
        assert named <= flags_of(module)
        return
    arguments = [word for word in arguments if not word.startswith("--compile_for=")]  # libtpu
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
        ours = re.sub(r"^```text\n.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        named = set(re.findall(r"--(?!xla_)([a-z]\w+)", ours)) - {"help"}  # nor XLA's own
        assert named <= known, f"{name_of(path)}: {named - known}"


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`\n]*`", "", text)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            assert not target or (path.parent / target).exists(), f"{name_of(path)}: {link}"
            if anchor and not target:
                headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
                assert anchor in anchors, f"{name_of(path)}: {link}"


def test_examples_page_shows_every_example():
    page = (DOCS / "guide" / "examples.md").read_text()
    shown = re.findall(r"literalinclude} \S+/(\w+\.py)$", page, re.M)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    pages = [*DOCS.glob("*.md"), *DOCS.glob("guide/*.md"), *DOCS.glob("api/*.rst")]
    for path in pages:
        if path.name != "index.md":
            assert f"\n{path.relative_to(DOCS).with_suffix('')}\n" in index, path


@pytest.mark.long
def test_pictures_of_the_gates_are_drawn(tmp_path):
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(sys, "argv", ["gates.py", str(tmp_path)])
        runpy.run_path(str(DOCS / "images" / "gates.py"), run_name="__main__")
    for name in ("gates.png", "timescales.png"):
        drawn, kept = ((folder / name).read_bytes() for folder in (tmp_path, DOCS / "images"))
        assert drawn[:24] == kept[:24]  # a PNG of the same width and height


# Tables


def rows(heading):
    """The cells of every table row in a section of the page of cells, inner code quotes kept."""
    section = CELLS_PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
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


def test_protocols_table_is_what_the_experiments_have():
    page = (ROOT / "docs/guide/experiments.md").read_text()
    table = page.split("| task | protocols beside `small` |\n|---|---|\n")[1].split("\n\n")[0]
    printed = {}
    for line in table.splitlines():
        tasks, protocols = line.strip("|").split("|")
        for task in tasks.split(","):
            printed[task.strip()] = set(re.findall(r"`(\w+)`", protocols))
    assert printed == {e.name: set(e.protocols) - {"small"} for e in EXPERIMENTS}


# The API pages


MODULES = {name: getattr(rg, name) for name in rg._MODULES}
HOMES = {"": rg, **MODULES}
PUBLIC = {
    f"{home}.{name}".lstrip("."): getattr(module, name)
    for home, module in HOMES.items()
    for name in module.__all__
    if home or name not in MODULES
}
CLASSES = sorted(name for name, value in PUBLIC.items() if inspect.isclass(value))
FUNCTIONS = sorted(name for name, value in PUBLIC.items() if inspect.isroutine(unjitted(value)))


def test_all_is_complete():
    for home, module in HOMES.items():
        assert len(set(module.__all__)) == len(module.__all__), home
    there = {
        name
        for name, value in vars(rg).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert there | {"__version__"} == set(rg.__all__)
    for home, module in MODULES.items():
        ours = {
            name
            for name, value in vars(module).items()
            if f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
            and not name.startswith("_")
        }
        assert {name for name in ours if callable(vars(module)[name])} <= set(module.__all__), home


def documented(page):
    """The values that an API page shows."""
    module = rg
    for directive, name, options in re.findall(
        r"^\.\. (currentmodule|auto\w+):: (\S+)\n((?:   :.*\n)*)", page, re.M
    ):
        if directive == "currentmodule":
            module = importlib.import_module(name)
        elif directive == "automodule":
            own = importlib.import_module(name)
            yield from [getattr(own, n) for n in own.__all__] if ":members:" in options else ()
        else:
            place, _, last = name.rpartition(".")
            yield getattr(importlib.import_module(place) if place else module, last)


def test_every_public_name_is_on_one_api_page():
    pages = [path.read_text() for path in (DOCS / "api").glob("*.rst")]
    whole = re.findall(r"^\.\. automodule:: (\S+)", "\n".join(pages), re.M)
    assert sorted(whole) == sorted(module.__name__ for module in MODULES.values())
    on_pages = [value for page in pages for value in documented(page)]
    assert len({id(value) for value in on_pages}) == len(on_pages)
    assert {id(value) for value in on_pages} == {id(value) for value in PUBLIC.values()}


def sections(value):
    """{heading: text} of a Google-style docstring; what stands before any heading is ""."""
    headings = r"^(Args|Attributes|Example|Note|Raises|Returns):\n"
    parts = re.split(headings, inspect.getdoc(value) or "", flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(text):
    """The names that a section describes."""
    heads = re.findall(r"^  (\w[\w, ]*):\s", text, re.M)
    return [name for head in heads for name in head.split(", ")]


def raised(value):
    """The exceptions that a function's own lines raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    calls = [n.exc.func for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    return {call.id for call in calls}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_arguments_returns_and_errors(name):
    function = unjitted(PUBLIC[name])
    signature, said = inspect.signature(function), sections(function)
    assert said[""].split(), f"{name} has no docstring"
    assert entries(said.get("Args", "")) == list(signature.parameters)
    assert ("Returns" in said) == (signature.return_annotation != "None")
    assert set(entries(said.get("Raises", ""))) >= raised(function)
    # A letter and a full stop begin a list.
    assert not re.search(r"(^ +|: )\w\.$", "\n".join(said.values()), re.M)


@pytest.mark.parametrize("name", CLASSES)
def test_class_documents_its_fields_and_errors(name):
    value = PUBLIC[name]
    said = sections(value)
    assert said[""].split(), f"{name} has no docstring"
    assert not said[""].startswith(f"{value.__name__}("), f"{name} has only a generated docstring"
    if issubclass(value, enum.Enum):
        own = inherited = set(value.__members__)
    else:
        own = set(vars(value).get("__annotations__", {})) - {"parent", "name"}
        inherited = set().union(*(vars(base).get("__annotations__", {}) for base in value.__mro__))
    assert own <= set(entries(said.get("Attributes", ""))) <= inherited
    if "__post_init__" in vars(value):
        assert set(entries(said.get("Raises", ""))) >= raised(value.__post_init__)


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_have_docstrings(name):
    fields = vars(PUBLIC[name]).get("__annotations__", {})
    for member, attribute in vars(PUBLIC[name]).items():
        if member in fields:
            continue
        property_ = inspect.isdatadescriptor(attribute)  # Flax wraps a module's
        public = not member.startswith("_") or member == "__call__"
        if (inspect.isfunction(attribute) or property_) and public:
            text = inspect.getdoc(getattr(PUBLIC[name], member))
            assert text, f"{name}.{member} has no docstring"
            # Sphinx would take what stands before a colon for a property's type.
            assert not property_ or ": " not in text.splitlines()[0], f"{name}.{member}"


@pytest.mark.parametrize("called", [rg.Gate, rg.RNN, rg.Stack], ids=lambda value: value.__name__)
def test_calls_document_their_arguments(called):
    names = set(inspect.signature(called.__call__).parameters) - {"self"}
    said = set(entries(sections(called.__call__)["Args"]))
    if called is rg.Stack:  # the others are as in RNN
        said |= set(entries(sections(rg.RNN.__call__)["Args"]))
    assert names == said


def test_examples_in_docstrings_run():
    ran = 0
    modules = sorted(name for name in sys.modules if name.startswith("recurrent_gates"))
    for module in map(sys.modules.__getitem__, modules):
        with jax.numpy_dtype_promotion("standard"):
            result = doctest.testmod(module, extraglobs={"jax": jax, "jnp": jnp, "rg": rg})
        assert not result.failed, module.__name__
        ran += result.attempted
    assert ran
