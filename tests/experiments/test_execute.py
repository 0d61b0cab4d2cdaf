"""Programs: their answers, lengths and parts; the model, its scores and curricula."""

import collections
import contextlib
import re
from random import Random
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.execute import curriculum
from experiments.execute.programs import BLANK, PARTS, Programs, Source, at_level, part_of
from experiments.execute.santoro import OPERATIONS, Santoro
from experiments.execute.settings import EXECUTE
from experiments.execute.show import Examples
from experiments.execute.zaremba import Zaremba
from experiments.settings.cells import build_cell
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from tests import reference
from tests.experiments.probes.support import StopAfter
from tests.experiments.support import assert_drawn, assert_same_bits, leaves

GRAMMARS = {
    **{category: Santoro(9, 4, category) for category in OPERATIONS},
    "zaremba": Zaremba(9, 4),
}
TINY = {
    "cell": "lstm",
    "hidden_size": 8,
    "decoder": (),
    "batch_size": 6,
    "held_out_programs": 20,
    "steps": 12,
    "eval_every": 6,
}


def config(**settings):
    return resolve(EXECUTE, "small", TINY | settings)


# The programs


def loop_sum(value, times, term):
    """What ``x=valuefor[times]x+=term`` says."""
    x = value
    for _ in range(times):
        x += term
    return x


def as_python(text):
    """An expression of Santoro's in Python: the loop outside is the last one in the text."""
    if text.startswith("x="):
        begin, times, term = re.fullmatch(r"x=(.*)for\[(\d)\]x\+=(\d+)", text).groups()
        return f"loop_sum({as_python(begin)}, {times}, {term})"
    if text.startswith("("):
        inner, rest = re.fullmatch(r"\((.*)\)(.*)", text).groups()
        return f"({as_python(inner)})" + as_python(f"0{rest}")[1:]
    return re.sub(r"(if|else)", r" \1 ", text)


def printed(text):
    """What a program of Zaremba's prints."""
    lines = []
    code = text.replace("#", "\n").removesuffix("@")
    exec(compile(code, "program", "exec"), {"print": lines.append})
    (line,) = lines
    return line


