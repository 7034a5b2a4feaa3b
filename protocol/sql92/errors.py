"""Why an expression is refused: the position in its text, and the reason."""


class ExpressionError(ValueError):
    """An expression that the broker does not accept.

    ``position`` is the 0-based index in the text at which it was refused, ``reason`` a text for people. The broker
    answers SUBSCRIPTION_PARSE_FAILED (23) with both.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        return f"at position {self.position}: {self.reason}"
