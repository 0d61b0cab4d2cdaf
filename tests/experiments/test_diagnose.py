"""The diagnose binary: its table, its figures, cells of the user's own, wishes that cannot be."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from absl.flags import Error

from experiments import analysis_figures, diagnose, diagnosis, flags, studies, train
from experiments.config import UserError, build_cell
from recurrent_gates import analysis, desiderata
from tests.experiments.support import ROOT, environment, tiny
from tests.support import quick_jit

OWN = """
import jax.numpy as jnp
from flax import linen as nn
import recurrent_gates as rg


class Summing(rg.Cell):
    features: int

    def init_params(self, key, in_features):
        return {"W": jnp.ones((in_features, self.features))}

    def initial(self, batch_shape):
        return rg.HiddenState(jnp.zeros((*batch_shape, self.features)))

    def step(self, params, carry, z_t):
        return rg.HiddenState(carry.h + jnp.tanh(z_t @ params["W"]))


class Broken(Summing):
    def step(self, params, carry, z_t):
        raise RuntimeError("this step\\nis not written")


foreign = nn.SimpleCell(4)
number = 3
"""


@pytest.fixture(autouse=True, scope="module")
def quick():
    """The measurement compiled in a tenth of the time."""
    whole = desiderata._measure
    desiderata._measure = quick_jit(whole.__wrapped__, static_argnums=(0, 1, 2, 3))
    yield
    desiderata._measure = whole


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's."""
    (tmp_path / "own_cells_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_cells_of_a_test"
    sys.modules.pop("own_cells_of_a_test", None)


def run(*argv):
    diagnose.begin("diagnose", flags.parse(["diagnose", *argv], diagnose.define))


SMALL = ("--hidden_size=6", "--in_features=2", "--steps=12", "--draws=2")


def drawn(folder):
    """Names of the PNGs and their pictures' sizes, from the files' headers."""
    pictures = {}
    for path in folder.glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        pictures[path.name] = tuple(np.frombuffer(data[16:24], ">u4"))
        # A figure has ink: far more bytes than an empty canvas of its size.
        assert len(data) > 10_000, path
    return pictures


def verdicts(text):
    """{criterion: (expected, verdict)} of a printed table."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) == 6 and cells[0][0].isdigit():
            found[int(cells[0][0])] = (cells[4], cells[5])
    return found


def test_an_lstm(tmp_path, capsys):
    run("--cell=ur_lstm", *SMALL, f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    no, yes = ("not met", "not met"), ("met", "met")
    assert verdicts(text) == {1: no, 2: yes, 3: no, 4: yes, 5: yes}
    assert "ur_lstm: c remembers and is read through tanh; h feeds back" in text
    assert "measured as expected: all five" in text
    for words in ("all paths", "without c", "without h", "gates, mean", "uniform, refined"):
        assert words in text
    names = {"criteria.png", "gradient_paths.png", "gate_histograms.png", "timescales.png"}
    assert set(drawn(tmp_path)) == names


def test_a_network_without_gates(tmp_path, capsys):
    run("--cell=rnn", *SMALL, f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    assert "names no gates" in text
    assert set(drawn(tmp_path)) == {"criteria.png", "gradient_paths.png"}


def test_a_cell_of_the_users_own(own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(f"--cell={own}:Summing", *SMALL)
    text = capsys.readouterr().out
    found = verdicts(text)
    assert {k: v for k, (_, v) in found.items()} == {
        1: "met",
        2: "not met",
        3: "met",
        4: "met",
        5: "not met",
    }
    assert {expected for expected, _ in found.values()} == {"-"}
    assert "measured as expected" not in text
    assert len(drawn(tmp_path / "runs" / "diagnose" / f"{own}.Summing")) == 2


def test_a_foreign_cell(own, tmp_path, monkeypatch, capsys):
    """Its y is no field that gradients flow through; its width is its own."""
    titles = []
    draw = analysis_figures.gradient_paths
    monkeypatch.setattr(
        analysis_figures, "gradient_paths", lambda *a: (titles.append(a[2]), draw(*a))
    )
    run(f"--cell={own}:foreign", *SMALL, f"--out_dir={tmp_path}")
    assert titles == [f"{own}:foreign  ·  4 units  ·  2 draws of parameters"]
    text = capsys.readouterr().out
    assert text.count("all paths") == 2
    assert "without" not in text


def test_the_reading_can_be_given(own, tmp_path, capsys):
    run(
        f"--cell={own}:foreign",
        *SMALL,
        "--remembered=0",
        "--gamma=cos",
        "--recurrent=0,1",
        f"--out_dir={tmp_path}",
    )
    text = capsys.readouterr().out
    assert "field 0 remembers and is read through cos; field 0 and field 1 feed back" in text
    assert [verdicts(text)[k][1] for k in (2, 3, 4)] == ["met", "met", "met"]
    run(f"--cell={own}:Summing", *SMALL, "--recurrent=none", f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    assert "nothing feeds back" in text
    assert verdicts(text)[5][1] == "met"  # there is no r


def test_a_run_before_and_after_its_training(tmp_path, capsys, monkeypatch):
    histograms, paths = [], []
    draw, draw_paths = analysis_figures.gate_histograms, analysis_figures.gradient_paths
    monkeypatch.setattr(
        analysis_figures, "gate_histograms", lambda *a: (histograms.append(a[0]), draw(*a))
    )
    monkeypatch.setattr(
        analysis_figures, "gradient_paths", lambda *a: (paths.append(a[0]), draw_paths(*a))
    )
    config = tiny(cell="lstm", seeds=2, learning_rates=(1e-1, 1e30))
    train.run(config, tmp_path)
    run(f"--workdir={tmp_path}", "--steps=5")
    text = capsys.readouterr().out
    assert f"{tmp_path.name}: lstm before and after 4 steps of training\n" in text
    assert "log10 |d state_T / d state_t| at gap 5, before training: all paths" in text
    assert set(drawn(tmp_path / "figures")) >= {"gradient_paths.png", "gate_histograms.png"}

    # The two lanes that did not diverge, one by one.
    found = studies.finished(tmp_path)
    tokens = np.asarray(found.config.task.held_out(found.config.task.load())["held_out"].inputs)
    for moment, params in (
        ("before training", found.learner.initial().params),
        ("after training", found.params),
    ):
        expected = []
        for lane in range(2):
            one = found.lane(params, lane)
            xs = np.asarray(one["encoder"]["Embed_0"]["embedding"])[tokens[:, :16]]
            gates = analysis.gate_activations(
                build_cell(found.config.model), one["recurrent"]["cell"], jnp.asarray(xs)
            )
            expected.append(np.mean(gates["f"], axis=(0, 1)))
            norms = analysis.gradient_paths(
                build_cell(found.config.model), one["recurrent"]["cell"], jnp.asarray(xs[:5, 0])
            )
            drawn_norms = paths[0][moment]["all paths"]
            assert drawn_norms.shape == (2, 6)
            np.testing.assert_allclose(drawn_norms[lane], norms[()], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(histograms[0][moment]["f"], np.concatenate(expected), rtol=1e-5)
        middle = np.sort(1 / (1 - histograms[0][moment]["f"]))[6]
        assert f"timescales 1/(1-f) {moment}, 1%, 50%, 99% of units: " in text
        assert f", {middle:.3g}, " in text
    assert not np.allclose(*(means["f"] for means in histograms[0].values()))


def test_a_run_without_gates_or_survivors(tmp_path, capsys):
    config = tiny(cell="rnn", hidden_size=4, keep_best=True)
    train.run(config, tmp_path / "rnn")
    run(f"--workdir={tmp_path / 'rnn'}", f"--out_dir={tmp_path / 'out'}")
    text = capsys.readouterr().out
    assert "\nbest held-out copied_token_probability: " in text
    assert "names no gates" in text
    assert "steps of training, with the best parameters of that time\n" in text
    # ABA has fewer than 200 steps, of which the last is not read.
    assert f"at gap {2 * 3 + 4 - 1}, after" in text
    assert set(drawn(tmp_path / "out")) == {"gradient_paths.png"}
    train.run(tiny(learning_rates=(1e30,)), tmp_path / "diverged")
    with pytest.raises(UserError, match="every seed of this run diverged"):
        run(f"--workdir={tmp_path / 'diverged'}")


def test_the_refine_gate(tmp_path, capsys):
    run("--figure=gates", f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    for words in ("of shape 1.0", "5/6 = 0.8333", "5/12 = 0.4167", "differ by"):
        assert words in text
    assert set(drawn(tmp_path)) == {"refine_gate.png"}


def test_the_table_says_where_theory_failed():
    good = desiderata.EXPECTED["gato"]
    results = [
        desiderata.Criterion(k, "s", "q", 0.5, 1.0, k != 4, np.zeros((1, 1))) for k in range(1, 6)
    ]
    text = diagnosis.table(results, good)
    assert text.endswith("measured as expected: all but 4")
    assert "4 |sin| <= 1" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.38e-5, "3.4e-05"), (0.589, "0.589"), (1.0, "1"), (1e21, "1e+21"), (np.inf, "inf")],
)
def test_numbers_are_short(value, text):
    assert analysis_figures.shown(value) == text


BAD = {
    "--cell=lstn": "There is no cell named 'lstn'; did you mean lstm",
    "--cell=gato --hidden_size=7": "must be even; got 7",
    "--cell=nowhere:Cell": "Module 'nowhere' cannot be imported: ModuleNotFoundError",
    "--cell=OWN:Missing": "has no 'Missing'",
    "--cell=OWN:number": "cannot be built: TypeError",
    "--cell=collections:OrderedDict": "nor a Flax cell, but OrderedDict",
    "--cell=OWN:Broken": "cannot be measured: RuntimeError: this step",
    "--cell=gru --remembered=c": "no floating field 'c'; it has h",
    "--hidden_size=0": "--hidden_size must be at least 1",
    "--steps=0": "--steps must be at least 1",
    "--draws=-1": "--draws must be at least 1",
    "--in_features=0": "--in_features must be at least 1",
    "--seed=-1": "--seed must be at least 0",
    "--cell=lstm --hidden_size=512 --steps=5000": "GB: lower --steps, --hidden_size or --draws",
    "--learning_rate=0.1": "learning_rate",
    "--gamma=relu": "gamma",
    "--workdir=x --cell=lstm": "--cell is for fresh parameters: --workdir has its own",
    "--workdir=x --figure=gates": "--figure is for fresh parameters",
    "--workdir=nowhere": "nowhere is not a workdir",
    "--remembered=": "--remembered= has no value",
    "lstm": "no argument 'lstm'",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence(wish, own, tmp_path):
    argv = [part.replace("OWN", own) for part in wish.split()]
    with pytest.raises((Error, UserError)) as caught:
        run(*argv, f"--out_dir={tmp_path / 'out'}")
    assert BAD[wish] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        run(f"--out_dir={tmp_path / 'file' / 'x'}")


def binary(*argv):
    command = [sys.executable, "-m", "experiments.diagnose", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


def test_help_exits_0():
    done = binary("--help")
    assert done.returncode == 0
    assert "--in_features" in done.stdout
    assert "learning_rate" not in done.stdout


def test_an_unknown_flag_exits_2():
    done = binary("--hiden_size=3")
    assert done.returncode == 2
    assert done.stderr.startswith("experiments.diagnose: There is no flag --hiden_size; did you")
    assert "Traceback" not in done.stderr


def test_an_unknown_cell_exits_2(tmp_path):
    done = binary("--cell=lstn", f"--out_dir={tmp_path}")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
