"""The drill: a profile starts with 5 % and is taken back for a slow drafter, for one that errs and
for one that changes answers, each time for that reason, and no client sees a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway_fakes import World, rollout, with_gateway
from outrider.testing.asgi import Response

AT_ONCE = 8
MOST = 4000  # requests until a fault must have been found


async def until_taken_back(world: World, name: str) -> list[Response]:
    """Send traffic until the profile is off; every answer that came."""
    answers: list[Response] = []
    number = 0
    while "spec" in world.gateway.controller.weights.serving:
        assert number < MOST, f"the {name} drafter was never taken back"
        batch = [
            world.ask(f"{name} {number + i}", stream=True, max_tokens=4) for i in range(AT_ONCE)
        ]
        answers += await asyncio.gather(*batch)
        number += AT_ONCE
        world.gateway.tick()
    await world.gateway.flow.mirrors.quiet()
    return answers


def why(world: World) -> str:
    state = world.gateway.controller.state.profiles["spec"]
    assert state.phase == "rolled_back" and state.weight == 0
    return state.why


async def armed(world: World) -> None:
    """A person arms it, and it starts with 5 % again."""
    spec = world.engines["spec"]
    spec.token_s, spec.status, spec.wrong = 0.0, None, None
    assert (await world.order("arm")).status == 200
    for _ in range(2):
        world.gateway.tick()
    if world.gateway.controller.weights.serving.get("spec") != 500:
        assert (await world.order("set", share="5%")).status == 200
    assert world.gateway.controller.weights.serving == {"spec": 500}


async def drill(world: World) -> None:
    spec = world.engines["spec"]
    assert world.gateway.controller.weights.serving == {"spec": 500}

    spec.token_s = 0.01
    answers = await until_taken_back(world, "slow")
    assert "tpot" in why(world)

    await armed(world)
    spec.status = 500
    answers += await until_taken_back(world, "erring")
    assert "server_errors" in why(world)

    await armed(world)
    spec.wrong = 2
    answers += await until_taken_back(world, "lossy")
    assert "parity" in why(world) and "parts at character" in why(world)

    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        assert answer.events[-1] == "[DONE]"
        assert not any("error" in event for event in answer.events[:-1])
    log = world.gateway.ledger.history()
    assert log.fault is None
    taken = [entry for entry in log.entries if entry["action"] == "rollback"]
    assert [entry["who"] for entry in taken] == ["outrider"] * 3
    assert all(entry["why"] and entry["evidence"] for entry in taken)


def test_each_fault_is_found_for_what_it_is_and_no_client_sees_it(tmp_path: Path) -> None:
    values = rollout(tmp_path, spec={"rollout": "5%", "shadow": "100%"})
    values["verdict"] = {"every_s": 0.05, "least_samples": 20, "plan": [40, 200]}
    with_gateway(values, drill)
