"""The positions of a batch that count, and which of the model's tensors have these positions.

A batch of sequences has a mask (N, T) of the positions that are no padding, and an encoder-decoder has two, one for
each side. That a tensor begins with (N, T) does not say that it has the positions of a mask: the decoder's input can be
as long as the encoder's, the sequence can come first, and an image can have as many patches as a text has words. So the
model is run once more with each side one position shorter, and what becomes shorter has the positions of that side.
Of the tensors of a batch that begin with the (N, T) of a side, those with two dimensions, such as tokens and masks, are
shortened together. A tensor with more dimensions can be embeddings of the tokens or an image of as many patches: it is
shortened as well if the model does not run otherwise.
"""

__all__ = ["MASK_NAMES", "Masks", "Place", "Places", "ScoreFill", "Shapes", "counted", "find_places", "positions_of"]

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MASK_NAMES = ("attention_mask", "decoder_attention_mask")
"""The arguments that hold masks, by the side of the model: encoder, or the only side, and decoder."""

Shapes = dict[nn.Module | None, torch.Size]
"""The shape of the first output of each module, and under None of the model's output."""


class Place(NamedTuple):
    """Which positions the rows of a tensor are."""

    side: int | None
    """The index in MASK_NAMES; None: those of neither side."""
    axis: int
    """The dimension along which the sequence lies; 0 also where batch and sequence are one dimension."""


Places = dict[nn.Module | None, Place]
"""Which positions the output of each module has, and under None that of the model."""


class Masks:
    """The masks of one batch, (N, T) of booleans, by side; None where every position counts.

    Args:
        masks: The masks by side.
        places: Which positions the output of a module has, as far as :func:`find_places` found it.
    """

    def __init__(self, masks: tuple[Tensor | None, ...], places: Places | None = None) -> None:
        self.masks, self._places = masks, places or {}

    def rows(self, x: Tensor, module: nn.Module | None = None) -> Tensor | None:
        """Return the mask of the first dimensions of a tensor at a module, in its layout; None where all rows count.

        The tensor is the module's input or output, or that of the model. Without a known place, the first mask of a
        matching shape counts.
        """
        place = self._places.get(module)
        if place is None:
            matching = (_matching(x, mask, None) for mask in self.masks if mask is not None)
            return next((mask for mask in matching if mask is not None), None)
        mask = None if place.side is None else self.masks[place.side]
        return None if mask is None else _matching(x, mask, place.axis)


def _matching(x: Tensor, mask: Tensor, axis: int | None) -> Tensor | None:
    """Return a mask (N, T) in the layout of x, whose sequence lies along ``axis``; None if x has other dimensions.

    x begins with (N, T) or (T, N), or has N T rows.
    """
    if x.dim() > 2:
        if axis in (None, 1) and x.shape[:2] == mask.shape:
            return mask
        return mask.mT if axis in (None, 0) and x.shape[:2] == mask.shape[::-1] else None
    is_flat = x.dim() == 2 and len(x) == mask.numel() != len(mask)
    return mask.flatten() if is_flat and axis in (None, 0) else None


def positions_of(mask: Any) -> Tensor | None:
    """Return which positions a mask keeps, (N, T) of booleans, or None for what is not a mask.

    A mask that is added to scores has zeros there. A mask (N, ..., T) of pairs, queries by keys, keeps the positions
    that any query of any head reads.
    """
    if not _is_mask(mask):
        return None
    is_added = mask.is_floating_point() and not bool((mask > 0).any())
    positions = mask == 0 if is_added else mask != 0
    return positions.flatten(1, -2).any(1) if positions.dim() > 2 else positions


def counted(x: Tensor, masks: Masks | None, module: nn.Module | None = None) -> Tensor:  # (*, n) -> (rows, n)
    """Return the rows of a tensor at a module that count."""
    if x.dim() < 2:
        return x.reshape(1, -1)
    rows = None if masks is None else masks.rows(x, module)
    return (x if rows is None else x[rows]).flatten(0, -2)


def find_places(batch: Any, shapes_of: Callable[[Any], Shapes]) -> Places:
    """Return which positions the outputs of modules have; nothing where the batch has no mask or cannot be shortened.

    ``shapes_of`` runs the model on a batch. Modules whose output keeps its shape have the positions of neither side.

    Cost: two or three forwards, and one more for each tensor (N, T, ...) that has more dimensions than a mask.
    """
    if not isinstance(batch, Mapping) or not any(_is_mask(batch.get(name)) for name in MASK_NAMES):
        return {}
    shapes = shapes_of(batch)
    places: Places = {}
    is_complete = True
    for side, keys in enumerate(_sides(batch, shapes_of)):
        if not keys:
            continue
        shorter = _shorter_shapes(batch, keys, shapes, shapes_of)
        if shorter is None:
            is_complete = False
            continue
        for module, shape in shapes.items():
            pairs = enumerate(zip(shape, shorter.get(module, shape), strict=False))
            if (axis := next((axis for axis, (old, new) in pairs if old != new), None)) is not None:
                places.setdefault(module, Place(side, axis))
    if is_complete:
        places = {module: Place(None, 0) for module in shapes} | places
    return places


