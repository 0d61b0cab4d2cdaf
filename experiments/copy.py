"""Copy a sequence after a long delay: ``python -m experiments.copy --cell=gato``."""

from experiments import flags


def define(values: flags.FlagValues) -> None:
    """The flags that only this binary has."""
    flags.enum(values, "loss_on", ["copied", "all"], "which steps the loss is on")
    flags.enum(values, "inputs", ["embed", "one_hot", "scalar"], "how a token becomes an input")


if __name__ == "__main__":
    flags.main("copy", define)
