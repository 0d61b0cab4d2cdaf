"""Environments: thousands of episodes within the rules, and players that score what they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.match.environments import CountRecall, Match, RepeatPrevious, TMaze
from experiments.match.environments.base import restarted
from tests.experiments import match_players as players
from tests.support import quick_jit, users_jit

EPISODES = 10_000
QUICK = [Match(False, "pycolab"), Match(True, "dmlab", (15, 60, 30), 10, (5.0,))]
FULL = [
    *(Match(active, "pycolab") for active in (False, True)),
    *(Match(active, "dmlab", (75, 450, 75), 10, (1.0,)) for active in (False, True)),
    Match(True, "dmlab", (75, 450, 75), 0),
]


def pytest_generate_tests(metafunc):
    if "match" in metafunc.fixturenames:
        matches = FULL if metafunc.config.getoption("--full") else QUICK
        names = [f"{'active' if m.active else 'passive'}-{m.rules}-{m.apples}" for m in matches]
        metafunc.parametrize("match", matches, ids=names, scope="module")


@pytest.fixture(scope="module")
def played(match):
    """What 10,000 random walks, best players and players of a random door each did."""
    doors = jnp.asarray(players.DOORS[match.rules])
    kinds = (players.walk, players.best, players.straight)

    def act(kind, *seen):
        answers = [player(*seen, match.phases) for player in kinds]
        return jax.tree.map(lambda *each: jnp.stack(each)[kind], *answers)

    def row(number, key):
        keys = jax.random.split(key, 3)
        observation, state = match.reset(keys[0])
        kind = number % len(kinds)
        column = jnp.where(kind == 2, jax.random.choice(keys[1], doors), -1)
        tally = dict.fromkeys(("length", "apples", "last", "strange", "wrong"), jnp.float32(0))
        start = (players.blank(column), observation, state, jnp.bool_(True), tally)
        _, *_, tally = jax.lax.fori_loop(
            0, match.steps, lambda t, now: step(kind, jax.random.fold_in(keys[2], t), now), start
        )
        return tally

    def step(kind, key, now):
        memory, observation, state, alive, tally = now
        strange = judged(match, observation, state)
        memory, action = act(kind, memory, observation, state, key)
        turn = match.step(key, state, action)
        last = turn.info["last_phase"]
        more = {
            "length": 1.0,
            "apples": jnp.where(last, 0, turn.reward),
            "last": jnp.where(last, turn.reward, 0),
            "strange": strange.astype(jnp.float32),
            "wrong": wrong(match, state, turn).astype(jnp.float32),
        }
        tally = {name: tally[name] + jnp.where(alive, more[name], 0) for name in tally}
        return memory, turn.observation, turn.state, alive & ~turn.done, tally

    numbers = jnp.arange(3 * EPISODES, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(5), 3 * EPISODES)
    tally = users_jit(jax.vmap(row))(numbers, keys)
    return {name: np.asarray(value).reshape(EPISODES, 3) for name, value in tally.items()}


def judged(match, observation, state):
    """How many cells of an observation have a colour that its phase does not have."""
    explore, distractor, _ = match.phases
    phase = (state.clock >= explore).astype(int) + (state.clock >= explore + distractor)
    fixed = jnp.asarray(np.stack([players.BACKGROUND, players.WALL, players.PLAYER]))
    apple = jnp.asarray(players.APPLE)[None]
    of_phase = jnp.stack(
        [
            jnp.broadcast_to(state.colours[state.target], state.colours.shape),
            jnp.broadcast_to(apple, state.colours.shape),
            jnp.where(state.touched < 0, state.colours, jnp.asarray(players.WALL)[None]),
        ]
    )[phase]
    allowed = jnp.concatenate([fixed, of_phase])
    fits = (observation[:, :, None] == allowed[None, None]).all(axis=-1).any(axis=-1)
    centre = (observation[2, 2] == jnp.asarray(players.PLAYER)).all()
    return (~fits).sum() + ~centre


def wrong(match, state, turn):
    """Whether a reward is none of those of its phase, or of another one than the step is in."""
    explore, distractor, _ = match.phases
    last = state.clock >= explore + distractor
    worst = {"pycolab": 0.0, "dmlab": 1.0}[match.rules]
    doors = (turn.reward == 0) | (turn.reward == 10.0) | (turn.reward == worst)
    apples = (turn.reward == 0) | jnp.isin(turn.reward, jnp.asarray(match.apple_rewards))
    apples = jnp.where(state.clock < explore, turn.reward == 0, apples)
    kept = jnp.where((state.touched >= 0), turn.reward == 0, True)
    return ~jnp.where(last, doors & kept, apples) | (last != turn.info["last_phase"])


@pytest.mark.long
def test_random_episodes_keep_the_rules(match, played):
    length, steps = played["length"], sum(match.phases)
    assert not played["strange"].any()
    assert not played["wrong"].any()
    assert (length <= steps).all()
    if match.rules == "pycolab":
        assert (length == steps).all()
    else:
        touched = played["last"] > 0
        before = match.phases[0] + match.phases[1]
        assert (length[touched] >= before + 3).all()
        assert (length[~touched] == steps).all()
        assert (length[:, 1:] < steps).all()  # who goes to a door ends the episode
    assert set(np.unique(played["last"])) <= {
        0.0,
        10.0,
        {"pycolab": 0.0, "dmlab": 1.0}[match.rules],
    }
    assert (played["apples"][:, 0].mean() > 0) == (match.apples > 0)


@pytest.mark.long
def test_the_best_player_always_finds_the_door(match, played):
    assert match.best == 10.0
    assert (played["last"][:, 1] == 10.0).all()


@pytest.mark.long
def test_a_random_door_scores_chance_and_a_random_walk_less(match, played):
    of_door, of_walk = played["last"][:, 2], played["last"][:, 0]
    assert match.chance == pytest.approx({"pycolab": 10 / 3, "dmlab": 3.25}[match.rules])
    assert abs(of_door.mean() - match.chance) < 4 * of_door.std() / EPISODES**0.5
    print(f"{match}: a random door {of_door.mean():.3f}, a random walk {of_walk.mean():.3f}")
    assert of_walk.mean() < match.chance


@pytest.mark.parametrize("rooms", QUICK, ids=["passive", "active"])
def test_no_observation_after_the_first_phase_depends_on_the_answer(rooms):
    """Another target: the same actions show the same, but for the first phase."""
    doors = len(players.DOORS[rooms.rules])
    rows = 200

    def episode(key, shift):
        keys = jax.random.split(key, 1 + rooms.steps)
        _, state = rooms.reset(keys[0])
        state = state._replace(target=(state.target + shift) % doors)

        def step(state, key):
            turn = rooms.step(key, state, jax.random.randint(key, (), 0, 4, jnp.int32))
            return turn.state, (turn.observation, turn.reward)

        return jax.lax.scan(step, state, keys[1:])[1]

    both = quick_jit(jax.vmap(jax.vmap(episode, (None, 0)), (0, None)))
    observations, rewards = both(jax.random.split(jax.random.key(1), rows), jnp.arange(2))
    later = rooms.phases[0] - 1  # the action that ends the first phase
    np.testing.assert_array_equal(observations[:, 0, later:], observations[:, 1, later:])
    assert (observations[:, 0, :later] != observations[:, 1, :later]).any()
    assert (rewards[:, 0] != rewards[:, 1]).any()


def test_an_oracle_of_the_present_observation_scores_chance():
    """It knows, for everything that is seen from between the doors, which was right most often."""
    match = Match(True, "pycolab", (15, 5, 15), 0)
    way = jnp.array([0] * 20 + [players.NORTH] * 2 + [players.WEST])

    def seen(key):
        def step(state, action):
            turn = match.step(key, state, action)
            return turn.state, turn.observation

        _, state = match.reset(key)
        state, observations = jax.lax.scan(step, state, way)
        return observations[-1], state.target

    observations, targets = quick_jit(jax.vmap(seen))(jax.random.split(jax.random.key(2), EPISODES))
    views = np.unique(np.asarray(observations).reshape(EPISODES, -1), axis=0, return_inverse=True)
    names, targets = views[1].ravel(), np.asarray(targets)
    assert len(views[0]) == 6  # the shuffled colours
    half, counts = EPISODES // 2, np.zeros((6, 3))
    np.add.at(counts, (names[:half], targets[:half]), 1)
    rewards = 10.0 * (counts.argmax(axis=1)[names[half:]] == targets[half:])
    assert abs(rewards.mean() - match.chance) < 4 * rewards.std() / half**0.5


@pytest.mark.parametrize(
    "rooms",
    [
        Match(False, "pycolab", (3, 60, 15), 22, (1.0, 10.0)),
        Match(True, "dmlab", (15, 0, 40), 0),
        Match(True, "pycolab", (15, 90, 15)),
    ],
    ids=["apples", "no-delay", "public"],
)
def test_every_frame_is_that_of_the_public_rules(rooms):
    reset, step = quick_jit(jax.vmap(rooms.reset)), quick_jit(jax.vmap(rooms.step))
    rows, rng = 12, np.random.default_rng(3)
    keys = jax.random.split(jax.random.key(4), rows)
    observation, state = reset(keys)
    expected = [
        players.Simulation(rooms, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(rows)
    ]
    alive, total = np.ones(rows, bool), 0.0
    for _ in range(rooms.steps):
        for i in np.flatnonzero(alive):
            np.testing.assert_array_equal(observation[i], expected[i].observation())
        # Into one direction for a while: it eats more apples and reaches doors.
        actions = np.where(rng.random(rows) < 0.5, rng.integers(0, 4, rows), state.clock // 2 % 4)
        turn = step(keys, state, jnp.asarray(actions, jnp.int32))
        for i in np.flatnonzero(alive):
            reward, done = expected[i].step(actions[i])
            assert (float(turn.reward[i]), bool(turn.done[i])) == (reward, done)
            total += reward
            alive[i] = not done
        observation, state = turn.observation, turn.state
    assert not alive.any()
    assert total > 0


# Memory alone


@pytest.mark.parametrize(("length", "walking"), [(1, True), (7, True), (5, False)])
def test_the_t_maze_is_a_walk_on_its_map(length, walking):
    maze, rng = TMaze(length, walking), np.random.default_rng(length)
    reset, step = quick_jit(maze.reset), quick_jit(maze.step)
    cells = {(x, 0) for x in range(length + 1)} | {(length, 1), (length, -1)}
    moves = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    goals, wins = set(), 0
    for episode in range(40):
        observation, state = reset(jax.random.key(episode))
        goal = int(state.goal)
        goals.add(goal)
        assert observation.tolist() == [2 if goal > 0 else 1]
        x = y = 0
        for clock in range(1, length + 2):
            action = rng.choice(4, p=[0.85, 0.05, 0.05, 0.05]) if clock <= length else 1
            turn = step(jax.random.key(0), state, jnp.int32(action))
            east, north = moves[action if walking or x == length else 0]
            there = (x + east, y + north)
            x, y = there if there in cells else (x, y)
            expected = [{0: 3, 1: 4, -1: 5}[y] if x == length else 0]
            assert turn.observation.tolist() == expected
            done = clock == length + 1
            won = float(y == goal) if done else -float(x < clock) / length
            assert float(turn.reward) == pytest.approx(won)
            assert (bool(turn.done), bool(turn.info["last_phase"])) == (done, done)
            state = turn.state
        wins += won
    assert goals == {-1, 1}
    assert 0 < wins < 40


@pytest.mark.parametrize(("decks", "lag"), [(1, 1), (1, 4), (2, 32)])
def test_repeat_previous_asks_for_the_hands_card(decks, lag):
    """As POPGym's code: the hand's card of that number from its end."""
    game, rng = RepeatPrevious(decks, lag), np.random.default_rng(lag)
    reset, step = quick_jit(game.reset), quick_jit(game.step)
    observation, state = reset(jax.random.key(lag))
    hand, total, knowing = [int(observation[0])], 0.0, 0.0
    deck = 52 * decks - 1
    for _ in range(game.steps):
        asked = len(hand) >= lag
        knows = hand[-lag] if asked else 0
        action = knows if rng.random() < 0.5 else rng.integers(4)
        turn = step(jax.random.key(0), state, jnp.int32(action))
        worth = (1 if action == knows else -1) / (52 * decks - lag) if asked else 0.0
        assert float(turn.reward) == pytest.approx(worth)
        total, knowing = total + worth, knowing + asked / (52 * decks - lag)
        done = deck == 1
        hand.append(int(turn.observation[0]))
        deck, state = deck - 1, turn.state
        assert bool(turn.done) == done
    assert knowing == pytest.approx(game.best)
    assert np.bincount(hand).tolist() == [13 * decks] * 4


@pytest.mark.parametrize(("decks", "kind", "kinds"), [(1, "colors", 2), (2, "suits", 4)])
def test_count_recall_asks_for_what_was_dealt(decks, kind, kinds):
    game, rng = CountRecall(decks, kind), np.random.default_rng(decks)
    reset, step = quick_jit(game.reset), quick_jit(game.step)
    observation, state = reset(jax.random.key(decks))
    counts, asked, best = np.zeros(kinds, int), np.zeros(kinds, int), 0.0
    for left in reversed(range(game.steps)):
        value, query = observation.tolist()
        counts[value] += 1
        asked[query] += 1
        action = counts[query] if rng.random() < 0.5 else rng.integers(game.actions)
        turn = step(jax.random.key(0), state, jnp.int32(action))
        worth = (1 if action == counts[query] else -1) / (52 * decks - 1)
        assert float(turn.reward) == pytest.approx(worth)
        assert bool(turn.done) == (left == 0)
        best += 1 / (52 * decks - 1)
        observation, state = turn.observation, turn.state
    assert best == pytest.approx(game.best)
    assert game.actions == 52 * decks // kinds + 1
    for seen in (counts, asked):  # all but the last card
        assert sorted(seen.tolist()) == [52 * decks // kinds - 1] + [52 * decks // kinds] * (
            kinds - 1
        )


@pytest.mark.parametrize(
    "game",
    [TMaze(10), RepeatPrevious(), CountRecall(2, "suits")],
    ids=["t_maze", "repeat_previous", "count_recall"],
)
@pytest.mark.long
def test_random_answers_score_chance(game):
    """10,000 episodes; in the T-maze of who walks to the fork, and chooses an arm there."""

    def episode(key):
        keys = jax.random.split(key, 1 + game.steps)

        def step(state, at):
            t, key = at
            action = jax.random.randint(key, (), 0, game.actions, jnp.int32)
            if isinstance(game, TMaze):
                action = jnp.where(t < game.length, 0, 1 + 2 * (action % 2))
            turn = game.step(key, state, action)
            inside = jnp.stack(
                [turn.observation.min() >= 0, *(turn.observation < jnp.asarray(game.symbols))]
            )
            return turn.state, (turn.reward, turn.done, inside.all())

        times = jnp.arange(game.steps, dtype=jnp.int32)
        return jax.lax.scan(step, game.reset(keys[0])[1], (times, keys[1:]))[1]

    keys = jax.random.split(jax.random.key(9), EPISODES)
    rewards, done, inside = jax.tree.map(np.asarray, users_jit(jax.vmap(episode))(keys))
    assert inside.all()
    np.testing.assert_array_equal(
        done, np.arange(game.steps)[None] == [[game.steps - 1]] * EPISODES
    )
    scores = rewards.sum(axis=1)
    assert abs(scores.mean() - game.chance) < 4 * scores.std() / EPISODES**0.5


def test_only_who_is_done_begins_anew():
    game = TMaze(3)
    keys = jax.random.split(jax.random.key(0), 4)
    observations, states = jax.vmap(game.reset)(keys)
    moved = states._replace(clock=jnp.array([1, 2, 3, 4]))
    done = jnp.array([False, True, False, True])
    again, now = restarted(game, keys[::-1], done, observations + 10, moved)
    fresh, anew = jax.vmap(game.reset)(keys[::-1])
    np.testing.assert_array_equal(now.clock, [1, 0, 3, 0])
    np.testing.assert_array_equal(again, np.where(done[:, None], fresh, observations + 10))
    np.testing.assert_array_equal(now.goal, np.where(done, anew.goal, states.goal))
