"""The versions of other libraries for which an adapter is written."""

__all__ = ["check_version"]

import re

from panther.errors import ConfigError


def check_version(name: str, version: str, *majors: int, least: tuple[int, int] | None = None) -> None:
    """Raise unless a library's major version is one of those that the adapter was tested with.

    Args:
        name: The library.
        version: Its version.
        majors: The major versions that serve.
        least: The oldest version that has all the adapter needs, major and minor.

    Raises:
        ConfigError: With the version found and those that serve.

    Example:
        >>> check_version("transformers", "5.23.0", 5)
        >>> check_version("ray", "2.9.3", 2, least=(2, 60))
        Traceback (most recent call last):
        panther.errors.ConfigError: ray 2.9.3 is installed, and Panther needs 2.60 or newer: pip install 'ray>=2.60'
    """
    if version.partition(".")[0] not in map(str, majors):
        known = " or ".join(f"{major}.x" for major in majors)
        raise ConfigError(
            f"{name} {version} is installed, and this Panther's adapter is made for {known}: install that "
            "version, or a newer Panther"
        )
    if least is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
        raise ConfigError(
            f"{name} {version} is installed, and Panther needs {least[0]}.{least[1]} or newer: "
            f"pip install '{name}>={least[0]}.{least[1]}'"
        )
