"""The update rules that there are, and how one is read back from a description."""

from __future__ import annotations

from typing import Any, Final

from dsa.errors import StateMismatchError
from dsa.rules.adagrad import ADAGRAD, ROW_WISE_ADAGRAD
from dsa.rules.adam import ADAM, CATCH_UP_ADAM, FRAME_ADAM, ROW_WISE_ADAM, adam_rule
from dsa.rules.conventions import SecondMoment
from dsa.rules.lion import LION
from dsa.rules.sgd import SGD
from dsa.rules.updates import AnyRule

__all__ = ["RULES", "rule_from_json", "rule_of"]

RULES: Final[tuple[AnyRule, ...]] = (
    ADAM,
    FRAME_ADAM,
    ROW_WISE_ADAM,
    CATCH_UP_ADAM,
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    LION,
)
"""One for each name; `UpdateRule.with_options` tells apart those of one name."""


def rule_from_json(data: Any) -> AnyRule:  # noqa: ANN401 - JSON is untyped until it has been checked here
    """Return the rule that a description names.

    Args:
        data: What `dsa.rules.updates.rule_to_json` made of it.

    Raises:
        StateMismatchError: this release knows no rule of that name.
        ValueError: it is no description of a rule.

    Example:
        >>> rule_from_json({"name": "row_wise_adam"}).schema(dim=2).names
        ('w', 'm', 'v', 't', 's')
    """
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"{data!r} is no update rule: restore the description from a copy")
    for rule in RULES:
        if rule.name == data["name"]:
            return rule.with_options({key: value for key, value in data.items() if key != "name"})
    raise StateMismatchError(
        f"the update rule {data['name']!r} is not known here: use one of "
        f"{', '.join(repr(rule.name) for rule in RULES)}"
    )


def rule_of(second_moment: SecondMoment, rule: str | None) -> AnyRule:
    """Return the update rule that a name, or else Adam's second moment, chooses.

    Raises:
        ValueError: there is none, or both are given.
    """
    if rule is None:
        return adam_rule(second_moment)
    if second_moment != "coordinate":
        raise ValueError(
            f"rule={rule!r} and second_moment={second_moment!r} are both given: pass one of them"
        )
    for each in RULES:
        if each.name == rule:
            return each
    raise ValueError(f"rule={rule!r} is not known: use one of {sorted(each.name for each in RULES)}")
