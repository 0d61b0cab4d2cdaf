"""Classify images pixel by pixel: ``python -m experiments.pixels --cell=ur_lstm``."""

from absl import flags as absl_flags

from experiments import flags


def define(values: flags.FlagValues) -> None:
    """The flags that only this binary has."""
    names = ["digits", "smnist", "pmnist", "fashion", "scifar10"]
    flags.enum(values, "dataset", names, "the images; smnist and pmnist are MNIST")
    orders = ["scanline", "bit_reversal", "random"]
    flags.enum(values, "permutation", orders, "the order of the pixels")
    absl_flags.DEFINE_integer(
        "permutation_seed",
        None,
        "of the random order; default: --seed, if it is the only one",
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "epochs", None, "passes over the training set, instead of --steps", flag_values=values
    )
    absl_flags.DEFINE_float(
        "dropout", None, "probability of dropping a hidden unit of the head", flag_values=values
    )


if __name__ == "__main__":
    flags.main("pixels", define)
