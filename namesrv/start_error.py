"""The error of a start that is refused."""


class StartError(Exception):
    """The name server cannot start; the text says why, for the user at the terminal."""
