"""Context fields of a request against the spec's context features."""

from __future__ import annotations

import pytest

from gem.data.spec import FeatureSpec
from serving.context import ContextFields
from serving.schema import Refusal

FIELDS = ContextFields(
    [
        FeatureSpec(name="device", kind="categorical"),
        FeatureSpec(name="slot", column="slot_no", kind="numeric"),
        FeatureSpec(name="tags", kind="multi"),
        FeatureSpec(name="page", kind="embedding", width=2),
    ]
)


def test_names_and_columns_both_work_and_come_out_as_names() -> None:
    assert FIELDS.values({"slot": 2}) == FIELDS.values({"slot_no": 2}) == {"slot": 2}
    sent = {"device": "ios", "tags": ["a", 3], "page": [0.5, 1], "slot": None}
    assert FIELDS.values(sent) == sent
    assert FIELDS.values({}) == {}


@pytest.mark.parametrize(
    ("context", "field", "says"),
    [
        ({"devise": "ios"}, "context.devise", 'Did you mean "device"?'),
        ({"device": 1.5}, "context.device", "an integer, a string or null"),
        ({"device": ["ios"]}, "context.device", "got list"),
        ({"slot": "3"}, "context.slot", "must be a number or null"),
        ({"slot": True}, "context.slot", "must be a number or null"),
        ({"tags": 3}, "context.tags", "a list of integers or strings"),
        ({"tags": "a,b"}, "context.tags", "got str"),
        ({"page": [1.0]}, "context.page", "a list of numbers"),
        ({"slot": 1, "slot_no": 1}, "context.slot_no", "sent already"),
    ],
)
def test_wrong_fields_are_refused_by_name(context: dict[str, object], field: str, says: str) -> None:
    with pytest.raises(Refusal) as caught:
        FIELDS.values(context)
    assert caught.value.status == 422
    assert caught.value.problems[0][0] == field and says in caught.value.problems[0][1]


def test_all_wrong_fields_are_listed() -> None:
    with pytest.raises(Refusal) as caught:
        FIELDS.values({"a": 1, "slot": "x"})
    assert [field for field, _ in caught.value.problems] == ["context.a", "context.slot"]


def test_a_data_set_without_context_says_so() -> None:
    with pytest.raises(Refusal, match="no context features"):
        ContextFields([]).values({"x": 1})
