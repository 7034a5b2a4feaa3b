"""SQL92 expressions over the properties of a message: RocketMQ's grammar and rules. docs/sql92.md describes them.

``compile_expression`` parses a text and makes one Python function of it; ``Expression`` evaluates it.
"""

from trimq.protocol.sql92.errors import ExpressionError
from trimq.protocol.sql92.expression import Expression, compile_expression

__all__ = ["Expression", "ExpressionError", "compile_expression"]
