"""Match: its own settings, the protocols of UR-gates and of the public code."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.derived import Depends
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import LIBRARY_CELLS, Protocol, Sourced

_MATCH = ("passive_match", "active_match")
_CARDS = ("repeat_previous", "count_recall")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchSettings:
    """An agent that plays, and what it learns from."""

    challenge: str = setting(
        "what is played: a colour that is seen (passive_match) or found (active_match) opens a "
        "door later, or a challenge to memory alone",
        choices=(*_MATCH, "t_maze", *_CARDS),
    )
    rules: str = setting(
        "of match: doors, rewards and timing of the public 2-D version (pycolab) or of the 3-D "
        "original (dmlab)",
        choices=("pycolab", "dmlab"),
        needs=("challenge", _MATCH),
    )
    explore_steps: int = setting(
        "steps of match's first phase", least=1, most=10_000, needs=("challenge", _MATCH)
    )
    distractor_steps: int = setting(
        "steps of match's second phase, the delay",
        least=0,
        most=10_000,
        needs=("challenge", _MATCH),
    )
    reward_steps: int = setting(
        "steps of match's third phase", least=1, most=10_000, needs=("challenge", _MATCH)
    )
    apples: int = setting(
        "apples of match's second phase", least=0, most=22, needs=("challenge", _MATCH)
    )
    apple_rewards: tuple[float, ...] = setting(
        "what apples give: one of these, drawn for each episode",
        Sourced((5.0,), "Hung et al., 2018: their level's 5"),
        least=-1000,
        most=1000,
        needs="apples",
    )
    shuffled: bool = setting(
        "the doors of match have other colours in every episode, or another order; else their "
        "place alone tells the colour",
        Sourced(True, "Hung et al., 2018: of each episode; the public code: of each copy"),
        needs=("challenge", _MATCH),
    )
    length: int = setting(
        "steps from the start of the T-maze to its fork",
        Sourced(10, "ours: short"),
        least=1,
        most=10_000,
        needs=("challenge", ("t_maze",)),
    )
    walking: bool = setting(
        "the agent walks the T-maze's corridor itself, and delay costs; else it is led to the fork",
        Sourced(False, "Osband et al., 2020: memory alone; Ni et al., 2023: it walks"),
        needs=("challenge", ("t_maze",)),
    )
    decks: int = setting(
        "decks of 52 cards in repeat_previous and count_recall",
        Sourced(1, "POPGym: easy; medium 2, hard 3 (repeat_previous) or 4 (count_recall)"),
        least=1,
        most=100,
        needs=("challenge", _CARDS),
    )
    lag: int = setting(
        "which of the last cards repeat_previous asks for; 1: that of now",
        Sourced(4, "POPGym: easy; medium 32, hard 64"),
        least=1,
        most=5199,
        needs=("challenge", ("repeat_previous",)),
    )
    cards: str = setting(
        "what count_recall counts",
        Sourced("colors", "POPGym: easy; medium suits, hard ranks"),
        choices=("colors", "suits", "ranks"),
        needs=("challenge", ("count_recall",)),
    )
    window: int = setting(
        "steps of a training window; 0: those of the longest episode",
        Sourced(0, "the public code: an update sees whole episodes"),
        least=0,
        most=100_000,
    )
    discount: float = setting("gamma, of rewards to come", least=0, most=1)
    returns: str = setting(
        "what the critic learns and advantages are made of",
        Sourced("lambda", "the public code"),
        choices=("lambda", "n_step", "v_trace"),
    )
    return_decay: float = setting(
        "lambda of the returns; with 1 all rewards of a window count",
        least=0,
        most=1,
        needs=("returns", ("lambda", "v_trace")),
    )
    n_steps: int = setting(
        "rewards of an n-step return",
        Sourced(20, "Espeholt et al., 2018: IMPALA's unrolls"),
        least=1,
        most=1000,
        needs=("returns", ("n_step",)),
    )
    passes: int = setting(
        "updates on each window; v_trace corrects for what the policy has learnt in those before",
        Sourced(1, "A3C and the public code: one"),
        least=1,
        most=16,
    )
    entropy_cost: float = setting("weight of the policy's entropy", least=0)
    baseline_cost: float = setting(
        "weight of half the squared error of the values",
        Sourced(0.4, "the public code"),
        least=0,
    )
    reconstruction: bool = setting(
        "the recurrent output must give back what was seen (RMA's losses)",
        Sourced(False, "no core but the RMA has it"),
    )
    image_cost: float = setting(
        "weight of the reconstructed observation",
        Sourced(50.0, "the public code"),
        least=0,
        needs="reconstruction",
    )
    channels: tuple[int, ...] = setting(
        "of the 3 x 3 convolutions that read an image, or none", least=1
    )
    code: int = setting("width of an observation's code", least=1)
    memoryless: bool = setting(
        "start every step from the first state and show it neither action nor reward: a "
        "feed-forward agent",
        Sourced(False, "ours: a control"),
    )
    held_out_episodes: int = setting(
        "episodes of an evaluation, played with sampled and again with greedy actions",
        Sourced(256, "ours: the standard error of the doors' chance is 0.3"),
        least=1,
        most=4096,
    )


_PUBLIC = {
    "cell": Sourced("ur_lstm", "ours: UR's cell"),
    "channels": Sourced((16, 32), "the public code"),
    "code": Sourced(500, "the public code"),
    "hidden_size": Sourced(256, "the public code: its controller's LSTM"),
    "embedding": Sourced(0, "ours: nothing is embedded"),
    "decoder": Sourced((200,), "the public code; ReLU for its tanh is ours"),
    "batch_size": Sourced(16, "the public code"),
    "learning_rates": Sourced((2e-4,), "the public code"),
    "optimizer": Sourced(
        "adam", "the public code; ours: beta 0.9, 0.999, epsilon 1e-8 for its 0, 0.95, 1e-6"
    ),
    "clip_norm": Sourced(0.0, "the public code: none; it clips the gradients of logits by value"),
    "discount": Sourced(0.92, "the public code"),
    "return_decay": Sourced(0.92, "the public code: lambda is gamma"),
    "entropy_cost": Sourced(0.05, "the public code"),
    "steps": Sourced(30_000, "ours: some 500,000 episodes"),
    "eval_every": Sourced(500, "ours: 60 points on the curve"),
}
_PYCOLAB = {
    "challenge": Sourced("active_match", "the public code has no passive one"),
    "rules": Sourced("pycolab", "the public code"),
    "explore_steps": Sourced(15, "the public code"),
    "distractor_steps": Sourced(90, "the public code"),
    "reward_steps": Sourced(15, "the public code"),
    "apples": Sourced(10, "the public code"),
    "apple_rewards": Sourced((1.0, 10.0), "the public code: an end of its range"),
}
_TIMES = {
    "rules": Sourced("dmlab", "UR D: the settings of Hung et al. (2018)"),
    "explore_steps": Sourced(75, "Hung et al., 2018: 5 s; ours: 15 steps a second"),
    "distractor_steps": Sourced(450, "Hung et al., 2018: 30 s"),
    "reward_steps": Sourced(75, "Hung et al., 2018: the rest of 40 s"),
}
_RMA_RECONSTRUCTS = {
    "reconstruction": Sourced(
        Depends("cell", {"*rma": True, "*": False}), "Hung et al., 2018: the RMA's losses"
    ),
}
_UR = {
    **_PUBLIC,
    **_TIMES,
    **_RMA_RECONSTRUCTS,
    "window": Sourced(100, "ours: A3C's is not in the paper"),
    "return_decay": Sourced(1.0, "ours: A3C's returns reach the window's end"),
    "entropy_cost": Sourced(0.01, "ours: not in the paper; the public agent's default"),
    "steps": Sourced(200_000, "ours: not in the paper"),
    "eval_every": Sourced(2000, "ours: 100 points on the curve"),
}


def _active(figure: str, *, apples: float, discount: float) -> Protocol:
    """Active Match among apples of one reward."""
    return Protocol(
        settings={
            **_UR,
            "challenge": Sourced("active_match", figure),
            "apples": Sourced(10, "ours: the public code's"),
            "apple_rewards": Sourced((apples,), f"UR D.3: apples of {apples:g}"),
            "discount": Sourced(discount, "UR D.3: reinforcement learning"),
        },
        cells=LIBRARY_CELLS,
    )


_PROTOCOLS = {
    "ur_fig7": Protocol(
        settings={
            **_UR,
            "challenge": Sourced("passive_match", "UR Figure 7; active_match, too"),
            "apples": Sourced(0, "UR Figure 7: without distractors; the delay stays (ours)"),
            "discount": Sourced(0.96, "UR D.3: reinforcement learning"),
        },
        cells=LIBRARY_CELLS,
    ),
    "ur_fig8": _active("UR Figure 8", apples=1.0, discount=0.998),
    "ur_fig10": _active("UR Figure 10", apples=5.0, discount=0.96),
    "pycolab": Protocol(
        settings={**_PUBLIC, **_PYCOLAB, "reconstruction": Sourced(True, "the public code")},
        cells=LIBRARY_CELLS,
    ),
    "small": Protocol(
        settings={
            **_RMA_RECONSTRUCTS,
            "challenge": Sourced("passive_match", "ours: no search"),
            "rules": Sourced("pycolab", "ours: the smaller grid"),
            "explore_steps": Sourced(2, "ours: a size that two cores learn in minutes"),
            "distractor_steps": Sourced(10, "ours: as explore_steps"),
            "reward_steps": Sourced(15, "the public code"),
            "apples": Sourced(0, "ours: as explore_steps"),
            "shuffled": Sourced(False, "ours: as explore_steps"),
            "cell": Sourced("ur_lstm", "ours: UR's cell"),
            "channels": Sourced((), "ours: as explore_steps"),
            "code": Sourced(64, "ours: as explore_steps"),
            "hidden_size": Sourced(64, "ours: as explore_steps"),
            "embedding": Sourced(0, "ours: nothing is embedded"),
            "decoder": Sourced((64,), "ours: as explore_steps"),
            "batch_size": Sourced(64, "ours: as explore_steps"),
            "learning_rates": Sourced((2e-3,), "ours: as explore_steps"),
            "clip_norm": Sourced(0.5, "ours: as explore_steps"),
            "discount": Sourced(
                Depends("challenge", {"*_match": 0.96, "t_maze": 0.9, "*": 0.99}),
                "UR D for match; ours: a T-maze's last action alone counts",
            ),
            "return_decay": Sourced(0.95, "ours: as explore_steps"),
            "entropy_cost": Sourced(
                Depends("challenge", {"*_match": 0.3, "t_maze": 0.03, "*": 0.001}),
                "ours: by the rewards' size; with less it goes to the same door for ever",
            ),
            "steps": Sourced(4000, "ours: as explore_steps"),
            "eval_every": Sourced(200, "ours: 20 points on the curve"),
        },
        cells=LIBRARY_CELLS,
    ),
}


def _task() -> Any:
    from experiments.match.task import MatchTask

    return MatchTask


MATCH = Experiment("match", MatchSettings, _task, _PROTOCOLS)
