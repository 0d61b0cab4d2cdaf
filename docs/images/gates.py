"""Draws what each gate does, gates.png and timescales.png: python docs/images/gates.py [FOLDER]."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import recurrent_gates as rg

FORGET, INPUT, GREY = "#1f6fb4", "#d9541a", "0.55"
X = jnp.linspace(-6, 6, 201)
UNITS = 32  # of ordered gates
MASTERS = (0.1, 0.5, 0.9)


def curves(gate, **pre):
    """The effective f and i of a gate against ``X``, everything that is not given at zero."""
    zeros = {slot: jnp.zeros(X.shape) for slot in gate.slots(len(X))}
    return gate.activate({**zeros, **{slot: value + 0 * X for slot, value in pre.items()}})


def peak(unit):
    """Pre-activations of ordered gates that are highest at one unit."""
    return -(((jnp.arange(UNITS) - unit) / 3.0) ** 2)


def draw_free(axes):
    f, i = curves(rg.GATES["standard"], f=X)
    axes.plot(X, f, color=FORGET)
    axes.plot(X, i, color=INPUT)
    axes.set_title("standard, c, u\ni has a map of its own")
    axes.set_xlabel("pre-activation of f")


def draw_refined(axes):
    gate = rg.GATES["r"]
    (low, _), (f, i), (high, _) = (curves(gate, f=X, r=r) for r in (-30.0, 0.0, 30.0))
    axes.fill_between(X, low, high, color=FORGET, alpha=0.2, linewidth=0)
    axes.fill_between(X, 1 - low, 1 - high, color=INPUT, alpha=0.2, linewidth=0)
    axes.plot(X, f, color=FORGET)
    axes.plot(X, i, color=INPUT)
    axes.set_title("r, ur, cr\na refine gate moves f")
    axes.set_xlabel("pre-activation of f")


def draw_ordered(axes):
    unit = np.arange(UNITS)
    f, i = rg.GATES["o"].activate({"f": peak(20), "i": peak(12)})
    axes.plot(unit, f, color=FORGET, drawstyle="steps-mid")
    axes.plot(unit, i, color=INPUT, drawstyle="steps-mid")
    axes.set_title("o, or\none sum over all units")
    axes.set_xlabel("unit")


def draw_masters(axes):
    for master in MASTERS:
        logit = np.log(master / (1 - master))
        f, i = curves(rg.GATES["um"], f=X, i=X, mf=logit, mi=-logit)
        axes.plot(X, f, color=FORGET)
        axes.plot(X, i, color=INPUT, dashes=(3, 3))
        axes.text(-6, float(f[0]) + 0.02, f"{master:g}", color=GREY, size=9)
    axes.set_title("om, um, cm\nmaster gates (grey) bound f, i")
    axes.set_xlabel("pre-activation of the fine gate")


def slopes(gate, features=16, samples=150):
    """(f, the norm of its gradient by all pre-activations) of units at random pre-activations."""
    widths = gate.slots(features)
    keys = dict(zip(widths, jax.random.split(jax.random.key(0), len(widths)), strict=True))
    pre = {s: 3 * jax.random.normal(keys[s], (samples, width)) for s, width in widths.items()}
    f = jax.vmap(lambda pre: gate.activate(pre)[0])(pre)
    jacobian = jax.vmap(jax.jacobian(lambda pre: gate.activate(pre)[0]))(pre)
    return f, jnp.sqrt(sum(jnp.sum(slope**2, axis=-1) for slope in jacobian.values()))


def draw_slopes(axes, gate):
    g = np.linspace(0.001, 0.999, 500)
    f, size = slopes(gate)
    axes.plot(f.ravel(), size.ravel(), ".", color=FORGET, markersize=1.5, rasterized=True)
    axes.plot(g, g * (1 - g), color=GREY, linewidth=1)
    axes.set(xlabel="effective forget gate", xlim=(0, 1), ylim=(0, 0.42))


def save(figure, path):
    """Writes a figure as a PNG of 64 colours, a third of the size of one of all."""
    figure.set_dpi(110)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    plt.close(figure)


def draw_gates(path):
    figure, axes = plt.subplots(2, 4, figsize=(10.5, 6), layout="constrained")
    above = (draw_free, draw_refined, draw_ordered, draw_masters)
    for draw, column in zip(above, axes[0], strict=True):
        draw(column)
        column.set_ylim(-0.03, 1.03)
    for name, column in zip(("standard", "r", "o", "um"), axes[1], strict=True):
        draw_slopes(column, rg.GATES[name])
    axes[0, 0].set_ylabel("effective gate")
    axes[0, 0].text(3, 0.86, "f", color=FORGET, size=13)
    axes[0, 0].text(3, 0.42, "i", color=INPUT, size=13)
    axes[1, 0].set_ylabel("size of the gradient of f")
    axes[1, 1].text(0.5, 0.03, "grey: f (1 - f), a sigmoid's", color=GREY, ha="center", size=9)
    for column in axes.flat:
        column.grid(alpha=0.25, linewidth=0.6)
        column.title.set_size(9.5)
    save(figure, path)


def draw_timescales(path):
    laws = (
        ("standard, r: a constant bias of 1", rg.gate_theory.constant_bias(), GREY),
        ("c: chrono, tmax 100", rg.gate_theory.chrono_known(100), "#2f8f4e"),
        ("c: chrono, unknown timescale", rg.gate_theory.chrono_drawn(), "#8a5fb5"),
        ("u: uniform, 1024 units", rg.gate_theory.uniform_gates(1024), FORGET),
        (
            "ur: uniform, refined, 1024 units",
            rg.gate_theory.refined(rg.gate_theory.uniform_gates(1024)),
            INPUT,
        ),
    )
    steps = np.logspace(0, 4, 800)
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for name, law, color in laws:
        axes.loglog(steps, np.maximum(1 - law.cdf(steps), 1e-9), color=color, label=name)
    axes.set(
        xlabel="decay period D = 1 / (1 - f) at the start, in steps",
        ylabel="share of units beyond it",
        xlim=(1, 1e4),
        ylim=(7e-4, 1.3),
    )
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(fontsize=8.5, loc="lower left")
    save(figure, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_gates(folder / "gates.png")
    draw_timescales(folder / "timescales.png")
