"""The error of everything that a user can mend."""


class ConfigError(ValueError):
    """Refuse a configuration, a data file, a model folder, a checkpoint or the environment.

    The text is for the user: sentences that name the key or the file and say what to do. The
    command line prints it and exits with code 2; every other exception is a fault of the program.
    """
