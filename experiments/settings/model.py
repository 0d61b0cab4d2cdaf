"""The settings of the cell, of the layers and of the constant parts around them."""

from __future__ import annotations

import dataclasses

from experiments.settings.fields import Sourced, setting

BACKENDS = ("auto", "scan", "native", "fused", "parallel", "newton", "pallas", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model. None where the cell has no such setting."""

    cell: str = setting("the recurrent cell: a name in recurrent_gates.CELLS, or module:Class")
    hidden_size: int = setting("units of the cell; for GATO 2J", least=1)
    layers: int = setting(
        "recurrent layers, each with cells of its own parameters",
        Sourced(1, "one in every synthetic task and image of the papers"),
        least=1,
        most=64,
    )
    layer_dropout: float = setting(
        "probability of dropping an output of a recurrent layer below the last",
        Sourced(0.0, "ours: off; torch's dropout between layers"),
        least=0,
        below=1,
        needs=("layers", range(2, 65)),
    )
    init: str | None = setting(
        "start of the cell's parameters: torch's U(±1/sqrt(F)) everywhere, the library's own, or "
        "the library's own but for input kernels as of torch's nn.Linear",
        choices=("torch", "library", "torch_inputs"),
    )
    bias_vectors: int | None = setting("bias vectors: 1, or 2 as torch has", least=1, most=2)
    forget_bias: float | None = setting(
        "where the bias of a sigmoid forget gate starts, of a plain or a refined one (R)"
    )
    reset: str | None = setting(
        "where a GRU's reset gate acts, before or after the recurrent product",
        choices=("before", "after"),
    )
    refine_bias: str | None = setting(
        "where a refine gate starts beside a drawn bias b: at -b (UR Listing 2) or at zero",
        choices=("negative", "zero"),
    )
    downsize: int | None = setting("units that share a master gate (om, um, cm cells)", least=1)
    tmax: float | None = setting(
        "chrono initialisation's longest dependency in steps, above 2 (c, cr, cm cells); unless "
        "given, --hidden_size",
        least=2,
    )
    s_update: str | None = setting(
        "GATO's ablations: what becomes of s", choices=("accumulate", "zero", "replace")
    )
    memory_slots: int | None = setting(
        "slots of a memory (rmc, dnc, rma); those of an RMC share --hidden_size", least=1
    )
    heads: int | None = setting(
        "attention heads of an RMC; blocks of the block-diagonal recurrent weights of an LSTM, a "
        "GRU, a JANET or an sLSTM, whose units then read those of their own block, or none",
        least=1,
    )
    word_size: int | None = setting("units of a memory's slot (dnc, rma)", least=1)
    read_heads: int | None = setting("heads that read a memory (dnc, rma)", least=1)
    rows_read: int | None = setting(
        "rows of its memory that a head of an RMA reads, the most similar ones (its top_k)", least=1
    )
    lambda_: float | None = setting("GATO's decay rate", least=0, below=1)
    embedding: int = setting("width of the token embedding", least=0, needs=("inputs", ("embed",)))
    embedding_dropout: float = setting(
        "probability of dropping an entry of an embedded input",
        Sourced(0.0, "none but in UR's language models"),
        least=0,
        below=1,
        needs=("inputs", ("embed",)),
    )
    decoder: tuple[int, ...] = setting("widths of the decoder's ReLU layers, or none", least=1)
    dropout: float = setting(
        "probability of dropping a unit of the decoder's hidden layers",
        Sourced(0.0, "none but beside zoneout in UR D.2"),
        least=0,
        below=1,
        needs="decoder",
    )
    dtype: str = setting(
        "of the computation; parameters and state are float32 beside bfloat16, too; float64 needs "
        "JAX_ENABLE_X64=1",
        Sourced("float32", "the papers' frameworks default to it"),
        choices=("float32", "bfloat16", "float64"),
    )
    backend: str = setting(
        "how the recurrence is computed; the mathematics are the same",
        Sourced("auto", "ours: the fastest form of the same mathematics"),
        choices=BACKENDS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarrySettings:
    """What happens to the carry around a step in training."""

    detach_prob: float = setting(
        "probability of detaching the state at a step (h-detach)",
        Sourced(0.0, "h-detach only"),
        least=0,
        most=1,
    )
    detach_state: str = setting(
        "field of the state that is detached or damped: h, c, r, ...; feedback: what feeds back",
        Sourced("feedback", "h-detach, Algorithm 1: h; ours for GATO: r feeds back"),
    )
    detach_per_example: bool = setting(
        "detach by example, not the whole batch together",
        Sourced(False, "h-detach code: one draw per step for the batch"),
        needs="detach_prob",
    )
    detach_off_steps: int = setting(
        "no detaching in this many last steps",
        Sourced(0, "h-detach: not in the paper; the later code has 39 epochs"),
        least=0,
        needs="detach_prob",
    )
    damp_prob: float = setting(
        "multiply the gradient through the state by one minus this",
        Sourced(0.0, "ours: off; the expectation of h-detach, its Corollary 1"),
        least=0,
        most=1,
    )
    zoneout_c: float = setting(
        "probability that a unit of c keeps its old value",
        Sourced(0.0, "none in any of the papers' synthetic tasks"),
        least=0,
        most=1,
    )
    zoneout_h: float = setting(
        "probability that a unit of h keeps its old value",
        Sourced(0.0, "none in any of the papers' synthetic tasks"),
        least=0,
        most=1,
    )
