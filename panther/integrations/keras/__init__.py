"""Sketched layers for Keras 3, in ``keras.ops``: the same code on its backends torch, TensorFlow and JAX.

``dense`` and ``convolution`` hold the layers. ``layer`` holds their base class, with the seed, its record in files, and
the exchange of weights with the layers of :mod:`panther.nn`. ``philox`` draws the signs. Importing this package
registers the layers, so that ``keras.saving.load_model`` finds them.
"""

from typing import Any

from panther.errors import MissingExtraError, check_version, require_extra

try:
    _keras: Any = require_extra("keras", "keras")
except ModuleNotFoundError as error:  # Keras imports its backend, which by default is TensorFlow
    if (_backend := (error.name or "").partition(".")[0]) not in ("tensorflow", "jax", "openvino"):
        raise  # a requirement of Keras itself is missing
    raise MissingExtraError(
        f"Keras is set to a backend that needs {_backend}, which is not installed: install it, or set the "
        "environment variable KERAS_BACKEND to torch, tensorflow or jax, whichever is installed"
    ) from error
check_version("keras", _keras.__version__, 3)  # before the imports below, which fail with unsupported versions

from .convolution import SKConv2D  # noqa: E402
from .dense import SKDense  # noqa: E402

__all__ = ["SKConv2D", "SKDense"]
