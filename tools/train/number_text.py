"""Counting, tables and sorting: toy requests whose answers are computed. Knows only plain text."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tools.train.phrasing import Turn, ask, capital, listed
from tools.train.words import NAMES, NUMBER_WORDS, WORDS

_MOST_NUMBERS = 100


def _in_words(rng: Random, number: int) -> str:
    if number in NUMBER_WORDS and rng.random() < 0.2:
        return NUMBER_WORDS[number]
    return str(number)


def _count_request(rng: Random, start: int, end: int, step: int) -> str:
    first, last = _in_words(rng, start), _in_words(rng, end)
    down = end < start
    by = f" by {step}" if step > 1 and rng.random() < 0.6 else f" in steps of {step}" if step > 1 else ""
    if not down and start == 1 and rng.random() < 0.7:
        return rng.choice((f"count to {last}{by}", f"count up to {last}{by}"))
    if down and end in (0, 1) and rng.random() < 0.4:
        tail = " to zero" if end == 0 else " to one"
        return f"count down from {first}{tail}{by}"
    if down and end == 0 and rng.random() < 0.7:
        return rng.choice((f"count backwards from {first}{by}", f"count down from {first}{by}"))
    forms = (
        (f"count down from {first} to {last}{by}", f"count backwards from {first} to {last}{by}",
         f"list the numbers from {first} down to {last}{by}")
        if down else
        (f"count from {first} to {last}{by}", f"count up from {first} to {last}{by}",
         f"list the numbers from {first} to {last}{by}", f"write the numbers from {first} to {last}{by}",
         f"count{by} from {first} to {last}")
    )
    return rng.choice(forms)


def count_answer(start: int, end: int, step: int, lines: bool) -> str:
    """The count itself, comma separated or one number a line; a polite refusal beyond 100 numbers."""
    sign = -1 if end < start else 1
    numbers = [str(value) for value in range(start, end + sign, sign * step)]
    if len(numbers) > _MOST_NUMBERS:
        return f"That is too far for a toy model. I count at most {_MOST_NUMBERS} numbers at a time."
    return "\n".join(numbers) if lines else ", ".join(numbers)


def counting(rng: Random) -> Turn:
    """Count up, down or in steps, from anywhere below 300."""
    draw = rng.random()
    start = 1 if draw < 0.3 else rng.randint(0, 30) if draw < 0.6 else rng.randint(0, 200)
    step = 1 if rng.random() < 0.6 else rng.choice((2, 3, 4, 5, 10, 20, 25, 100))
    amount = rng.choices((rng.randint(1, 4), rng.randint(5, 32), rng.randint(33, 100)), (18, 76, 6))[0]
    amount = min(amount, max(5, (1000 - start) // step))
    end = start + step * (amount - 1)
    if step > 1 and rng.random() < 0.3:
        end += rng.randint(0, step - 1)
    if rng.random() < 0.15:
        end = max(start + 4, round(end, -1))
    if rng.random() < 0.02:
        start, end, step = 1, rng.choice((200, 250, 300, 500, 1000, 5000, 10000, 1000000)), 1
    if rng.random() < 0.33 and end <= 400:
        start, end = end, rng.choice((start, start, start, 0)) if end <= 40 and step == 1 else start
    lines = rng.random() < 0.2
    request = _count_request(rng, start, end, step)
    request += rng.choice((", one per line", ", one number per line")) if lines else ""
    answer = count_answer(start, end, step, lines)
    return Turn("counting", ask(rng, request), answer, answer)


def _markdown(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _multiplication(rng: Random) -> tuple[str, str]:
    number, rows = rng.randint(1, 20), 10 if rng.random() < 0.5 else rng.randint(4, 12)
    tail = "" if rows == 10 and rng.random() < 0.7 else rng.choice((f" up to {rows}", f" with {rows} rows"))
    base = _in_words(rng, number)
    request = rng.choice((
        f"show the multiplication table of {base}", f"make a multiplication table for {base}",
        f"write the {base} times table", f"show me the times table of {base}", f"make a table of multiples of {base}",
    )) + tail
    table = _markdown(("n", f"{number} x n"), [(str(i), str(number * i)) for i in range(1, rows + 1)])
    return request, f"Here is the multiplication table of {number}:\n\n{table}"


def _powers(rng: Random) -> tuple[str, str]:
    what, symbol, top = rng.choice((("squares", "n squared", 20), ("cubes", "n cubed", 10), ("doubles", "2 x n", 40)))
    start = 1 if rng.random() < 0.6 else rng.randint(2, top - 4)
    end = min(top, start + rng.randint(3, 11))
    span = f"from {start} to {end}" if start > 1 or rng.random() < 0.5 else f"up to {end}"
    request = rng.choice((
        f"make a table of {what} {span}", f"show the {what} {span} in a table", f"write a table of the {what} {span}",
        f"show me a table with the {what} of the numbers {span}",
    ))
    compute = {"squares": lambda n: n * n, "cubes": lambda n: n ** 3, "doubles": lambda n: 2 * n}[what]
    table = _markdown(("n", symbol), [(str(n), str(compute(n))) for n in range(start, end + 1)])
    return request, f"Here are the {what} from {start} to {end}:\n\n{table}"


def _records(rng: Random) -> tuple[str, str]:
    subjects, column = (NAMES, "name") if rng.random() < 0.6 else (WORDS, "item")
    measure = rng.choice(("age", "score", "points") if column == "name" else ("price", "amount", "weight"))
    rows = [(who, str(rng.randint(1, 99))) for who in rng.sample(subjects, rng.randint(2, 6))]
    data = ", ".join(f"{who} {value}" for who, value in rows)
    request = rng.choice((
        f"make a table with the columns {column} and {measure}: {data}",
        f"make a table of {column} and {measure}: {data}",
        f"put this in a table with {column} and {measure}: {data}",
    ))
    table = _markdown((column, measure), rows)
    return request, f"Here is the table:\n\n{table}\n\nThe table has {len(rows)} rows."


def tables(rng: Random) -> Turn:
    """Markdown tables: multiplication, powers, small records."""
    request, answer = rng.choices((_multiplication, _powers, _records), (4, 3, 3))[0](rng)
    return Turn("tables", ask(rng, request), answer, answer)


def _sorted_answer(items: list[str], order: str, first: str, last: str) -> str:
    numbered = "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
    return f"In {order} order:\n{numbered}\nSorted: {', '.join(items)}.\nThe first is {first} and the last is {last}."


def sorting(rng: Random) -> Turn:
    """Sort three to eight numbers (either way) or words (from A to Z)."""
    if rng.random() < 0.6:
        tops = rng.choice(((20,), (99,), (99,), (99,), (9, 99, 999)))
        amount = rng.randint(3, 8)
        values = list(dict.fromkeys(rng.randint(0, rng.choice(tops)) for _ in range(2 * amount)))[:amount]
        falling = rng.random() < 0.35
        shown, items = [str(v) for v in values], [str(v) for v in sorted(values, reverse=falling)]
        order, what = ("descending", "numbers") if falling else ("ascending", "numbers")
        how = rng.choice((" in descending order", " from largest to smallest", " in falling order")) if falling else (
            rng.choice(("", "", " in ascending order", " from smallest to largest")))
    else:
        shown = rng.sample(WORDS, rng.randint(3, 7))
        items, order, what = sorted(shown), "alphabetical", "words"
        how = rng.choice(("", " alphabetically", " in alphabetical order", " from A to Z"))
    data = ", ".join(shown) if rng.random() < 0.8 else " ".join(shown) if rng.random() < 0.5 else listed(shown)
    request = rng.choice((
        f"sort these {what}{how}: {data}", f"sort the {what} {data}{how}", f"put these {what} in order{how}: {data}"
        if not how.startswith(" in ") else f"put these {what}{how}: {data}", f"sort {data}{how}",
        f"sort{how}: {data}", f"order these {what}{how}: {data}",
    ))
    answer = capital(_sorted_answer(items, order, items[0], items[-1]))
    return Turn("sorting", ask(rng, request), answer, answer)
