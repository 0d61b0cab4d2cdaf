"""The kernels as libraries, compiled where they run: found again, refused, or built anew."""

import pathlib

import pytest

from recurrent_gates.backends.native import library


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The library's functions without what they have built before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return library.missing.__wrapped__


def test_a_machine_without_a_compiler_is_told_so(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert fresh("lstm") == (
        "kernels are compiled on this machine, and there is no C++ compiler (no-such-compiler)."
    )


def test_kernels_can_be_turned_off(fresh, monkeypatch):
    monkeypatch.setenv("RECURRENT_GATES_NATIVE", "0")
    assert fresh("lstm") == "RECURRENT_GATES_NATIVE=0 turns kernels off."


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cc:1: error: no" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "does not compile the kernels: x.cc:1: error: no." in fresh("lstm")
    assert not list((tmp_path / "recurrent_gates").iterdir())


def test_a_damaged_library_is_compiled_anew(monkeypatch, tmp_path):
    """The compiler's part is played: it takes some ten seconds."""
    whole, output = library._built("janet").read_bytes(), library._output

    def played(command):
        if "-o" not in command:
            return output(command)
        pathlib.Path(command[-1]).write_bytes(whole)
        return ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_output", played)
    path = library._built("janet")
    path.write_bytes(b"half of it")
    assert hasattr(library._loaded("janet"), "rg_forward")
    assert path.read_bytes() == whole


def test_a_machine_without_a_home_is_told_so(fresh, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home"))
    )
    assert fresh("lstm") == ("there is no home directory, and XDG_CACHE_HOME is not set.")


def test_a_directory_that_cannot_be_written_is_named(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert f"kernels cannot be written to {tmp_path / 'file'}/recurrent_gates" in fresh("lstm")


def test_a_library_is_kept_by_what_it_depends_on(fresh, monkeypatch, tmp_path):
    """Compiled once; another processor, which may share the directory, has one of its own."""
    compiled = []

    def output(command):
        if "-o" in command:
            compiled.append(command)
            pathlib.Path(command[-1]).write_bytes(b"a library")
        return "a version"

    monkeypatch.setattr(library, "_output", output)
    first = library._built("lstm")
    assert library._built("lstm") == first
    assert len(compiled) == 1
    monkeypatch.setattr(library, "_processor", lambda: "another")
    assert library._built("lstm") != first
    assert len(list((tmp_path / "recurrent_gates").iterdir())) == len(compiled) == 2
