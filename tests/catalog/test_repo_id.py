"""Repository names: the Hub's own rules, and one slash."""

from __future__ import annotations

from huggingface_hub.utils import HFValidationError, validate_repo_id
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_local.catalog.repo_id import is_repo_id


@given(
    st.text(alphabet="aZ0_-./ \n", max_size=12)
    | st.from_regex(r"[A-Za-z0-9_.-]{1,6}/[A-Za-z0-9_.-]{1,6}(\.git)?", fullmatch=True)
)
@example("a/" + "b" * 96)
@example("a/" + "b" * 97)
@example("a" * 96 + "/b")
@example("a" * 97 + "/b")
@example("a/b\n")
@example("-rf/x")
def test_the_rules_are_those_of_the_hub(name: str) -> None:
    try:
        validate_repo_id(name)
        valid = name.count("/") == 1 and not name.endswith("\n")
    except HFValidationError:
        valid = False
    assert is_repo_id(name) == valid
