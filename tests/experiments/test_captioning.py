"""Captions: decoders, the attention's gradient, masks, scores."""

import builtins
import collections
import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.captioning import scenes, scoring
from experiments.captioning.attention import AttendingCell, around_state
from experiments.captioning.model import END, Captioner, Features, Said
from experiments.captioning.pictures import Window
from experiments.captioning.settings import CAPTIONING
from experiments.machine.mesh import Rows
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from experiments.training.models import Pass, TokenEncoder
from recurrent_gates import GRU, LSTM, RNN, Detach, unroll
from tests.experiments.probes.support import StopAfter
from tests.experiments.support import assert_drawn, assert_same_bits, leaves
from tests.support import quick_jit, randomize

TINY = {
    "hidden_size": 7,
    "embedding": 5,
    "picture_features": 6,
    "attention_units": 4,
    "held_out_scenes": 9,
    "batch_size": 4,
    "captions": 2,
    "steps": 4,
    "eval_every": 2,
}
ATTENDING = {"captioner": "show_attend_tell"}


def config(**settings):
    names = {**TINY, "captioner": "show_and_tell", **settings}
    absent = {
        "attention_units": names["captioner"] != "show_attend_tell",
        "held_out_scenes": names.get("dataset", "scenes") != "scenes",
        "embedding": names.get("inputs") == "one_hot",
    }
    names = {name: value for name, value in names.items() if not absent.get(name)}
    return resolve(CAPTIONING, "small", names)


# The attention


def attending(seed=0, steps=6, rows=4, pictures=2, regions=3):
    """An attending LSTM, its parameters, words and a first carry, in float32."""
    rng = np.random.default_rng(seed)
    cell = LSTM(5)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "cell": cell.init_params(jax.random.key(seed), 3 + 4),
        "query": normal(5, 6),
        "score": normal(6),
        "keys": normal(pictures, regions, 6),
        "regions": normal(pictures, regions, 4),
    }
    outer = AttendingCell(cell, "h", regions)
    carry = outer.initial((rows,))
    state = jax.tree.map(lambda leaf: normal(*leaf.shape) / 2, carry.state)
    return outer, params, normal(steps, rows, 3), carry._replace(state=state, query=state.h)


def by_hand(params, words, state, detached, detach_query):
    """Xu et al., Eqs. (4), (5) and (13), and the LSTM, word by word and picture by picture."""
    c, h = state
    kernel, recurrent, bias = (
        params["cell"][name] for name in ("kernel", "recurrent_kernel", "bias")
    )
    outputs, looks = [], []
    for word, stops in zip(words, detached, strict=True):
        fed_back = jax.lax.stop_gradient(h) if stops else h
        asks = fed_back if detach_query else h
        contexts, weights = [], []
        for row in range(len(word)):
            picture = row // (len(word) // len(params["keys"]))
            energies = jnp.stack(
                [
                    jnp.tanh(key + asks[row] @ params["query"]) @ params["score"]
                    for key in params["keys"][picture]
                ]
            )
            alpha = jnp.exp(energies) / jnp.exp(energies).sum()
            contexts.append(alpha @ params["regions"][picture])
            weights.append(alpha)
        x = jnp.concatenate([word, jnp.stack(contexts)], axis=-1)
        before = {s: x @ kernel[s] + fed_back @ recurrent[s] + bias[s][None] for s in kernel}
        sigmoid = jax.nn.sigmoid
        f, i, o = (sigmoid(before[s]) for s in ("f", "i", "o"))
        c = f * c + i * jnp.tanh(before["u"])
        h = o * jnp.tanh(c)
        outputs.append(h)
        looks.append(jnp.stack(weights))
    return jnp.stack(outputs), jnp.stack(looks)


