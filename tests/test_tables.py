"""Tables and amounts: widths, units, and nothing that could move a cursor."""

from __future__ import annotations

from dflash_local.tables import GIB, Column, amount, field, listing, table, wrapped


def test_amounts_carry_their_unit() -> None:
    assert amount(None) == "unknown"
    assert amount(1500 * GIB) == "1,500.0 GiB" and amount(0.3 * 2**20) == "0.3 MiB"


def test_tables_align_shrink_and_drop_what_is_empty() -> None:
    columns = (Column("NAME", shrinks=True), Column("SIZE", right=True), Column("NOTE"))
    rows = [("a", "1", ""), ("long\x1bname\nof two lines", "22", "")]
    assert table(columns, rows, 80) == [
        "NAME                    SIZE",
        "a                          1",
        "long␛name␊of two lines    22",
    ]
    assert max(map(len, table(columns, rows, 20))) == 20 and "…" in table(columns, rows, 20)[2]
    assert wrapped("An option is --option-of-a-command", 25) == ["An option is", "  --option-of-a-command"]
    assert field("label", "word " * 10, 30)[1].startswith(" " * 14 + "word")
    assert listing(["a"]) == "a" and listing([*"abcdefg"], 2) == "a, b and 5 more"
