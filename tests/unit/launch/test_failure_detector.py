"""Who is to blame, from what is known of the ranks."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.launch.heartbeat import Seen, detect, unawaited

#: Rank 0 to 3, all at work in step 7, heard of just now.
WORKING = [Seen(r, f"rank {r}", 7, "computing", "computes", 0.1, 0.1, 10.0) for r in range(4)]


def ranks(**changes: dict) -> list[Seen]:
    """`WORKING`, with changes: r1={"age_s": 20}."""
    return [dataclasses.replace(seen, **changes.get(f"r{seen.rank}", {})) for seen in WORKING]


WAITS = {"kind": "waits", "what": "row exchange", "age_s": 11.0}
OWN = {**WAITS, "needs": range(2, 4)}
PATIENT = {**OWN, "allowance_s": 99.0}
PULLS = {"kind": "pulls", "what": "waiting for servers", "age_s": 11.0}
STUCK = {"age_s": 11.0}
SERVES = {"kind": "serves", "what": "serving", "step": -1, "age_s": 99.0}


@pytest.mark.parametrize(
    ("seen", "culprits", "words"),
    [
        (ranks(), None, ""),
        (ranks(r1=STUCK), None, ""),  # Nobody needs it.
        (ranks(r0=WAITS, r1=STUCK, r2=WAITS, r3=WAITS), (1,), "rank 1 has made no progress for 11 s, in step 7"),
        (ranks(r0=WAITS, r1=STUCK, r2=STUCK, r3=WAITS), (1, 2), "ranks 0, 3 wait for it"),
        (ranks(r0=WAITS, r1={"age_s": 1.0}, r2=WAITS, r3=WAITS), None, ""),  # Rank 1 goes on, slowly.
        (ranks(r0=WAITS, r1={"kind": "compiles", "age_s": 999.0}, r2=WAITS), None, ""),
        (ranks(r0=WAITS, r1={"kind": "compiles", "silent_s": 11.0}, r2=WAITS), (1,), "no sign of life for 11 s"),
        (ranks(r0=WAITS, r1={"silent_s": 11.0}, r2=STUCK, r3=WAITS), (1,), "no sign of life"),
        (ranks(r0=WAITS, r1={"silent_s": 11.0, "allowance_s": None}, r2=WAITS, r3=WAITS), None, ""),
        (ranks(r0=WAITS, r1={**STUCK, "allowance_s": None}, r2=WAITS, r3=WAITS), None, ""),
        (ranks(r0=WAITS, r1={**WAITS, "step": 6}, r2=WAITS, r3=WAITS), (1,), "All ranks wait for each other"),
        (ranks(r0=WAITS, r1=WAITS, r2=WAITS, r3=WAITS), (0, 1, 2, 3), "rank 3 has waited for 11 s"),
        # Ranks that have left:
        (ranks(r1={"left": True}), None, ""),
        (ranks(r1={"left": True, "step": 6}, r0={**WAITS, "age_s": 0.5}), None, ""),
        (ranks(r1={"left": True, "step": 6, "code": 0}, r0={**WAITS, "age_s": 2.0}), (1,), "left with exit code 0"),
        (ranks(r1={"left": True}, r0=WAITS, r2=WAITS, r3=WAITS), (1,), "ranks 0, 2, 3 wait for it in step 7"),
        (ranks(r1={"left": True}, r0=WAITS, r2=WAITS, r3={"age_s": 1.0}), None, ""),
        (
            ranks(**{f"r{r}": {**WAITS, "age_s": 3.0, "allowance_s": 2.0, "left": r == 1} for r in range(4)}),
            (1,),
            "left",
        ),
        (ranks(r0={"left": True}, r1={"left": True}, r2={"left": True}, r3={"left": True}), None, ""),
        # Ranks that wait for servers: one that has left still answers.
        (ranks(r1={"left": True, "step": 6}, r0={**PULLS, "age_s": 5.0}), None, ""),
        (ranks(r1={"left": True, "step": 6}, r0=PULLS, r2=STUCK, r3={"age_s": 1.0}), (2,), "rank 0 waits for it"),
        # Ranks that wait for some of the others, as those of one client do:
        (ranks(r0={"left": True, "step": 6}, r2={**OWN, "age_s": 5.0}, r3={**OWN, "age_s": 5.0}), None, ""),
        (ranks(r0={"left": True}, r1={"left": True}, r2=PATIENT, r3=PATIENT), None, ""),
        (ranks(r0={"left": True}, r1={"left": True}, r2=OWN, r3=OWN), (2, 3), "All ranks wait for each other"),
        (ranks(r0={"left": True}, r1={"left": True}, r2={"left": True}, r3=OWN), (2,), "rank 3 waits for it"),
        (ranks(r2={"left": True, "step": 6}, r3={**OWN, "age_s": 2.0}), (2,), "rank 3 waits for it in step 7"),
        # Dedicated servers:
        (ranks(r1=STUCK, r2=STUCK, r3=SERVES), None, ""),
        (ranks(r0=WAITS, r1=WAITS, r2=WAITS, r3=SERVES), (0, 1, 2), "All ranks wait for each other"),
        (ranks(r0=PULLS, r1=PULLS, r2=PULLS, r3=STUCK), (3,), "ranks 0, 1, 2 wait for it"),
        (ranks(r3={**SERVES, "silent_s": 11.0}), (3,), "rank 3 has given no sign of life"),
        (ranks(r0=WAITS, r1={"left": True}, r2=WAITS, r3=SERVES), (1,), "ranks 0, 2 wait for it"),
    ],
)
def test_judge(seen: list[Seen], culprits: tuple[int, ...] | None, words: str) -> None:
    verdict = detect(seen)
    assert (verdict.culprits if verdict else None) == culprits
    assert words in (verdict.message if verdict else "")


@pytest.mark.parametrize(("step", "asks"), [(6, True), (7, False)])
def test_ranks_that_wait_in_different_places_are_asked_for_their_calls(step: int, asks: bool) -> None:
    verdict = detect(ranks(r0=WAITS, r1={**WAITS, "step": step}, r2=WAITS, r3=WAITS))
    assert verdict is not None and ("make the same calls" in verdict.message) == asks


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (ranks(), []),
        (ranks(r1=STUCK), [1]),
        (ranks(r1={**STUCK, "step": -1}), []),  # it hasn't begun
        (ranks(r1={**STUCK, "allowance_s": None}), []),
        (ranks(r1={**STUCK, "kind": "compiles"}), []),
        (ranks(r1={**STUCK, "left": True}), []),
        (ranks(r0=STUCK, r1=STUCK, r2=STUCK, r3=STUCK), []),  # nobody goes on
    ],
)
def test_those_that_others_go_on_without(seen: list[Seen], named: list[int]) -> None:
    assert [r.rank for r in unawaited(seen)] == named