@pytest.mark.parametrize("detach_query", [pytest.param(False, marks=pytest.mark.long), True])
def test_attention_and_h_detach_by_hand(detach_query):
    """Values, and the gradients of both paths of h: through the cell alone, or both, cut off."""
    outer, params, words, carry = attending()
    detached = jnp.array([False, True, True, False, True, False])
    fns, noise = around_state([Detach(0.5)], [detached], "h", detach_query)
    probe = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, 5)), jnp.float32)
    of_look = probe[..., :3]

    def library(params):
        _, (ys, weights) = unroll(outer, params, words, carry, carry_fns=fns, noise=noise)
        return (ys * probe).sum() + (weights * of_look).sum(), (ys, weights)

    def reference(params):
        ys, weights = by_hand(params, words, carry.state, detached.tolist(), detach_query)
        return (ys * probe).sum() + (weights * of_look).sum(), (ys, weights)

    found, values = jax.jit(jax.grad(library, has_aux=True))(params)
    expected, true_values = jax.jit(jax.grad(reference, has_aux=True))(params)
    for a, b in zip(values, true_values, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
        assert np.abs(b).max() > 1e-3


# The whole model


@pytest.fixture(scope="module", params=[{}, ATTENDING], ids=["tell", "attend"])
def learner(request):
    """A learner that can score, and its first parameters."""
    made = Learner(config(**request.param, doubly_stochastic=0.5) if request.param else config())
    made.load()
    return made, made.initial().params


def window(task, count, seed=0):
    rows = type("Rows", (), {"numbers": jnp.arange(count, dtype=jnp.int32), "count": count})
    return jax.jit(lambda key, step: task.draw(None, None, (), key, step, rows)[0])(
        jax.random.key(seed), jnp.int32(0)
    )


def told(learner, params, pictures, captions):
    """The log-probabilities of captions ``[N, C, T]``, compiled."""
    return jax.jit(lambda *operands: learner.apply(*operands).log_p)(params, pictures, captions)


def test_every_scene_of_every_step_is_of_its_own_key(monkeypatch):
    def key_of_scene(key, *_):
        return scenes.Scenes(jax.random.key_data(key), jnp.zeros((5, 3), jnp.int32))

    monkeypatch.setattr(scenes, "draw", key_of_scene)
    task, rows, seen = config().task, Rows(0, 2, 2), []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        batch, _ = task.draw(None, None, (), jax.random.key(seed), step, rows)
        seen += map(tuple, batch.pictures.tolist())
    assert len(set(seen)) == len(seen) == 6


def test_the_loss_by_hand():
    """Of the words and of the end; a region that is not looked at once costs, Xu et al., Eq. (14),
    as many times as the caption has words."""
    task = config(**ATTENDING, doubly_stochastic=0.5).task
    captions = np.array(
        [[[3, 2, END, END], [1, END, END, END]], [[1, 2, 3, END], [2, 2, END, END]]]
    )
    counts = np.array([True, False])
    rng = np.random.default_rng(0)
    log_p, weights = rng.normal(size=(2, 2, 4, 5)), rng.random((2, 2, 4, 3))
    expected = 0.0
    for caption, own, looks in zip(captions[0], log_p[0], weights[0], strict=True):
        size = list(caption).index(END) + 1
        expected -= sum(own[at, word] for at, word in enumerate(caption[:size]))
        expected += 0.5 * size * ((1 - looks.sum(axis=0)) ** 2).sum()
    said = Said(jnp.asarray(log_p, jnp.float32), jnp.asarray(weights, jnp.float32))
    batch = Window((), jnp.asarray(captions, jnp.int32), jnp.arange(2), jnp.asarray(counts))
    total, weight = task.loss(lambda *_: said, None, batch, (), True).loss
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert weight == 3 + 2


def test_what_the_layer_emits_is_dropped_in_training():
    """Drawn for each word and caption; what is left is made up for. The layer has one unit."""
    words = TokenEncoder("embed", 2, 4)
    model = Captioner(Features(), words, RNN(GRU(1), time_major=True), 2, output_dropout=0.75)
    pictures = {"pooled": jnp.ones((40, 3), jnp.float16)}
    captions = jnp.ones((40, 2, 5), jnp.int32)
    params = randomize(jax.eval_shape(model.init, jax.random.key(0), pictures, captions), 0)
    params["params"]["head"]["bias"] *= 0

    @quick_jit
    def odds(key):
        during = Pass(rows=Rows(0, 40, 40), noise_key=key)
        passes = (model.apply(params, pictures, captions, during=one) for one in (during, Pass()))
        return [log_p[..., 1] - log_p[..., 0] for log_p, _ in passes]

    trained, evaluated = odds(jax.random.key(1))
    kept = np.abs(trained) > 2 * np.abs(evaluated)
    assert_drawn(kept.sum(), 1 / 4, kept.size)
    np.testing.assert_allclose(trained, 4 * kept * evaluated, rtol=1e-4, atol=1e-6)
    assert len({row.tobytes() for row in kept.reshape(80, 5).T}) == 5
    assert not np.array_equal(trained, odds(jax.random.key(2))[0])


@pytest.mark.long
def test_padding_changes_no_loss_and_no_gradient(learner):
    """Three more steps behind the ends, and a picture that does not count."""
    learner, params = learner
    task = learner.task
    plain = window(task, 3)
    longer = plain._replace(captions=jnp.pad(plain.captions, ((0, 0), (0, 0), (0, 3))))
    more = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), plain)
    more = more._replace(counts=jnp.array([True, True, True, False]))

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params, window):
        total, weight = task.loss(learner.apply, params, window, (), True).loss
        return total / weight

    expected = loss_and_gradients(params, plain)
    for other in (longer, more):
        actual = loss_and_gradients(params, other)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for part in ("head", "recurrent", "vision", "words", "begin"):
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1][part])) > 0


