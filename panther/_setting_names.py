"""Panther's names for the settings of other libraries, and hints in messages about unknown settings.

The names and the advice are in ``hints.toml``. A guess by spelling needs a close match, because a wrong guess is worse
than the list of all settings.
"""

__all__ = ["advice_for", "name_hint", "near_name", "value_hint"]

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from panther._missing_names import CLOSE, advice_in, hints

_LAUNCHED = ("TrainConfig", "parallelism_config")  # whose processes a launcher starts
# Settings that only TrainConfig has.
_TRAIN_CONFIG_SETTINGS = (
    "activation_checkpointing batch_size bucket_cap_mb checkpoint_dir checkpoint_every_n_epochs "
    "checkpoint_every_n_steps comm_hook compile cpu_offload data_parallel_size epochs find_unused_parameters "
    "gradient_accumulation_steps gradient_clipping learning_rate log_every_n_steps max_steps mixed_precision "
    "num_microbatches pipeline_parallel_size profile progress reshard_after_forward resume run_name "
    "scaler_growth_interval scaler_init_scale schedule seed sketch_fraction strategy tensor_parallel_size "
    "trackers utilization warmup_steps"
)


def name_hint(name: str, names: Collection[str], owner: str = "") -> str:
    """Return the end of a message about an unknown setting: what to use instead, or all settings.

    Args:
        name: The unknown setting.
        names: The names of the owner's settings.
        owner: The class or argument that takes them. There is special advice for ``"TrainConfig"``,
            ``"parallelism_config"``, ``"LaunchConfig"`` and some functions.

    Example:
        >>> name_hint("lr", ["learning_rate", "epochs"])
        "did you mean 'learning_rate'?"
        >>> name_hint("eps", ["learning_rate", "epochs"])
        'use some of learning_rate, epochs'
    """
    if (advice := advice_for(name, owner)) is not None:
        return advice
    if (near := near_name(name, names)) is not None:
        return f"did you mean {near!r}?"
    train_settings = [synonym for synonym in (name, *_names_here(name)) if synonym in _TRAIN_CONFIG_SETTINGS.split()]
    if train_settings and owner in ("TrainConfig", "parallelism_config", "LaunchConfig"):
        return f"{train_settings[0]} is a setting of panther.train.TrainConfig, for a Trainer"
    return f"use some of {', '.join(names)}"


def advice_for(name: str, owner: str) -> str | None:
    """Return what to do in place of a setting that other libraries have and the owner has not; None if unknown."""
    settings = hints()["settings"]
    advice = advice_in(settings["launched"], name) if owner in _LAUNCHED else None
    return advice or advice_in(settings.get(owner, {}), name)


def near_name(name: str, names: Collection[str]) -> str | None:
    """Return the entry of ``names`` that is a synonym of ``name`` or is spelled similarly, or None.

    A name of several words with which one entry alone begins is spelled similarly too.

    Example:
        >>> near_name("num_gpus", ["gpus", "memory"])
        'gpus'
        >>> near_name("log_every", ["log_every_n_steps", "seed"])
        'log_every_n_steps'
    """
    synonyms = [synonym for synonym in _names_here(name) if synonym in names]
    if similar := synonyms or get_close_matches(name, names, 1, cutoff=CLOSE):
        return similar[0]
    longer = [longer_name for longer_name in names if "_" in name and longer_name.startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def _names_here(name: str) -> list[str]:
    return [name_here for name_here, other_names in hints()["synonyms"].items() if name in other_names.split()]


def value_hint(setting: str, value: Any, values: Sequence[Any], owner: str = "") -> str:
    """Return the end of a message about an unknown value of a setting, as :func:`name_hint` does for names.

    Example:
        >>> value_hint("strategy", "FSDP", ["ddp", "fsdp"])
        "did you mean 'fsdp'?"
        >>> value_hint("strategy", "zero2", ["ddp", "fsdp"], "TrainConfig")
        "use strategy='fsdp' with reshard_after_forward=False"
    """
    plain, advice = _letters_and_digits(value), hints()["values"]
    if (hint := advice_in(advice.get(f"{owner}.{setting}", advice.get(setting, {})), plain)) is not None:
        return hint
    by_plain = {_letters_and_digits(accepted): accepted for accepted in values}
    if near := get_close_matches(plain, by_plain, 1, cutoff=CLOSE):
        return f"did you mean {by_plain[near[0]]!r}?"
    return f"use one of {', '.join(map(repr, values))}"


def _letters_and_digits(value: Any) -> str:
    return "".join(character for character in str(value).lower() if character.isalnum())
