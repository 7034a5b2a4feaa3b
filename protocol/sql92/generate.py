"""The tree of an expression as one Python function.

The function's source consists of names that this module makes, and of lengths: names of properties and literals are
values in the function's namespace, so no text of a user is ever read as code.

A node is generated in one of three ways: its value (true, false, or None for null), whether it is true, whether it is
false. The last two are shorter, and most expressions need nothing else. RocketMQ's AND evaluates its right side also
after a null on the left, and a comparison that fails ends the whole evaluation: hence some chains need values, see
``_null_before_failure``.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from trimq.protocol.property_text import decode_properties
from trimq.protocol.sql92 import values
from trimq.protocol.sql92.nodes import (
    And,
    Between,
    Cast,
    Compare,
    Equal,
    Find,
    In,
    Node,
    Not,
    Nothing,
    Number,
    Or,
    Property,
    Relation,
    Text,
    Truth,
)

_OPPOSITE: Final[dict[Relation, str]] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_HELPERS: Final[dict[str, object]] = {
    "str": str,
    "EvaluationError": values.EvaluationError,
    "to_int": values.to_int,
    "to_long": values.to_long,
    "to_finite": values.to_finite,
    "compare": values.compare,
    "equal": values.equal,
    "is_text": values.is_text,
    "decode_properties": decode_properties,
}
_SEARCHED: Final = 12
"""Up to so many properties are looked for in the text one by one; for more, all of the text's are decoded."""
_IN_TEXT: Final = ["        if text.__class__ is not str:", "            text = str(text, 'utf-8', 'replace')"]


def generate(tree: Node) -> tuple[Callable[..., bool], frozenset[str]]:
    """The function of an expression, and the properties that it reads.

    It is called with the properties as text or bytes, or with None and a function that returns a property by name.
    """
    generator = _Generator()
    result = generator.true(tree, final=True)
    names = list(generator.properties)
    source = "\n".join(
        [
            "def matches(text, get=None):",
            *generator.extraction(names),
            "    try:",
            f"        return True if {result} else False",
            "    except EvaluationError:",
            "        return False",
            "",
        ]
    )
    exec(compile(source, "<sql92>", "exec"), generator.namespace)  # noqa: S102 - no text of a user in it, see above
    function: Callable[..., bool] = generator.namespace["matches"]
    return function, frozenset(names)