@pytest.mark.long
def test_what_is_said_is_what_is_scored(learner):
    """Word by word, the carry of ``follow`` gives the log-probabilities of the whole caption."""
    learner, params = learner
    task = learner.task
    batch = window(task, 3)
    caption = batch.captions[:, :1]
    said = told(learner, params, batch.pictures, caption)[:, 0]
    start, follow = (functools.partial(learner.apply, method=of) for of in ("start", "follow"))
    memory, carry = jax.jit(start, static_argnums=2)(params, batch.pictures, 1)
    follow = jax.jit(follow)
    words = jnp.full(3, END, jnp.int32)
    for time in range(6):
        carry, log_p = follow(params, memory, words, carry)
        np.testing.assert_allclose(log_p, said[:, time], rtol=2e-5, atol=1e-6)
        words = caption[:, 0, time]


@pytest.mark.parametrize("cell", [pytest.param("dnc", marks=pytest.mark.full), "ur_rma", "rmc"])
@pytest.mark.long
def test_a_memory_begins_as_its_cell_has_it(cell):
    """And the picture gives the controller's state; the words that follow are probabilities."""
    made = Learner(config(**ATTENDING, cell=cell, hidden_size=8))
    made.load()
    params = made.initial().params
    batch = window(made.task, 2)
    start = functools.partial(made.apply, method="start")
    _, carry = jax.jit(start, static_argnums=2)(params, batch.pictures, 2)
    fresh = made.cell.initial((4,))
    for name in fresh._fields:
        value, before = getattr(carry.state, name), getattr(fresh, name)
        if cell != "rmc" and name in ("c", "h"):
            assert np.abs(np.asarray(value)).min() > 0
            np.testing.assert_array_equal(value[::2], value[1::2])  # two captions of a picture
        else:
            np.testing.assert_array_equal(value, before)
    asked = carry.state.memory.reshape(4, -1) if cell == "rmc" else carry.state.h
    np.testing.assert_array_equal(carry.query, asked)
    said = told(made, params, batch.pictures, batch.captions[:, :1])
    assert np.isfinite(said).all()


@pytest.mark.long
def test_an_slstm_begins_with_a_weight_of_one():
    """The picture gives c and h, and c / n is what is remembered."""
    made = Learner(config(**ATTENDING, cell="slstm", hidden_size=8))
    made.load()
    start = jax.jit(functools.partial(made.apply, method="start"), static_argnums=2)
    _, carry = start(made.initial().params, window(made.task, 2).pictures, 1)
    assert (carry.state.n == 1).all() and (carry.state.m == 0).all()
    assert np.abs(carry.state.c).min() > 0
    np.testing.assert_array_equal(carry.state.c, carry.state.h)


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.long), ATTENDING])
def test_the_picture_s_maps_begin_as_torch_s(more):
    """U(-1/sqrt(n), 1/sqrt(n)) of n inputs, kernels and biases."""
    settings = {"picture_features": 64, "embedding": 40, "hidden_size": 40} | more
    made = Learner(config(**settings, **({"attention_units": 40} if more else {})))
    made.load()
    params = made.initial().params
    for name in ("begin", "key") if more else ("begin",):
        bias, kernel = jax.tree.leaves(params[name])
        bound = len(kernel) ** -0.5
        assert 0.99 * bound < np.abs(kernel).max() <= bound, name
        assert 0.7 * bound < np.abs(bias).max() <= bound, name


