"""Captions of pictures: their own settings, and h-detach's values."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.settings.derived import Depends, Epochs
from experiments.settings.fields import setting
from experiments.settings.resolver import Experiment
from experiments.settings.sources import HDETACH_CELLS, LIBRARY_CELLS, Protocol, Sourced

_FILES = ("coco", "flickr8k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningSettings:
    """A sentence that says what a picture shows."""

    dataset: str = setting(
        "generated scenes of coloured shapes, COCO 2014 in Karpathy's split, or Flickr8k",
        choices=("scenes", *_FILES),
    )
    data_dir: str | None = setting(
        "directory with the raw published files of COCO or Flickr8k",
        Sourced(None, "ours: the data are the user's"),
        needs=("dataset", _FILES),
    )
    groups: int = setting(
        "of shapes in a scene; a caption has 20 steps at most, and 9 more for each group above 2",
        Sourced(2, "ours: 20 steps"),
        least=2,
        most=8,
        needs=("dataset", ("scenes",)),
    )
    held_out_scenes: int = setting(
        "the size of each held-out set of scenes",
        Sourced(500, "ours: BLEU-4 of 0.9 is sure to 0.01"),
        least=1,
        needs=("dataset", ("scenes",)),
    )
    restval: bool = setting(
        "COCO's 30,504 validation pictures that no held-out part has are for training, too",
        Sourced(True, "h-detach code: 113,287 pictures; the paper says 80,000"),
        needs=("dataset", ("coco",)),
    )
    min_count: int = setting(
        "words that the training captions have no more often than this are one, the unknown word",
        Sourced(5, "h-detach code, which counts over all parts; ours: over the training part"),
        least=0,
        needs=("dataset", _FILES),
    )
    length: int = setting(
        "most words of a caption from files; longer ones are cut, and none that is said is longer",
        Sourced(16, "h-detach code"),
        least=1,
        needs=("dataset", _FILES),
    )
    captions: int = setting(
        "captions of a picture in a batch; drawn, where it has more or fewer",
        least=1,
    )
    inputs: str = setting("how a word becomes an input", choices=("embed", "one_hot"))
    captioner: str = setting(
        "the model: Show and Tell, or Show, Attend and Tell",
        choices=("show_and_tell", "show_attend_tell"),
    )
    attention_units: int = setting(
        "that compare the regions of a picture with the state",
        least=1,
        needs=("captioner", ("show_attend_tell",)),
    )
    detach_query: bool = setting(
        "h-detach acts on what the attention asks with, too, as in Algorithm 1",
        needs=("captioner", ("show_attend_tell",)),
    )
    doubly_stochastic: float = setting(
        "weight of the penalty on regions that are looked at more or less than once in a caption",
        Sourced(0.0, "h-detach code: none; Xu et al. 4.2.1 has one"),
        least=0,
        needs=("captioner", ("show_attend_tell",)),
    )
    output_dropout: float = setting(
        "probability of dropping what the recurrent layer emits", least=0, below=1
    )
    encoder: str = setting("how pictures are seen", choices=("cnn", "resnet152"))
    picture_features: int = setting(
        "of a picture as a whole, from the small convolutional encoder",
        Sourced(256, "ours: learns in minutes"),
        least=1,
        needs=("encoder", ("cnn",)),
    )
    weights: str | None = setting(
        "safetensors file of ResNet-152; experiments/captioning/torchvision_weights.py makes one",
        Sourced(None, "ours: the weights are the user's"),
        needs=("encoder", ("resnet152",)),
    )
    train_encoder: bool = setting(
        "train ResNet-152 along; else its features are made once, and kept",
        Sourced(False, "h-detach code; the paper says that both are trained"),
        needs=("encoder", ("resnet152",)),
    )
    image_size: int = setting(
        "pixels of a side that pictures from files are squeezed to, a multiple of 32",
        least=32,
        needs=("dataset", _FILES),
    )
    blind: bool = setting(
        "the decoder sees nothing: what the words alone tell",
        Sourced(False, "ours: a control"),
    )
    beam: int = setting(
        "sentences that are followed at evaluation; 1: the likeliest word at each step",
        Sourced(1, "h-detach code"),
        least=1,
    )
    length_power: float = setting(
        "a beam's sentences are compared by log-probability over their length to this power",
        Sourced(0.0, "ours: none, as in h-detach's code"),
        least=0,
        needs=("beam", range(2, 10_000)),
    )
    evaluation: str = setting(
        "the scores: BLEU, or those of COCO's evaluation (pip install pycocoevalcap), of which "
        "CIDEr-D decides what is best",
        choices=("bleu", "coco"),
    )


_HDETACH = {
    "cell": Sourced("lstm", "h-detach 3.4"),
    "dataset": Sourced("coco", "h-detach 3.4"),
    "inputs": Sourced("embed", "h-detach code"),
    "captioner": Sourced("show_and_tell", "h-detach Table 3: Show&Tell; the other by flag"),
    "attention_units": Sourced(512, "h-detach code"),
    "detach_query": Sourced(False, "h-detach code: h as it was before it is detached"),
    "output_dropout": Sourced(0.5, "h-detach code"),
    "captions": Sourced(5, "h-detach code"),
    "encoder": Sourced("resnet152", "h-detach 3.4"),
    "image_size": Sourced(448, "ours: the code's 14 x 14 regions; there of pictures of any size"),
    "evaluation": Sourced("coco", "h-detach Table 3"),
    "hidden_size": Sourced(512, "h-detach 3.4"),
    "embedding": Sourced(512, "h-detach code"),
    "decoder": Sourced((), "h-detach code: one linear layer"),
    "epochs": Sourced(30, "h-detach code"),
    "steps": Sourced(Epochs("epochs"), "h-detach code"),
    "batch_size": Sourced(10, "h-detach code: 10 pictures, 50 captions"),
    "learning_rates": Sourced((1e-4,), "h-detach 3.4"),
    "clip_norm": Sourced(0.0, "h-detach code: by value instead"),
    "clip_value": Sourced(0.1, "h-detach code"),
    "eval_every": Sourced(6000, "h-detach code"),
    "keep_best": Sourced(True, "h-detach 3.4: early stopping by CIDEr"),
    "detach_prob": Sourced(
        Depends("captioner", {"show_and_tell": 0.25, "*": 0.4}), "h-detach Table 3"
    ),
}
_HDETACH_CELLS = {
    **HDETACH_CELLS,
    "*": {
        **HDETACH_CELLS["*"],
        "bias_vectors": Sourced(1, "ours: h-detach's code has none here, a cell has at least one"),
    },
}

_SMALL = {
    "cell": Sourced("lstm", "h-detach 3.4"),
    "dataset": Sourced("scenes", "ours: no file is needed"),
    "inputs": Sourced("embed", "h-detach code"),
    "captioner": Sourced("show_attend_tell", "h-detach Table 3; ours: it learns sooner"),
    "attention_units": Sourced(64, "ours: learns in minutes"),
    "detach_query": Sourced(True, "h-detach, Algorithm 1"),
    "output_dropout": Sourced(0.0, "ours: scenes never come twice"),
    "captions": Sourced(2, "ours: more pictures in the same time"),
    "encoder": Sourced(
        Depends("dataset", {"scenes": "cnn", "*": "resnet152"}), "ours: learns in minutes"
    ),
    "image_size": Sourced(224, "ours: that of ImageNet"),
    "evaluation": Sourced("bleu", "ours: no Java, and nothing large to install"),
    "hidden_size": Sourced(128, "ours: learns in minutes"),
    "embedding": Sourced(64, "ours: as hidden_size"),
    "decoder": Sourced((), "h-detach code: one linear layer"),
    "epochs": Sourced(Depends("dataset", {"scenes": 30, "*": 5}), "ours: as hidden_size"),
    "steps": Sourced(Epochs("epochs"), "ours: as hidden_size"),
    "batch_size": Sourced(32, "ours: as hidden_size"),
    "learning_rates": Sourced((2e-3,), "ours: as hidden_size"),
    "clip_norm": Sourced(1.0, "ours: as hidden_size"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
    "keep_best": Sourced(True, "ours: the test score of the best validation score"),
}

_SMALL_CELLS = {
    **LIBRARY_CELLS,
    "*": {
        **LIBRARY_CELLS["*"],
        "forget_bias": Sourced(
            3.0, "ours: Show and Tell reads a picture once, and keeps it for 20 steps"
        ),
    },
}

_PROTOCOLS = {
    "hdetach": Protocol(settings=_HDETACH, cells=_HDETACH_CELLS),
    "small": Protocol(settings=_SMALL, cells=_SMALL_CELLS),
}


def _task() -> Any:
    from experiments.captioning.task import CaptioningTask

    return CaptioningTask


CAPTIONING = Experiment("captioning", CaptioningSettings, _task, _PROTOCOLS)
