"""The forms that a weight can take, and the choice of one for every layer."""

# Nothing is imported here: `allocation` needs the fits, which need `options`.
__all__: list[str] = []
