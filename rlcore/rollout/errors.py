"""The error of an engine that has failed. The module imports nothing, so that child processes start
fast."""


class EngineFailedError(RuntimeError):
    """Error of an engine that has failed and needs a restart; the message gives the reason. Invalid
    calls to a working engine raise other errors."""
