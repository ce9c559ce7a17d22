"""numba's njit where it is installed; elsewhere the plain function, which is right but slow.

The bench runs none of these without numba (`Drafter.modules`); tests compare the plain functions.
"""

try:
    from numba import njit
except ImportError:

    def njit(function):  # noqa: ANN001, ANN201
        """The function as it is."""
        return function


__all__ = ["njit"]
