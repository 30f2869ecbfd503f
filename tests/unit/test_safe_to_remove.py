"""`workers`, `drain --wait` and `remove` agree on who can be spared, and say why not."""

from __future__ import annotations

import pytest

from tests.unit.planner_host_rig import Rig


@pytest.mark.parametrize(
    ("others", "why"),
    [
        pytest.param([("d2", "decode", False)], None, id="another_serves"),
        pytest.param([], "no other worker plays decode, so it still gets requests", id="last"),
        pytest.param(
            [("d2", "decode", True)],
            "no other worker plays decode, so it still gets requests",
            id="the_other_drains_too",
        ),
        pytest.param(
            [("p1", "prefill", False)],
            "no other worker plays decode, so it still gets requests",
            id="of_another_pool",
        ),
    ],
)
async def test_the_last_of_a_role_is_not_safe_and_not_removed(
    others: list[tuple[str, str, bool]], why: str | None
) -> None:
    rig = Rig(mode="off")
    rig.joins("d1", drained=True)
    for ident, pool, drained in others:
        rig.joins(ident, pool, drained=drained)
    told = rig.control.admin.told("d1")
    assert (told["safe_to_remove"], told["unsafe_because"]) == (why is None, why)
    status, body = rig.control.admin.answer("remove", {"worker": "d1"})
    if why is None:
        assert (status, body["removing"]) == (200, True)
    else:
        assert (status, why in body["error"]["message"]) == (400, True)


async def test_one_that_serves_is_not_safe() -> None:
    rig = Rig(mode="off")
    rig.joins("d1")
    rig.joins("d2")
    assert rig.control.admin.told("d1")["unsafe_because"] == "it serves; drain it first"


async def test_of_another_variant_is_no_other() -> None:
    rig = Rig(mode="off")
    rig.joins("d1", drained=True)
    rig.joins("d2", variant="tiny")
    assert not rig.control.admin.told("d1")["safe_to_remove"]
