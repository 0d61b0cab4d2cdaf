"""The list of mutants fits the code; the program that plants them tells the caught from others.

`make mutate` plants the listed mistakes themselves, which takes minutes.
"""

import ast
import re
import subprocess

import pytest

from tests import mutate

MUTANTS = mutate.load()


def test_names_are_names():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant):
    """Its old text is there once, what it makes of a module is Python, its test is there."""
    text = (mutate.ROOT / mutant.file).read_text()
    planted = mutant.planted(text)
    if mutant.file.endswith(".py"):
        planted, text = (ast.dump(ast.parse(source)) for source in (planted, text))
    assert planted != text
    path, _, function = re.split(r"[\[ ]", mutant.test)[0].partition("::")
    test = (mutate.ROOT / path).read_text()
    assert not function or f"\ndef {function}(" in test


LIST = """
[[mutant]]
name = "a sign"
file = "module.py"
old = "1 + x"
new = "1 - x"
test = "test_module.py::test_sum"

[[mutant]]
name = "what no test sees"
file = "module.py"
old = "2 * x"
new = "3 * x"
test = "test_module.py::test_sum"

[[mutant]]
name = "a test that always fails"
file = "module.py"
old = "1 + x"
new = "1 - x"
test = "test_module.py::test_broken"

[[mutant]]
name = "a test that is not there"
file = "module.py"
old = "1 + x"
new = "1 - x"
test = "test_module.py -k nothing"

[[mutant]]
name = "an old text that is not there"
file = "module.py"
old = "4 * x"
new = "5 * x"
test = "test_module.py"

[[mutant]]
name = "an old text of two places"
file = "module.py"
old = "* x"
new = "+ x"
test = "test_module.py"
"""
FILES = {
    "module.py": "def plus(x):\n    return 1 + x\n\n\ndef twice(x):\n    return 2 * x + 0 * x\n",
    "test_module.py": (
        "from module import plus\n\n\ndef test_sum():\n    assert plus(1) == 2\n\n\n"
        "def test_broken():\n    assert plus(1) == 3\n"
    ),
    "tests/mutants.toml": LIST,
    "setup.cfg": "[tool:pytest]\n",
}


@pytest.fixture
def clone(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.long
def test_only_a_test_that_fails_with_the_mutant_alone_catches_it(clone, capsys):
    assert mutate.main(["mutate"], clone) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a sign: caught",
        "what no test sees: NOT CAUGHT: pytest ends with 0",
        "a test that always fails: NOT CAUGHT: without it pytest ends with 1 too",
        "a test that is not there: NOT CAUGHT: without it pytest ends with 5 too",
        "an old text that is not there: does not apply: module.py has the old text 0 times",
        "an old text of two places: does not apply: module.py has the old text 2 times",
        "1 of 6 caught",
    ]
    assert {name: (clone / name).read_text() for name in FILES} == FILES


def test_a_pattern_chooses_mutants_by_name(clone, capsys):
    assert mutate.main(["mutate", "two places"], clone) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["0 of 1 caught"]
    assert mutate.main(["mutate", "cosine"], clone) == 1
    assert capsys.readouterr().out == "No mutant has 'cosine' in its name.\n"
