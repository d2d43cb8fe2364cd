"""One small train step for each way in which a step may use a table, with what is expected of it.

A variant is the step of `single.py` with one thing changed. Values are finite: a lookup that fills with
NaN is followed by nan_to_num.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.zoo.case import Case
from tests.zoo.lookups import DENSE_ID_CASES, DENSE_LOOKS, ID_CASES, LOOKS, TABLE_CASES
from tests.zoo.single import Look, table_case
from tests.zoo.whole_steps import DEFERRED_STEPS, DENSE_STEPS, STEPS


@dataclass(frozen=True)
class Variant:
    """A named Case; `make()` builds it.

    `expect`: under "lift" all of the Case's `tables` must be lifted, under "defer" their untouched rows are to be
    deferred besides, under "dense" none of them may be lifted.
    """

    name: str
    make: Callable[[], Case]
    expect: Literal["lift", "defer", "dense"]


def _all() -> dict[str, Variant]:
    def of(looks: dict[str, Look]) -> dict[str, Callable[[], Case]]:
        return {name: functools.partial(table_case, look) for name, look in looks.items()}

    lifting = {**of(LOOKS), **ID_CASES, **TABLE_CASES, **STEPS}
    dense = {**of(DENSE_LOOKS), **DENSE_ID_CASES, **DENSE_STEPS}
    variants = [Variant(name, make, "lift") for name, make in lifting.items()]
    variants += [Variant(name, make, "defer") for name, make in DEFERRED_STEPS.items()]
    variants += [Variant(name, make, "dense") for name, make in dense.items()]
    return {variant.name: variant for variant in variants}


VARIANTS = _all()
