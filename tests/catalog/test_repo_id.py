"""Repository names: the Hub's own rules, and one slash."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import HFValidationError, validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.catalog.repo_id import check_repo_id, is_repo_id
from dflash_local.errors import UsageError


def accepted_by_the_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


@given(
    st.text(alphabet="aZ0_-./ \n", max_size=12)
    | st.from_regex(r"[A-Za-z0-9_.-]{1,6}/[A-Za-z0-9_.-]{1,6}(\.git)?", fullmatch=True)
)
def test_the_rules_are_those_of_the_hub(name: str) -> None:
    assert is_repo_id(name) == accepted_by_the_hub(name)


@pytest.mark.parametrize("length", [1, 95, 96, 97])
def test_each_part_has_the_hubs_length(length: int) -> None:
    for name in (f"{'a' * length}/b", f"a/{'b' * length}"):
        assert is_repo_id(name) == accepted_by_the_hub(name) == (length <= 96)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "0 slashes"),
        ("a/b/c", "2 slashes"),
        ("/b", "no owner"),
        ("a/", "no name"),
        ("a--b/c", "'--'"),
        ("a/b..c", "'..'"),
        ("a/b.git", "'.git'"),
        ("-rf/x", "owner '-rf'"),
        ("a/b\n", "name 'b\\n'"),
        ("a/\x1b[2J", "name '\\x1b[2J'"),
        ("a/ü", "name"),
        ("a/" + "b" * 5000, "5000 characters"),
    ],
)
def test_a_bad_name_is_told_why_on_one_short_line(name: str, reason: str) -> None:
    with pytest.raises(UsageError) as found:
        check_repo_id(name)
    assert reason in found.value.message and "owner/name" in found.value.hint
    assert len(str(found.value)) < 300 and str(found.value).isprintable()
