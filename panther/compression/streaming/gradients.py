"""Gradients at the results of parts, which later parts have sent and which wait in files for the backward pass."""

__all__ = ["ResultGradients"]

from collections.abc import Mapping, Sequence

from torch import Tensor

from panther.compression.streaming.spool import Spool


class ResultGradients:
    """The gradients at the results of parts, by pass, part and index, until the part has taken them.

    A file is named after the part that sent the last of its gradients, and is not changed: a part that is run again,
    because the process was killed, finds the sums without its own gradients.

    Args:
        spool: Where the gradients are kept.
        description: The name of the backward pass.
        is_new: Whether the pass begins; otherwise it continues with the gradients of the last commit.
    """

    def __init__(self, spool: Spool, description: str, *, is_new: bool) -> None:
        self._spool, self._prefix = spool, f"gradients-{description.replace('/', ' of ')}-"
        self._names: dict[tuple[int, int], str] = {}
        for name in spool.names(self._prefix):
            if is_new:
                spool.remove(name)
            else:
                number, place, _ = map(int, name.removeprefix(self._prefix).split("-"))
                self._names[number, place] = name

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the gradients that wait."""
        return self._spool.size_of(self._prefix)

    def add(self, number: int, sender: int, leaves: Mapping[tuple[int, int], Tensor]) -> None:
        """Add the gradients of leaves to those of the results that the leaves are; ``sender`` is the part that ran."""
        by_place: dict[int, dict[int, Tensor]] = {}
        for (place, index), leaf in leaves.items():
            if leaf.grad is not None:
                by_place.setdefault(place, {})[index] = leaf.grad
                leaf.grad = None
        for place, new in by_place.items():
            sums = self._stored(number, place)
            for index, gradient in new.items():
                sums[index] = sums[index] + gradient if index in sums else gradient
            name = f"{self._prefix}{number}-{place}-{sender}"
            self._spool.write(name, sums)
            self._forget(number, place)
            self._names[number, place] = name

    def take(self, number: int, place: int, results: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the results of a part that have gradients, with these gradients, which are then forgotten."""
        stored = self._stored(number, place)
        self._forget(number, place)
        return [(results[index], gradient) for index, gradient in stored.items() if results[index].requires_grad]

    def remove(self) -> None:
        """Remove the gradients that no part has taken."""
        for number, place in [*self._names]:
            self._forget(number, place)

    def _stored(self, number: int, place: int) -> dict[int, Tensor]:
        name = self._names.get((number, place))
        stored: dict[int, Tensor] = {} if name is None else self._spool.read(name)
        return stored

    def _forget(self, number: int, place: int) -> None:
        if (name := self._names.pop((number, place), None)) is not None:
            self._spool.remove(name)