@pytest.fixture(scope="module")
def count(request):
    return 100_000 if request.config.getoption("full") else 1000


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("mixed", [True, False])
def test_answers_are_pythons_and_lengths_within_bounds(name, mixed, count):
    grammar, draw = GRAMMARS[name], Random(7)
    longest_text = longest_answer = 0
    for _ in range(count // 2):
        length, nesting = grammar.mixed(draw) if mixed else (grammar.length, grammar.nesting)
        if name == "zaremba":
            program = grammar.compose(draw, lambda: grammar.mixed(draw) if mixed else (9, 4))
            assert program.answer == f"{printed(program.text)}."
        else:
            program = grammar.compose(draw, lambda size=(length, nesting): size)
            value = eval(as_python(program.text), {"loop_sum": loop_sum})
            assert program.answer == str(value % 10 ** (length + 1)), program.text
            # The bounds of the published code (Santoro et al., 2018).
            most = (3 * length + 10) * (nesting - 1) + 4 * length + 10 + 2 * (nesting - 1)
            assert len(program.text) <= most
            assert len(program.answer) <= 2 * length
        assert set(program.text + program.answer) <= set(grammar.characters)
        longest_text = max(longest_text, len(program.text))
        longest_answer = max(longest_answer, len(program.answer))
    assert 0 < longest_text <= grammar.program_characters
    assert 0 < longest_answer <= grammar.answer_characters
    assert len(set(grammar.characters)) == len(grammar.characters)


def test_translation_knows_the_operations():
    assert eval(as_python("x=(5-8)for[3]x+=2"), {"loop_sum": loop_sum}) == 3
    assert eval(as_python("(x=1for[2]x+=3)if4<3else9"), {"loop_sum": loop_sum}) == 9
    assert eval(as_python("((12+3)*4)-1"), {}) == 59
    assert printed("a=5;#b=2#for x in range(3):b-=(a+4)#print((b if 1<2 else 3))@") == -25


@pytest.mark.parametrize(
    "grammar", [Santoro(1, 2, "program"), Santoro(2, 2, "addition"), Zaremba(1, 1)]
)
def test_the_longest_program_is_as_long_as_said(grammar):
    draw = Random(0)
    level = grammar.levels()[-1]
    programs = [grammar.compose(draw, lambda: level) for _ in range(5000)]
    assert max(len(one.text) for one in programs) == grammar.program_characters


def test_full_programs_have_the_full_size():
    """Four operations; Santoro's literals have nine digits each, Zaremba's one to ten."""
    draw = Random(1)
    for _ in range(100):
        text = GRAMMARS["program"].compose(draw, lambda: (9, 4)).text
        assert {len(digits) for digits in re.findall(r"(?<!\[)\d+", text)} == {9}
        assert text.count("(") == 3
    text = GRAMMARS["addition"].compose(draw, lambda: (9, 4)).text
    assert re.fullmatch(r"\(\(\(\d{9}\+\d{9}\)\+\d{9}\)\+\d{9}\)\+\d{9}", text)
    assert GRAMMARS["addition"].program_characters == len(text)


def test_every_operation_is_as_frequent():
    draw = Random(2)
    texts = [Santoro(3, 1, "program").compose(draw, lambda: (3, 1)).text for _ in range(4000)]
    kinds = collections.Counter(re.sub(r"\d|[<>\[\]()=x]", "", text)[:2] for text in texts)
    assert_drawn([kinds[kind] for kind in ("+", "-", "*", "if", "fo")], 1 / 5, 4000)
    patterns = {
        "pair": r"print\(\(\d+[+-]\d+\)\)@",
        "smallmul": r"print\(\(\d+\*\d+\)\)@",
        "equality": r"print\(\d+\)@",
        "vars": r"([a-j])=\d+;#print\(\(\1[+-]\d+\)\)@",
        "small_loop": r"([a-j])=\d+#for x in range\(\d+\):\1[+-]=\d+#print\(\1\)@",
        "ifstat": r"print\(\(\d+ if \d+[<>]\d+ else \d+\)\)@",
    }
    texts = [Zaremba(3, 1).compose(draw, lambda: (3, 1)).text for _ in range(4000)]
    for pattern in patterns.values():
        assert_drawn(sum(bool(re.fullmatch(pattern, text)) for text in texts), 1 / 6, 4000)


def test_the_counts_of_programs():
    """Of all that there are, by drawing until nothing new comes."""
    for grammar in (Santoro(1, 1, "addition"), Santoro(1, 2, "addition")):
        draw = Random(3)
        size = 1, grammar.nesting
        texts = {grammar.compose(draw, lambda size=size: size).text for _ in range(12_000)}
        assert len(texts) == grammar.count
    assert Santoro(1, 1, "control").count == 2 * 9**4 + 9 * 9**2


# By number


@pytest.mark.parametrize("name", GRAMMARS)
def test_no_program_is_in_two_parts(name):
    source = Source(GRAMMARS[name], "mix")
    level = source.grammar.levels()[-1]
    texts = {
        part: {source.program(part, seed, number, level).text for number in range(150)}
        for part in PARTS
        for seed in (0, 1)
    }
    for part, of_part in texts.items():
        assert {part_of(text) for text in of_part} == {part}
        assert len(of_part) > 100
    drawn = [source.program("train", 5, number, level) for number in range(4)]
    again = [source.program("train", 5, number, level) for number in (3, 2, 1, 0)]
    assert drawn == again[::-1]
    assert len(set(drawn)) == 4


def test_a_tenth_of_the_programs_is_in_each_held_out_part():
    draw, grammar = Random(4), Santoro(3, 2, "program")
    texts = {grammar.compose(draw, lambda: (3, 2)).text for _ in range(4000)}
    parts = [part_of(text) for text in sorted(texts)]
    assert_drawn([parts.count(part) for part in PARTS], [0.8, 0.1, 0.1], len(texts))


@pytest.mark.parametrize("name", ["santoro", "zaremba"])
def test_windows_hold_the_programs_of_their_numbers(name):
    task = config(grammar=name, curriculum="combine").task
    source, data = task.source, task.data()
    window = data.read(3, 7, np.array([0, 4, 5]))
    for at, row in enumerate((0, 4, 5)):
        for k, level in enumerate(source.levels("train")):
            text, answer = source.program("train", 3, 7 * 2**32 + row, level)
            one = jax.tree.map(lambda leaf, at=at, k=k: leaf[..., at, k], window)
            characters = "_" + task.programs.characters
            tokens, answers = ("".join(characters[i] for i in one[j]) for j in (0, 1))
            seen = text + answer[:-1] if name == "zaremba" else text
            assert tokens == seen.ljust(len(tokens), "_")
            assert answers == answer.ljust(len(answers), "_")
            assert one.first == len(text) - (name == "zaremba")
            assert one.size == len(answer)
    some = data.read(3, 7, np.array([4]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[..., 1:2, :]), some, window)
    held_out = [data.read_held_out("test", 0, np.arange(20)), data.read(0, 0, np.arange(6))]
    assert [window.size.shape[-1] for window in held_out] == [1, len(source.levels("train"))]


def test_rows_beyond_a_held_out_set_stay_empty():
    data = Programs(Source(Santoro(2, 2, "addition"), "mix"), 10, 300)
    first, second = (data.read_held_out("test", index, np.arange(256)) for index in (0, 1))
    assert (first.size > 0).all()
    assert (second.size[:44] > 0).all()
    assert (second.size[44:] == 0).all()
    assert (second.tokens[:, 44:] == BLANK).all()


# Curricula


def sizes(texts):
    """(digits of a literal, number of operations) of sums."""
    return [(len(re.findall(r"\d+", text)[0]), text.count("+")) for text in texts]


def test_lengths_and_nestings_of_each_curriculum():
    grammar = Santoro(4, 3, "addition")
    assert grammar.levels() == [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 3)]
    assert Zaremba(2, 2).levels() == [(1, 1), (2, 1), (1, 2), (2, 2)]
    drawn = {}
    for name in ("mix", "combine", "naive", "baseline"):
        source = Source(grammar, name)
        for level in source.levels("train"):
            texts = [source.program("train", 0, n, level).text for n in range(600)]
            drawn[name, level] = collections.Counter(sizes(texts))
    for name in ("mix", "combine"):
        shares = drawn[name, (4, 3)]
        assert set(shares) == {(a, b) for a in range(1, 5) for b in range(1, 4)}
        assert min(shares.values()) > 20
    assert set(drawn["combine", (3, 1)]) == {(1, 1), (2, 1), (3, 1)}
    assert all(set(drawn["naive", level]) == {level} for level in grammar.levels())
    assert set(drawn["baseline", (4, 3)]) == {(4, 3)}
    held_out = [Source(grammar, "mix").program("test", 0, n, (4, 3)).text for n in range(50)]
    assert set(sizes(held_out)) == {(4, 3)}


