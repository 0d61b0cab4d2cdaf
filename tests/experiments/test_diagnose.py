"""The diagnose binary: its table, its figures, cells of the user's own, wishes that cannot be."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command import flags, runs
from experiments.copy.settings import COPY
from experiments.datasets import reviews
from experiments.diagnose import __main__ as binary
from experiments.diagnose import figures, measurements
from experiments.language_model.settings import LANGUAGE_MODEL
from experiments.records.workdir import Workdir
from experiments.sentiment.settings import SENTIMENT
from experiments.settings.cells import build_cell
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from recurrent_gates import analysis, desiderata
from tests.experiments.support import refusal, tiny
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
    whole = desiderata._values
    desiderata._values = quick_jit(whole.__wrapped__, static_argnums=(0, 1, 2, 3))
    yield
    desiderata._values = whole


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's."""
    (tmp_path / "own_cells_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_cells_of_a_test"
    sys.modules.pop("own_cells_of_a_test", None)


def start(*argv):
    binary.begin(flags.parse(["diagnose", *argv], binary.define))


SMALL = ("--hidden_size=6", "--in_features=2", "--steps=12", "--draws=2")


def pictures(folder):
    """Names of the PNGs and their pictures' sizes, from the files' headers."""
    sizes = {}
    for path in folder.glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes[path.name] = tuple(np.frombuffer(data[16:24], ">u4"))
        # A figure has ink: far more bytes than an empty canvas of its size.
        assert len(data) > 10_000, path
    return sizes


def verdicts(text):
    """{criterion: (expected, verdict)} of a printed table."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) == 6 and cells[0][0].isdigit():
            found[int(cells[0][0])] = (cells[4], cells[5])
    return found


@pytest.mark.long
def test_an_lstm(tmp_path, capsys):
    start("--cell=ur_lstm", *SMALL, f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    no, yes = ("not met", "not met"), ("met", "met")
    assert verdicts(text) == {1: no, 2: yes, 3: no, 4: yes, 5: yes}
    assert "ur_lstm: c remembers and is read through tanh; h feeds back" in text
    assert "measured as expected: all five" in text
    for words in ("all paths", "without c", "without h", "gates, mean", "uniform, refined"):
        assert words in text
    names = {"criteria.png", "gradient_paths.png", "gate_histograms.png", "timescales.png"}
    assert set(pictures(tmp_path)) == names


def test_a_network_without_gates(tmp_path, capsys):
    start("--cell=rnn", *SMALL, f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    assert "names no gates" in text
    assert set(pictures(tmp_path)) == {"criteria.png", "gradient_paths.png"}


def test_a_cell_of_the_users_own(own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start(f"--cell={own}:Summing", *SMALL)
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
    assert len(pictures(tmp_path / "runs" / "diagnose" / f"{own}.Summing")) == 2


@pytest.mark.long
def test_a_foreign_cell(own, tmp_path, monkeypatch, capsys):
    """Its y is no field that gradients flow through; its width is its own."""
    titles = []
    draw = figures.gradient_paths
    monkeypatch.setattr(figures, "gradient_paths", lambda *a: (titles.append(a[2]), draw(*a)))
    start(f"--cell={own}:foreign", *SMALL, f"--out_dir={tmp_path}")
    assert titles == [f"{own}:foreign  ·  4 units  ·  2 draws of parameters"]
    text = capsys.readouterr().out
    assert text.count("all paths") == 2
    assert "without" not in text


@pytest.mark.long
def test_the_reading_can_be_given(own, tmp_path, capsys):
    start(
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
    start(f"--cell={own}:Summing", *SMALL, "--recurrent=none", f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    assert "nothing feeds back" in text
    assert verdicts(text)[5][1] == "met"  # there is no r


@pytest.fixture(scope="module")
def trained(learners, tmp_path_factory):
    """The workdirs of an LSTM with rates of which one diverged, and of a cell without gates."""
    directory = tmp_path_factory.mktemp("runs")
    loop.run(tiny(cell="lstm", seeds=2, learning_rates=(1e-1, 1e30)), directory / "lstm")
    loop.run(tiny(cell="rnn", hidden_size=4, keep_best=True), directory / "rnn")
    return directory


@pytest.mark.long
def test_a_run_before_and_after_its_training(trained, tmp_path, capsys, monkeypatch):
    histograms, paths = [], []
    draw, draw_paths = figures.gate_histograms, figures.gradient_paths
    monkeypatch.setattr(figures, "gate_histograms", lambda *a: (histograms.append(a[0]), draw(*a)))
    monkeypatch.setattr(figures, "gradient_paths", lambda *a: (paths.append(a[0]), draw_paths(*a)))
    measure, measured = measurements._gradient_paths, []
    monkeypatch.setattr(
        measurements, "_gradient_paths", lambda *a: (measured.append(a[1]), measure(*a))[1]
    )
    start(f"--workdir={trained / 'lstm'}", "--steps=5")
    # Not spread over the devices of the run's mesh, which would wait for each other.
    assert {type(leaf) for leaf in jax.tree.leaves(measured)} == {np.ndarray}
    text = capsys.readouterr().out
    assert "lstm: lstm before and after 4 steps of training\n" in text
    assert "log10 |d state_T / d state_t| at gap 5, before training: all paths" in text
    names = {"gradient_paths.png", "gate_histograms.png"}
    assert set(pictures(trained / "lstm" / "figures")) >= names

    # The two lanes that did not diverge, one by one.
    finished = runs.finished(trained / "lstm", [COPY])
    finished.learner.load()
    cell = build_cell(finished.config.model)
    tokens = np.asarray(finished.config.task.sets(finished.config.task.load())["held_out"].inputs)
    for moment, params in (
        ("before training", finished.learner.initial().params),
        ("after training", finished.params),
    ):
        expected = []
        for lane in range(2):
            one = finished.lane(params, lane)
            xs = np.asarray(one["encoder"]["Embed_0"]["embedding"])[tokens[:, :16]]
            own = one["recurrent"]["cell"]
            gates = analysis.gate_activations(cell, own, jnp.asarray(xs))
            expected.append(np.mean(gates["f"], axis=(0, 1)))
            norms = analysis.gradient_paths(cell, own, jnp.asarray(xs[:5, 0]))
            drawn_norms = paths[0][moment]["all paths"]
            assert drawn_norms.shape == (2, 6)
            np.testing.assert_allclose(drawn_norms[lane], norms[()], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(histograms[0][moment]["f"], np.concatenate(expected), rtol=1e-5)
        middle = np.sort(1 / (1 - histograms[0][moment]["f"]))[6]
        assert f"timescales 1/(1-f) {moment}, 1%, 50%, 99% of units: " in text
        assert f", {middle:.3g}, " in text
    assert not np.allclose(*(means["f"] for means in histograms[0].values()))


@pytest.mark.long
def test_a_run_without_gates(trained, tmp_path, capsys):
    start(f"--workdir={trained / 'rnn'}", f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    assert "names no gates" in text
    assert "steps of training, with the best parameters of that time\n" in text
    # ABA has fewer than 200 steps, of which the last is not read.
    assert f"at gap {2 * 3 + 4 - 1}, after" in text
    assert set(pictures(tmp_path)) == {"gradient_paths.png"}


@pytest.mark.long
def test_runs_that_cannot_be_measured(trained, tmp_path, monkeypatch):
    layers = tiny(layers=2)
    finished = runs.Finished(layers, Learner(layers), None, {})
    with pytest.raises(UserError, match="looks at one recurrent layer, and the run has several"):
        measurements.measure_run(finished, "run", 5, tmp_path)
    monkeypatch.setattr(measurements, "_MEMORY", 4 * 2 * 5 * 12**2 - 1)  # h and c of 6 units
    with pytest.raises(UserError, match="most of it is for Jacobians: lower --steps"):
        start(f"--workdir={trained / 'lstm'}", "--steps=5", f"--out_dir={tmp_path}")
    monkeypatch.setattr(runs.Finished, "diverged", [True])
    with pytest.raises(UserError, match="every seed of this run diverged"):
        start(f"--workdir={trained / 'rnn'}", f"--out_dir={tmp_path}")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_padding_is_not_measured(tmp_path, monkeypatch):
    """Of reviews, which are padded in front: the first one's gradients, and the gates' means."""
    tiny_reviews = {"hidden_size": 5, "embedding": 4, "batch_size": 6, "held_out_reviews": 40}
    config = resolve(SENTIMENT, "small", tiny_reviews | {"cell": "lstm"})
    learner = Learner(config)
    state = learner.initial()
    paths, gates = [], []
    monkeypatch.setattr(figures, "gate_histograms", lambda *a: gates.append(a[0]))
    monkeypatch.setattr(figures, "gradient_paths", lambda *a: paths.append(a[0]))
    one = runs.Finished(config, learner, state, {"steps": 0})
    measurements.measure_run(one, "reviews", 200, tmp_path)
    cell, params = build_cell(config.model), state.params["recurrent"]["cell"]
    table = np.asarray(state.params["encoder"]["Embed_0"]["embedding"])
    words = np.asarray(learner.data["sets"][learner.watched].inputs)[:, :16]
    padding = (words == reviews.PADDING).sum(axis=0)
    assert 0 < padding.max() < len(words)
    reviews_gates = [
        np.asarray(analysis.gate_activations(cell, params, jnp.asarray(table[words[n:, i]]))["f"])
        for i, n in enumerate(padding)
    ]
    expected = np.concatenate(reviews_gates).mean(axis=0)
    np.testing.assert_allclose(gates[0]["after training"]["f"], expected, rtol=1e-5)
    assert paths[0]["after training"]["all paths"].shape == (1, len(words) - padding[0] + 1)


def test_runs_without_examples_are_refused(tmp_path):
    config = resolve(LANGUAGE_MODEL, "small", {"hidden_size": 6})
    Workdir(tmp_path / "text").path.mkdir()
    with contextlib.closing(Workdir(tmp_path / "text")) as work:
        work.claim(config)
    with pytest.raises(UserError, match=r"is one of language_model, not of .*copy"):
        start(f"--workdir={tmp_path / 'text'}", f"--out_dir={tmp_path}")


def test_the_refine_gate(tmp_path, capsys):
    start("--figure=gates", f"--out_dir={tmp_path}")
    text = capsys.readouterr().out
    for words in ("of shape 1.0", "5/6 = 0.8333", "5/12 = 0.4167", "differ by"):
        assert words in text
    assert set(pictures(tmp_path)) == {"refine_gate.png"}


def test_the_table_says_where_theory_failed():
    good = desiderata.EXPECTED["gato"]
    results = [
        desiderata.Criterion(k, "s", "q", 0.5, 1.0, k != 4, np.zeros((1, 1))) for k in range(1, 6)
    ]
    text = measurements.table(results, good)
    assert text.endswith("measured as expected: all but 4")
    assert "4 |sin| <= 1" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.38e-5, "3.4e-05"), (0.589, "0.589"), (1.0, "1"), (1e21, "1e+21"), (np.inf, "inf")],
)
def test_numbers_are_short(value, text):
    assert figures.shown(value) == text


BAD = {
    "--cell=lstn": "There is no cell named 'lstn'; did you mean lstm",
    "--cell=gato --hidden_size=7": "must be even; got 7",
    "--cell=nowhere:Cell": "module nowhere cannot be imported: ModuleNotFoundError",
    "--cell=OWN:Missing": "has no 'Missing'",
    "--cell=OWN:number": "cannot be built: TypeError",
    "--cell=collections:OrderedDict": "nor a Flax cell, but OrderedDict",
    "--cell=OWN:Broken": "cannot be measured: RuntimeError: this step",
    "--cell=gru --remembered=c": "no floating field 'c'; it has h",
    "--cell=gru --recurrent=h,h": "--recurrent must name each value once.",
    "--hidden_size=0": "--hidden_size must be at least 1 and below 2147483648, got 0.",
    "--hidden_size=2147483648": "--hidden_size must be at least 1 and below 2147483648",
    "--steps=0": "--steps must be at least 1",
    "--steps=0x10": "--steps=0x10: it must be a whole number in plain digits",
    "--draws=-1": "--draws must be at least 1",
    "--in_features=0": "--in_features must be at least 1",
    "--seed=-1": "--seed must be at least 0",
    "--cell=lstm --hidden_size=512 --steps=5000": "105 GB of memory, and 4 are the most",
    "--hidden_size=2000000000": "most of it is for Jacobians: lower --steps, --hidden_size",
    "--in_features=2000000000": "most of it is for parameters: lower --steps, --hidden_size",
    "--in_features=200000 --draws=100": "most of it is for inputs: lower --steps, --hidden_size",
    "--draws=2000000000": "most of it is for Jacobians",
    "--learning_rate=0.1": "learning_rate",
    "--gamma=relu": "--gamma=relu: it must be one of identity, tanh",
    "--figure=gates --cell=lstm": "--cell is for a cell: --figure=gates is of the refine gate",
    "--figure=gates --steps=9": "--steps is for a cell: --figure=gates is of the refine gate",
    "--figure=gates --recurrent=none": "--recurrent is for a cell: --figure=gates is of the",
    "--figure=gates --seed=-1": "--seed must be at least 0",
    "--workdir=x --cell=lstm": "--cell is for fresh parameters: --workdir has its own",
    "--workdir=x --seed=0": "--seed is for fresh parameters: --workdir has its own",
    "--workdir=x --draws=5": "--draws is for fresh parameters: --workdir has its own",
    "--workdir=x --figure=gates": "--figure is for fresh parameters",
    "--workdir=x --steps=0": "--steps must be at least 1",
    "--workdir=nowhere": "nowhere is not a workdir",
    "--remembered=": "--remembered= has no value",
    "lstm": "no argument 'lstm'",
}


@pytest.mark.parametrize("wish", BAD)
def test_bad_wishes_get_one_sentence(wish, own, tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "table", pytest.fail)
    argv = [part.replace("OWN", own) for part in wish.split()]
    assert BAD[wish] in refusal(start, *argv, f"--out_dir={tmp_path / 'out'}")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the directory .*/x: Not a directory"):
        start(f"--out_dir={tmp_path / 'file' / 'x'}")


def test_figures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="Figures need matplotlib: pip install"):
        start("--figure=gates", f"--out_dir={tmp_path / 'out'}")
    assert not list(tmp_path.iterdir())


def test_exit_codes(tmp_path, program):
    code, out, err = program("experiments.diagnose", "--cell=lstn", f"--out_dir={tmp_path}")
    assert (code, out) == (2, "")
    assert err.startswith("experiments.diagnose: There is no cell named 'lstn'; did you mean lstm")
    assert err.count("\n") == 1
    code, out, err = program("experiments.diagnose", "--hiden_size=3")
    assert (code, out) == (2, "")
    assert err.startswith("experiments.diagnose: There is no flag --hiden_size; did you mean --hid")
    code, out, err = program("experiments.diagnose", "--help")
    assert (code, err) == (0, "")
    assert "\n  --in_features=IN_FEATURES\n" in out
    assert "learning_rate" not in out
