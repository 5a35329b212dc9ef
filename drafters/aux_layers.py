"""The target layers whose hidden states a drafter reads."""

from typing import Any

from drafters.target import TargetSpec

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Field of config.json with which vLLM numbers them as cotrain does: id k is the state after k layers."""


def check_aux_layers(layers: Any, target: TargetSpec, field: str) -> tuple[int, ...]:
    """Return the ids of the aux layers; None stands for every engine's default (2, N//2, N-3) in a target of N layers.

    Raises ValueError naming `field` unless they are strictly ascending and inside the target, which the default is not
    in small targets.
    """
    last = target.num_layers - 1
    name = "the default aux layers" if layers is None else "aux layers"
    layers = (2, target.num_layers // 2, last - 2) if layers is None else tuple(layers)
    # vLLM sorts the ids and drops duplicates: fc would read fewer columns, or in another order, than in training.
    if list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > last:
        raise ValueError(
            f"{field}: {name} {list(layers)} are not ascending ids between 1 and {last}, the states between the target's "
            f"{target.num_layers} layers; set such ids"
        )
    return layers
