"""The versions of other libraries for which an adapter is written."""

__all__ = ["check_version"]

from panther.errors import ConfigError


def check_version(name: str, version: str, *majors: int) -> None:
    """Raise unless a library's major version is one of those that the adapter was tested with.

    Raises:
        ConfigError: With the version found and those that serve.

    Example:
        >>> check_version("transformers", "5.23.0", 5)
    """
    if version.partition(".")[0] not in map(str, majors):
        known = " or ".join(f"{major}.x" for major in majors)
        raise ConfigError(
            f"{name} {version} is installed, and this Panther's adapter is made for {known}: install that "
            "version, or a newer Panther"
        )
