"""The error type for everything that a user can fix."""


class ConfigError(ValueError):
    """An invalid configuration, data file, model folder, checkpoint or environment.

    The text is for the user: sentences that name the key or the file and say what to do. The
    command line prints it and exits with code 2. Every other exception is a bug in rlcore.
    """
