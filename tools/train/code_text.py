"""Small Python functions and classes: the toy's requests for code and the one answer to each. Only text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.train.phrasing import Turn, ask, listed
from tools.train.words import HARD_CODE


@dataclass(frozen=True, slots=True)
class _Task:
    """`says` completes "a function that ..."; {a} {b} {c} stand for the arguments, {f} for the function."""

    says: tuple[str, ...]
    name: str
    args: tuple[str, ...]
    doc: str
    body: tuple[str, ...]
    example: str


_T = _Task
_TOO_HARD = (
    "That is too hard for a toy model. I know small functions, such as add, factorial, is_prime, reverse and sort_list."
)
_TASKS: tuple[_Task, ...] = (
    _T(("adds two numbers", "returns the sum of two numbers"), "add", ("a", "b"), "Return the sum of {a} and {b}.",
       ("return {a} + {b}",), "{f}(2, 3) returns 5"),
    _T(("subtracts two numbers", "returns the difference of two numbers"), "subtract", ("a", "b"),
       "Return {a} minus {b}.", ("return {a} - {b}",), "{f}(7, 3) returns 4"),
    _T(("multiplies two numbers", "returns the product of two numbers"), "multiply", ("a", "b"),
       "Return the product of {a} and {b}.", ("return {a} * {b}",), "{f}(2, 3) returns 6"),
    _T(("divides two numbers", "returns the quotient of two numbers"), "divide", ("a", "b"),
       "Return {a} divided by {b}.",
       ("if {b} == 0:", '    raise ValueError("{b} must not be zero")', "return {a} / {b}"), "{f}(6, 3) returns 2.0"),
    _T(("returns the larger of two numbers", "finds the maximum of two numbers"), "maximum", ("a", "b"),
       "Return the larger of {a} and {b}.", ("if {a} > {b}:", "    return {a}", "return {b}"), "{f}(2, 3) returns 3"),
    _T(("returns the smaller of two numbers", "finds the minimum of two numbers"), "minimum", ("a", "b"),
       "Return the smaller of {a} and {b}.", ("if {a} < {b}:", "    return {a}", "return {b}"), "{f}(2, 3) returns 2"),
    _T(("computes the average of two numbers", "returns the mean of two numbers"), "average", ("a", "b"),
       "Return the average of {a} and {b}.", ("return ({a} + {b}) / 2",), "{f}(2, 4) returns 3.0"),
    _T(("squares a number", "returns the square of a number"), "square", ("n",), "Return the square of {a}.",
       ("return {a} * {a}",), "{f}(3) returns 9"),
    _T(("doubles a number", "returns twice a number"), "double", ("n",), "Return two times {a}.",
       ("return 2 * {a}",), "{f}(3) returns 6"),
    _T(("checks if a number is even", "tells whether a number is even"), "is_even", ("n",),
       "Return True if {a} is even.", ("return {a} % 2 == 0",), "{f}(4) returns True"),
    _T(("checks if a number is odd", "tells whether a number is odd"), "is_odd", ("n",), "Return True if {a} is odd.",
       ("return {a} % 2 == 1",), "{f}(4) returns False"),
    _T(("computes the factorial of a number", "returns the factorial"), "factorial", ("n",),
       "Return the factorial of {a}.",
       ("result = 1", "for i in range(2, {a} + 1):", "    result = result * i", "return result"), "{f}(4) returns 24"),
    _T(("computes the power of a number", "raises a number to a power"), "power", ("base", "exponent"),
       "Return {a} to the power of {b}.",
       ("result = 1", "for i in range({b}):", "    result = result * {a}", "return result"), "{f}(2, 3) returns 8"),
    _T(("returns the absolute value of a number", "computes the absolute value"), "absolute", ("n",),
       "Return the absolute value of {a}.", ("if {a} < 0:", "    return -{a}", "return {a}"), "{f}(-3) returns 3"),
    _T(("sums a list of numbers", "returns the sum of a list"), "sum_list", ("numbers",),
       "Return the sum of all {a}.", ("total = 0", "for item in {a}:", "    total = total + item", "return total"),
       "{f}([1, 2, 3]) returns 6"),
    _T(("finds the largest number in a list", "returns the maximum of a list"), "largest", ("numbers",),
       "Return the largest of the {a}.",
       ("best = {a}[0]", "for item in {a}:", "    if item > best:", "        best = item", "return best"),
       "{f}([1, 5, 3]) returns 5"),
    _T(("finds the smallest number in a list", "returns the minimum of a list"), "smallest", ("numbers",),
       "Return the smallest of the {a}.",
       ("best = {a}[0]", "for item in {a}:", "    if item < best:", "        best = item", "return best"),
       "{f}([4, 1, 3]) returns 1"),
    _T(("counts the items of a list", "returns the length of a list"), "count_items", ("items",),
       "Return how many {a} there are.", ("count = 0", "for item in {a}:", "    count = count + 1", "return count"),
       "{f}([1, 2, 3]) returns 3"),
    _T(("keeps the even numbers of a list", "filters the even numbers of a list"), "keep_even", ("numbers",),
       "Return the even {a}.",
       ("result = []", "for item in {a}:", "    if item % 2 == 0:", "        result.append(item)", "return result"),
       "{f}([1, 2, 4]) returns [2, 4]"),
    _T(("doubles every number of a list", "doubles each item of a list"), "double_all", ("numbers",),
       "Return the {a}, each doubled.",
       ("result = []", "for item in {a}:", "    result.append(2 * item)", "return result"),
       "{f}([1, 2]) returns [2, 4]"),
    _T(("reverses a string", "returns a text backwards"), "reverse", ("text",), "Return {a} backwards.",
       ("return {a}[::-1]",), '{f}("abc") returns "cba"'),
    _T(("counts the vowels in a string", "returns the number of vowels in a text"), "count_vowels", ("text",),
       "Return the number of vowels in {a}.",
       ("count = 0", "for letter in {a}:", '    if letter in "aeiou":', "        count = count + 1", "return count"),
       '{f}("banana") returns 3'),
    _T(("counts the words of a text", "returns the number of words in a string"), "count_words", ("text",),
       "Return the number of words in {a}.", ("return len({a}.split())",), '{f}("a b c") returns 3'),
    _T(("checks if a word is a palindrome", "tells whether a text is a palindrome"), "is_palindrome", ("text",),
       "Return True if {a} reads the same backwards.", ("return {a} == {a}[::-1]",), '{f}("anna") returns True'),
    _T(("checks if a number is prime", "tells whether a number is a prime"), "is_prime", ("n",),
       "Return True if {a} is prime.",
       ("if {a} < 2:", "    return False", "for i in range(2, {a}):", "    if {a} % i == 0:", "        return False",
        "return True"), "{f}(7) returns True"),
    _T(("computes the fibonacci numbers", "returns a fibonacci number"), "fibonacci", ("n",),
       "Return fibonacci number {a}.",
       ("this, then = 0, 1", "for i in range({a}):", "    this, then = then, this + then", "return this"),
       "{f}(6) returns 8"),
    _T(("computes the area of a rectangle", "returns the area of a rectangle"), "area", ("width", "height"),
       "Return the area: {a} times {b}.", ("return {a} * {b}",), "{f}(2, 3) returns 6"),
    _T(("converts celsius to fahrenheit", "turns celsius into fahrenheit"), "to_fahrenheit", ("celsius",),
       "Return {a} in fahrenheit.", ("return {a} * 9 / 5 + 32",), "{f}(100) returns 212.0"),
    _T(("greets a person", "says hello to a person"), "greet", ("name",), "Return a greeting for {a}.",
       ('return "Hello, " + {a} + "!"',), '{f}("Anna") returns "Hello, Anna!"'),
    _T(("prints hello world", "says hello world", "prints a greeting to the world"), "hello", (),
       "Print a greeting to the world.", ('print("Hello, world!")',), '{f}() prints "Hello, world!"'),
    _T(("prints the numbers from one to n", "prints the first numbers"), "print_numbers", ("n",),
       "Print the numbers from 1 to {a}.", ("for i in range(1, {a} + 1):", "    print(i)"), "{f}(3) prints 1, 2 and 3"),
    _T(("sorts a list", "returns a sorted list"), "sort_list", ("items",), "Return the {a} in order.",
       ("return sorted({a})",), "{f}([3, 1, 2]) returns [1, 2, 3]"),
)

_VERBS = tuple("get make find run do take show try use check calc work".split())
_NOUNS = tuple("value total result price data step score item part rate unit count size level point".split())
_ARGS = tuple("x y z first second left right one other p q u v value data".split())

_CLASSES = tuple("Book Car Dog Cat House Person Student Movie Song Robot Planet Ship Recipe Game Phone Plant City Shop "
                 "Ticket Player".split())
_FIELDS = tuple("name title author age price size color weight speed year owner pages level score city country "
                "length width height rating".split())


def function_answer(task: _Task, name: str, args: tuple[str, ...]) -> str:
    """The whole reply: a fenced function with a docstring, and one example call."""
    slots = dict(zip("abc", args, strict=False)) | {"f": name}
    lines = [f"def {name}({', '.join(args)}):", f'    """{task.doc.format(**slots)}"""']
    lines += ["    " + line.format(**slots) for line in task.body]
    return "```python\n" + "\n".join(lines) + f"\n```\nFor example, {task.example.format(**slots)}."


def _that(rng: Random, says: str) -> str:
    """ "adds two numbers" -> "that adds two numbers" or "to add two numbers"."""
    if rng.random() < 0.65:
        return f"that {says}"
    verb, rest = says.split(" ", 1)
    return f"to {verb[:-3] + 'y' if verb.endswith('ies') else verb[:-1]} {rest}"


def _function(rng: Random) -> tuple[str, str, bool]:
    task = rng.choice(_TASKS)
    name, args, own = task.name, task.args, rng.random() < 0.55
    says = _that(rng, rng.choice(task.says))
    noun = rng.choice(("Python function", "Python function", "function", "small Python function", "Python program"))
    called = ""
    if own and rng.random() < 0.85:
        name = rng.choice(_VERBS) + "_" + rng.choice(_NOUNS) if rng.random() < 0.8 else rng.choice(_NOUNS)
        called = rng.choice((f" called {name}", f" named {name}"))
    tail = ""
    if own and args and (not called or rng.random() < 0.4):
        args = tuple(rng.sample(_ARGS, len(args)))
        tail = f", with the argument {args[0]}" if len(args) == 1 else f", with the arguments {listed(list(args))}"
    verb = rng.choice(("write", "write", "write", "give me", "show me", "make"))
    request = f"{verb} a {noun}{called} {says}{tail}"
    if not own and rng.random() < 0.15:
        request = rng.choice((f"write {name} in Python", f"write the function {name} in Python"))
    return request, function_answer(task, name, args), bool(called or tail)


def class_answer(name: str, fields: list[str]) -> str:
    """A fenced class with `__init__` and one getter per field."""
    lines = [f"class {name}:", f'    """A {name.lower()} with {listed(fields)}."""', "",
             f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f'        """Return the {field}."""']
        lines += [f"        return self.{field}"]
    return "```python\n" + "\n".join(lines) + "\n```"


def _class(rng: Random) -> tuple[str, str, bool]:
    name, fields = rng.choice(_CLASSES), rng.sample(_FIELDS, rng.randint(1, 4))
    word = "field" if len(fields) == 1 else "fields"
    verb = rng.choice(("write", "write", "make", "show me"))
    request = rng.choice((
        f"{verb} a Python class {name} with the {word} {listed(fields)}",
        f"{verb} a class {name} with {listed(fields)}",
        f"{verb} a Python class called {name} with {listed(fields)}",
    ))
    return request, class_answer(name, fields), True


def _hard(rng: Random) -> tuple[str, str, bool]:
    noun = rng.choice(("Python function", "function", "Python program", "class"))
    return f"{rng.choice(('write', 'give me', 'make'))} a {noun} {_that(rng, rng.choice(HARD_CODE))}", _TOO_HARD, False


def code(rng: Random) -> Turn:
    """A function (own or given names) or a class with getters. Own names are held out by answer, not by wording."""
    request, answer, own = rng.choices((_function, _class, _hard), (70, 26, 4))[0](rng)
    prompt = ask(rng, request)
    return Turn("code", prompt, answer, answer if own else prompt)