class _Generator:
    """Writes the source of one function, and collects the values of its namespace."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__builtins__": {}, **_HELPERS}
        self.properties: dict[str, str] = {}
        self._constants: dict[tuple[type, object], str] = {}
        self._temporaries = 0

    def extraction(self, names: list[str]) -> list[str]:
        """The statements that put the properties into variables."""
        if not names:
            return []
        by_name = [f"p{number} = get({self.constant(name)})" for number, name in enumerate(names)]
        if len(names) > _SEARCHED:
            take_all = ["        get = decode_properties(text).get"]
            return ["    if get is None:", *_IN_TEXT, *take_all, *[f"    {line}" for line in by_name]]
        search = [line for number, name in enumerate(names) for line in self._search_in_text(number, name)]
        return [
            "    if get is None:",
            *_IN_TEXT,
            "        text = '\\2' + text + '\\2'",
            *search,
            "    else:",
            *[f"        {line}" for line in by_name],
        ]

    def _search_in_text(self, number: int, name: str) -> list[str]:
        """Takes one property out of a text that starts and ends with a separator.

        If its last occurrence has no value, an earlier one counts that has one: then all are decoded, once for all
        names.
        """
        mark = f"\x02{name}\x01"
        return [
            f"        at = text.rfind({self.constant(mark)})",
            "        if at < 0:",
            f"            p{number} = None",
            "        else:",
            f"            at += {len(mark)}",
            f"            p{number} = text[at:text.find('\\2', at)]",
            f"            if not p{number}:",
            "                if get is None:",
            "                    get = decode_properties(text).get",
            f"                p{number} = get({self.constant(name)})",
        ]

    def constant(self, value: object) -> str:
        """The name of a value in the function's namespace."""
        key = (value.__class__, value)
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"c{len(self._constants)}"
            self.namespace[name] = value
        return name

    def _variable(self, node: Property) -> str:
        return self.properties.setdefault(node.name, f"p{len(self.properties)}")

    def _temporary(self) -> str:
        self._temporaries += 1
        return f"t{self._temporaries}"

    # -- value: true, false or None; a text or a number for operands

    def value(self, node: Node) -> str:
        """An expression for the value of a node."""
        match node:
            case Property():
                return self._variable(node)
            case Text() | Number():
                return self.constant(node.value)
            case Truth():
                return str(node.value)
            case Nothing():
                return f"(None if {self.value(node.operand)} else None)" if _fails(node) else "None"
            case Cast():
                return f"(None if {self._variable(node.operand)} is None else False)"
            case Not():
                kept = self._temporary()
                return f"(None if ({kept} := {self.value(node.operand)}) is None else not {kept})"
            case And():
                names, parts = self._kept(node.operands)
                return f"({' and '.join(f'{part} is not False' for part in parts)} and {' and '.join(names)} and True)"
            case Or():
                names, parts = self._kept(node.operands)
                nulls = " or ".join(f"{name} is None" for name in names)
                return f"({' or '.join(parts)} or (None if {nulls} else False))"
            case Equal() | Compare() | Between() | In() | Find():
                test = self._test(node)
                if not test.present:
                    return f"({test.condition})"
                return f"({test.condition} if {test.present} else None)"

    # -- conditions: truthy exactly if the node is true, or if it is false

    def true(self, node: Node, *, final: bool) -> str:
        """A condition for "the node is true".

        ``final``: the result is that of the whole expression, so a failure of the evaluation may count as "not true".
        """
        match node:
            case Not():
                return self.false(node.operand, final=final)
            case And() if final or not _null_before_failure(node.operands):
                return f"({' and '.join(self.true(one, final=final) for one in node.operands)})"
            case Or():
                *first, last = node.operands
                parts = [self.true(one, final=False) for one in first]
                return f"({' or '.join([*parts, self.true(last, final=final)])})"
            case Cast():
                self._variable(node.operand)
                return "False"
            case Equal() | Compare() | Between() | In() | Find():
                test = self._test(node)
                return f"({test.present} and {test.condition})" if test.present else test.condition
            case _:
                return self.value(node)

    def false(self, node: Node, *, final: bool) -> str:
        """A condition for "the node is false"; ``final`` as in ``true``."""
        match node:
            case Not():
                return self.true(node.operand, final=final)
            case Or() if final or not _null_before_failure(node.operands):
                return f"({' and '.join(self.false(one, final=final) for one in node.operands)})"
            case And():
                *first, last = node.operands
                parts = [self.false(one, final=False) for one in first]
                return f"({' or '.join([*parts, self.false(last, final=final)])})"
            case Cast():
                return f"{self._variable(node.operand)} is not None"
            case Equal() | Compare() | Between() | In() | Find():
                test = self._test(node)
                return f"({test.present} and {test.opposite})" if test.present else test.opposite
            case _:
                return f"({self.value(node)} is False)"

    def _kept(self, operands: tuple[Node, ...]) -> tuple[list[str], list[str]]:
        """The values of operands, each kept in a variable."""
        kept = [self._temporary() for _ in operands]
        return kept, [f"({name} := {self.value(one)})" for name, one in zip(kept, operands, strict=True)]

    # -- tests

    def _test(self, node: Equal | Compare | Between | In | Find) -> "_Test":
        match node:
            case Equal():
                return self._equality(node)
            case Compare():
                return self._comparison(node)
            case Between():
                name = self._variable(node.operand)
                low, high = self.constant(node.low.value), self.constant(node.high.value)
                number = f"{values.converter(node.low.value).__name__}({name})"
                inside, outside = f"{low} <= {number} <= {high}", f"not {low} <= {number} <= {high}"
                return _test(f"{name} is not None", inside, outside, negated=node.negated)
            case In():
                name, found = self._variable(node.operand), self.constant(node.values)
                return _test(
                    f"{name} is not None", f"{name} in {found}", f"{name} not in {found}", negated=node.negated
                )
            case Find():
                return self._search(node)

    def _equality(self, node: Equal) -> "_Test":
        match node.left, node.right:
            case left, Truth(None):
                operand = self.value(left)
                return _Test("", f"({operand} is None)", f"({operand} is not None)")
            case Property() as left, (Property() | Text()) as right:
                one, other = self.value(left), self.value(right)
                present = f"{one} is not None"
                if isinstance(right, Property):
                    present = f"({present} or {other} is None)"
                return _Test(present, f"{one} == {other}", f"{one} != {other}")
            case Text() as left, Property() as right:
                return _Test(
                    "",
                    f"{self.value(right)} == {self.constant(left.value)}",
                    f"{self.value(right)} != {self.constant(left.value)}",
                )
            case Property() as left, Number(value):
                number = self._number(left, value)
                return _Test(
                    f"{self.value(left)} is not None",
                    f"{number} == {self.constant(value)}",
                    f"{number} != {self.constant(value)}",
                )
            case Number(value), Property() as right:
                name, number = self.value(right), self._number(right, value)
                here = f"{name} is not None and {number} == {self.constant(value)}"
                return _Test("", f"({here})", f"(not ({here}))")
            case left, right:
                kept = self._temporary()
                call = f"({kept} := equal({self.value(left)}, {self.value(right)}))"
                return _Test(f"{call} is not None", kept, f"not {kept}")

    def _comparison(self, node: Compare) -> "_Test":
        relation, opposite = node.relation, _OPPOSITE[node.relation]
        one, other, present = "", "0", ""
        match node.left, node.right:
            case Property() as left, Number(value):
                present = f"{self.value(left)} is not None"
                one, other = self._number(left, value), self.constant(value)
            case Number(value), Property() as right:
                present = f"{self.value(right)} is not None"
                one, other = self.constant(value), self._number(right, value)
            case left, right:
                first, second = self._temporary(), self._temporary()
                present = (
                    f"({first} := {self.value(left)}) is not None and ({second} := {self.value(right)}) is not None"
                )
                one = f"compare({first}, {second})"
        return _Test(present, f"{one} {relation} {other}", f"{one} {opposite} {other}")

    def _search(self, node: Find) -> "_Test":
        if not node.text:
            return _Test("", "False", "True")
        text = self.constant(node.text)
        if isinstance(node.operand, Property):
            name = self._variable(node.operand)
            there = f"{name} is not None"
            found = f"{text} in {name}" if node.how == "CONTAINS" else f"{name}.{node.how.lower()}({text})"
        else:
            kept = self._temporary()
            there = f"is_text({kept} := {self.value(node.operand)})"
            found = f"{text} in {kept}" if node.how == "CONTAINS" else f"{kept}.{node.how.lower()}({text})"
        if node.negated:
            found = f"not {found}"
        return _Test("", f"({there} and {found})", f"(not ({there} and {found}))")

    def _number(self, node: Property, like: float) -> str:
        return f"{values.converter(like).__name__}({self._variable(node)})"


