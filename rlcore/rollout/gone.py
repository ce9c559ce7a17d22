"""The error of an engine that is no more; light, as child processes import it first."""


class EngineGoneError(RuntimeError):
    """The engine cannot be used again; the message says why. What it refuses while it lives is
    another error."""
