"""Predict the bytes of the files of a model that is compressed part by part, before the long work begins."""

__all__ = ["DiskPlan", "Sections", "TargetBytes", "predict_disk_bytes"]

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# Three choices are compared, with a new layer of each form of a weight that one of them has.
_CHOICES = 3
_DESCRIPTION_BYTES = 4000  # of a fit, its options and the names of both, beside the tensors


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


@dataclass(frozen=True)
class DiskPlan:
    """Which values stay on disk, and how many bytes they take.

    Attributes:
        needed: Predicted peak of the bytes of all files.
        phases: The bytes of the phases that are to come.
        sections: The sections in which the model runs.
        keeps_moments: Whether the moments of all weights stay until the weights are fitted.
    """

    needed: int
    phases: Mapping[str, int]
    sections: "Sections"
    keeps_moments: bool


@dataclass(frozen=True)
class Sections:
    """The sections of a model, whose parts are run forward again before they run backward.

    With one section, the results of all parts are kept. Otherwise the results of the parts of one section are, and of
    the other parts those that later sections read.

    Attributes:
        last_reads: For each part but the last, the last part that reads its results.
        number: The number of sections.
    """

    last_reads: Sequence[int]
    number: int = 1

    @cached_property
    def _starts(self) -> list[int]:
        num_parts = len(self.last_reads) + 1
        return [section * num_parts // self.number for section in range(self.number)]

    @cached_property
    def _needed(self) -> set[int]:
        """The parts whose results are kept until they run backward."""
        return {earlier for start in self._starts for earlier in self.read_from(start)}

    @property
    def drops(self) -> bool:
        """Return whether results are dropped at all."""
        return self.number > 1

    def start(self, place: int) -> int:
        """Return the first part of the section that contains a part."""
        return max(start for start in self._starts if start <= place)

    def read_from(self, place: int) -> list[int]:
        """Return the parts before a part whose results it or a later part reads."""
        return [earlier for earlier in range(place) if self.last_reads[earlier] >= place]

    def read_last(self, place: int) -> list[int]:
        """Return the parts whose results no part after this one reads."""
        return [earlier for earlier, last in enumerate(self.last_reads[: place + 1]) if last <= place]

    def droppable(self, place: int, section_start: int) -> list[int]:
        """Return the parts whose results may be dropped when a part has run on the way to a section."""
        return [each for each in self.read_last(place) if each < section_start and each not in self._needed]

    def held_bytes(self, sizes: Sequence[int], commits: Collection[int], *, gradients: bool) -> tuple[int, list[int]]:
        """Return the largest bytes of results on the way forward, and the bytes while each part gathers moments.

        Args:
            sizes: Bytes of the results of each part but the last.
            commits: The parts at whose end there is a commit, which frees what has been dropped before it.
            gradients: Whether parts gather moments backward, in the order of the sections; otherwise forward.

        The bytes are in the order in which the parts gather moments.
        """
        num_parts = len(sizes) + 1
        if not self.drops:
            return sum(sizes), [sum(sizes)] * num_parts
        recorded_places: set[int] = set()
        held: list[set[int]] = []
        for place in range(num_parts):
            recorded_places.add(place)
            held.append(set(recorded_places))
            recorded_places -= set(self.droppable(place, self._starts[-1]) if gradients else self.read_last(place))
        forward = list(held)
        if gradients:
            held = [
                {each for each in self._needed if each < place} | {*range(self.start(place), place + 1)}
                for place in range(num_parts)[::-1]
            ]
        dropped: set[int] = set()  # since the last commit
        places = range(num_parts)[::-1] if gradients else range(num_parts)
        for index, place in enumerate(places):
            now_dropped = {place} if gradients else held[index].intersection(self.read_last(place))
            held[index] = held[index] | dropped
            dropped = now_dropped if place in commits else dropped | now_dropped

        def largest(held: Sequence[set[int]]) -> list[int]:
            return [sum(sizes[place] for place in places if place < len(sizes)) for places in held]

        return max(largest(forward)), largest(held)


def predict_disk_bytes(
    targets: Sequence[TargetBytes],
    results: tuple[int, Sequence[int]],
    gradients: int,
    measured: tuple[int, int],
    new_layers: int,
    *,
    keeps_moments: bool,
) -> Mapping[str, int]:
    """Return the largest bytes of all files while moments are gathered and weights fitted, and of the choice.

    Args:
        targets: The weights.
        results: Bytes of the results for all batches: the most on the way forward, and while each part gathers moments,
            in the order in which the parts run.
        gradients: Largest bytes of the gradients at these results that wait for a part.
        measured: Bytes of the results and of the gradients while losses of the fitted weights are measured.
        new_layers: Bytes that the new layers may take.
        keeps_moments: Whether the moments of all weights stay until the weights are fitted, and longer.
    """
    forward, held = results
    fits = states = complete = largest = 0
    for part, results_held in enumerate(held):
        completed = [target for target in targets if max(target.places) == part]
        fits += sum(target.fit + _DESCRIPTION_BYTES for target in completed)
        if completed:  # its file also has the sums of weights that are called in this part and in later ones
            states += sum(target.moments for target in targets if min(target.places) <= part < max(target.places))
        # The weights are fitted from their moments, which are in a file until the last of them is fitted.
        moments = sum(target.moments for target in completed)
        complete += keeps_moments * moments  # in another file
        largest = max(largest, results_held + gradients + fits * (not keeps_moments) + states + moments + complete)
    measured_results, measured_gradients = measured
    return {
        "forward": forward,
        "moments": largest,
        "choice": complete
        + fits
        + states
        + measured_results
        + max(measured_gradients + new_layers, _CHOICES * new_layers),
    }