@pytest.mark.long
def test_a_picture_is_as_wide_as_a_word():
    """One-hot words have the vocabulary's width, whatever an embedding has."""
    made = Learner(config(inputs="one_hot"))
    made.load()
    params = made.initial().params
    (kernel,) = (leaf for leaf in jax.tree.leaves(params["begin"]) if leaf.ndim == 2)
    assert kernel.shape[-1] == len(made.task.vocabulary)
    batch = window(made.task, 2)
    assert np.isfinite(told(made, params, batch.pictures, batch.captions)).all()


@pytest.mark.long
def test_a_beam_scores_at_least_what_is_greedy(learner):
    learner, params = learner
    batch = window(learner.task, 4)

    def score(task):
        words = jax.jit(lambda: task.say(learner.apply, params, batch.pictures, 4))()
        words = np.asarray(words)
        said = told(learner, params, batch.pictures, words[:, None])[:, 0]
        chosen = np.take_along_axis(np.asarray(said), words[..., None], axis=-1)[..., 0]
        counted = np.cumsum(words == END, axis=1) - (words == END) == 0
        return np.where(counted, chosen, 0).sum(axis=1)

    wide = score(dataclasses.replace(learner.task, beam=4))
    assert (wide >= score(learner.task) - 1e-4).all()


@pytest.mark.long
def test_a_blind_decoder_sees_nothing():
    made = Learner(config(blind=True))
    made.load()
    batch = window(made.task, 3)
    params = made.initial().params
    said = told(made, params, batch.pictures, batch.captions[:1].repeat(3, axis=0))
    np.testing.assert_array_equal(said[0], said[1])
    seeing = Learner(config())
    seeing.load()
    said = told(seeing, params, batch.pictures, batch.captions[:1].repeat(3, axis=0))
    assert np.abs(said[0] - said[1]).max() > 1e-4


@pytest.mark.long
def test_held_out_scores_count_each_picture_once(learner):
    """Nine pictures in windows: the loss is that of all at once."""
    learner, params = learner
    task = learner.task
    parts = learner.data
    whole = parts["test"]
    total, weight = jax.jit(
        lambda params, whole: task.loss(learner.apply, params, whole, (), False).sums["loss"]
    )(params, whole)
    state = learner.initial()._replace(params=params, best=None)
    scores = learner.final_scores(state)
    np.testing.assert_allclose(scores["loss"], total / weight, rtol=1e-5)
    said = jax.jit(lambda: task.say(learner.apply, params, whole.pictures, 9))()
    truth = [[task.text(one) for one in of] for of in np.asarray(whole.captions)]
    expected = plain_bleu([task.text(words) for words in said.tolist()], truth)
    np.testing.assert_allclose(scores["bleu_1"], expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {**ATTENDING, "detach_prob": 0.4, "seeds": 2},
        pytest.param({"seeds": 3}, marks=pytest.mark.full),
    ],
)
@pytest.mark.long
def test_a_stopped_run_ends_with_the_same_bits(learners, tmp_path, settings, monkeypatch):
    run = config(**settings)
    loop.run(run, tmp_path / "whole")
    with monkeypatch.context() as context:
        context.setattr(loop, "stopping", lambda: contextlib.nullcontext(StopAfter(3)))
        assert loop.run(run, tmp_path / "stopped") is None
    loop.run(run, tmp_path / "stopped")
    assert_same_bits(leaves(tmp_path / "stopped", 4), leaves(tmp_path / "whole", 4))
    rows = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")]
    assert rows[0] == rows[1]


# Scores


def plain_bleu(said, references):
    """Corpus BLEU of one to four words (Papineni et al., 2002), closest reference lengths."""
    scores, product = [], 1.0
    length = truth = 0
    for order in range(1, 5):
        right = total = 0
        for caption, of in zip(said, references, strict=True):
            words = caption.split()
            counts = collections.Counter(zip(*(words[at:] for at in range(order)), strict=False))
            most = collections.Counter()
            for reference in of:
                these = reference.split()
                most |= collections.Counter(zip(*(these[at:] for at in range(order)), strict=False))
            right += sum((counts & most).values())
            total += sum(counts.values())
            if order == 1:
                length += len(words)
                sizes = [len(reference.split()) for reference in of]
                truth += min(sizes, key=lambda size: (abs(size - len(words)), size))
        # Without a match a count is 1e-15, as in pycocoevalcap.
        product *= (right or 1e-15) / total if total else 0
        brevity = min(1.0, math.exp(1 - truth / length)) if length else 0
        scores.append(brevity * product ** (1 / order))
    return scores


