"""Define the error type for problems that a user can fix."""


class ConfigError(ValueError):
    """An invalid configuration, data file, model folder, checkpoint or environment.

    The message is for the user: it names the key or file and describes how to fix the problem. The
    command line prints the message and exits with code 2. Any other exception is a bug in rlcore.
    """


class LimitError(ConfigError):
    """Input that exceeds a limit of time or memory again and again. Unlike one invalid row, which
    is skipped, it ends the reading of a file."""
