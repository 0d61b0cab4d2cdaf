"""How close captions are to their references.

BLEU comes from sacrebleu. The other scores, and BLEU once more, are those of COCO's evaluation
(pycocoevalcap), of which METEOR and the tokeniser of the Penn Treebank need Java.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.settings.errors import UserError

BLEU = ("bleu_4", "bleu_1", "bleu_2", "bleu_3")
COCO = ("cider", "rouge_l", "meteor")
NEEDS_COCO = (
    "CIDEr-D, ROUGE-L and METEOR are scores of pycocoevalcap, which is not installed: "
    "pip install pycocoevalcap, or give --evaluation=bleu."
)
NEEDS_JAVA = (
    "METEOR and the tokeniser of the Penn Treebank need Java, and there is none on the path: "
    "METEOR is left out, and a tokeniser of ours takes the other's place."
)

_WORD = re.compile(r"[^\W_]+(?:'[a-z]+)?|<[a-z]+>")
# What pycocoevalcap adds to a count of zero: a corpus without a match scores almost zero.
_FLOOR = 1e-15


def tokens(caption: str) -> list[str]:
    """The words of a caption in small letters, without punctuation."""
    return _WORD.findall(caption.lower())


def bleu(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Corpus BLEU of one to four words, by sacrebleu; in [0, 1].

    Args:
      captions: words with blanks between them.
      references: of each caption one or more, likewise.

    Raises:
      UserError: if sacrebleu is not installed.
    """
    try:
        from sacrebleu import metrics
    except ImportError:
        raise UserError("BLEU needs sacrebleu: pip install sacrebleu.") from None
    count = max(map(len, references))
    streams: Any = [
        [group[index] if index < len(group) else None for group in references]
        for index in range(count)
    ]
    scores = {}
    for order in (4, 1, 2, 3):
        scorer = metrics.BLEU(
            max_ngram_order=order,
            tokenize="none",
            smooth_method="floor",
            smooth_value=_FLOOR,
            force=True,
        )
        scores[f"bleu_{order}"] = scorer.corpus_score(list(captions), streams).score / 100
    return scores


def has_coco() -> bool:
    """Whether pycocoevalcap is installed."""
    return importlib.util.find_spec("pycocoevalcap") is not None


def has_java() -> bool:
    """Whether Java is on the path."""
    return shutil.which("java") is not None


def coco(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The scores of COCO's evaluation: BLEU of one to four words, ROUGE-L, CIDEr-D, and METEOR
    where there is Java.

    Args:
      captions: words with blanks between them, as ``tokenised`` makes them.
      references: of each caption one or more, likewise.

    Raises:
      UserError: if pycocoevalcap is not installed.
    """
    if not has_coco():
        raise UserError(NEEDS_COCO)
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    truth = {number: list(texts) for number, texts in enumerate(references)}
    candidates = {number: [caption] for number, caption in enumerate(captions)}
    bleu_scores, _ = Bleu(4).compute_score(truth, candidates, verbose=0)
    scores = {f"bleu_{order}": value for order, value in enumerate(bleu_scores, start=1)}
    scores["rouge_l"] = float(Rouge().compute_score(truth, candidates)[0])
    scores["cider"] = float(Cider().compute_score(truth, candidates)[0])
    if has_java():
        with _meteor() as meteor:
            scores["meteor"] = float(meteor.compute_score(truth, candidates)[0])
    return scores


@contextlib.contextmanager
def _meteor() -> Iterator[Any]:
    """METEOR's scorer, whose Java ends with the context, and closes its pipes."""
    from pycocoevalcap.meteor.meteor import Meteor

    scorer = Meteor()
    with scorer.meteor_p as process:
        try:
            yield scorer
        finally:
            process.kill()


def tokenised(texts: Sequence[Sequence[str]], treebank: bool) -> list[list[str]]:
    """Captions of pictures with blanks between their words, by our tokeniser, or as COCO's
    evaluation takes them: by that of the Penn Treebank, where there is Java."""
    if treebank and has_java():
        from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

        texts_by_picture = {
            number: [{"caption": text} for text in captions]
            for number, captions in enumerate(texts)
        }
        words = PTBTokenizer().tokenize(texts_by_picture)
        return [words[number] for number in range(len(texts))]
    return [[" ".join(tokens(text)) for text in captions] for captions in texts]
