"""The kernels as libraries, compiled where they run: found again, refused, or built anew."""

import pathlib
import time

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


@pytest.mark.parametrize("damage", ["short", "half", "zeros"])
def test_a_damaged_library_is_compiled_anew(monkeypatch, tmp_path, damage):
    """The compiler's part is played: it takes some ten seconds. To load half of a library would
    end this process with a bus error."""
    whole, output = library._built("janet").read_bytes(), library._output

    def played(command):
        if "-o" not in command:
            return output(command)
        pathlib.Path(command[-1]).write_bytes(whole)
        return ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_output", played)
    path = library._built("janet")
    half = len(whole) // 2
    path.write_bytes(
        {
            "short": b"a bit of it",
            "half": whole[:half],
            "zeros": whole[:4096] + bytes(half - 4096) + whole[half:],
        }[damage]
    )
    assert hasattr(library._loaded("janet"), "rg_forward")
    assert path.read_bytes() == whole


def test_a_compiler_that_does_not_end_is_ended_with_its_children(fresh, monkeypatch, tmp_path):
    path, child = tmp_path / "c++", tmp_path / "child"
    path.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {child}\nwait\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(library, "_SECONDS", 1)
    assert "the C++ compiler cannot be run: " in fresh("lstm")
    status = pathlib.Path(f"/proc/{int(child.read_text())}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the compiler had started runs on")


def test_a_library_that_never_loads_is_compiled_in_vain_once(fresh, monkeypatch):
    """On a file system without programs, say: later processes are told so at once."""
    compiled, output = [], library._output

    def played(command):
        if "-o" not in command:
            return output(command)
        compiled.append(command)
        pathlib.Path(command[-1]).write_bytes(b"no library")
        return ""

    monkeypatch.setattr(library, "_output", played)
    for times in (2, 2, 2):
        assert fresh("janet").startswith("kernels cannot be loaded: ")
        assert len(compiled) == times


def test_a_library_that_loads_again_is_not_given_up(monkeypatch, tmp_path):
    path, unloadable = tmp_path / "library-content.so", tmp_path / "library.unloadable"
    path.write_bytes(library._built("janet").read_bytes())
    unloadable.touch()
    monkeypatch.setattr(library, "_built", lambda cell: path)
    assert hasattr(library._loaded("janet"), "rg_forward")
    assert not unloadable.exists()


def test_what_the_system_refuses_is_a_reason(fresh, monkeypatch):
    """A home of somebody else, for one."""

    def refuse(path, pattern):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(pathlib.Path, "glob", refuse)
    assert "cannot be had on this machine: [Errno 5] Input/output error" in fresh("lstm")


def test_a_compiler_that_cannot_be_read_is_a_reason(fresh, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "')
    assert fresh("lstm") == "kernels cannot be had on this machine: No closing quotation."


@pytest.mark.long
def test_fast_mathematics_are_turned_off(fresh, monkeypatch):
    """A compiler that is told to add up in any order has other numbers."""
    monkeypatch.setenv("CXX", "c++ -ffast-math")
    assert library._loaded("janet").rg_adds_in_order()


@pytest.mark.long
def test_a_compiler_that_adds_up_in_another_order_is_refused(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "c++ -ffast-math")
    monkeypatch.setattr(
        library, "_FLAGS", tuple(flag for flag in library._FLAGS if flag != "-fno-fast-math")
    )
    assert fresh("janet").startswith("the C++ compiler adds up in another order than is written")


def test_a_library_that_is_there_is_left_to_those_who_loaded_it(tmp_path):
    path = tmp_path / "library.so"
    for name in ("first", "second"):
        built = tmp_path / name
        built.write_text(name)
        library._publish(built, path)
    assert path.read_text() == "first"


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
