"""A callback that ends a run in the middle, as an exception of the user's code or Ctrl-C does."""

from panther.train import Callback


class BrokenError(Exception):
    pass


class Breaks(Callback):
    """Raises an error after a step."""

    def __init__(self, step, error=BrokenError):
        self.at, self.error = step, error

    def on_step(self, trainer, loss):
        if trainer.step == self.at:
            raise self.error
