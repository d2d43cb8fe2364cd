"""The zoo: ordinary single-device training steps on which autopar's contract (docs/accuracy.md) is tested.

Nothing here knows autopar. Three axes, each a dict by name:

- `MODELS`: whole models, crossed with any optimizer by `MODELS[m].make(OPTIMIZERS[o].make())`; of those
  `WITHOUT_TABLES` nothing is lifted, of those `WITH_TABLES` something with most optimizers;
- `OPTIMIZERS`: Optax transformations, each with whether it lets a table be lifted;
- `VARIANTS`: one small step for each way of looking a table up, with what is expected of the table.
"""

from tests.zoo.case import Case, key_path
from tests.zoo.models import MODELS, WITH_TABLES, WITHOUT_TABLES, Model
from tests.zoo.optimizers import OPTIMIZERS, Optimizer, is_table
from tests.zoo.variants import VARIANTS, Variant

__all__ = [
    "MODELS",
    "OPTIMIZERS",
    "VARIANTS",
    "WITHOUT_TABLES",
    "WITH_TABLES",
    "Case",
    "Model",
    "Optimizer",
    "Variant",
    "is_table",
    "key_path",
]