class _Test(NamedTuple):
    """A test: null unless ``present`` (empty: never null), then true or false by ``condition`` or by ``opposite``."""

    present: str
    condition: str
    opposite: str


def _test(present: str, condition: str, opposite: str, *, negated: bool) -> _Test:
    return _Test(present, opposite, condition) if negated else _Test(present, condition, opposite)


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case And() | Or():
            return node.operands
        case Equal() | Compare():
            return node.left, node.right
        case Nothing() | Not() | Find():
            return (node.operand,)
    return ()


def _fails(node: Node) -> bool:
    """Whether the evaluation can fail."""
    match node:
        case Compare() | Between():
            return True
        case Equal(_, Truth(None)) | Equal(Property() | Text(), Property() | Text()):
            return any(map(_fails, _children(node)))
        case Equal():
            return True
    return any(map(_fails, _children(node)))


def _null(node: Node) -> bool:
    """Whether the value can be null, as far as that is easily seen."""
    match node:
        case Find() | Equal(_, Truth(None)) | Equal(Text() | Number(), _) | Truth(True | False):
            return False
        case Not():
            return _null(node.operand)
        case And() | Or():
            return any(map(_null, node.operands))
    return True


def _null_before_failure(operands: tuple[Node, ...]) -> bool:
    """Whether an operand may fail after one that may be null: RocketMQ evaluates it, a stop at the null would not."""
    null = False
    for operand in operands:
        if null and _fails(operand):
            return True
        null = null or _null(operand)
    return False
