"""What a newcomer gets wrong: each mistake is one sentence on what was expected and what was
given."""

import pathlib
import traceback
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates import analysis
from recurrent_gates.analysis import newton_report

T, B, D, F = 5, 2, 3, 4
KEY = jax.random.key(0)
XS = jax.random.normal(KEY, (T, B, D))
LSTM = rg.LSTM(F)
GATO = rg.CELLS["gato1"](F)
PARAMS = LSTM.init_params(KEY, D)
GATO_PARAMS = GATO.init_params(KEY, D)
CARRY = LSTM.initial((B,))
Z = LSTM.project(PARAMS, XS[0])
LAYER = rg.RNN(LSTM, time_major=True)
VARIABLES = {"params": {"cell": PARAMS}}
DETACH = rg.Detach(0.5)
TORCH = {
    "weight_ih_l0": np.ones((4 * F, D), np.float32),
    "weight_hh_l0": np.ones((4 * F, F), np.float32),
}


def run(*args, **options):
    return rg.unroll(*(args or (LSTM, PARAMS, XS)), **options)


def layer(xs=XS, variables=VARIABLES, **options):
    return LAYER.apply(variables, xs, **options)


def stack(*cells, **options):
    return rg.Stack(cells or (LSTM, rg.LSTM(F)), time_major=True, **options)


