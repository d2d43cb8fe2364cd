"""The text of a program: the skeleton, with the pieces that were drawn in the place of the plainest ones."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.fuzz import modes, pieces, sessions, skeleton, updates
from tests.fuzz.program import Program
from tests.support import bad_ingredients, ingredients
from tests.support.ingredients import PARTS, WIDTH

HEAD, DRAWN, COMMON, ITSELF = (f"# --- {name} ---\n" for name in ("head", "drawn", "the same for all", "by itself"))


@dataclasses.dataclass(frozen=True)
class _Source:
    """A module's text, taken apart.

    Attributes:
      tables: The names of each dict of it -> their expressions; merged with those that it begins with.
      definitions: Functions and constants, with statements that belong to them (`f.defvjp(...)`).
    """

    tables: dict[str, dict[str, ast.expr]]
    definitions: dict[str, list[ast.stmt]]


class _Bare(ast.NodeTransformer):
    """Takes annotations and docstrings away."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


@cache
def _source(path: str) -> _Source:
    tree = _Bare().visit(ast.parse(Path(path).read_text()))
    tables: dict[str, dict[str, ast.expr]] = {}
    definitions: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = [node]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            definitions[node.value.func.value.id].append(node)  # type: ignore[attr-defined]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            if not isinstance(target, ast.Name):  # figures, which the skeleton has
                continue
            if isinstance(node.value, ast.Dict):
                tables[target.id] = dict(_entries(node.value))
            elif isinstance(node.value, ast.Attribute):
                tables[target.id] = _named(node.value)
            else:
                definitions[target.id] = [node]
    return _Source(tables, definitions)


#: Where pieces are.
_OWN = (pieces, updates, sessions)
_MODULES = {module.__name__.rpartition(".")[2]: module for module in (ingredients, bad_ingredients, *_OWN)}


def _named(node: ast.expr) -> dict[str, ast.expr]:
    assert isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return _source(str(_MODULES[node.value.id].__file__)).tables[node.attr]


def _entries(table: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if key is None:
            yield from _named(value).items()
        elif isinstance(key, ast.Constant):
            yield str(key.value), value


def _needed(nodes: list[ast.AST], known: dict[str, list[ast.stmt]]) -> list[ast.stmt]:
    """The definitions that these nodes name, and those that these name, in order."""
    wanted: set[str] = set()
    while nodes:
        names = {n.id for n in ast.walk(nodes.pop()) if isinstance(n, ast.Name)} & set(known) - wanted
        wanted |= names
        nodes += [statement for name in names for statement in known[name]]
    return [statement for name, statements in known.items() if name in wanted for statement in statements]


def text_of(program: Program) -> str:
    """A script that runs by itself."""
    tables = {name: table for module in _OWN for name, table in _source(str(module.__file__)).tables.items()}
    sources = [_source(str(module.__file__)) for module in _MODULES.values()]
    text = Path(str(skeleton.__file__)).read_text().replace("  # noqa: F401", "")
    given = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    known = {n: s for source in sources for n, s in source.definitions.items() if n not in given}
    assert len(known) == sum(len(set(s.definitions) - given) for s in sources), "two definitions of one name"

    def pick(table: str, *names: str) -> list[ast.expr]:
        return [tables[table][name] for name in names]

    def pairs(table: str, *names: str) -> list[ast.expr]:
        """Tuples that begin with the name."""
        return [
            ast.Tuple([ast.Constant(name), *(e.elts if isinstance(e, ast.Tuple) else [e])], ast.Load())
            for name, e in zip(names, pick(table, *names), strict=True)
        ]

    slot = program.optimizer if program.optimizer in updates.SLOTS else ""
    looked_up = "BAGS" if program.bags else "LOOKUPS"
    lookups = [ast.Tuple([*pick(looked_up, a), *pick("ID_KINDS", b)], ast.Load()) for a, b in program.lookups]
    single = {
        "STORED": pick("STORED", program.stored),
        "AFTER": pick("AFTER", program.after),
        "LOSS": pick("LOSSES", program.loss),
        "WHERE": pick("WHERE", program.where),
        "GRADIENT": pick("GRADIENTS", program.gradient),
        "SLOT": pick("SLOTS", slot),
        "OPTIMIZER": pick("OPTIMIZERS", program.optimizer),
        "CLOSED": pick("CLOSED", program.closed),
        "GUARD": pick("GUARDS", program.guard),
        "AROUND": pick("AROUND", program.around),
        "CALL": pick("CALLS", program.call),
    }
    several = {
        "CHAIN": pick("CHAIN", *program.chain),
        "LOOKUPS": lookups,
        "TRANSFORMS": pick("TRANSFORMS", *program.transforms),
        "WRITES": pick("WRITES", *program.writes),
        "RESULTS": pairs("RESULTS", *program.results),
        "KEPT": pairs("KEPT", *program.kept),
        "EVENTS": pick("EVENTS", *program.events),
    }
    strategy = program.strategy
    strategy = dict(strategy) if strategy and isinstance(strategy[0], tuple) else strategy
    options = {"strategy": strategy, "donate": program.donate, **dict(program.options)}
    if "sync" in options:  # servers go on with every step
        options["donate"] = True
    texts = [f"{name!r}: {value if name == 'sync' else repr(value)}" for name, value in options.items()]
    number = f'float("{program.number}")' if program.number * 0 else program.number
    figures = (program.seed, program.tables, program.rows, WIDTH, program.ids, PARTS)
    lines = [
        f"SEED, TABLES, ROWS, WIDTH, IDS, PARTS = {', '.join(map(str, figures))}",
        f"DTYPE = {program.dtype}",
        "from autopar.sync import Async, Average, Elastic",
        f"DEVICES, OPTIONS = {program.devices}, {{{', '.join(texts)}}}",
        f"PIPELINE = {program.pipeline!r}",
        f"NUMBER, NUMPY, BAGS = {number}, {program.numpy}, {program.bags}",
    ]
    nodes: list[ast.AST] = [node for group in (*single.values(), *several.values()) for node in group]
    lines += [ast.unparse(statement) for statement in _needed(nodes, known)]
    lines += [f"{name} = {ast.unparse(node)}" for name, (node,) in single.items()]
    for name, group in several.items():
        lines += [
            f"{name} = [{''.join(f'{chr(10)}    {ast.unparse(e)},' for e in group)}\n]" if group else f"{name} = []"
        ]
    common, itself = text.split(COMMON)[1].split(ITSELF)
    head = text.split(HEAD)[1].split(DRAWN)[0]
    return "".join([head, DRAWN, "\n".join(lines), "\n\n", COMMON, common, ITSELF, itself])


def script_of(program: Program, mode: modes.Mode, told: str) -> str:
    """The text with what must be set before JAX starts, and what was found in it."""
    start = f"mpiexec -n {mode.ranks} python" if mode.ranks > 1 else "python"
    settings = "\n".join(f"os.environ[{name!r}] = {value!r}" for name, value in mode.environment.items())
    head, rest = text_of(program).split("import os\n", 1)
    about = f'"""Mode {mode.name}: {program}\n\nRun it by `{start} THIS_FILE`. {told}\n"""\n'
    return f"{about}{head}import os\n\n{settings}\n{rest}"
