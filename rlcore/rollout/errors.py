"""Error of a failed engine, in a module without imports so that child processes start fast."""


class EngineFailedError(RuntimeError):
    """Error of an engine that has failed and needs a restart; the message gives the reason. Invalid
    calls to a working engine raise other errors."""