def _shorter_shapes(
    batch: Mapping[str, Any], keys: list[str], shapes: Shapes, shapes_of: Callable[[Any], Shapes]
) -> Shapes | None:
    """Return the shapes where as few of the tensors as possible are shortened; None where the model does not run."""
    flat = [key for key in keys if batch[key].dim() == 2 or key in MASK_NAMES]
    deep = [key for key in keys if key not in flat]
    shorter = None
    for attempt in dict.fromkeys(map(tuple, [flat, *([*flat, key] for key in deep), keys])):
        new_shapes = _shapes_or_none(_shortened(batch, attempt), shapes_of) if attempt else None
        if new_shapes is not None:
            shorter = new_shapes
            if any(shape != shapes.get(module) for module, shape in new_shapes.items()):
                break  # a model that does not read its mask runs with a shorter one, which shows nothing
    return shorter


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() in (2, 3, 4)


def _sides(batch: Mapping[str, Any], shapes_of: Callable[[Any], Shapes]) -> tuple[list[str], list[str]]:
    """Return the arguments that have the positions of the encoder, or of the only side, and those of the decoder."""
    decoder = _alike(batch, [key for key in batch if key.startswith("decoder_")])
    labels = _alike(batch, ["labels"])
    encoder = [key for key in _alike(batch, [MASK_NAMES[0], "input_ids", *batch]) if key not in (*decoder, *labels)]
    masks_of_pairs = [[name] if _is_mask(batch.get(name)) and batch[name].dim() > 2 else [] for name in MASK_NAMES]
    encoder, decoder = encoder + masks_of_pairs[0], decoder + masks_of_pairs[1]
    if labels and not decoder:
        # Labels of a decoder alone are as long as its input, and a model that gets them shorter refuses.
        return (encoder, labels) if _shapes_or_none(_shortened(batch, labels), shapes_of) else ([*encoder, *labels], [])
    return encoder, [*decoder, *labels]


def _alike(batch: Mapping[str, Any], keys: list[str]) -> list[str]:
    """Return the keys of the tensors that begin with the same (N, T) as the first of them, without masks of pairs."""
    tensors = {
        key: batch[key]
        for key in keys
        if isinstance(batch.get(key), Tensor)
        and batch[key].dim() > 1
        and not (key in MASK_NAMES and batch[key].dim() > 2)
    }
    first = next(iter(tensors.values()), None)
    return [] if first is None else [key for key, x in tensors.items() if x.shape[:2] == first.shape[:2]]


def _shortened(batch: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the batch with one position less in these tensors, or with one more where there are one or two.

    One position could be broadcast, and a model would run with tensors of different lengths.
    """

    def changed(x: Tensor, axis: int) -> Tensor:
        length = x.shape[axis]
        return x.narrow(axis, 0, length - 1) if length > 2 else torch.cat([x, x.narrow(axis, length - 1, 1)], axis)

    shorter = dict(batch)
    for key in keys:
        x = batch[key]
        if key in MASK_NAMES and x.dim() > 2:
            shorter[key] = changed(changed(x, -1), -2) if x.shape[-2] == x.shape[-1] else changed(x, -1)
        else:
            shorter[key] = changed(x, 1)
    return shorter


def _shapes_or_none(batch: Any, shapes_of: Callable[[Any], Shapes]) -> Shapes | None:
    try:
        return shapes_of(batch)
    except Exception:  # a model of one length, for example; any error of its forward means that it cannot be told
        return None


_SMALLEST_FILL, _CERTAIN_FILL = 1e4, 1e6
_FILL_GAP = 100.0


@dataclass(frozen=True)
class ScoreFill:
    """The entries of a model's output that hold a large negative number in the place of a score.

    Models fill the scores of choices that are not allowed with -inf, the smallest number of the dtype, -1e9 or -1e4.
    The square of such a number would hide every error in the entries that are scores.
    """

    threshold: float | None
    """Entries up to this number are filled; None where every entry is a score."""
    floor: float
    """The smallest score."""

    @classmethod
    def of(cls, output: Tensor) -> "ScoreFill":
        """Return the fill of an output.

        Entries are filled if their size is 100 times that of all scores or more, and either 1e6 or more, or 1e4 or more
        and for at least half of them, which are at least two, the same number.
        """
        threshold, scores = None, output.detach()
        while scores.numel() and (lowest := scores.amin().item()) <= -_SMALLEST_FILL:
            limit = max(lowest, torch.finfo(scores.dtype).min) / 2
            filled, larger_scores = scores[scores <= limit], scores[scores > limit]
            if not larger_scores.numel() or not _FILL_GAP * larger_scores.abs().amax().item() <= -lowest:
                break
            repeated = int((filled == lowest).sum())
            if lowest > -_CERTAIN_FILL and (repeated < 2 or 2 * repeated < len(filled)):
                break
            threshold, scores = limit, larger_scores
        return cls(threshold, -torch.inf if threshold is None else scores.amin().item())

    def scores(self, output: Tensor) -> Tensor:
        """Return the entries that are scores: one-dimensional where some are filled, otherwise the output itself."""
        return output if self.threshold is None else output[output > self.threshold]

    def replaced(self, output: Tensor) -> Tensor:
        """Return the output with the smallest score in filled entries, so that two outputs can be subtracted."""
        return output if self.threshold is None else output.masked_fill(output <= self.threshold, self.floor)
