"""Predict the bytes of the files of a model that is compressed part by part, before the long work begins."""

__all__ = ["TargetBytes", "predict_disk_bytes"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Three choices are compared, with a new layer of each form of a weight that one of them has.
_CHOICES = 3
_PICKLED_BYTES = 4000  # of a fit, its options and the names of both, beside the tensors


@dataclass(frozen=True)
class TargetBytes:
    """The bytes of the files of one weight.

    Attributes:
        fit: Its fit in all forms.
        moments: Its moments.
        places: The parts that contain it, by their number in the order in which the parts run.
    """

    fit: int
    moments: int
    places: Sequence[int]


def predict_disk_bytes(
    targets: Sequence[TargetBytes],
    num_parts: int,
    results: int,
    gradients: int,
    measured_gradients: int,
    new_layers: int,
) -> Mapping[str, int]:
    """Return the largest bytes of all files while moments are gathered and weights fitted, and of the choice.

    Args:
        targets: The weights.
        num_parts: The number of parts.
        results: Bytes of the results of all parts for all batches.
        gradients: Largest bytes of the gradients at these results that wait for a part.
        measured_gradients: As ``gradients``, while losses of the fitted weights are measured.
        new_layers: Bytes that the new layers may take.
    """
    fits = states = largest = 0
    for part in range(num_parts):
        completed = [target for target in targets if max(target.places) == part]
        fits += sum(target.fit + _PICKLED_BYTES for target in completed)
        if completed:  # its file also has the sums of weights that are called in this part and in later ones
            states += sum(target.moments for target in targets if min(target.places) <= part < max(target.places))
        # The weights are fitted from their moments, which are in a file until the last of them is fitted.
        largest = max(largest, fits + states + sum(target.moments for target in completed))
    return {
        "moments": results + gradients + largest,
        "choice": results + fits + states + max(measured_gradients + new_layers, _CHOICES * new_layers),
    }
