"""The papers' equations in plain NumPy (float64), one step at a time, from the papers alone.

GATO: "Gates are not the only option". UR: "Improving the gating mechanism of recurrent neural
networks". h-detach: "h-detach: modifying the LSTM gradient toward better optimization".
Parameters come in the library's tree, role then slot; nothing else of the library is used here.
"""

import numpy as np


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def softplus(x):
    return np.logaddexp(0.0, x)


def cumax(x):
    """cumsum of softmax (UR 2.5)."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.cumsum(weights / weights.sum(axis=-1, keepdims=True), axis=-1)


def refine(f, r):
    """UR eq. 16: r interpolates between f^2 and 1 - (1 - f)^2."""
    return (1.0 - r) * f**2 + r * (1.0 - (1.0 - f) ** 2)


def affine(params, slot, x, h):
    """W x + b + U h + b', with the biases that there are."""
    out = x @ params["kernel"][slot] + h @ params["recurrent_kernel"][slot]
    for role in ("bias", "recurrent_bias"):
        out = out + params.get(role, {}).get(slot, 0.0)
    return out


def gate(name, pre, b=None, tied=False, downsize=1):
    """The effective forget and input gates of UR Table 1 and appendix B.5.

    `pre(slot)` gives the linear map of a slot. `tied` is the rule of GRU and JANET, where a gate
    without its own input gate takes i = 1 - f.
    """
    if name == "standard":
        f = sigmoid(pre("f"))
        return f, 1.0 - f if tied else sigmoid(pre("i"))
    if name in ("c", "u"):  # eq. 17, 18: b on f, -b on i
        f = sigmoid(pre("f") + b)
        return f, 1.0 - f if tied else sigmoid(pre("i") - b)
    if name == "o":  # eq. 28, 29
        f = cumax(pre("f"))
        return f, 1.0 - f if tied else 1.0 - cumax(pre("i"))
    if name in ("r", "ur", "cr", "or"):  # eq. 10-13, Listing 2; eq. 34-37
        if name == "r":
            f, r = sigmoid(pre("f")), sigmoid(pre("r"))
        elif name == "or":
            f, r = cumax(pre("f")), sigmoid(pre("r"))
        else:
            f, r = sigmoid(pre("f") + b), sigmoid(pre("r") - b)
        g = refine(f, r)
        return g, 1.0 - g
    if name in ("om", "um", "cm"):  # eq. 19-23; eq. 32, 33 for the masters of um
        if name == "om":
            master_f, master_i = cumax(pre("mf")), 1.0 - cumax(pre("mi"))
        else:
            master_f, master_i = sigmoid(pre("mf") + b), sigmoid(pre("mi") - b)
        master_f, master_i = (np.repeat(m, downsize, axis=-1) for m in (master_f, master_i))
        f, i = sigmoid(pre("f")), sigmoid(pre("i"))
        w = master_f * master_i
        return f * w + (master_f - w), i * w + (master_i - w)
    raise KeyError(name)


def lstm(
    params,
    carry,
    x,
    name="standard",
    activation=np.tanh,
    output_activation=np.tanh,
    forget_gate=True,
    **how,
):
    """h-detach eq. 1-6, GATO eq. 7; carry (c, h). Without a forget gate: the lecture's s = s + i
    * s~."""
    c, h = carry
    if forget_gate:
        f, i = gate(
            name, lambda slot: affine(params, slot, x, h), params.get("gate", {}).get("b"), **how
        )
    else:
        f, i = 1.0, sigmoid(affine(params, "i", x, h))
    o = sigmoid(affine(params, "o", x, h))
    c = f * c + i * activation(affine(params, "u", x, h))
    return c, o * output_activation(c)


def gru(params, carry, x, name="standard", reset="after", **how):
    """GATO appendix E: h = z * h_tm1 + (1 - z) * h~; the gate's f is z, i is what multiplies h~."""
    (h,) = carry
    f, i = gate(
        name,
        lambda slot: affine(params, slot, x, h),
        params.get("gate", {}).get("b"),
        **{"tied": True, **how},
    )
    if reset:
        r = sigmoid(affine(params, "reset", x, h))
    if reset == "before":  # W x + U (r * h)
        u = np.tanh(affine(params, "u", x, r * h))
    elif reset == "after":  # torch: W x + b + r * (U h + b')
        late = h @ params["recurrent_kernel"]["u"] + params.get("recurrent_bias", {}).get("u", 0.0)
        u = np.tanh(x @ params["kernel"]["u"] + params["bias"]["u"] + r * late)
    else:
        u = np.tanh(affine(params, "u", x, h))
    return (f * h + i * u,)


