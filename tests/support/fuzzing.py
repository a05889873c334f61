"""What the property tests share: the number of examples, and the form of an error.

``PANTHER_FUZZ_EXAMPLES`` sets the number of examples of each test: 25 by default, 50 in the shares of ``.ci/run``, 200
in ``make verify`` and 2,000 in ``make torture``.
"""

import os

from hypothesis import HealthCheck, settings

fuzz = settings(
    max_examples=int(os.environ.get("PANTHER_FUZZ_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def is_a_sentence(error: Exception) -> None:
    """One line that says more than the name of what went wrong."""
    assert len(str(error)) > 20
    assert "\n" not in str(error)