MISTAKES = {
    # The cell.
    "unroll of a name": (lambda: run("lstm", PARAMS, XS), "cell", "'lstm'"),
    "unroll of a class": (lambda: run(rg.LSTM, PARAMS, XS), "cell", "class LSTM"),
    "unroll of a foreign cell": (lambda: run(nn.LSTMCell(F), PARAMS, XS), "cell", "FlaxCell"),
    "unroll of a layer": (lambda: run(LAYER, PARAMS, XS), "cell", "RNN"),
    "unroll of a factory": (lambda: run(rg.CELLS["lstm"], PARAMS, XS), "cell", "factory of one"),
    "RNN of a class": (lambda: rg.RNN(rg.LSTM), "cell", "class LSTM"),
    "RNN of a name": (lambda: rg.RNN("lstm"), "cell", "'lstm'"),
    "RNN of a number": (lambda: rg.RNN(32), "cell", "32"),
    "RNN of a foreign cell": (lambda: rg.RNN(nn.GRUCell(F)), "cell", "FlaxCell"),
    "RNN of an RNN": (lambda: rg.RNN(LAYER), "cell", "RNN"),
    "Stack of one cell": (lambda: rg.Stack(LSTM), "sequence of cells", "LSTM"),
    "Stack of classes": (lambda: rg.Stack((rg.LSTM, rg.LSTM)), "cell", "class LSTM"),
    "Stack of names": (lambda: rg.Stack(("lstm",)), "cell", "'lstm'"),
    "Stack of nothing": (lambda: rg.Stack(()), "at least one", "Stack"),
    "Stack with a dropout in words": (lambda: stack(dropout="0.5"), "number", "'0.5'"),
    "Stack with a dropout in percent": (lambda: stack(dropout=50), "0, 1", "50"),
    # Settings.
    "no units": (lambda: rg.LSTM(0), "positive", "0"),
    "half a unit": (lambda: rg.LSTM(4.5), "integer", "4.5"),
    "units as a string": (lambda: rg.GRU("4"), "integer", "'4'"),
    "units as a bool": (lambda: rg.GRU(True), "integer", "True"),
    "units as a shape": (lambda: rg.GRU((4,)), "integer", "tuple"),
    "a gate by name": (lambda: rg.LSTM(F, gate="ur"), "Gate", "'ur'"),
    "a gate's class": (lambda: rg.GRU(F, gate=rg.Gate), "Gate", "class Gate"),
    "an activation by name": (lambda: rg.LSTM(F, activation="tanh"), "function", "'tanh'"),
    "a GRU's activation by name": (lambda: rg.GRU(F, activation="tanh"), "function", "'tanh'"),
    "an Elman's activation by name": (lambda: rg.Elman(F, activation=1), "function", "1"),
    "an initializer by name": (lambda: rg.GRU(F, kernel_init="zeros"), "function", "'zeros'"),
    "a dtype of integers": (lambda: rg.LSTM(F, dtype=jnp.int32), "floating", "int32"),
    "parameters of integers": (lambda: rg.GRU(F, param_dtype=int), "floating", "int"),
    "a dtype that is none": (lambda: rg.GRU(F, dtype="float23"), "floating", "float23"),
    "GATO in integers": (lambda: rg.GATO(F, dtype=jnp.int8), "floating", "int8"),
    "no parameters' dtype": (lambda: rg.GRU(F, param_dtype=None), "floating", "None"),
    "bias vectors as a bool": (lambda: rg.LSTM(F, bias_vectors=True), "1 or 2", "True"),
    "a flag as a string": (lambda: rg.LSTM(F, forget_gate="no"), "True or False", "'no'"),
    "GATO's f by name": (lambda: rg.GATO(F, f="decay"), "GATOMap", "'decay'"),
    "GATO's g as a class": (lambda: rg.GATO(F, g=rg.TwoLayer), "GATOMap", "class TwoLayer"),
    "GATO's gamma by name": (lambda: rg.GATO(F, gamma="cos"), "function", "'cos'"),
    "a rate that is no number": (lambda: rg.GatedDecay(np.nan), "finite", "nan"),
    "a rate in words": (lambda: rg.CELLS["gato"](F, rate="0.7"), "number", "'0.7'"),
    "a period of 0": (lambda: rg.GATO(F, wrap=0.0), "above 0", "0.0"),
    "a period of nan": (lambda: rg.GATO(F, wrap=np.nan), "above 0", "nan"),
    "a negative period": (lambda: rg.GATO(F, wrap=-1), "above 0", "-1"),
    "hidden units by half": (lambda: rg.TwoLayer(2.5), "whole", "2.5"),
    "a forget bias of nan": (lambda: rg.Gate(forget_bias=np.nan), "finite", "nan"),
    "tmax in words": (lambda: rg.Gate(bias="chrono", tmax="9"), "tmax", "'9'"),
    "downsize by half": (lambda: rg.Gate(master=True, downsize=1.5), "whole", "1.5"),
    "a gate's flag as a word": (lambda: rg.Gate(refine="yes"), "True or False", "'yes'"),
    # Options that nothing would read.
    "o_lstm's forget bias": (lambda: rg.CELLS["o_lstm"](F, forget_bias=5), "no effect", "5"),
    "its default, too": (lambda: rg.CELLS["o_lstm"](F, forget_bias=1), "no effect", "1"),
    "u_lstm's forget bias": (lambda: rg.CELLS["u_lstm"](F, forget_bias=5), "no effect", "5"),
    "u_lstm's tmax": (lambda: rg.CELLS["u_lstm"](F, tmax=50), "no effect", "50"),
    "lstm's downsize": (lambda: rg.CELLS["lstm"](F, downsize=4), "no effect", "4"),
    "lstm's bias mode": (lambda: rg.CELLS["lstm"](F, bias_mode="frozen"), "no effect", "frozen"),
    "u_lstm's refine bias": (
        lambda: rg.CELLS["u_lstm"](F, refine_bias="zero"),
        "no effect",
        "zero",
    ),
    "a forget bias without a gate": (
        lambda: rg.CELLS["lstm"](F, forget_gate=False, forget_bias=2),
        "no effect",
        "forget_gate=False",
    ),
    "a gate and its options": (
        lambda: rg.CELLS["lstm"](F, gate=rg.Gate(), forget_bias=2),
        "not both",
        "forget_bias",
    ),
    # Parameters.
    "a layer's variables": (
        lambda: run(LSTM, VARIABLES, XS),
        "kernel, recurrent_kernel",
        "['params']['cell']",
    ),
    "a layer's params": (lambda: run(LSTM, VARIABLES["params"], XS), "kernel", "['cell']"),
    "a stack's params": (
        lambda: run(LSTM, {"params": {"cells_0": PARAMS}}, XS),
        "kernel",
        "['params']['cells_0']",
    ),
    "another cell's parameters": (lambda: run(GATO, PARAMS, XS), "f, g", "kernel"),
    "another gate's parameters": (
        lambda: run(rg.CELLS["u_lstm"](F), PARAMS, XS),
        "gate",
        "kernel, recurrent_kernel, bias",
    ),
    "a gate too many": (
        lambda: run(LSTM, PARAMS | {"gate": {"b": jnp.ones(F)}}, XS),
        "must have bias, kernel, recurrent_kernel,",
        "gate",
    ),
    "another family's parameters": (lambda: run(rg.GRU(F), PARAMS, XS), "reset", "i, o, u"),
    "another size's parameters": (lambda: run(rg.LSTM(8), PARAMS, XS), "[8]", "[4]"),
    "another width's parameters": (
        lambda: run(LSTM, PARAMS, jnp.ones((T, B, 7))),
        "inputs of 7",
        "[3, 4]",
    ),
    "no parameters": (lambda: run(LSTM, None, XS), "init_params", "None"),
    "empty parameters": (lambda: run(LSTM, {}, XS), "kernel", "empty"),
    "a list of parameters": (lambda: run(LSTM, [PARAMS], XS), "dict", "list"),
    "shapes in lists": (lambda: run(LSTM, PARAMS | {"bias": [1.0]}, XS), "bias", "list"),
    "integers in parameters": (
        lambda: run(LSTM, jax.tree.map(lambda a: a.astype(int), PARAMS), XS),
        "floating",
        "int32",
    ),
    "parameters and inputs swapped": (lambda: run(LSTM, XS, PARAMS), "xs|dict", "array|mapping"),
    "a layer with the params alone": (lambda: layer(variables=PARAMS), "kernel", "empty"),
    "a layer with another size": (
        lambda: rg.RNN(rg.LSTM(8), time_major=True).apply(VARIABLES, XS),
        "[8]",
        "[4]",
    ),
    "a layer with another cell": (
        lambda: rg.RNN(GATO, time_major=True).apply(VARIABLES, XS),
        "f, g",
        "kernel",
    ),
    "a layer on another width": (lambda: layer(jnp.ones((T, B, 7))), "inputs of 7", "[3, 4]"),
    "init_params with a number for a key": (lambda: LSTM.init_params(0, D), "PRNG key", "0"),
    "GATO with a number for a key": (lambda: GATO.init_params(0, D), "PRNG key", "0"),
    "init_params with the inputs": (lambda: LSTM.init_params(KEY, XS), "xs.shape", "[5, 2, 3]"),
    "init_params with a shape": (lambda: GATO.init_params(KEY, (B, D)), "whole", "tuple"),
    "init_params with no inputs": (lambda: LSTM.init_params(KEY, 0), "at least 1", "0"),
    "initial with a number": (lambda: LSTM.initial(B), "tuple", "2"),
    "initial with the inputs": (lambda: GATO.initial(XS), "tuple", "[5, 2, 3]"),
    "initial with a key": (lambda: LSTM.initial(KEY), "tuple", "key"),
    "initial with halves": (lambda: LSTM.initial((2.5,)), "whole", "2.5"),
    # A step.
    "a raw x in step": (lambda: LSTM.step(PARAMS, CARRY, XS[0]), "project", "[2, 3]"),
    "a raw x in GATO's step": (
        lambda: GATO.step(GATO_PARAMS, GATO.initial((B,)), XS[0]),
        "project",
        "[2, 3]",
    ),
    "a raw x in lstm_step": (lambda: rg.lstm_step(PARAMS, CARRY, XS[0]), "project", "[2, 3]"),
    "a raw x in gru_step": (
        lambda: rg.gru_step(PARAMS, rg.HiddenState(CARRY.h), XS[0]),
        "project",
        "[2, 3]",
    ),
    "a raw x in gato_step": (
        lambda: rg.gato_step(GATO_PARAMS, GATO.initial((B,)), XS[0]),
        "project",
        "[2, 3]",
    ),
    "a raw x in gates": (lambda: LSTM.gates(PARAMS, CARRY, XS[0]), "project", "[2, 3]"),
    "a step of swapped arguments": (lambda: LSTM.step(PARAMS, Z, CARRY), "order", "mapping"),
    "a tuple as a step's carry": (lambda: LSTM.step(PARAMS, tuple(CARRY), Z), "LSTMState", "tuple"),
    "another carry in a step": (
        lambda: LSTM.step(PARAMS, GATO.initial((B,)), Z),
        "LSTMState",
        "GATOState",
    ),
    "a step of all times": (
        lambda: LSTM.step(PARAMS, CARRY, LSTM.project(PARAMS, XS)),
        "one time",
        "[5, 2, 4]",
    ),
    "a step with variables": (lambda: LSTM.step(VARIABLES, CARRY, Z), "kernel", "['cell']"),
    "project with variables": (lambda: LSTM.project(VARIABLES, XS), "kernel", "['cell']"),
    "GATO's project with variables": (
        lambda: GATO.project({"params": GATO_PARAMS}, XS),
        "kernel",
        "None",
    ),
    "project of a list of arrays": (
        lambda: LSTM.project(PARAMS, [XS[0], XS[1]]),
        "one array",
        "stack",
    ),
    "a cell of (x, carry)": (
        lambda: LSTM.apply({"params": PARAMS}, XS[0], CARRY),
        "cell(carry, x)",
        "LSTMState",
    ),
    "a cell of x alone as the carry": (
        lambda: LSTM.apply({"params": PARAMS}, XS[0], XS[0]),
        "LSTMState",
        "[2, 3]",
    ),
    "a cell with another batch": (
        lambda: LSTM.apply({"params": PARAMS}, LSTM.initial((7,)), XS[0]),
        "[2, 4]",
        "[7, 4]",
    ),
    "a cell of a number": (lambda: LSTM.apply({"params": PARAMS}, CARRY, jnp.ones(())), "D", "x"),
    "a cell without inputs": (lambda: LSTM.apply({"params": PARAMS}, CARRY, None), "x", "None"),
    # Sequences.
    "inputs without time": (lambda: run(LSTM, PARAMS, XS[0, 0]), "time first", "[3]"),
    "inputs as numbers": (lambda: run(LSTM, PARAMS, [[0.0] * D] * T), "array", "0.0"),
    "no inputs": (lambda: run(LSTM, PARAMS, None), "array", "None"),
    "integer inputs": (lambda: run(LSTM, PARAMS, XS.astype(int)), "floating", "int32"),
    "bool inputs": (lambda: run(LSTM, PARAMS, XS > 0), "floating", "bool"),
    "a list of inputs": (lambda: run(LSTM, PARAMS, list(XS)), "one array", "stack"),
    "a layer's input without time": (lambda: layer(XS[0, 0]), "time and feature", "3"),
    "a layer's inputs in a list": (lambda: layer(list(XS)), "one array", "stack"),
    "a layer's inputs in a dict": (lambda: layer({"x": XS}), "one array", "x"),
    "a layer's integers": (lambda: layer(XS.astype(int)), "floating", "int32"),
    "a carry of another batch": (lambda: run(carry=LSTM.initial((7,))), "(2, 4)", "(7, 4)"),
    "a batch-major sequence": (
        lambda: run(LSTM, PARAMS, jnp.swapaxes(XS, 0, 1), CARRY),
        "(5, 4)",
        "(2, 4)",
    ),
    "another cell's carry": (lambda: run(carry=GATO.initial((B,))), "LSTMState", "GATOState"),
    "a layer's other carry": (
        lambda: layer(initial_carry=GATO.initial((B,))),
        "LSTMState",
        "GATOState",
    ),
    "h alone as the carry": (lambda: run(carry=CARRY.h), "LSTMState", "[2, 4]"),
    "a key as the carry": (lambda: run(LSTM, PARAMS, XS, KEY), "LSTMState", "key"),
    "strings as the carry": (lambda: run(carry=("c", "h")), "arrays of numbers", "'c'"),
    "a carry to reset to of another batch": (
        lambda: run(reset_carry=LSTM.initial((7,))),
        "(2, 4)",
        "(7, 4)",
    ),
    "another dict as the carry": (
        lambda: run(carry={"r": CARRY.c, "s": CARRY.h}),
        "LSTMState",
        "r, s",
    ),
    "a number for a key": (lambda: run(carry_fns=[DETACH], key=0), "PRNG key", "0"),
    "several keys": (lambda: run(carry_fns=[DETACH], key=jax.random.split(KEY)), "one", "[2]"),
    "floats for a key": (lambda: run(carry_fns=[DETACH], key=jnp.ones(2)), "PRNG key", "float32"),
    "no key": (lambda: run(carry_fns=[DETACH]), "key=", "Detach"),
    "one carry function": (lambda: run(carry_fns=rg.Detach(0.5)), "sequence", "[Detach(...)]"),
    "a carry function's class": (lambda: run(carry_fns=[rg.Detach]), "hold", "class Detach"),
    "a carry function by name": (lambda: run(carry_fns=["detach"]), "hold", "'detach'"),
    "carry functions by name": (lambda: run(carry_fns="detach"), "sequence", "'detach'"),
    "no carry functions": (lambda: run(carry_fns=None), "sequence", "None"),
    "a function as a carry function": (lambda: run(carry_fns=[jnp.tanh]), "hold", "tanh"),
    "a layer's one carry function": (lambda: layer(carry_fns=DETACH), "sequence", "Detach"),
    "a stack's one carry function": (
        lambda: stack(carry_fns=DETACH).init(KEY, XS),
        "sequence",
        "Detach",
    ),
    "a probability as a string": (lambda: rg.Detach("0.5"), "probability", "'0.5'"),
    "a probability in percent": (lambda: rg.Zoneout(np.float32(50)), "probability", "50"),
    "a field that is none": (
        lambda: run(carry_fns=[rg.Damp(0.5, field=1.5)]),
        "c, h",
        "1.5",
    ),
    "one noise": (lambda: run(carry_fns=[DETACH], noise=jnp.ones(T)), "one entry per", "[5]"),
    "noise in a list": (
        lambda: run(carry_fns=[DETACH], noise=[[True] * T]),
        "leading axis T",
        "True",
    ),
    "noise of another time": (
        lambda: run(carry_fns=[DETACH], noise=[jnp.ones(7, bool)]),
        "T = 5",
        "(7,)",
    ),
    "two noises for one": (
        lambda: run(carry_fns=[DETACH], noise=[jnp.ones(T, bool)] * 2),
        "1",
        "2",
    ),
    "noise that is not drawn": (
        lambda: run(carry_fns=[DETACH], noise=[jnp.ones(T, bool)], deterministic=True),
        "no effect",
        "deterministic=True",
    ),
    "a field of a mapping": (
        lambda: rg.carry.get_field({"grid": jnp.ones(3), "steps": 1}, None),
        "a NamedTuple, a tuple or one array",
        "grid, steps",
    ),
    "draw_noise of one function": (
        lambda: rg.draw_noise(DETACH, KEY, T, (B,)),
        "sequence",
        "Detach",
    ),
    "draw_noise with a number": (lambda: rg.draw_noise([DETACH], 0, T, (B,)), "PRNG key", "0"),
    "float lengths": (lambda: run(lengths=jnp.ones(B)), "integers", "float32"),
    "negative lengths": (lambda: run(lengths=jnp.array([-1, 2])), "from 0 to T = 5", "-1"),
    "lengths beyond T": (lambda: run(lengths=[3, 9]), "from 0 to T = 5", "9"),
    "lengths of another batch": (lambda: run(lengths=jnp.ones(7, int)), "(2,)", "(7,)"),
    "a length for all": (lambda: run(lengths=3), "(2,)", "()"),
    "a layer's lengths beyond T": (
        lambda: layer(seq_lengths=[3, 9], reverse=True),
        "from 0 to T",
        "9",
    ),
    "lengths and valid": (
        lambda: run(lengths=[3, 3], valid=jnp.ones((T, B), bool)),
        "not both",
        "valid",
    ),
    "a float valid": (lambda: run(valid=jnp.ones((T, B))), "bool", "float32"),
    "float resets": (lambda: run(resets=jnp.zeros((T, B))), "bool", "float32"),
    "nan resets": (lambda: run(resets=jnp.full((T, B), jnp.nan)), "bool", "float32"),
    "a mask without batch": (lambda: run(resets=jnp.zeros(T, bool)), "(5, 2)", "(5,)"),
    "a batch-major mask": (lambda: run(valid=jnp.ones((B, T), bool)), "(5, 2)", "(2, 5)"),
    "a layer's mask without batch": (lambda: layer(resets=[True] * T), "(5, 2)", "(5,)"),
    "a layer's float mask": (lambda: layer(valid=jnp.ones((T, B))), "bool", "float32"),
    "reverse as a word": (lambda: run(reverse="no"), "True or False", "'no'"),
    "deterministic as a word": (lambda: run(deterministic="yes"), "True or False", "'yes'"),
    "a layer's reverse as a word": (lambda: layer(reverse="no"), "True or False", "'no'"),
    "time_major as a number": (lambda: layer(time_major=1), "True or False", "1"),
    "a layer deterministic by a word": (lambda: layer(deterministic="no"), "True or", "'no'"),
    "remat as a bool": (lambda: run(remat=True), "at least 1", "True"),
    "remat by half": (lambda: run(remat=2.5), "at least 1", "2.5"),
    "unroll as a bool": (lambda: run(unroll=True), "at least 1", "True"),
    "unroll as a word": (lambda: run(unroll="all"), "at least 1", "'all'"),
    "unroll of 0": (lambda: run(unroll=0), "at least 1", "0"),
    "return_carries as a bool": (lambda: run(return_carries=True), "'last' or 'all'", "True"),
    "a backend that is none": (lambda: run(backend="cuda"), "'fused'", "'cuda'"),
    "no backend": (lambda: run(backend=None), "'fused'", "None"),
    "a report of a name": (lambda: newton_report("gato", GATO_PARAMS, XS), "cell", "'gato'"),
    "a report without time": (lambda: newton_report(GATO, GATO_PARAMS, XS[0, 0]), "time", "[3]"),
    "a stack's one carry": (
        lambda: stack().init(KEY, XS, initial_carry=XS),
        "one entry per layer: 2",
        "[5, 2, 3]",
    ),
    # Interop, initializers and the rest.
    "from_torch of a module": (
        lambda: rg.from_torch(types.SimpleNamespace(state_dict=dict)),
        "state dict",
        "state_dict()",
    ),
    "from_torch of a list": (lambda: rg.from_torch([1]), "mapping", "list"),
    "from_torch of a path": (lambda: rg.from_torch("lstm.pt"), "mapping", "'lstm.pt'"),
    "from_torch of two modules": (
        lambda: rg.from_torch({f"{n}.{k}": v for n in "ab" for k, v in TORCH.items()}),
        "one LSTM",
        "'a.', 'b.'",
    ),
    "from_torch of a whole model": (
        lambda: rg.from_torch(TORCH | {"decoder.weight": np.ones((2, 2))}),
        "LSTM or GRU",
        "decoder.weight",
    ),
    "from_torch of vectors": (
        lambda: rg.from_torch(TORCH | {"weight_hh_l0": np.ones(16)}),
        "2 axes",
        "(16,)",
    ),
    "from_torch of words": (
        lambda: rg.from_torch(TORCH | {"weight_hh_l0": "ones"}),
        "floats",
        "'ones'",
    ),
    "to_torch of params": (lambda: rg.to_torch(PARAMS), "{'forward': params}", "kernel"),
    "to_torch of a list of params": (lambda: rg.to_torch([PARAMS]), "{'forward': params}", "bias"),
    "to_torch of one layer": (lambda: rg.to_torch({"forward": PARAMS}), "sequence", "forward"),
    "to_torch of variables": (
        lambda: rg.to_torch([{"forward": VARIABLES}]),
        "recurrent_kernel",
        "params",
    ),
    "to_torch of GATO": (lambda: rg.to_torch([{"forward": GATO_PARAMS}]), "LSTM", "f, g"),
    "to_torch of GRU-D": (
        lambda: rg.to_torch([{"forward": rg.GRUD(4).init_params(KEY, 6)}]),
        "no",
        "decay",
    ),
    "to_torch of a reset before the product": (
        lambda: rg.to_torch([{"forward": rg.GRU(4, reset="before").init_params(KEY, 3)}]),
        'GRU(reset="after")',
        "none",
    ),
    "to_torch of nothing": (lambda: rg.to_torch([]), "sequence", "list of 0"),
    "to_torch of one way and two": (
        lambda: rg.to_torch([{"forward": PARAMS}, {"forward": PARAMS, "backward": PARAMS}]),
        "one direction",
        "two",
    ),
    "uniform_gate_bias of a number": (lambda: rg.uniform_gate_bias(0, 8), "PRNG key", "0"),
    "uniform_gate_bias of a shape": (lambda: rg.uniform_gate_bias(KEY, (8,)), "d >= 3", "(8,)"),
    "chrono_bias of a number": (lambda: rg.chrono_bias(KEY, 8), "tuple", "8"),
    "chrono_bias of words": (lambda: rg.chrono_bias(KEY, (8,), "9"), "tmax", "'9'"),
    "count_parameters of a cell": (lambda: rg.count_parameters(LSTM), "tree of arrays", "LSTM"),
    "cumax of a list": (lambda: rg.cumax([1.0, 2.0]), "array", "list"),
    "cumax of integers": (lambda: rg.cumax(jnp.arange(3)), "floating", "int32"),
    "an unknown field in a norm": (
        lambda: analysis.gap_norms(analysis.step_jacobians(LSTM, PARAMS, XS), of="s"),
        "'c', 'h'",
        "'s'",
    ),
    "an analysis of a class": (
        lambda: analysis.gate_activations(rg.LSTM, PARAMS, XS),
        "cell",
        "class LSTM",
    ),
    "timescales of a name": (lambda: analysis.initial_timescales("lstm", KEY), "cell", "'lstm'"),
    "timescales of a number": (lambda: analysis.initial_timescales(LSTM, 0), "PRNG key", "0"),
    "desiderata of a class": (lambda: rg.desiderata.measure(rg.Elman), "cell", "class Elman"),
    "desiderata of a seed": (lambda: rg.desiderata.measure(LSTM, D, key=3), "PRNG key", "3"),
    "FlaxCell of a layer": (lambda: rg.FlaxCell(nn.Dense(3)), "RNNCellBase", "Dense"),
    "FlaxCell of a class": (lambda: rg.FlaxCell(nn.LSTMCell), "LSTMCell(8)", "class LSTMCell"),
    "a stepper of a part of a batch": (lambda: rg.stepper(LSTM, PARAMS, 2.0), "sizes", "2.0"),
    "a stepper of less than none": (lambda: rg.stepper(LSTM, PARAMS, (3, -1)), "sizes", "-1"),
    "a stepper of variables": (lambda: rg.stepper(LSTM, VARIABLES), "pass ['params']['cell']", ""),
    "a stepper of no parameters": (lambda: rg.stepper(LSTM, None), "dict", "None"),
    "an unknown cell": (lambda: rg.CELLS["lsmt"], "lstm", "lsmt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    """It says what was expected and what was given, and is an error of ours, not a bare one."""
    make, expected, given = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, rg.UnknownCellError)) as error:
        make()
    text = str(error.value)
    *_, (frame, _) = traceback.walk_tb(error.tb)
    ours = pathlib.Path(rg.__file__).parent in pathlib.Path(frame.f_code.co_filename).parents
    assert ours, f"raised outside of the library: {text}"
    assert "\n" not in text.strip(), text
    assert any(words in text for words in expected.split("|")), f"{expected!r} is not in: {text}"
    assert any(words in text for words in given.split("|")), f"{given!r} is not in: {text}"
