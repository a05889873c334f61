"""Which files of a folder hold the weights of its model, and what to do where these files are not all there."""

__all__ = ["PICKLES", "check_weight_files", "has_usual_weights", "weight_files"]

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from panther._text import list_names
from panther.errors import FormatError
from panther.files.reader import check_inside, check_no_pointer, check_plain_name, open_file, read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Weights of other programs beside a config.json, and how they become a folder that transformers reads.
_FOREIGN = {
    "*.h5": "weights of TensorFlow: load them in transformers 4 by from_pretrained(..., from_tf=True)",
    "*.msgpack": "weights of flax: load them in transformers 4 by from_pretrained(..., from_flax=True)",
    "*.gguf": "weights of llama.cpp: load them by from_pretrained(..., gguf_file=...) of transformers",
}


def has_usual_weights(folder: Path) -> bool:
    """Return whether a folder has weights, or an index of weights, under the names that transformers looks for."""
    return any(os.path.lexists(folder / name) for name in (_WEIGHTS, _INDEX))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers or diffusers would read in a folder, and no others.

    FormatError says that an index or the numbers of shards name a missing file, or that a file is a pointer of Git LFS.
    """
    index = folder / _INDEX
    if not has_usual_weights(folder):
        indices = sorted(folder.glob("*.safetensors.index.json"))
        index = indices[0] if len(indices) == 1 else index
    if os.path.lexists(folder / _WEIGHTS):  # transformers reads it, and no index that earlier shards have left there
        names = [_WEIGHTS]
    elif index.is_file():
        names = _indexed(index)
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        _check_numbers(folder, names)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FormatError(f"{index} names {len(names)} files, and {_listed(missing)} missing: copy them too")
    for name in names:
        with open_file(folder / name) as file:
            check_no_pointer(file, folder / name)
    return [folder / name for name in names]


def check_weight_files(folder: Path, name: str, variant: str | None = None) -> None:
    """Raise FormatError where the class ``name`` of transformers would find no weights in a folder, with the fix."""
    names = [path.name for path in weight_files(folder)]
    if (index := folder / f"{_WEIGHTS}.index.{variant}.json").is_file():  # which transformers reads for the variant
        _indexed(index)
    if variant is not None or _WEIGHTS in names or (folder / _INDEX).is_file():
        return
    if shards := [name for name in names if _SHARD.fullmatch(name)]:
        raise FormatError(
            f"{folder} holds {len(shards)} shards and no {_INDEX}, which tells the tensors of each: copy it too"
        )
    if variants := [name.split(".")[1] for name in names if re.fullmatch(r"model\.[^.]+\.safetensors", name)]:
        raise FormatError(
            f"{folder} holds no {_WEIGHTS}, and {names[0]} is a variant: give variant={variants[0]!r}, or rename it"
        )
    if pickle := _pickled_weights(folder):
        raise FormatError(
            f"{folder} holds {pickle}, a pickle, which can run code and is not opened: if you trust it, convert it "
            f"once with transformers.{name}.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    if (folder / "adapter_config.json").is_file():
        raise FormatError(f"{folder} holds an adapter of PEFT and no model: merge it into its model, and save that")
    for pattern, fix in _FOREIGN.items():
        if paths := sorted(folder.glob(pattern)):
            raise FormatError(f"{folder} holds no {_WEIGHTS}, and {paths[0].name} holds {fix}, and save the model")
    raise FormatError(f"{folder} holds no {_WEIGHTS}: give a folder that save_pretrained of transformers wrote")


def _pickled_weights(folder: Path) -> str | None:
    """Return the name of a file in a folder that holds weights as a pickle; None without one."""
    return next((path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES), None)


def _indexed(index: Path) -> list[str]:
    """Return the names of the files that an index names."""
    try:
        places = read_json(index)["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(f"{index} is not an index of safetensors files: copy or write it again") from None
    for name in names:
        check_plain_name(name, index)
        check_inside(index.with_name(name), index.parent)
    return names


def _check_numbers(folder: Path, names: Sequence[str]) -> None:
    """Raise FormatError if the numbers in the names of shards tell that shards are missing."""
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        if shard := _SHARD.fullmatch(name):
            numbers[shard[1], int(shard[3])].add(int(shard[2]))
    for (stem, count), present in numbers.items():
        if missing := [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1) if i not in present]:
            raise FormatError(
                f"{folder} holds {len(present)} of {count} shards, and {_listed(missing)} missing: copy them too"
            )


def _listed(names: Sequence[str]) -> str:
    """Return names with a verb."""
    return f"{list_names(names, 3)} {'is' if len(names) == 1 else 'are'}"
