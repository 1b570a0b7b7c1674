"""Texts that any working language model finds likely, and the prompts that a check drafts replies to."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.bench.prompts import Prompt, a_few, built_in, held_out
from dflash_local.catalog import bundled

PROMPTS = 5

PROSE = """\
The market opens at six in the morning, long before most of the town is awake. Farmers from the villages around bring
vegetables, eggs and cheese, and in late summer there are so many tomatoes that nobody can sell them all. My grandmother
used to go there every Saturday with a large basket. She knew most of the sellers by name, and she never paid the first
price that they asked. When I was eight years old she began to take me with her, and it was my task to carry the bread.

What I remember best is the winter. It was still dark when we left the house, the streets were covered with snow, and
our breath hung in the air. The man who sold fish had a small stove behind his table, and he always let me warm my
hands for a minute while the two of them talked about the weather, about the price of potatoes and about people who had
died before I was born. On the way home she would tell me how the town had looked when she was a child: there had been
no cars, only horses, and the river had been so clean that everybody learned to swim in it. I did not believe all of it
then. Years later I found an old photograph in a book, and everything was just as she had said.
"""

CODE = '''\
import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Order:
    """One line of the file of orders."""

    customer: str
    product: str
    quantity: int
    price: float

    @property
    def total(self) -> float:
        return self.quantity * self.price


def read_orders(path: Path) -> list[Order]:
    """Read all orders from a CSV file with a header."""
    orders = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            orders.append(
                Order(
                    customer=row["customer"],
                    product=row["product"],
                    quantity=int(row["quantity"]),
                    price=float(row["price"]),
                )
            )
    return orders


def total_by_customer(orders: list[Order]) -> dict[str, float]:
    """Return the sum of all orders of each customer."""
    totals: dict[str, float] = defaultdict(float)
    for order in orders:
        totals[order.customer] += order.total
    return dict(totals)


def main() -> None:
    orders = read_orders(Path("orders.csv"))
    totals = total_by_customer(orders)
    for customer, total in sorted(totals.items(), key=lambda item: item[1], reverse=True):
        print(f"{customer:<20} {total:>10.2f}")


if __name__ == "__main__":
    main()
'''

STORY = Prompt("story", "Tell me a short story about a fisherman who finds a letter in a bottle.")


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text, and the question that it answers. ``alone``: it can stand without, as models find texts in training."""

    kind: str
    text: str
    question: str
    alone: bool = True


def plain_texts() -> tuple[ScoredText, ...]:
    """A few hundred tokens each of prose and of code, written for this purpose: no model was trained on them."""
    return (
        ScoredText("prose", PROSE, "Describe in plain words a market that you remember from your childhood."),
        ScoredText("code", CODE, "Write a Python program that sums up the orders of each customer in a CSV file."),
    )


def toy_texts() -> tuple[ScoredText, ...]:
    """The same for bundled pairs, which know no other language than their own: right answers that were held out."""
    return tuple(ScoredText(each.kind, each.answer, each.text, alone=False) for each in _held_out() if each.answer)


def prompts_of(pair: bundled.Pair) -> tuple[Prompt, ...]:
    """What replies are drafted to. CheckpointError: the file of a bundled pair's prompts is missing."""
    return _held_out() if pair.toy else (*built_in(), STORY)


def _held_out() -> tuple[Prompt, ...]:
    return a_few(held_out(bundled.HELD_OUT), PROMPTS)
