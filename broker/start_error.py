"""The error of a start that cannot go on."""


class StartError(Exception):
    """The broker cannot start. The text gives the reason and a remedy; the command prints it."""
