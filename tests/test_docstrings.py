"""Docstrings that inherit arguments and errors of others."""

import inspect

import panther as pr
from panther._docstrings import inherit_arguments


def source(m, seed):
    """Draw rows.

    Args:
        m: Number of rows, which is
            large.
        seed: Seed of the rows.

    Raises:
        TypeError: If m is not a number.
        ValueError: If m is negative.
    """


def test_entries_are_in_the_order_of_the_signature_and_own_entries_win():
    @inherit_arguments(source)
    def function(k, m, *rest, seed=None):
        """Draw columns.

        Args:
            k: Number of columns.
            *rest: Anything.
            seed: Own seed.

        Raises:
            ValueError: If k is negative.

        Cost: k draws.
        """

    sections = function.__doc__.split("\n\n")
    assert sections[0] == "Draw columns."
    assert sections[1].splitlines() == [
        "Args:",
        "    k: Number of columns.",
        "    m: Number of rows, which is",
        "        large.",
        "    *rest: Anything.",
        "    seed: Own seed.",
    ]
    assert sections[2].splitlines() == [
        "Raises:",
        "    TypeError: If m is not a number.",
        "    ValueError: If k is negative.",
    ]
    assert sections[3] == "Cost: k draws."


def test_missing_sections_are_added_in_their_place():
    @inherit_arguments(source)
    class Layer:
        """A layer.

        Returns:
            Nothing.

        Example:
            >>> 1
            1
        """

        def __init__(self, seed):
            self.seed = seed

    heads = [part.partition("\n")[0] for part in Layer.__doc__.split("\n\n")]
    assert heads == ["A layer.", "Args:", "Returns:", "Raises:", "Example:"]
    assert "m:" not in Layer.__doc__


def test_every_sketch_shows_its_arguments():
    for kind in (pr.sketch.GaussianSketch, pr.sketch.SparseSketch, pr.sketch.SRHT):
        for name in inspect.signature(kind).parameters:
            assert f"\n    {name}: " in kind.__doc__


def test_a_removed_docstring_stays_removed():
    """As with Python's option -OO."""

    def function(m, seed):
        pass

    assert inherit_arguments(source)(function).__doc__ is None
    function.__doc__ = "Draw."
    assert inherit_arguments(lambda m: None)(function).__doc__ == "Draw."
