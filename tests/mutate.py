"""Plants the mistakes of mutants.toml, one by one, in a copy of the tracked files, and says which
are caught by the tests that they name: `python -m tests.mutate [PATTERN]`."""

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A mistake: the old text of a file, the new one, and the test that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def planted(self, text):
        """The file's text with the mistake; ValueError if it has not one place."""
        places = text.count(self.old)
        if places != 1:
            raise ValueError(f"{self.file} has the old text {places} times")
        return text.replace(self.old, self.new)


def load(path=ROOT / "tests" / "mutants.toml"):
    """The mutants of a list."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


def copy_tracked_files(clone, folder):
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=clone, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clone / name, target)


def exit_code(folder, test):
    """pytest's: 0 if the test passes, 1 if it fails, another number if it does not run."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *shlex.split(test)]
    # No .pyc: one of the same second and size as a mutant's would be taken for it.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode


def verdict(folder, mutant, codes):
    """What becomes of a mutant; ``codes`` collects the exit codes of tests without mutants."""
    path = folder / mutant.file
    text = path.read_text()
    try:
        planted = mutant.planted(text)
    except ValueError as error:
        return f"does not apply: {error}"
    if mutant.test not in codes:
        codes[mutant.test] = exit_code(folder, mutant.test)
    if codes[mutant.test]:
        return f"NOT CAUGHT: without it pytest ends with {codes[mutant.test]} too"
    path.write_text(planted)
    try:
        code = exit_code(folder, mutant.test)
    finally:
        path.write_text(text)
    return "caught" if code == 1 else f"NOT CAUGHT: pytest ends with {code}"


def main(argv, clone=ROOT):
    """Prints a line for each mutant whose name has the pattern; 0 if all are caught."""
    pattern = f"*{argv[1]}*" if argv[1:] else "*"
    mutants = load(clone / "tests" / "mutants.toml")
    mutants = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, pattern)]
    if not mutants:
        print(f"No mutant has {argv[1]!r} in its name.")
        return 1
    codes, caught = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tracked_files(clone, Path(folder))
        for mutant in mutants:
            said = verdict(Path(folder), mutant, codes)
            caught += said == "caught"
            print(f"{mutant.name}: {said}", flush=True)
    print(f"{caught} of {len(mutants)} caught")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