def random_sets(seed, count):
    """Sets of captions with one to six references, of few words, so that many match."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        words = rng.choice(list("abcdefgh"), size=8, replace=False)

        def sentence(rng=rng, words=words):
            return " ".join(rng.choice(words[: rng.integers(2, 8)], size=rng.integers(4, 13)))

        pictures = rng.integers(2, 12)
        references = [[sentence() for _ in range(rng.integers(1, 7))] for _ in range(pictures)]
        said = [str(rng.choice(of)) if rng.random() < 0.4 else sentence() for of in references]
        yield said, references


def test_bleu_by_hand():
    for said, references in random_sets(0, 30):
        found = scoring.bleu(said, references)
        expected = plain_bleu(said, references)
        np.testing.assert_allclose(
            [found[f"bleu_{order}"] for order in range(1, 5)], expected, atol=1e-7
        )


def test_captions_in_plain_words():
    assert scoring.tokens("A man's  dog, running!  (2 of THEM)") == [
        "a", "man's", "dog", "running", "2", "of", "them",
    ]  # fmt: skip


def test_what_is_not_installed_is_one_sentence(monkeypatch):
    plain = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("sacrebleu", "pycocoevalcap"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"^BLEU needs sacrebleu: pip install sacrebleu\.$"):
        scoring.bleu(["a"], [["a"]])
    monkeypatch.setattr(scoring, "has_coco", lambda: False)
    with pytest.raises(UserError, match=r"^CIDEr-D[^\n]*pip install pycocoevalcap[^\n]*$"):
        scoring.coco(["a"], [["a"]])
    with pytest.raises(UserError, match="pip install pycocoevalcap"):
        config(evaluation="coco")


def test_without_java_meteor_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(scoring, "has_java", lambda: False)
    monkeypatch.setattr(scoring, "has_coco", lambda: True)
    run = config(evaluation="coco")
    names = [metric.name for metric in run.task.metrics]
    assert names[0] == "cider"
    assert "rouge_l" in names
    assert "meteor" not in names
    run.task.data()
    assert capsys.readouterr().out.count("need Java") == 1
    monkeypatch.setattr(scoring, "has_java", lambda: True)
    assert "meteor" in [metric.name for metric in run.task.metrics]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"decoder": (4,)}, "--decoder is not for captioning"),
        ({"captions": 6}, "--captions is at most 5"),
        ({"encoder": "resnet152"}, "--encoder=resnet152 is for pictures from files"),
        ({"beam": 1, "length_power": 1.0}, "--length_power has no effect with --beam=1"),
        ({"detach_query": True}, "--detach_query has no effect"),
        ({"data_dir": "."}, "--data_dir has no effect"),
        (
            {**ATTENDING, "cell": "flax.linen:LSTMCell"},
            "of flax.linen:LSTMCell has the fields 0 and 1",
        ),
        ({**ATTENDING, "layers": 2}, "--captioner=show_attend_tell is for --layers=1"),
        ({"dataset": "coco", "weights": "w", "picture_features": 6}, "--picture_features has no"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        Learner(config(**settings))
    assert sentence in str(refusal.value)


@pytest.mark.extras
def test_bleu_is_that_of_coco():
    """1,000 sets; needs pycocoevalcap."""
    from pycocoevalcap.bleu.bleu import Bleu

    worst = 0.0
    for said, references in random_sets(1, 1000):
        truth = dict(enumerate(references))
        theirs, _ = Bleu(4).compute_score(truth, {at: [one] for at, one in enumerate(said)}, 0)
        ours = scoring.bleu(said, references)
        worst = max(worst, *(abs(ours[f"bleu_{n}"] - theirs[n - 1]) for n in range(1, 5)))
    assert worst < 1e-6


@pytest.mark.extras
def test_every_score_of_coco():
    """Captions that are right score the most; needs pycocoevalcap and Java."""
    references = scoring.tokenised([["A dog runs.", "The man's dog!"], ["Two cats sit."]], True)
    assert references == [["a dog runs", "the man 's dog"], ["two cats sit"]]
    right = scoring.coco(["a dog runs", "two cats sit"], references)
    wrong = scoring.coco(["a cat sits on it", "one dog"], references)
    assert right["rouge_l"] == pytest.approx(1)
    assert right["meteor"] == pytest.approx(1)
    assert all(right[name] > wrong[name] for name in ("bleu_4", "cider", "rouge_l", "meteor"))
