"""Four tasks on eight devices of one, two and four processes against one device."""

import numpy as np
import pytest

from tests.experiments import groups

pytestmark = pytest.mark.full

MODULE = "tests.experiments.scaling"
ALONE = ("copy=", "pixels=", "language_model=", "match=")
SHARED = (
    *("copy=data:8", "pixels=data:8", "language_model=data:8", "match=data:8"),
    *("copy=lanes:4,data:2", "language_model=vocab:2,data:4"),
)


def measured(path, count, cases, devices):
    """What so many processes find, by case and name."""
    arguments = (str(path), *cases)
    if count == 1:
        with_one = groups.start(*arguments, devices=devices, module=MODULE)
        ended = groups.ends([with_one])
    else:
        ended = groups.trained(count, *arguments, devices=devices, module=MODULE)
    assert [(code, err) for code, _, err in ended] == [(0, "")] * count
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("alone") / "one.npz", 1, ALONE, devices=1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_eight_devices_train_as_one(alone, count, tmp_path):
    """20 losses to 1e-4, in float64 200 to 1e-8; one step's gradient to 1e-5 of its norm, in
    float64 that of each parameter to 1e-10 of its own."""
    shared = measured(tmp_path / "shared.npz", count, SHARED, devices=8 // count)
    for case in SHARED:
        for dtype, steps, bound in (("float32", 20, 1e-4), ("float64", 200, 1e-8)):
            actual, expected = of_case(shared, case, dtype), of_case(alone, case, dtype, alone=True)
            losses, expected_losses = actual.pop("losses"), expected.pop("losses")
            assert len(losses) == steps
            error = (np.abs(losses - expected_losses) / np.abs(expected_losses)).max()
            assert actual.keys() == expected.keys()
            of_leaves = [
                distance([actual[name]], [expected[name]])
                for name in expected
                if np.any(expected[name])
            ]
            of_all = distance([actual[name] for name in expected], list(expected.values()))
            named = f"{count} x {8 // count} {case} {dtype}: losses {error:.1e}"
            print(f"{named}, gradient {of_all:.1e}, its leaves {max(of_leaves):.1e}", flush=True)
            assert error <= bound
            assert of_all <= 1e-5
            assert max(of_leaves) <= (1e-10 if dtype == "float64" else 1e-4)


def of_case(arrays, case, dtype, *, alone=False):
    """The arrays of a case by name; alone, it has no mesh."""
    start = f"{case.partition('=')[0]}=" if alone else case
    start = f"{start}/{dtype}/"
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}


def distance(actual, expected):
    """The norm of the difference of lists of arrays, in the norm of what is expected."""
    squares = [np.square(a - b, dtype=float).sum() for a, b in zip(actual, expected, strict=True)]
    norm = np.sqrt(sum(np.square(leaf, dtype=float).sum() for leaf in expected))
    return float(np.sqrt(sum(squares)) / norm)