def test_zarembas_combined_curriculum_mixes_one_time_in_five():
    draw, grammar = Random(0), Zaremba(4, 3)
    drawn = collections.Counter(grammar.combined(draw, (3, 2)) for _ in range(6000))
    levels = [(a, b) for a in range(1, 5) for b in range(1, 4)]
    assert_drawn(
        [drawn[level] for level in levels],
        [0.2 / 12 + 0.8 * (level == (3, 2)) for level in levels],
        6000,
    )


def test_levels_are_left_by_the_rule():
    """The rule of the published code, with its queue of losses, in plain Python."""
    every, threshold, last = 3, 0.02, 4
    losses = np.float32(2 + np.sin(np.arange(300) / 7) + np.random.RandomState(0).rand(300))
    level, queue, steps, expected = 0, collections.deque(maxlen=10), [], []
    for loss in losses:
        steps.append(loss)
        if len(steps) == every:
            queue.append(np.mean(steps))
            steps = []
            if len(queue) == 10:
                change = np.mean(np.diff(queue)) / np.mean(queue)
                if change < threshold and level < last:
                    level += 1
                    queue.clear()
        expected.append(level)
    climb, levels = curriculum.begin(), []
    after = jax.jit(curriculum.after, static_argnums=(2, 3, 4))
    for loss in losses:
        climb = after(climb, jnp.float32(loss), every, threshold, last)
        levels.append(int(climb.level))
    assert levels == expected
    assert set(levels) == set(range(5))
    assert np.diff(np.nonzero(np.diff(levels))[0]).max() > 30  # it stayed where the loss rose


# The model


@pytest.fixture(scope="module", params=["santoro", "zaremba"])
def model(request):
    """A learner, parameters that are not small, and a window of six programs."""
    settings = {"decoder": (5,)} if request.param == "santoro" else {"inputs": "embed"}
    more = {"embedding": 4} if request.param == "zaremba" else {}
    learner = Learner(config(grammar=request.param, nesting=2, **settings, **more))
    learner.load()
    params = jax.tree.map(lambda leaf: 3 * leaf, learner.initial().params)
    window = at_level(learner.task.data().read(0, 0, np.arange(6)), 0)
    return learner, params, window