def gru_d(params, carry, x):
    """Che et al., 2018: rates of decay exp(-max(0, W delta + b)) of the input, towards the mean,
    which is 0, and of the state; then a GRU of the imputed input and the mask m. Their z is 1 - f.
    """
    (h,) = carry
    last, m, delta = np.split(x, 3, axis=-1)
    kernel, bias = params["decay"]["kernel"], params["decay"]["bias"]
    gamma_x = np.exp(-np.maximum(0, delta * kernel["input"] + bias["input"]))
    gamma_h = np.exp(-np.maximum(0, delta @ kernel["state"] + bias["state"]))
    x_hat = m * last + (1 - m) * gamma_x * last
    h_hat = gamma_h * h
    read = np.concatenate([x_hat, m], axis=-1)
    z = sigmoid(-affine(params, "f", read, h_hat))
    r = sigmoid(affine(params, "reset", read, h_hat))
    h_tilde = np.tanh(affine(params, "u", read, r * h_hat))
    return ((1 - z) * h_hat + z * h_tilde,)


def janet(params, carry, x, name="standard", **how):
    """UR footnote 4: h = f * h_tm1 + (1 - f) * u."""
    (h,) = carry
    f, i = gate(
        name,
        lambda slot: affine(params, slot, x, h),
        params.get("gate", {}).get("b"),
        **{"tied": True, **how},
    )
    return (f * h + i * np.tanh(affine(params, "u", x, h)),)


def elman(params, carry, x, activation=np.tanh):
    """GATO eq. 1."""
    (h,) = carry
    return (activation(affine(params, "h", x, h)),)


def gato_maps(params, r, x, rate=0.7):
    """f(r, x) and the increment SoftPlus(...) of GATO eq. 5 (one layer) or eq. 6 (two layers)."""

    def pre(part, slot):
        out = x @ part["kernel"][slot] + part["recurrent_kernel"][slot] * np.tile(
            r, part["recurrent_kernel"][slot].shape[-1] // r.shape[-1]
        )
        for role in ("bias", "recurrent_bias"):
            out = out + part.get(role, {}).get(slot, 0.0)
        return out

    new_r = rate * sigmoid(pre(params["f"], "gate")) * r + np.tanh(pre(params["f"], "candidate"))
    inner = pre(params["g"], "s")
    if "out_kernel" in params["g"]:  # F_j sees r_j and x through k hidden units of its own
        weights = params["g"]["out_kernel"]  # [k, J]
        hidden = np.maximum(inner.reshape(*inner.shape[:-1], *weights.shape), 0.0)
        inner = (weights * hidden).sum(axis=-2) + params["g"]["out_bias"]
    return new_r, softplus(inner)


def gato(params, carry, x, rate=0.7, s_update="accumulate"):
    """GATO eq. 4-6; carry (r, s); appendix A for the two ablations."""
    r, s = carry
    new_r, increment = gato_maps(params, r, x, rate)
    new_s = {"accumulate": s + increment, "zero": np.zeros_like(s), "replace": increment}[s_update]
    return new_r, new_s


def gato_derivatives(params, r, x, rate=0.7):
    """df_j/dr_j and dg_j/dr_j of one unbatched step, by hand, each [J]."""
    part = params["f"]
    a = x @ part["kernel"]["gate"] + part["recurrent_kernel"]["gate"] * r + part["bias"]["gate"]
    c = (
        x @ part["kernel"]["candidate"]
        + part["recurrent_kernel"]["candidate"] * r
        + part["bias"]["candidate"]
    )
    df = rate * (sigmoid(a) + sigmoid(a) * (1 - sigmoid(a)) * part["recurrent_kernel"]["gate"] * r)
    df = df + (1 - np.tanh(c) ** 2) * part["recurrent_kernel"]["candidate"]
    part = params["g"]
    weight = part["recurrent_kernel"]["s"]
    if "out_kernel" not in part:
        inner, slope = x @ part["kernel"]["s"] + weight * r + part["bias"]["s"], weight
    else:
        shape = part["out_kernel"].shape
        hidden = (x @ part["kernel"]["s"] + part["bias"]["s"]).reshape(shape) + weight.reshape(
            shape
        ) * r[None]
        inner = (part["out_kernel"] * np.maximum(hidden, 0)).sum(0) + part["out_bias"]
        slope = (part["out_kernel"] * (hidden > 0) * weight.reshape(shape)).sum(0)
    return df, sigmoid(inner) * slope


