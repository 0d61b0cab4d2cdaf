"""Writes torchvision's ResNet-152 as a safetensors file for ``--weights``.

Run it where torch, torchvision and safetensors are, which this project needs nowhere else:

    python experiments/captioning/torchvision_weights.py resnet152.safetensors

torchvision downloads the weights of its training on ImageNet; with a second argument, the file of
a state_dict that was downloaded before, it reads that instead.
"""

import sys


def main(path: str, state_dict: str | None = None) -> None:
    """Writes the file.

    Args:
      path: of the file.
      state_dict: a file that torch.save wrote; None: torchvision downloads it.
    """
    import torch
    from safetensors.torch import save_file

    if state_dict is None:
        from torchvision.models import ResNet152_Weights, resnet152

        weights = resnet152(weights=ResNet152_Weights.IMAGENET1K_V1).state_dict()
    else:
        weights = torch.load(state_dict, map_location="cpu", weights_only=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: torchvision_weights.py FILE [STATE_DICT]")
    main(*sys.argv[1:])
