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
    """One step's gradients to 1e-5 of the largest, 20 losses to 1e-4, in float64 200 to 1e-8."""
    shared = measured(tmp_path / "shared.npz", count, SHARED, devices=8 // count)
    assert_alike(alone, shared, count)


def assert_alike(alone, shared, count):
    largest = {}
    for name, value in shared.items():
        case, dtype, what = name.split("/")
        expected = alone[f"{case.partition('=')[0]}=/{dtype}/{what}"]
        error = np.abs(value - expected)
        if what == "losses":
            assert value.shape[0] == {"float32": 20, "float64": 200}[dtype]
            error, bound = error / np.abs(expected), {"float32": 1e-4, "float64": 1e-8}[dtype]
        else:
            what, bound = "gradient", 1e-5
            error = error / np.maximum(np.abs(expected).max(), 1e-30)
        assert error.max() <= bound, (name, error.max())
        key = (case, dtype, what)
        largest[key] = max(largest.get(key, 0.0), float(error.max()))
    for (case, dtype, what), error in largest.items():
        print(f"{count} x {8 // count}  {case}  {dtype}  {what}: {error:.1e}", flush=True)
