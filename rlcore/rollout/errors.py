"""The error of an engine that has failed for good. The module imports nothing, so that child
processes start fast."""


class EngineFailedError(RuntimeError):
    """Raised if the engine has failed and cannot be used again; the message is the reason. Invalid
    calls to a working engine raise other errors."""
