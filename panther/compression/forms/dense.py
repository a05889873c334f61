"""The dense form: the layer stays as it is."""

__all__: list[str] = []

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import DENSE, Form, FormSettings, Option, TargetFit, register
from panther.compression.forms.replacement import Replacement


class Dense(Form):
    """The dense weight."""

    name = DENSE
    is_default = True
    fits_every_kind = True

    def options(self, target: Target, settings: FormSettings) -> list[Option]:
        """Return the dense weight."""
        return [Option(DENSE, target.dense_bytes, error=0.0)]

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float]:
        """Return zeros."""
        return 0.0, 0.0

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return no new layers."""
        return {}


register(Dense())