def detach_matrices(params, carry, x, role, slot, row, column):
    """A_t and B_t of h-detach eq. 7 for one weight, from Notation 1 of its appendix; one
    unbatched step.

    The weight is `params[role][slot][row, column]`: the library keeps W transposed, [in, out], so
    it is the paper's (W_slot)_{column, row}. In psi~ the factor Delta^c is meant, which the
    appendix's Corollary 3 drops.
    """
    c_tm1, h_tm1 = carry
    slots = {"f": "f", "i": "i", "o": "o", "g": "u"}
    pre = {star: affine(params, name, x, h_tm1) for star, name in slots.items()}
    f, i, o, g = sigmoid(pre["f"]), sigmoid(pre["i"]), sigmoid(pre["o"]), np.tanh(pre["g"])
    c = f * c_tm1 + i * g
    delta_c = o * (1 - np.tanh(c) ** 2)
    delta = {
        "o": o * (1 - o) * np.tanh(c),
        "f": f * (1 - f) * c_tm1,
        "i": i * (1 - i) * g,
        "g": (1 - g**2) * i,
    }
    recurrent = {
        star: np.asarray(params["recurrent_kernel"][name]).T for star, name in slots.items()
    }
    read = (h_tm1 if role == "recurrent_kernel" else x)[row]  # what the weight multiplies
    e = {
        star: np.where(np.arange(len(c)) == column, read, 0.0) * (name == slot)
        for star, name in slots.items()
    }
    psi = sum(delta[star][:, None] * recurrent[star] for star in "fgi")
    psi_tilde = delta["o"][:, None] * recurrent["o"] + delta_c[:, None] * psi
    k = sum(delta[star] * e[star] for star in "fgi")
    k_tilde = delta["o"] * e["o"] + delta_c * k
    zero, one = np.zeros_like(psi), np.eye(len(c))
    a = np.block(
        [
            [np.diag(f), zero, np.diag(k)],
            [np.diag(delta_c * f), zero, np.diag(k_tilde)],
            [zero, zero, one],
        ]
    )
    b = np.block([[zero, psi, zero], [zero, psi_tilde, zero], [zero, zero, zero]])
    return a, b, (c, o * np.tanh(c))


def unroll(
    step,
    carry,
    xs,
    emit,
    reset_carry=None,
    valid=None,
    resets=None,
    reverse=False,
    before=None,
    after=None,
):
    """The loop over time as the design states it, on arrays [T, B, ...]; returns all carries,
    last carry, ys."""
    steps = len(xs)
    order = reversed(range(steps)) if reverse else range(steps)
    carries, ys = [None] * steps, [None] * steps

    def choose(mask, new, old):
        return tuple(np.where(mask[:, None], n, o) for n, o in zip(new, old, strict=True))

    for t in order:
        if resets is not None:
            carry = choose(resets[t], reset_carry, carry)
        new = step(before(t, carry) if before else carry, xs[t])
        new = after(t, carry, new) if after else new
        y = emit(new)
        if valid is not None:
            new = choose(valid[t], new, carry)
            y = np.where(valid[t][:, None], y, 0.0)
        carry = new
        carries[t], ys[t] = carry, y
    stacked = tuple(np.stack(field) for field in zip(*carries, strict=True)) if steps else None
    return stacked, carry, (np.stack(ys) if steps else None)


# Linear recurrences, whose maps read the input alone.


def input_gate(params, x, name, **how):
    """f and i of a gate over maps of the input."""
    return gate(
        name,
        lambda slot: x @ params["kernel"][slot] + params["bias"][slot],
        params.get("gate", {}).get("b"),
        **how,
    )


def mingru(params, carry, x, name="standard"):
    """Feng et al. 2024, 3.1: h = (1 - z) h + z (W x + b), z the input's share."""
    (h,) = carry
    f, z = input_gate(params, x, name, tied=True)
    return (f * h + z * (x @ params["kernel"]["u"] + params["bias"]["u"]),)


def minlstm(params, carry, x, name="standard"):
    """Feng et al. 2024, 3.2: f' = f / (f + i), i' = i / (f + i)."""
    (h,) = carry
    f, i = input_gate(params, x, name)
    return ((f * h + i * (x @ params["kernel"]["u"] + params["bias"]["u"])) / (f + i),)


def rg_lru(params, carry, x, name="standard"):
    """De et al. 2024, eq. 1-4, the recurrence gate r being 1 - f."""
    (h,) = carry
    f, i = input_gate(params, x, name)
    a = sigmoid(params["decay"]) ** (8.0 * (1.0 - f))
    u = x @ params["kernel"]["u"] + params["bias"]["u"]
    left = np.maximum(1.0 - a**2, 0.0)  # cumax rounds to above 1
    return (a * h + np.sqrt(left) * (i * u),)


def lru(params, carry, x):
    """Orvieto et al. 2023, 3.3 and 3.4, in complex numbers; carry (real, imaginary)."""
    state = carry[0] + 1j * carry[1]
    turn = np.exp(-np.exp(params["nu"]) + 1j * np.exp(params["theta"]))
    inputs = x @ (params["kernel"]["real"] + 1j * params["kernel"]["imag"])
    state = turn * state + np.exp(params["gamma"]) * inputs
    return state.real, state.imag


def lru_output(params, carry, x):
    """Re(C s) + D x."""
    out = params["out_kernel"]["real"] + 1j * params["out_kernel"]["imag"]
    return ((carry[0] + 1j * carry[1]) @ out).real + x @ params["skip"]


def gated_gato_decay(params, r, x, name, rate=0.7):
    """GATO eq. 5 with the forget gate of another mechanism in the place of the sigmoid."""

    def pre(slot):
        if slot == "i":  # masters have one, which f does not read
            return np.zeros_like(r)
        return (
            x @ params["kernel"][slot]
            + params["recurrent_kernel"][slot] * r
            + (params["bias"][slot])
        )

    f, _ = gate(name, pre, params.get("gate", {}).get("b"), tied=True)
    return rate * f * r + np.tanh(pre("candidate"))
