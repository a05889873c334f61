"""The forms that a weight can take, and the choice of one for every layer."""

# Nothing is imported here, because `allocation` imports the fits, which import `options`.
__all__: list[str] = []