def by_hand(learner, params, characters):
    """Outputs ``[T, V]`` of one sequence of characters, one after the other, in NumPy."""
    task = learner.task
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = np.eye(1 + len(task.programs.characters))
    if task.inputs == "embed":
        table = params["encoder"]["tokens"]["Embed_0"]["embedding"]
    carry, outputs = (np.zeros(8), np.zeros(8)), []
    for character in characters:
        x = table[character] if character != BLANK else np.zeros_like(table[0])
        carry = reference.lstm(params["recurrent"]["cell"], carry, x)
        outputs.append(carry[1])
    ys = np.stack(outputs)
    for index in range(len(params["decoder"])):
        dense = params["decoder"][f"Dense_{index}"]
        ys = np.maximum(ys, 0) if index else ys
        ys = ys @ dense["kernel"] + dense["bias"]
    return ys


def told_by_hand(learner, params, window, row):
    """Right characters, logits beside them, and what the model says on its own, of one program."""
    first, size = int(window.first[row]), int(window.size[row])
    answer = window.answers[:size, row].astype(int)
    if not learner.task.programs.forced:
        program = [*window.tokens[:first, row].astype(int)]
        logits = by_hand(learner, params, program + [BLANK] * size)[len(program) :]
        return answer, logits, logits.argmax(axis=-1)
    program = [*window.tokens[: first + 1, row].astype(int)]
    logits = by_hand(learner, params, [*program, *answer[:-1]])[len(program) - 1 :]
    free = []
    for _ in answer:
        free.append(int(by_hand(learner, params, [*program, *free])[-1].argmax()))
    return answer, logits, np.array(free)


def test_scores_are_those_of_programs_one_by_one(model):
    learner, params, window = model
    task = learner.task
    rows = [told_by_hand(learner, params, window, row) for row in range(6)]

    @jax.jit
    def outcome(params):
        return task.loss(learner.apply, params, window, (), False)

    result = outcome(params)
    log_p = [
        jax.nn.log_softmax(logits)[np.arange(len(answer)), answer] for answer, logits, _ in rows
    ]
    characters = sum(len(answer) for answer, *_ in rows)
    np.testing.assert_allclose(result.loss[0], -np.concatenate(log_p).sum(), rtol=2e-4)
    assert result.loss[1] == characters
    right = [logits.argmax(axis=-1) == answer for answer, logits, _ in rows]
    sums = {"": right, "free_": [free == answer for answer, _, free in rows]}
    for prefix, hits in sums.items():
        if f"{prefix}accuracy" not in result.sums:
            assert not task.programs.forced
            continue
        assert [*map(float, result.sums[f"{prefix}accuracy"])] == [
            np.concatenate(hits).sum(),
            characters,
        ]
        assert [*map(float, result.sums[f"{prefix}exact"])] == [sum(h.all() for h in hits), 6]
    told = np.asarray(jax.jit(lambda params: task.told(learner.apply, params, window))(params))
    for row, (answer, _, free) in enumerate(rows):
        assert told[: len(answer), row].tolist() == free.tolist()


@pytest.mark.parametrize("model", ["santoro"], indirect=True)
def test_whole_answers_count_when_every_character_is_right(model):
    """With the model's own answers as the right ones, all of them are."""
    learner, params, window = model
    task = learner.task
    told = np.array(task.told(learner.apply, params, window), np.uint8)
    sums = task.loss(learner.apply, params, window._replace(answers=told), (), False).sums
    assert float(sums["exact"][0]) == 6
    told[0, 2] += 1
    sums = task.loss(learner.apply, params, window._replace(answers=told), (), False).sums
    assert float(sums["exact"][0]) == 5
    assert float(sums["accuracy"][0]) == window.size.sum() - 1


def test_empty_rows_and_room_to_spare_change_nothing(model):
    learner, params, window = model
    task = learner.task
    wider = window._replace(tokens=np.pad(window.tokens, ((0, 3), (0, 0))))
    wider = jax.tree.map(
        lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[..., :2])], axis=-1), wider
    )

    @jax.jit
    def loss(params, window):
        total, weight = task.loss(learner.apply, params, window, (), True).loss
        return total / weight

    plain, wide = (jax.value_and_grad(loss)(params, one) for one in (window, wider))
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    sums = task.loss(learner.apply, params, wider, (), False).sums
    assert float(sums["exact"][1]) == 6


def test_the_baseline_knows_how_common_characters_are():
    task = config(held_out_programs=300).task
    answers = [task.source.program("test", 0, n, (2, 2)).answer for n in range(300)]
    ones = [
        collections.Counter(answer[k] for answer in answers if k < len(answer)) for k in (0, 1, 2)
    ]
    hits = sum(counts.most_common(1)[0][1] for counts in ones)
    entropy = -sum(n * np.log(n / sum(counts.values())) for counts in ones for n in counts.values())
    total = sum(map(len, answers))
    metrics = {metric.name: metric.baseline for metric in task.metrics}
    np.testing.assert_allclose(metrics["accuracy"], hits / total)
    np.testing.assert_allclose(metrics["loss"], entropy / total)


# Runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three seeds whose curriculum climbs."""
    path = tmp_path_factory.mktemp("whole")
    loop.run(climbing(), path)
    return path


def climbing():
    return config(curriculum="combine", level_steps=1, level_threshold=10.0, seeds=3)


@pytest.mark.long
def test_a_climb_that_was_stopped_ends_with_the_same_bits(whole, tmp_path):
    with mock.patch.object(loop, "stopping", lambda: contextlib.nullcontext(StopAfter(5))):
        assert loop.run(climbing(), tmp_path) is None
    loop.run(climbing(), tmp_path)
    after = leaves(tmp_path, 12)
    assert_same_bits(after, leaves(whole, 12))
    levels = [value for name, value in after.items() if "level" in name]
    assert [level.tolist() for level in levels] == [[1, 1, 1]]
    rows = [(path / "metrics.jsonl").read_bytes() for path in (tmp_path, whole)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("grammar", ["santoro", "zaremba"])
def test_examples_are_held_out_programs_with_the_models_answers(grammar):
    learner = Learner(config(grammar=grammar, nesting=3, held_out_programs=50))
    learner.load()
    params = jax.tree.map(lambda leaf: 3 * leaf, learner.initial().params)
    text = Examples(learner, 4).text(params)
    source = learner.task.source
    programs = [source.program("validation", 0, n, (2, 3)) for n in range(4)]
    for program in programs:
        lines = program.text.removesuffix("@").replace("#", "\n")
        assert f"{lines}\n    " in text
    verdicts = re.findall(r"^    (.*)  (?:right|wrong, (.*))$", text, re.MULTILINE)
    assert [wrong or told for told, wrong in verdicts] == [one.answer for one in programs]


@pytest.mark.long
def test_the_binary_shows_programs(program, tmp_path):
    flags = [f"--{name}={value}" for name, value in TINY.items() if name != "decoder"]
    code, _, errors = program("experiments.execute", *flags, "--show=21")
    assert code == 2 and "--show=21 is more than --held_out_programs=20." in errors
    code, out, _ = program("experiments.execute", *flags, "--show=2", f"--workdir={tmp_path}")
    assert code == 0
    assert len(re.findall(r"\(\d\d\+\d\d\)\+\d\d\n    \S+  (right|wrong, \d+)", out)) == 2
    assert "test accuracy: " in out
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"wrong, " in events


def test_an_rmc_has_the_slots_and_heads_that_are_asked_for():
    """Even where those that it has of its own accord do not divide its size."""
    run = config(cell="ur_rmc", hidden_size=45, memory_slots=3, heads=5)
    cell = build_cell(run.model)
    assert (cell.memory_slots, cell.heads, cell.features) == (3, 5, 45)
    ur = {cell: resolve(EXECUTE, "ur", {"cell": cell}) for cell in ("rmc", "lstm")}
    assert ur["rmc"].training.steps == 200_000
    assert ur["lstm"].training.steps == 500_000
    assert (ur["rmc"].model.memory_slots, ur["rmc"].model.heads) == (2, 2)
    assert (ur["lstm"].model.memory_slots, ur["lstm"].model.heads) == (None, None)
    slots = {config(cell="rmc", hidden_size=24, memory_slots=n).hash() for n in (2, 3, 4)}
    assert len(slots) == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cell": "rmc", "hidden_size": 30, "memory_slots": 4}, "4 slots do not divide 30"),
        ({"cell": "rnn", "heads": 2}, "--heads is not for rnn"),
        ({"curriculum": "steep"}, "--curriculum is one of mix, combine, naive, baseline"),
        ({"program_steps": 9}, "has up to 10 characters, which are more than the encoder reads"),
        ({"length": 1}, "there are 729 such programs, too few"),
        ({"length": 1, "nesting": 3, "held_out_programs": 657}, "only 656 are for a held-out set"),
        ({"grammar": "zaremba", "category": "control"}, "--category has no effect"),
        ({"level_steps": 5}, "--level_steps has no effect with --curriculum=mix"),
        ({"nesting": 11}, "--nesting must be at least 1 and at most 10"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        Learner(config(**settings))
    assert sentence in str(refusal.value)
